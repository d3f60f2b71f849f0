"""Checks, then measures, everything that needs GPUs, in one run. Start it with ``scripts/gpu_check``.

With fewer GPUs than ranks the ranks share them: that proves numbers and errors, never times, so the timed part runs
only where every rank has a GPU of its own, and the report says when it did not.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console

from benchmarks import cuda_faults, growth, nccl_order
from benchmarks.environment import environment
from tpoverlap.testing import RankPool, conformance, run_ranks
from tpoverlap.testing.conformance.gemms import check_bulk
from tpoverlap.tools.bench.job import BenchJob
from tpoverlap.tools.bench.tables import gemm_table
from tpoverlap.tools.bench.worker import spawn

console = Console(width=110)
Row = dict[str, Any]
NUMBERS = (
    (2, torch.bfloat16, 1),
    (2, torch.float16, 2),
    (2, torch.float32, 2),
    (4, torch.bfloat16, 1),
    (8, torch.bfloat16, 1),
)
"""Group size, dtype, and which part of the cases: few are about the dtype."""
QUICK_NUMBERS = ((2, torch.bfloat16, 5), (4, torch.bfloat16, 10))
PARTS = ("numbers", "kernels", "fp8", "messages", "doctor", "queues", "order", "train", "costs", "times")
RING_BOUND = 0.93
"""A ring at 8192^3 on two GPUs must take at most this part of sequential."""


class Report:
    """Rows of what was checked; a failure is a row, and the run goes on."""

    def __init__(self, out: Path, where: Row) -> None:
        self.rows: list[Row] = []
        self.times: list[Row] = []
        self.not_run: list[str] = []
        self._out = out
        self._where = where

    def write(self) -> None:
        """Write what there is: after every check, so that a run that is cut off leaves its rows."""
        self._out.parent.mkdir(parents=True, exist_ok=True)
        content = {"environment": self._where, "checks": self.rows, "times": self.times, "not_run": self.not_run}
        self._out.write_text(json.dumps(content, indent=1) + "\n")

    def check(self, name: str, run: Callable[[], Any]) -> Any:
        """Run one check and keep its result or its error."""
        begin, result, status, detail = time.monotonic(), None, "ok", ""
        try:
            result = run()
        except Exception as error:
            status, detail = "failed", f"{type(error).__name__}: {error}"[:3000]
            traceback.print_exc(limit=1)
        seconds = round(time.monotonic() - begin, 1)
        self.rows.append({"check": name, "status": status, "seconds": seconds, "detail": detail, "result": result})
        self.write()
        console.print(f"[{'green' if status == 'ok' else 'red'}]{status:7}[/] {seconds:6.1f} s  {name}  {detail[:400]}")
        return result

    @property
    def failed(self) -> list[str]:
        """Names of failed checks."""
        return [row["check"] for row in self.rows if row["status"] != "ok"]


def _setting(dtype: torch.dtype, backend: str = "auto") -> conformance.Setting:
    return conformance.Setting(device="cuda", dtype=dtype, backend=backend, capacity=520, hidden=256, features=192)


def _numbers(report: Report, world_size: int, dtype: torch.dtype, every: int, backend: str = "auto") -> None:
    """CONFORMANCE.md's cases, as the CPU tests run them; each ``every``-th of them."""
    _run_cases(report, conformance.all_cases(_setting(dtype, backend), world_size)[::every], world_size, dtype, backend)


def _run_cases(
    report: Report, cases: Sequence[conformance.Case], world_size: int, dtype: torch.dtype, backend: str = "auto"
) -> None:
    label = f"R={world_size} {str(dtype).removeprefix('torch.')}" + ("" if backend == "auto" else f" {backend}")
    with RankPool(world_size, device="cuda") as pool:
        for case in cases:
            report.check(f"{label} {case.id}", lambda case=case: pool.run(case.check, *case.args, timeout_s=120)[0])


def _kernels(report: Report, quick: bool) -> None:
    """`fused` and copy programs: the named sizes, and one with more tiles than multiprocessors."""
    large = replace(_setting(torch.bfloat16), capacity=4100, hidden=2048, features=1536)
    dtypes = (torch.bfloat16,) if quick else (torch.bfloat16, torch.float16, torch.float32)
    for dtype in dtypes:
        _run_cases(report, [*conformance.kernel_cases(_setting(dtype), 2)], 2, dtype)
    cases = [replace(case, id=f"large-{case.id}") for case in conformance.kernel_cases(large, 2)]
    _run_cases(report, cases, 2, torch.bfloat16)
    if not quick:
        _run_cases(report, [*conformance.kernel_cases(_setting(torch.bfloat16), 4)], 4, torch.bfloat16)


