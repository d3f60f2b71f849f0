"""`tpoverlap doctor`: real probes on this machine, and GPU rows from fakes of torch, NVML and the driver."""

from __future__ import annotations

import ctypes
import io
import json
import os
import time
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from click.testing import CliRunner, Result
from rich.console import Console

from tpoverlap.tools.doctor import conclusions, probes, probes_cpu, probes_cuda, worker_cuda
from tpoverlap.tools.doctor.children import ChildResult, first_reason, run_ranks, worst
from tpoverlap.tools.doctor.command import doctor
from tpoverlap.tools.doctor.conclusions import BackendRun
from tpoverlap.tools.doctor.report import Report, Row, Status, render

# --- processes: whatever they do, the parent gets a result in time and nothing stays behind ---------------------


def _script(tmp_path: Path, body: str) -> Path:
    path = tmp_path / "fake_worker.py"
    header = "import json, os, sys, time\nsettings = json.loads(sys.argv[1])\nrank = settings['rank']\n"
    says = "def say(name, /, **content): print('@tpoverlap-doctor ' + json.dumps([name, content]), flush=True)\n"
    path.write_text(header + says + body)
    return path


def test_result_carries_sections_and_ignores_noise(tmp_path: Path) -> None:
    body = "print('a library says hello')\nsay('found', value=rank)\nprint('@tpoverlap-doctor [\"cut', flush=True)\n"
    results = run_ranks("x", 2, timeout_s=20, worker=_script(tmp_path, body))
    assert [r.sections["found"]["value"] for r in results] == [0, 1]
    assert worst(results) is Status.OK and first_reason(results) == ""


def test_hanging_rank_is_killed_with_its_children_and_named(tmp_path: Path) -> None:
    body = (
        "import subprocess\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "say('child', pid=child.pid)\n"
        "say('step', name='knit')\n"
        "time.sleep(60 if rank == 1 else 0)\n"
        "child.kill() if rank == 0 else None\n"
    )
    started = time.monotonic()
    results = run_ranks("x", 2, timeout_s=3, worker=_script(tmp_path, body))
    assert time.monotonic() - started < 10
    assert worst(results) is Status.TIMEOUT
    assert first_reason(results).startswith("rank 1, in step 'knit': no answer")
    deadline = time.monotonic() + 5
    while psutil.pid_exists(grandchild := results[1].sections["child"]["pid"]) and time.monotonic() < deadline:
        if psutil.Process(grandchild).status() == psutil.STATUS_ZOMBIE:  # dead; only init has not reaped it yet
            break
        time.sleep(0.05)
    else:
        assert not psutil.pid_exists(grandchild)


def test_crashed_rank_is_the_reason_not_the_peer_that_waits_for_it(tmp_path: Path) -> None:
    body = "say('step', name='map')\nos.kill(os.getpid(), 11) if rank == 1 else time.sleep(60)\n"
    started = time.monotonic()
    results = run_ranks("x", 2, timeout_s=30, worker=_script(tmp_path, body))
    assert time.monotonic() - started < 15, "the peer of a dead rank must not use up the whole time limit"
    assert worst(results) is Status.FAILED
    assert first_reason(results) == "rank 1, in step 'map': died of signal SIGSEGV"


def test_stderr_is_the_reason_when_nothing_else_is(tmp_path: Path) -> None:
    results = run_ranks("x", 1, timeout_s=20, worker=_script(tmp_path, "sys.exit('no such luck')\n"))
    assert "exit code 1: no such luck" in first_reason(results)


def test_unknown_task_and_raising_task_are_one_line() -> None:
    results = run_ranks("cpu:no_such_task", 1, timeout_s=20)
    assert worst(results) is Status.FAILED
    assert "KeyError" in first_reason(results) and "\n" not in first_reason(results)


def test_torchrun_variables_do_not_reach_the_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "elsewhere")
    body = "say('env', master=os.environ.get('MASTER_ADDR'), mine=os.environ['MINE'])\n"
    [result] = run_ranks("x", 1, timeout_s=20, worker=_script(tmp_path, body), env={"MINE": "1"})
    assert result.sections["env"] == {"master": None, "mine": "1"}


