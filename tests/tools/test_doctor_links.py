"""Doctor's measured rates, the largest TP that follows from them, what containers do, and the file that others read."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tpoverlap.errors import ConfigError
from tpoverlap.tools.cli import main
from tpoverlap.tools.doctor import bandwidth
from tpoverlap.tools.doctor.bandwidth import GPU_ROW, bandwidth_row, cpu_bandwidth_row, gpu_bandwidth_row
from tpoverlap.tools.doctor.children import ChildResult
from tpoverlap.tools.doctor.container import may_ptrace, mig_row, visible_devices_row
from tpoverlap.tools.doctor.largest_tp import largest_tp_row
from tpoverlap.tools.doctor.probes_cpu import limits_row
from tpoverlap.tools.doctor.report import Report, Row, Status
from tpoverlap.tools.predict.topology import on_topology, topology_of
from tpoverlap.tuning import load_device

# --- measuring ---------------------------------------------------------------------------------------------------


def test_memcpy_is_measured_pair_by_pair_and_all_at_once(tmp_path: Path) -> None:
    row = cpu_bandwidth_row(20, directory=tmp_path)
    assert row.status is Status.OK, row.detail
    ranks = len(row.data["all_at_once"])
    ordered = {f"{a}-{b}" for a in range(ranks) for b in range(ranks) if a != b}
    assert set(row.data["pairs"]) == set(row.data["both_ways"]) == ordered
    rates = [*row.data["pairs"].values(), *row.data["both_ways"].values(), *row.data["all_at_once"].values()]
    assert all(0.01 < rate < 1000 for rate in rates), rates
    assert "not a link between GPUs" in row.how and "memcpy" in row.name
    assert list(tmp_path.iterdir()) == []


def test_bytes_that_do_not_arrive_are_no_bandwidth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that writes to the wrong part is fast, and wrong."""
    real = bandwidth.run_ranks

    def astray(task: str, num_ranks: int, **kwargs: Any) -> list[ChildResult]:
        folder = Path(bandwidth.__file__).parent
        source = (folder / "worker_bandwidth.py").read_text()
        right = "at = (peer * num_ranks + rank) * part_bytes\n            pages"
        broken = source.replace(right, "at = 0\n            pages")
        assert broken != source
        (tmp_path / "worker_bandwidth.py").write_text(broken)
        (tmp_path / "worker.py").write_text((folder / "worker.py").read_text())
        return real(task, num_ranks, worker=tmp_path / "worker.py", **kwargs)

    monkeypatch.setattr(bandwidth, "run_ranks", astray)
    row = cpu_bandwidth_row(20, directory=tmp_path)
    assert row.status is Status.FAILED and "is not what arrived" in row.detail and not row.data


def test_no_place_for_the_pages_is_a_row(tmp_path: Path) -> None:
    row = cpu_bandwidth_row(5, directory=tmp_path / "missing")
    assert row.status is Status.FAILED and "No such file" in row.detail and row.remedy


def test_one_gpu_has_no_link() -> None:
    assert gpu_bandwidth_row(1, 5).status is Status.SKIPPED


def results(rates: dict[tuple[int, int], float], everyone: dict[int, float]) -> list[ChildResult]:
    """What ranks say that push at these rates."""
    found = []
    for rank, rate in everyone.items():
        alone = {str(b): value for (a, b), value in rates.items() if a == rank}
        said = {"part_bytes": 1, "alone": alone, "both": alone, "all_at_once": rate}
        found.append(ChildResult(rank, {"bandwidth": said}, 0))
    return found


def gpu_rows(rates: dict[tuple[int, int], float], everyone: dict[int, float], nvlink: dict[str, Any]) -> list[Row]:
    devices = [{"index": index, "name": "never looked at", "uuid": f"GPU-{index}"} for index in everyone]
    return [
        Row("gpu", "devices", Status.OK, "d", "h", data={"devices": devices}),
        Row("gpu", "links", Status.OK, "d", "h", data={"pairs": nvlink}),
        bandwidth_row("gpu", GPU_ROW, results(rates, everyone), "h", ""),
    ]


def test_aggregate_stands_beside_the_pairs() -> None:
    row = bandwidth_row("gpu", GPU_ROW, results({(0, 1): 350.0, (1, 0): 340.0}, {0: 330.0, 1: 320.0}), "h", "")
    assert row.data["pairs"] == {"0-1": 350.0, "1-0": 340.0} and row.data["all_at_once"] == {"0": 330.0, "1": 320.0}
    assert "one pair alone 345.0" in row.detail and "650.0 in all" in row.detail
    failed = [*results({(0, 1): 1.0}, {0: 1.0}), ChildResult(1, {"step": {"name": "push"}}, None, True)]
    assert bandwidth_row("gpu", GPU_ROW, failed, "h", "r").status is Status.TIMEOUT


