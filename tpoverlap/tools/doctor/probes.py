"""Run every probe, and put the rows in order."""

from __future__ import annotations

import glob
import platform
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version

from tpoverlap.tools.doctor import probes_cpu, probes_cuda
from tpoverlap.tools.doctor.bandwidth import CPU_ROW, GPU_ROW, cpu_bandwidth_row, gpu_bandwidth_row
from tpoverlap.tools.doctor.children import ChildResult, run_ranks
from tpoverlap.tools.doctor.conclusions import backend_rows, method_rows, run_methods
from tpoverlap.tools.doctor.container import mig_row, visible_devices_row
from tpoverlap.tools.doctor.largest_tp import NAME, largest_tp_row
from tpoverlap.tools.doctor.report import Report, Row, Status

_PACKAGES = ("tpoverlap", "torch", "triton", "numpy", "cuda-bindings", "nvidia-ml-py")
_GPU_ROWS = (
    "MIG",
    "links",
    "NVLink domain",
    "peer access",
    "stream memory operations",
    "multicast",
    "symmetric memory",
    "process group (nccl)",
    GPU_ROW,
    NAME,
)
Say = Callable[[str], None]


def run_probes(*, cpu_timeout_s: float = 20.0, gpu_timeout_s: float = 60.0, say: Say = lambda _: None) -> Report:
    """Probe this machine.

    Args:
        cpu_timeout_s: after that long a probe that needs no GPU is killed and becomes a ``timeout`` row.
        gpu_timeout_s: the same for probes that use a GPU.
        say: called with what is being probed.
    """
    started = time.monotonic()
    say("CPU: shared memory, process group")
    # Beside each other: were all of them to hang, the doctor still ends within one time limit.
    with ThreadPoolExecutor(3) as pool:
        shared = pool.submit(guard, "cpu", "shared memory", lambda: probes_cpu.shared_memory_row(cpu_timeout_s))
        handles = pool.submit(guard, "cpu", "handle exchange", lambda: probes_cpu.handle_exchange_row(cpu_timeout_s))
        gloo = pool.submit(guard, "cpu", "process group (gloo)", lambda: probes_cpu.gloo_row(cpu_timeout_s))
        rows = [
            guard("machine", "cpu", probes_cpu.cpu_row),
            guard("machine", "/dev/shm", probes_cpu.shm_row),
            guard("machine", "limits", probes_cpu.limits_row),
        ]
        cpu_rows = [shared.result(), handles.result(), gloo.result()]
    say("CPU: bandwidth")  # alone: the probes beside it would share the cores
    cpu_rows.append(guard("cpu", CPU_ROW, lambda: cpu_bandwidth_row(cpu_timeout_s)))
    gpu_rows, extra = _gpu_rows(gpu_timeout_s, say)
    rows = [guard("machine", "versions", lambda: versions_row(extra)), *rows, *cpu_rows, *gpu_rows]
    say("methods")
    runs = run_methods(rows, cpu_timeout_s, gpu_timeout_s)
    rows += [*backend_rows(rows, runs), *method_rows(runs)]
    return Report(tuple(rows), time.monotonic() - started)


def guard(section: str, name: str, probe: Callable[[], Row]) -> Row:
    """The probe's row; whatever it raises becomes a ``failed`` row."""
    try:
        return probe()
    except Exception as error:
        return Row(section, name, Status.FAILED, f"{type(error).__name__}: {error}", "the probe itself raised")


def _gpu_rows(timeout_s: float, say: Say) -> tuple[list[Row], dict[str, str]]:
    """Rows about GPUs, and versions that only the driver knows."""
    import torch

    how = "torch.version.cuda, /dev/nvidia*"
    if torch.version.cuda is None:
        nodes = [node for node in glob.glob("/dev/nvidia*") if node.removeprefix("/dev/nvidia").isdigit()]
        found = f"this torch ({torch.__version__}) is built without CUDA"
        if not nodes:
            row = Row(probes_cuda.SECTION, "devices", Status.SKIPPED, f"no NVIDIA GPU: {found}, no /dev/nvidia0", how)
        else:
            remedy = "install a CUDA build of torch: https://pytorch.org/get-started/locally"
            row = Row(
                probes_cuda.SECTION, "devices", Status.FAILED, f"{', '.join(nodes)} exist, but {found}", how, remedy
            )
        return [row, visible_devices_row([], None), *_skipped("no CUDA device")], {}
    say("GPU: devices")
    inventory = run_ranks("cuda:inventory", 1, timeout_s=timeout_s, env=probes_cuda.SAFE_ENV)[0]
    devices = probes_cuda.devices_row(inventory)
    if not devices.ok:
        return [devices, visible_devices_row([], None), *_skipped("no CUDA device")], {}
    found_devices = devices.data["devices"]
    count = len(found_devices)
    say("GPU: links")
    nvml = run_ranks(
        "cuda:nvml", 1, timeout_s=min(timeout_s, 20.0), settings={"uuids": [d["uuid"] for d in found_devices]}
    )[0]
    topology = probes_cuda.read_topology() if "links" not in nvml.sections else None
    say("GPU: symmetric memory")
    symmetric = guard("gpu", "symmetric memory", lambda: probes_cuda.symmetric_memory_row(count, timeout_s))
    say("GPU: NCCL")
    nccl = guard("gpu", "process group (nccl)", lambda: probes_cuda.nccl_row(count, timeout_s))
    say("GPU: bandwidth")
    bandwidth = guard("gpu", GPU_ROW, lambda: gpu_bandwidth_row(count, timeout_s))
    host = nvml.sections.get("host")
    made_here: list[tuple[str, Callable[[], Row]]] = [
        ("visible devices", lambda: visible_devices_row(found_devices, host)),
        ("MIG", lambda: mig_row(found_devices, None if host is None else host["mig"])),
        ("links", lambda: probes_cuda.links_row(nvml, count, topology)),
        ("NVLink domain", lambda: probes_cuda.domain_row(nvml)),
        ("peer access", lambda: probes_cuda.peer_access_row(inventory, count)),
        ("stream memory operations", lambda: probes_cuda.stream_operations_row(inventory)),
        ("multicast", lambda: probes_cuda.multicast_row(inventory)),
    ]
    rows = [devices, *(guard("gpu", name, make) for name, make in made_here), symmetric, nccl, bandwidth]
    rows.append(guard("gpu", NAME, lambda: largest_tp_row(rows)))
    return rows, _driver_versions(inventory, nvml)


def _skipped(why: str) -> list[Row]:
    return [Row(probes_cuda.SECTION, name, Status.SKIPPED, why, "not tried") for name in _GPU_ROWS]


def _driver_versions(inventory: ChildResult, nvml: ChildResult) -> dict[str, str]:
    found = {
        "cuda": inventory.sections.get("cuda", {}).get("cuda"),
        "nccl": inventory.sections.get("libraries", {}).get("nccl"),
        "driver": nvml.sections.get("driver", {}).get("version"),
    }
    return {name: str(value) for name, value in found.items() if value}


def versions_row(extra: dict[str, str]) -> Row:
    """Versions of everything that matters; ``-``: not there."""
    found = {"python": platform.python_version(), "kernel": platform.release()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "-"
    if found["tpoverlap"] == "-":  # run from a checkout
        import tpoverlap

        found["tpoverlap"] = str(getattr(tpoverlap, "__version__", "source checkout"))
    found.update({name: extra.get(name, "-") for name in ("cuda", "nccl", "driver")})
    detail = ", ".join(f"{name} {value}" for name, value in found.items())
    return Row("machine", "versions", Status.OK, detail, "importlib.metadata, torch, NVML", data=found)