# --- probes of this machine ------------------------------------------------------------------------------------


def test_shared_memory_really_shares_and_leaves_nothing(tmp_path: Path) -> None:
    row = probes_cpu.shared_memory_row(20, directory=tmp_path)
    assert row.status is Status.OK, row.detail
    assert list(tmp_path.iterdir()) == []


def test_shared_memory_fails_where_the_two_map_different_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = probes_cpu.run_ranks

    def apart(task: str, num_ranks: int, **kwargs: Any) -> list[ChildResult]:
        source = (Path(probes_cpu.__file__).with_name("worker_cpu.py")).read_text()
        source = source.replace("    with open(path,", "    path += str(rank)\n    with open(path,", 1)
        (tmp_path / "worker_cpu.py").write_text(source)
        (tmp_path / "worker.py").write_text(Path(probes_cpu.__file__).with_name("worker.py").read_text())
        for rank in "01":
            Path(kwargs["settings"]["path"] + rank).write_bytes(bytes(kwargs["settings"]["size_bytes"]))
        return real(task, num_ranks, worker=tmp_path / "worker.py", **kwargs)

    monkeypatch.setattr(probes_cpu, "run_ranks", apart)
    row = probes_cpu.shared_memory_row(3, directory=tmp_path)
    assert row.status is Status.FAILED and row.remedy
    assert "wait for the other rank's bytes, round 1" in row.detail


def test_shared_memory_says_why_the_directory_does_not_do(tmp_path: Path) -> None:
    row = probes_cpu.shared_memory_row(5, directory=tmp_path / "missing")
    assert row.status is Status.FAILED and "No such file" in row.detail and row.remedy


def test_missing_shm_is_a_failed_row(tmp_path: Path) -> None:
    assert probes_cpu.shm_row(tmp_path / "missing").status is Status.FAILED
    assert probes_cpu.shm_row(tmp_path).data["size_bytes"] > 0


def test_handle_exchange_fails_with_the_remedy_where_tmpdir_is_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert probes_cpu.handle_exchange_row(20).status is Status.OK
    long = tmp_path / ("x" * 120)  # a unix socket's path holds 107 characters
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    row = probes_cpu.handle_exchange_row(20)
    assert row.status is Status.FAILED and "bind a unix datagram socket" in row.detail and "TMPDIR" in row.remedy


def test_limits_of_both_cgroup_versions(tmp_path: Path) -> None:
    cgroup = tmp_path / "sys/fs/cgroup"
    cgroup.mkdir(parents=True)
    (cgroup / "cpu.max").write_text("200000 100000\n")
    (cgroup / "memory.max").write_text("max\n")
    row = probes_cpu.limits_row(tmp_path)
    assert row.data["cgroup_cpu"] == "200000 100000" and "cgroup cpu 200000 100000" in row.detail
    assert "cgroup memory" not in row.detail, "'max' is no limit"
    (cgroup / "memory.max").unlink()
    (cgroup / "memory").mkdir()
    (cgroup / "memory/memory.limit_in_bytes").write_text("1073741824")
    assert probes_cpu.limits_row(tmp_path).data["cgroup_memory"] == "1073741824"


# --- GPU rows from fakes ---------------------------------------------------------------------------------------