def _fp8(report: Report, quick: bool) -> None:
    setting = replace(_setting(torch.bfloat16), capacity=2048, hidden=512, features=256)
    cases = [*conformance.fp8_cases(setting, 2)][:: 3 if quick else 1]
    cases += [*conformance.fp8_kernel_cases(setting, 2)][:: 3 if quick else 1]
    _run_cases(report, cases, 2, torch.bfloat16)


def _queues(report: Report, quick: bool) -> None:
    """Case 3 and the error paths under one, eight and the default number of hardware queues."""
    setting = _setting(torch.bfloat16)
    for queues in ("1",) if quick else (None, "1", "8"):
        env = {"CUDA_DEVICE_MAX_CONNECTIONS": queues}
        report.check(
            f"CUDA_DEVICE_MAX_CONNECTIONS={queues}: bulk",
            lambda env=env: run_ranks(check_bulk, 2, setting, "bulk", device="cuda", env=env, timeout_s=120)[0],
        )
        for scenario, error in cuda_faults.EXPECTED.items():
            if scenario != "mismatch" and queues != "1":
                continue  # one queue is the hard case; the others are slow to wait for and differ by nothing else
            report.check(
                f"CUDA_DEVICE_MAX_CONNECTIONS={queues}: peer: {scenario}",
                lambda env=env, scenario=scenario, error=error: _fault(scenario, error, env),
            )


def _order(report: Report, quick: bool) -> None:
    """NCCL kernels of another library in opposite order on the ranks; once without them, for the price."""
    for queues in ("1",) if quick else (None, "1", "8"):
        with RankPool(2, device="cuda", env={"CUDA_DEVICE_MAX_CONNECTIONS": queues}) as pool:
            for label in nccl_order.operations():
                for other in (True,) if quick else (True, False):
                    beside = "beside NCCL in opposite order" if other else "alone"
                    report.check(
                        f"CUDA_DEVICE_MAX_CONNECTIONS={queues}: {label} {beside}",
                        lambda args=(label, other): pool.run(nccl_order.opposite_order, *args, timeout_s=60),
                    )


def _fault(scenario: str, error: str, env: dict[str, str | None]) -> Any:
    dead = (1,) if scenario == "die" else ()
    results = run_ranks(cuda_faults.run_scenario, 2, scenario, device="cuda", env=env, timeout_s=60, expect_dead=dead)
    reporting = [row for row in results if row is not None and row["error"] is not None]
    wanted = 2 if scenario == "mismatch" else 1
    if len(reporting) != wanted or any(row["error"] != error or not row["poisoned"] for row in reporting):
        raise AssertionError(f"expected {wanted} x {error} with poisoned rows, got {results}")
    return reporting


def _train(report: Report, out: Path, tp_size: int, steps: int) -> None:
    file = out.with_name(f"{out.stem}_train_tp{tp_size}.json")
    command = [sys.executable, "-m", "tpoverlap", "train", "--device", "cuda", "--tp", str(tp_size)]
    command += ["--steps", str(steps), "--check-reference", "--json", str(file)]

    def run() -> Any:
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        if done.returncode:
            raise RuntimeError(f"exit {done.returncode}: {(done.stdout + done.stderr)[-2500:]}")
        return json.loads(file.read_text())["summary"]

    report.check(f"main job, tp {tp_size}: {' '.join(command[1:-2])}", run)
    file.unlink(missing_ok=True)