# --- the largest TP -----------------------------------------------------------------------------------------------


def all_pairs(count: int, rate: float) -> dict[tuple[int, int], float]:
    return {(a, b): rate for a in range(count) for b in range(count) if a != b}


def nvml(count: int, joined: set[tuple[int, int]] | None = None) -> dict[str, Any]:
    """NVML's pairs; None: NVLink between all."""
    return {
        f"{a}-{b}": {"nvlink": joined is None or (a, b) in joined} for a in range(count) for b in range(a + 1, count)
    }


def test_all_gpus_at_one_rate() -> None:
    row = largest_tp_row(gpu_rows(all_pairs(4, 300.0), dict.fromkeys(range(4), 280.0), nvml(4)))
    assert row.ok and row.data["tp"] == 4 and row.data["gpus"] == [0, 1, 2, 3]
    assert (row.data["pair_gb_s"], row.data["all_gb_s"]) == (300.0, 280.0)
    assert row.detail.startswith("TP 4: GPUs 0, 1, 2, 3 write to each other over NVLink at 300 GB/s")


def test_two_islands() -> None:
    """0-1 and 2-3 over NVLink, PCIe between them: NVML says so, and the rates do where NVML is silent."""
    rates = all_pairs(4, 40.0) | {pair: 300.0 for pair in ((0, 1), (1, 0), (2, 3), (3, 2))}
    everyone = dict.fromkeys(range(4), 90.0)
    for links in (nvml(4, {(0, 1), (2, 3)}), {}, {"0-1": "NV18", "0-2": "SYS", "0-3": "SYS", "2-3": "NV18"}):
        row = largest_tp_row(gpu_rows(rates, everyone, links))
        assert row.data["tp"] == 2 and row.data["gpus"] == [0, 1], row
        assert row.data["all_gb_s"] is None, "with four pushing, nobody measured these two alone together"
        assert "beyond them it is 40 GB/s at most (GPUs 2, 3)" in row.detail


def test_one_slow_link_leaves_a_gpu_out() -> None:
    rates = all_pairs(4, 300.0) | {(1, 3): 100.0}
    row = largest_tp_row(gpu_rows(rates, dict.fromkeys(range(4), 200.0), nvml(4)))
    assert row.data["tp"] == 3 and row.data["gpus"] == [0, 1, 2]


def test_a_chain_is_no_domain() -> None:
    """0-1, 1-2, 2-3 are fast, yet only two of them see each other."""
    fast = {pair: 300.0 for a, b in ((0, 1), (1, 2), (2, 3)) for pair in ((a, b), (b, a))}
    assert largest_tp_row(gpu_rows(all_pairs(4, 20.0) | fast, dict.fromkeys(range(4), 60.0), {})).data["tp"] == 2


def test_pcie_only_and_one_gpu() -> None:
    for links in (nvml(2, set()), {}):
        row = largest_tp_row(gpu_rows(all_pairs(2, 50.0), {0: 45.0, 1: 45.0}, links))
        assert row.ok and row.data["tp"] == 1 and "50 GB/s, what PCIe gives" in row.detail
    one = Row("gpu", "devices", Status.OK, "d", "h", data={"devices": [{"index": 0}]})
    assert largest_tp_row([one]).data["tp"] == 1
    assert largest_tp_row([]).status is Status.SKIPPED
    unmeasured = gpu_rows(all_pairs(2, 50.0), {0: 45.0, 1: 45.0}, {})[:2]
    assert largest_tp_row(unmeasured).status is Status.UNKNOWN


# --- containers -----------------------------------------------------------------------------------------------------

TWO = [{"index": 0, "uuid": "GPU-a"}, {"index": 1, "uuid": "GPU-b"}]


def visible(value: str | None, devices: list[dict[str, Any]], host: dict[str, Any] | None) -> Row:
    environ = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    return visible_devices_row(devices, host, environ)


def test_remapped_devices() -> None:
    plain = visible(None, TWO, {"indices": [0, 1], "count": 2})
    assert plain.ok and "numbered alike" in plain.detail and not plain.remedy
    moved = visible("3,1", TWO, {"indices": [3, 1], "count": 8})
    assert moved.ok and "0 is the host's 3, 1 is the host's 1" in moved.detail and "by UUID" in moved.remedy
    assert moved.data["host_indices"] == [3, 1] and moved.data["environment"] == {"CUDA_VISIBLE_DEVICES": "3,1"}
    cut = visible("0,1,9,2", TWO, {"indices": [0, 1], "count": 4})
    assert cut.status is Status.FAILED and "4 entries, torch sees 2" in cut.detail and "it took 0, 1" in cut.remedy
    assert visible("0,0", [], {"count": 4}).status is Status.FAILED
    assert visible("7", [], {"count": 4}).status is Status.FAILED
    assert visible("", [], None).status is Status.SKIPPED and visible(None, [], None).status is Status.SKIPPED
    assert visible(None, TWO, None).ok