class FakeNvml:
    """Two GPUs on one switch, or directly linked, or with no NVLink at all."""

    NVML_NVLINK_MAX_LINKS = 4
    NVML_FEATURE_ENABLED = 1
    NVML_NVLINK_DEVICE_TYPE_GPU, NVML_NVLINK_DEVICE_TYPE_SWITCH = 0, 2
    NVML_P2P_CAPS_INDEX_NVLINK, NVML_P2P_STATUS_OK = 2, 0

    class c_nvmlGpuFabricInfo_v2_t(ctypes.Structure):
        _fields_ = [("clusterUuid", ctypes.c_uint8 * 16), ("cliqueId", ctypes.c_uint32), ("state", ctypes.c_uint)]

    def __init__(self, links: str, cluster: int = 0) -> None:
        self.links, self.cluster = links, cluster

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        if link == 3:
            raise OSError("Invalid argument")  # NVML raises for links that a GPU does not have
        return int(self.links != "none")

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: int, link: int) -> int:
        return 2 if self.links == "switch" else 0

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: int, link: int) -> Any:
        return SimpleNamespace(busId=b"SWITCH" if self.links == "switch" else b"BUS%d" % (1 - handle))

    def nvmlDeviceGetPciInfo(self, handle: int) -> Any:
        return SimpleNamespace(busId=b"BUS%d" % handle)

    def nvmlDeviceGetP2PStatus(self, one: int, other: int, index: int) -> int:
        return 5 if self.links == "none" else 0

    def nvmlDeviceGetTopologyCommonAncestor(self, one: int, other: int) -> int:
        return 50

    def nvmlDeviceGetGpuFabricInfoV(self, handle: int, info: Any) -> None:
        content = ctypes.cast(info, ctypes.POINTER(self.c_nvmlGpuFabricInfo_v2_t)).contents
        content.state, content.cliqueId, content.clusterUuid[0] = (3 if self.cluster else 0), 7, self.cluster


def _nvml_result(nvml: FakeNvml) -> ChildResult:
    sections = {"links": worker_cuda.read_links(nvml, [0, 1]), "fabric": worker_cuda.read_fabric(nvml, [0, 1])}
    return ChildResult(0, json.loads(json.dumps(sections)), exit_code=0)


@pytest.mark.parametrize(
    ("links", "expected"),
    [
        ("switch", ["GPU 0: 3 (3 to a switch)", "0-1: NVLink, PCIe across CPU sockets"]),
        ("direct", ["GPU 1: 3 (0 to a switch)", "0-1: NVLink (3 direct)"]),
        ("none", ["GPU 0: 0", "0-1: no NVLink"]),
    ],
)
def test_links(links: str, expected: list[str]) -> None:
    row = probes_cuda.links_row(_nvml_result(FakeNvml(links)), 2, None)
    assert row.status is Status.OK
    for part in expected:
        assert part in row.detail


def test_domain_is_measured() -> None:
    joined = probes_cuda.domain_row(_nvml_result(FakeNvml("switch")))
    assert "all 2 GPUs of this host, no multi-host clique" in joined.detail and joined.ok
    apart = probes_cuda.domain_row(_nvml_result(FakeNvml("none")))
    assert "NVLink between no pair of 1 pairs" in apart.detail
    clique = probes_cuda.domain_row(_nvml_result(FakeNvml("switch", cluster=0xAB)))
    assert clique.data["cliques"] == {"ab" + "00" * 15 + "/7": [0, 1]}


def test_links_without_nvml_come_from_nvidia_smi_else_unknown() -> None:
    topology = (
        "\x1b[4m\tGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\x1b[0m\n"
        "GPU0\t X \tNV18\tSYS\tPIX\t0-15\nGPU1\tNV18\t X \tPHB\tSYS\t0-15\nGPU2\tSYS\tPHB\t X \tSYS\t0-15\n"
        "NIC0\tPIX\tSYS\tSYS\t X \n\nLegend:\n  NV#  = Connection traversing NVLinks\n"
    )
    broken = ChildResult(0, {"error": {"message": "ModuleNotFoundError: No module named 'pynvml'"}}, exit_code=1)
    row = probes_cuda.links_row(broken, 3, topology)
    assert row.data["pairs"] == {"0-1": "NV18", "0-2": "SYS", "1-2": "PHB"} and row.ok
    unknown = probes_cuda.links_row(broken, 3, None)
    assert unknown.status is Status.UNKNOWN and "pynvml" in unknown.detail and "nvidia-ml-py" in unknown.remedy
    assert probes_cuda.domain_row(broken).status is Status.UNKNOWN
    assert probes_cuda.parse_topology("GPU0 X CPU\n") == {} and probes_cuda.parse_topology("") == {}


