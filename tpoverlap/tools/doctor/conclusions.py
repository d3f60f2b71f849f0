"""Which backends and which methods work here: the library's own operations, run on every backend that can be tried."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import tpoverlap
from tpoverlap.tools.doctor.children import ChildResult, first_reason, run_ranks, worst
from tpoverlap.tools.doctor.probes_cuda import SAFE_ENV
from tpoverlap.tools.doctor.report import Row, Status

METHODS = ("ring_exchange", "pipeline", "bulk", "sequential")
_HOW = "ranks ran it through the public functions, T not divisible by R, and compared with plain torch"
# What must have passed before a backend is tried. Every manager starts from a process group.
_NEEDS = {
    ("shared", "cpu"): ("shared memory", "process group (gloo)"),
    ("process_group", "cpu"): ("process group (gloo)",),
    ("cuda", "cuda"): ("symmetric memory", "process group (gloo)"),
    ("process_group", "cuda"): ("process group (nccl)", "process group (gloo)"),
}


@dataclass(frozen=True)
class BackendRun:
    """One backend on one device: which methods gave right results, and why the others did not."""

    backend: str
    device: str
    status: Status
    reason: str
    right: frozenset[str] = field(default_factory=frozenset)
    remedy: str = ""

    @property
    def label(self) -> str:
        """``backend on device``."""
        return f"{self.backend} on {self.device}"


def run_methods(rows: list[Row], cpu_timeout_s: float, gpu_timeout_s: float) -> list[BackendRun]:
    """Try every backend whose needs ``rows`` show to be met; a GPU backend never beside another one."""
    by_name = {row.name: row for row in rows}
    devices = by_name["devices"].data.get("devices", []) if "devices" in by_name else []

    def task(backend: str, device: str) -> Callable[[], BackendRun]:
        timeout_s = gpu_timeout_s if device == "cuda" else cpu_timeout_s
        return lambda: _try_backend(backend, device, by_name, len(devices), timeout_s)

    with ThreadPoolExecutor(2) as pool:
        cpu = [pool.submit(task(*key)) for key in _NEEDS if key[1] == "cpu"]
        runs = [future.result() for future in cpu]
    return runs + [task(*key)() for key in _NEEDS if key[1] == "cuda"]


def _try_backend(backend: str, device: str, by_name: dict[str, Row], gpus: int, timeout_s: float) -> BackendRun:
    for need in _NEEDS[backend, device]:
        row = by_name.get(need)
        if row is None or not row.ok:
            status = Status.UNKNOWN if row is None else row.status
            remedy = "" if row is None else row.remedy
            return BackendRun(backend, device, status, f"not tried, {need}: {status}", remedy=remedy)
    num_ranks = max(2, gpus) if device == "cuda" else 2
    # NCCL refuses two ranks on one GPU; symmetric memory allows them when told to.
    group = "cpu:gloo,cuda:nccl" if device == "cuda" and num_ranks == gpus else "gloo"
    root = str(Path(tpoverlap.__file__).parent.parent)
    env = {**SAFE_ENV, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)}
    if device == "cuda" and num_ranks > gpus:
        env["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    settings = {"backend": backend, "device": device, "process_group": group}
    results = run_ranks("methods:run", num_ranks, timeout_s=timeout_s, settings=settings, env=env)
    return summarise(backend, device, results)


def summarise(backend: str, device: str, results: list[ChildResult]) -> BackendRun:
    """A method is right when it was on every rank."""
    right = frozenset(method for method in METHODS if all(method in result.sections for result in results))
    return BackendRun(backend, device, worst(results), first_reason(results), right)


def backend_rows(rows: list[Row], runs: list[BackendRun]) -> list[Row]:
    """One row a backend and device; ok when every method gave right results on it."""
    found = []
    for run in runs:
        needs = " and ".join(_NEEDS[run.backend, run.device])
        missing = [method for method in METHODS if method not in run.right]
        detail = run.reason if run.status is not Status.OK else "all methods right"
        if run.right and missing:
            detail = f"right: {', '.join(sorted(run.right))}; {detail}"
        found.append(
            Row("backends", run.label, run.status, detail, f"{needs}; then every method, see below", run.remedy)
        )
    return found


def method_rows(runs: list[BackendRun]) -> list[Row]:
    """One row a method: the backends on which its results were right; ok when there is one."""
    rows = []
    for method in METHODS:
        right = [run.label for run in runs if method in run.right]
        wrong = [run.label for run in runs if method not in run.right and run.status in (Status.FAILED, Status.TIMEOUT)]
        detail = f"right with {', '.join(right)}" if right else "on no backend"
        detail += f"; not with {', '.join(wrong)}" if wrong else ""
        rows.append(Row("methods", method, Status.OK if right else Status.FAILED, detail, _HOW))
    hint = "compiles for a minute: scripts/gpu_check --only kernels"
    return [*rows, Row("methods", "fused", Status.SKIPPED, hint, "not tried")]