def test_mig() -> None:
    assert mig_row(TWO, [0, 0]).ok and mig_row(TWO, [None, None]).ok
    assert mig_row(TWO, None).status is Status.UNKNOWN and mig_row([], None).status is Status.SKIPPED
    for devices, modes in ((TWO, [0, 1]), ([TWO[0], {"index": 1, "uuid": "MIG-x"}], None)):
        row = mig_row(devices, modes)
        assert row.status is Status.FAILED and "[1]" in row.detail and "-mig 0" in row.remedy


def test_ptrace_permission() -> None:
    assert may_ptrace({"CapEff": "\t0000000000080000"}) is True and may_ptrace({"CapEff": "0"}) is False
    assert may_ptrace({}) is None and isinstance(limits_row().data["may_ptrace"], bool)


# --- the file: predict and tune read it ------------------------------------------------------------------------------


def doctor_json(path: Path, rows: list[Row]) -> str:
    report = Report((*rows, largest_tp_row(rows)), 0.1)
    path.write_text(json.dumps(report.to_dict()))
    return str(path)


LAYER = ("--hidden", "8192", "--ffn", "28672", "--tokens", "4096", "--gpu", "h200", "--json", "-")


def predicted(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(main, ["predict", *LAYER, *arguments])
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.output)
    return found


def test_round_trip_through_predict(tmp_path: Path) -> None:
    h200 = load_device("h200")
    usual = doctor_json(tmp_path / "usual.json", gpu_rows(all_pairs(2, 350.0), {0: 340.0, 1: 340.0}, nvml(2)))
    found = topology_of(h200, usual)
    assert (found.nvlink_domain, found.basis, found.pair_gb_s, found.all_gb_s) == (2, "measured", 350.0, 340.0)
    assert on_topology(h200, found, 2, 50.0) is h200, "the link that the model was fitted to"
    answer = predicted("--tp", "2", "--topology", usual)
    assert answer["label"] == "measured model" and answer["topology"]["pair_gb_s"] == 350.0
    beyond = predicted("--tp", "4", "--topology", usual)
    assert beyond["topology"]["ranks_outside_the_domain"] == 2
    slow = doctor_json(tmp_path / "slow.json", gpu_rows(all_pairs(2, 100.0), {0: 90.0, 1: 90.0}, nvml(2)))
    slower = predicted("--tp", "2", "--topology", slow)
    assert slower["label"] == "estimate" and "taken as 100 GB/s, as doctor measured" in slower["why"][0]
    for near, far in zip(answer["gemms"], slower["gemms"], strict=True):
        assert far["rows"][0]["sequential_us"] > near["rows"][0]["sequential_us"]
        assert far["rows"][0]["plain_us"] > near["rows"][0]["plain_us"]


def test_a_direct_mesh_sends_more_to_all_than_to_one(tmp_path: Path) -> None:
    """Four GPUs with a link for each pair: a group of four is as fast as all of a GPU's links together."""
    mesh = doctor_json(tmp_path / "mesh.json", gpu_rows(all_pairs(4, 130.0), dict.fromkeys(range(4), 380.0), nvml(4)))
    found = topology_of(load_device("h200"), mesh)
    assert found.link_gb_s(2) == 130.0 and found.link_gb_s(4) == 380.0
    assert "380 GB/s a rank to all peers at once" in found.source


def test_not_doctors_rows(tmp_path: Path) -> None:
    path = tmp_path / "d.json"
    good = {"tp": 2, "gpus": [0, 1], "pair_gb_s": 1.0, "all_gb_s": None, "reason": "r"}
    for data in ({}, good | {"tp": "x"}, good | {"tp": 0}, good | {"pair_gb_s": -1.0}, good | {"pair_gb_s": []}, None):
        path.write_text(json.dumps({"rows": [{"name": "largest TP", "status": "ok", "data": data}]}))
        with pytest.raises(ConfigError, match="'largest TP' is not doctor's"):
            topology_of(load_device("h200"), str(path))


def test_this_machines_own_file(doctors_report: tuple[Result, Path, float]) -> None:
    """The real command, then the real reader: on a machine without GPUs it says which row could not tell."""
    result, path, _ = doctors_report
    assert result.exit_code == 0, result.output
    rows = {row["name"]: row for row in json.loads(path.read_text())["rows"]}
    assert rows["memcpy bandwidth"]["status"] == "ok" and rows["memcpy bandwidth"]["data"]["pairs"]
    assert {"visible devices", "MIG", "link bandwidth", "largest TP"} <= set(rows)
    if rows["devices"]["status"] != "ok":
        with pytest.raises(ConfigError, match="could not tell the NVLink domain"):
            topology_of(load_device("h200"), str(path))
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("tpoverlap-doctor-")]