def _fake_torch(refused: set[tuple[int, int]]) -> Any:
    properties = SimpleNamespace(
        name="Some GPU", total_memory=2**37, major=9, minor=0, multi_processor_count=132, uuid="1234"
    )
    cuda = SimpleNamespace(
        device_count=lambda: 2,
        get_device_properties=lambda index: properties,
        can_device_access_peer=lambda a, b: (a, b) not in refused,
        nccl=SimpleNamespace(version=lambda: (2, 28, 9)),
    )
    return SimpleNamespace(cuda=cuda)


def test_devices_and_peer_access() -> None:
    fake = _fake_torch(refused={(1, 0)})
    sections = {"devices": worker_cuda.read_devices(fake), "peer_access": worker_cuda.read_peer_access(fake)}
    inventory = ChildResult(0, sections, exit_code=0)
    row = probes_cuda.devices_row(inventory)
    assert row.ok and "1: Some GPU, 128 GiB, 132 SMs, sm_9.0" in row.detail
    peer = probes_cuda.peer_access_row(inventory, 2)
    assert peer.status is Status.FAILED and "1-0" in peer.detail and "0-1" not in peer.detail
    assert probes_cuda.peer_access_row(inventory, 1).status is Status.SKIPPED
    assert worker_cuda.read_libraries(fake) == {"nccl": "2.28.9"}


def test_inventory_that_died_is_a_failed_row() -> None:
    died = ChildResult(0, {"step": {"name": "initialise CUDA"}}, exit_code=-11)
    assert probes_cuda.devices_row(died).status is Status.FAILED
    assert "SIGSEGV" in probes_cuda.devices_row(died).detail
    hung = ChildResult(0, {"step": {"name": "initialise CUDA"}}, exit_code=-9, timed_out=True)
    assert probes_cuda.devices_row(hung).status is Status.TIMEOUT


class _Attribute(IntEnum):
    CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS = 122
    CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED = 132


def _fake_driver(stream_ops: int, multicast: int) -> Any:
    answers = {122: stream_ops, 132: multicast}
    return SimpleNamespace(
        CUdevice_attribute=_Attribute,
        cuInit=lambda flags: (0,),
        cuDeviceGet=lambda ordinal: (0, ordinal),
        cuDeviceGetAttribute=lambda attribute, device: (0, answers[int(attribute)]),
    )


def _attributes(stream_ops: int, multicast: int) -> ChildResult:
    return ChildResult(
        0, {"attributes": worker_cuda.read_attributes(_fake_driver(stream_ops, multicast), 2)}, exit_code=0
    )


def test_stream_operations() -> None:
    assert probes_cuda.stream_operations_row(_attributes(1, 0)).ok
    assert probes_cuda.stream_operations_row(_attributes(0, 0)).status is Status.FAILED
    missing = ChildResult(0, {"attributes": {"error": "cuda.bindings cannot be imported"}}, exit_code=0)
    row = probes_cuda.stream_operations_row(missing)
    assert row.status is Status.UNKNOWN and "cuda-bindings" in row.remedy


@pytest.mark.parametrize(
    ("multicast", "environ", "expected"),
    [
        (1, {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}, "off (TORCH_SYMM_MEM_DISABLE_MULTICAST=1)"),
        (1, {}, "on: supported and not disabled"),
        (0, {}, "off: not supported"),
    ],
)
def test_multicast(multicast: int, environ: dict[str, str], expected: str) -> None:
    assert expected in probes_cuda.multicast_row(_attributes(1, multicast), environ).detail