def _doctor(report: Report) -> None:
    """`tpoverlap doctor` finds something that works here."""

    def run() -> Any:
        command = [sys.executable, "-m", "tpoverlap", "doctor", "--json", "-"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
        if done.returncode:
            raise RuntimeError(f"exit {done.returncode}: {(done.stdout + done.stderr)[-2500:]}")
        return json.loads(done.stdout)

    report.check("doctor", run)


def _host_suite() -> Any:
    """Rows of `tpoverlap bench --suite host`, which checks results before it times them."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "host.json"
        command = [sys.executable, "-m", "tpoverlap", "bench", "--device", "cuda", "--suite", "host", "--quick"]
        done = subprocess.run([*command, "--json", str(file)], capture_output=True, text=True, timeout=200, check=False)
        if not file.exists():
            raise RuntimeError(f"exit {done.returncode}: {(done.stdout + done.stderr)[-2500:]}")
        data = json.loads(file.read_text())
    if data["problems"] or not data["rows"]:
        raise RuntimeError(f"host suite: {data['problems'] or 'nothing was measured'}")
    return {row["label"]: row["host_us"] for row in data["rows"]}


def _costs(report: Report, quick: bool) -> None:
    report.check("host time: bench --suite host", _host_suite)

    def grown() -> Any:
        rows = run_ranks(growth.thousand_shapes, 2, "cuda", 200 if quick else 1000, device="cuda", timeout_s=240)
        for row in rows:
            if row["reserved_bytes_growth"] or row["allocated_bytes_growth"] or row["arena_allocations"] != 1:
                raise AssertionError(f"memory grew over random T: {rows}")
        return rows

    report.check("random T: no allocation, no growth", grown)


def _times(report: Report, quick: bool) -> list[Row]:
    """A few rows of ``tpoverlap bench --suite gemm``; the whole of it is that command's business."""
    shapes: tuple[tuple[int, int, int], ...] = ((8192, 8192, 8192),)
    if not quick:
        shapes += ((4096, 8192, 4096), (8192, 4096, 8192), (1024, 8192, 4096))
    job = BenchJob(
        suites=("gemm",),
        device_type="cuda",
        num_gpus=torch.cuda.device_count(),
        tp_size=2,
        ranks_per_host=2,
        shapes=shapes,
    )
    bench = report.check("times of methods", lambda: spawn(job, environment()).as_dict())
    rows: list[Row] = bench["rows"] if bench is not None else []
    if not any(row["measured"] for row in rows):
        raise click.ClickException("nothing was measured")
    for row in rows:
        report.check(f"{row['label']}: right numbers, no error", lambda row=row: _right(row))
        if (row["num_tokens"], row["in_features"], row["out_features"]) == shapes[0]:
            report.check(
                f"ring {row['direction']} at 8192^3 <= {RING_BOUND} of sequential",
                lambda methods=row["methods"]: _bound(methods),
            )
    return rows


def _right(row: Row) -> dict[str, float]:
    if row["problems"]:
        raise AssertionError("; ".join(row["problems"]))
    return {label: one["relative_error"] for label, one in row["methods"].items()}


def _bound(methods: Row) -> float:
    ratio = float(methods["ring_exchange"]["of_sequential"]["eager"])
    if ratio > RING_BOUND:
        raise AssertionError(f"ring takes {ratio:.3f} of plain sequential")
    return ratio


@click.command()
@click.option("--quick", is_flag=True, help="fewer dtypes, group sizes and repeats")
@click.option("--only", type=click.Choice(PARTS), multiple=True)
@click.option("--ranks", type=int, multiple=True, help="with numbers: these group sizes only")
@click.option("--out", type=click.Path(path_type=Path), default=None, help="JSON file; default benchmarks/results/")
def main(quick: bool, only: tuple[str, ...], ranks: tuple[int, ...], out: Path | None) -> None:
    """Check everything that needs GPUs, then measure it."""
    if not torch.cuda.is_available():
        raise click.ClickException("no CUDA device: this script is for GPU hosts; `make test` checks the CPU")
    where = environment()
    num_gpus = torch.cuda.device_count()
    gpu = where["gpus"][0].replace(" ", "-")
    out = out or Path("benchmarks/results") / f"gpu_check_{where['date'][:10]}_{num_gpus}x{gpu}.json"
    parts = only or PARTS
    where["ranks_share_gpus"] = num_gpus < 2
    report = Report(out, where)
    if "numbers" in parts:
        for world_size, dtype, every in QUICK_NUMBERS if quick else NUMBERS:
            if not ranks or world_size in ranks:
                _numbers(report, world_size, dtype, every)
    if "kernels" in parts:
        _kernels(report, quick)
    if "fp8" in parts:
        _fp8(report, quick)
    if "messages" in parts and num_gpus >= 2:  # NCCL refuses two ranks on one GPU
        _numbers(report, 2, torch.bfloat16, 5 if quick else 1, "process_group")
    elif "messages" in parts:
        report.not_run.append(f"NCCL messages: they need 2 GPUs, this machine has {num_gpus}")
    if "doctor" in parts:
        _doctor(report)
    if "queues" in parts:
        _queues(report, quick)
    if "order" in parts and num_gpus >= 2:
        _order(report, quick)
    elif "order" in parts:
        report.not_run.append(f"NCCL in opposite order: it needs 2 GPUs, this machine has {num_gpus}")
    if "train" in parts:
        for tp_size in (2,) if quick else (2, 4, 8):
            _train(report, out, tp_size, 8 if tp_size == 2 and not quick else 4)
    if "costs" in parts:
        _costs(report, quick)
    if "times" in parts and num_gpus >= 2:
        report.times = _times(report, quick)
        console.print(gemm_table(report.times))
    elif "times" in parts:
        report.not_run.append(f"times of methods: they need 2 GPUs, this machine has {num_gpus}, which ranks shared")
    report.write()
    console.print(f"{len(report.rows) - len(report.failed)} of {len(report.rows)} checks passed; {out}")
    for line in report.not_run:
        console.print(f"[yellow]not run:[/] {line}")
    if report.failed:
        console.print("[red]failed:[/] " + ", ".join(report.failed))
        sys.exit(1)


if __name__ == "__main__":
    main()