def test_symmetric_memory_ranks_can_never_create_multicast(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, dict[str, str]]] = []

    def fake(task: str, num_ranks: int, *, env: dict[str, str], **kwargs: Any) -> list[ChildResult]:
        calls.append((num_ranks, env))
        return [ChildResult(rank, exit_code=0) for rank in range(num_ranks)]

    monkeypatch.setattr(probes_cuda, "run_ranks", fake)
    assert "sharing 1 GPU" in probes_cuda.symmetric_memory_row(1, 5).how
    assert "one a GPU" in probes_cuda.symmetric_memory_row(4, 5).how
    assert probes_cuda.nccl_row(1, 5).status is Status.SKIPPED and probes_cuda.nccl_row(2, 5).ok
    assert [count for count, _ in calls] == [2, 4, 2]
    assert all(env["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1" and env["NCCL_NVLS_ENABLE"] == "0" for _, env in calls)
    assert [env.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES") for _, env in calls] == ["1", None, None]


def test_symmetric_memory_worker_refuses_without_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", raising=False)
    [result] = run_ranks("cuda:symmetric_memory", 1, timeout_s=20)
    assert "refused: TORCH_SYMM_MEM_DISABLE_MULTICAST" in result.why()


@pytest.mark.gpu
def test_symmetric_memory_on_real_gpus() -> None:
    row = probes_cuda.symmetric_memory_row(torch.cuda.device_count(), 60)
    assert row.status is Status.OK, row.detail
    assert not row.data["symmetric_memory"]["multicast"] and "stream_operations" in row.data


# --- conclusions, report, command ------------------------------------------------------------------------------


def _rows(**statuses: Status) -> list[Row]:
    names = {"shm": "shared memory", "gloo": "process group (gloo)", "symm": "symmetric memory"}
    return [
        Row("x", name, statuses.get(key, Status.SKIPPED), f"{key} detail", "how", f"fix {key}")
        for key, name in names.items()
    ]


def _report(runs: list[BackendRun]) -> Report:
    return Report(tuple(conclusions.backend_rows([], runs) + conclusions.method_rows(runs)), 1.0)


def test_a_backend_is_tried_only_when_what_it_needs_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[tuple[str, str, int]] = []

    def fake(task: str, num_ranks: int, *, settings: dict[str, str], **kwargs: Any) -> list[ChildResult]:
        tried.append((settings["backend"], settings["device"], num_ranks))
        sections: dict[str, dict[str, Any]] = {method: {} for method in conclusions.METHODS}
        return [ChildResult(rank, sections, exit_code=0) for rank in range(num_ranks)]

    monkeypatch.setattr(conclusions, "run_ranks", fake)
    runs = conclusions.run_methods(_rows(shm=Status.FAILED, gloo=Status.OK), 5, 5)
    assert tried == [("process_group", "cpu", 2)]
    backends = _report(runs).section("backends")
    assert backends["shared on cpu"].status is Status.FAILED and backends["shared on cpu"].remedy == "fix shm"
    assert backends["process_group on cpu"].ok and backends["cuda on cuda"].status is Status.SKIPPED
    assert _report(runs).works

    tried.clear()
    runs = conclusions.run_methods(_rows(shm=Status.OK, gloo=Status.TIMEOUT), 5, 5)
    assert not tried and not _report(runs).works, "every manager starts from a process group"


def test_a_method_counts_only_when_it_was_right_on_every_rank() -> None:
    done: dict[str, dict[str, Any]] = {method: {} for method in conclusions.METHODS}
    partly = {"sequential": {}, "ring_exchange": {}, "step": {"name": "pipeline"}, "error": {"message": "off by 3"}}
    results = [ChildResult(0, done, exit_code=0), ChildResult(1, partly, exit_code=1)]
    report = _report([conclusions.summarise("shared", "cpu", results)])
    statuses = {name: row.status for name, row in report.section("methods").items()}
    assert statuses == {
        "sequential": "ok", "ring_exchange": "ok", "pipeline": "failed", "bulk": "failed", "fused": "skipped"
    }  # fmt: skip
    backend = report.section("backends")["shared on cpu"]
    assert backend.status is Status.FAILED
    assert "right: ring_exchange, sequential; rank 1, in step 'pipeline': off by 3" in backend.detail


def test_methods_run_for_real_and_a_wrong_one_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = conclusions.run_ranks
    for name in ("worker.py", "worker_methods.py"):
        source = Path(conclusions.__file__).with_name(name).read_text()
        # Rank 1 multiplies by another weight where the reduce-scatter of the ring is tried.
        source = source.replace("def scatter(name: str) -> None:\n", "def scatter(name: str) -> None:\n" + " " * 12 +
            "partial_weight[1].mul_(1.01 if rank == 1 and name == 'fc2_fprop' else 1.0)\n")  # fmt: skip
        (tmp_path / name).write_text(source)
    monkeypatch.setattr(conclusions, "run_ranks", lambda *a, **k: real(*a, **k, worker=tmp_path / "worker.py"))
    runs = conclusions.run_methods(_rows(shm=Status.OK), 40, 40)
    assert [run.status for run in runs[:2]] == ["skipped", "skipped"], "gloo was not probed: not tried"
    runs = conclusions.run_methods(_rows(shm=Status.OK, gloo=Status.OK), 40, 40)
    assert runs[0].status is Status.FAILED and runs[0].right == {"sequential"}
    assert "in step 'ring_exchange': RuntimeError: fc2_fprop: gemm_reduce_scatter is off by" in runs[0].reason


def test_a_probe_that_raises_is_a_row() -> None:
    def bad() -> Row:
        raise ZeroDivisionError("oops")

    row = probes.guard("cpu", "shared memory", bad)
    assert row.status is Status.FAILED and row.detail == "ZeroDivisionError: oops"


def test_table_shows_rows_and_remedies_literally() -> None:
    rows = (
        Row("gpu", "links", Status.UNKNOWN, "GPUs [0, 1] in [bold]", "asked [nobody]", "do [this]"),
        Row("methods", "bulk", Status.OK, "", ""),
    )
    stream = io.StringIO()
    render(Report(rows, 0.1), Console(file=stream, width=200))
    text = stream.getvalue()
    for part in (
        "GPUs [0, 1] in [bold]",
        "asked [nobody]",
        "links: do [this]",
        "works here: bulk; backends without a fault: none",
    ):
        assert part in text


def test_command_on_this_machine(doctors_report: tuple[Result, Path, float]) -> None:
    result, path, took_s = doctors_report
    assert torch.cuda.is_available() or took_s < 30
    assert result.exit_code == 0, result.output
    report = json.loads(path.read_text())
    assert report["works"] and report["backends"]["shared on cpu"] == "ok", report["rows"]
    assert report["methods"] == dict.fromkeys(conclusions.METHODS, "ok") | {"fused": "skipped"}, report["rows"]
    assert all(row["how"] and row["detail"] for row in report["rows"])
    assert "ring_exchange" in result.stdout
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("tpoverlap-doctor-")]


@pytest.fixture
def canned(monkeypatch: pytest.MonkeyPatch) -> Callable[[Status], None]:
    def install(status: Status) -> None:
        report = Report((Row("methods", "bulk", status, "d", "h"),), 0.1)
        monkeypatch.setattr(probes, "run_probes", lambda **kwargs: report)

    return install


@pytest.mark.parametrize("arguments", [["--json"], ["--json", "-"]])
def test_json_to_stdout_is_nothing_but_json(arguments: list[str], canned: Callable[[Status], None]) -> None:
    canned(Status.OK)
    result = CliRunner().invoke(doctor, arguments)
    assert result.exit_code == 0 and json.loads(result.stdout)["methods"] == {"bulk": "ok"}


def test_exit_code_when_nothing_works(canned: Callable[[Status], None]) -> None:
    canned(Status.FAILED)
    result = CliRunner().invoke(doctor, [])
    assert result.exit_code == 1 and "nothing works here" in result.stdout


def test_unwritable_json_is_refused_before_probing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "run_probes", lambda **kwargs: pytest.fail("probed before the path was checked"))
    result = CliRunner().invoke(doctor, ["--json", str(tmp_path / "missing" / "r.json")])
    assert result.exit_code == 2 and "cannot write" in result.output and "Traceback" not in result.output
