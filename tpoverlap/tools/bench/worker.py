"""Ranks: spawned here, or one of them under ``torchrun``; then suite after suite, row after row."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import torch
import torch.distributed as dist

from tpoverlap.testing import run_ranks
from tpoverlap.tools.bench.job import BenchJob
from tpoverlap.tools.bench.report import BenchReport, write_report
from tpoverlap.tools.bench.session import Session
from tpoverlap.tools.bench.suites import load_suite

if TYPE_CHECKING:
    from tpoverlap.tools.bench.suite import Row

RANK_ENVIRONMENT = {
    # torch's async-TP makes a multicast object wherever it can; on shared hosts these have put GPUs out of service.
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}
_RUN_S = 3600.0
_GRACE_S = 300.0


def spawn(job: BenchJob, where: dict[str, Any]) -> BenchReport:
    """Start the ranks of ``job`` and give rank 0's report. Raises RankFailure; rows so far are in the JSON then."""
    limit_s = _RUN_S if job.minutes is None else 60.0 * job.minutes + _GRACE_S
    results = run_ranks(
        bench_rank,
        job.tp_size,
        job,
        where,
        device=job.device_type,
        env=RANK_ENVIRONMENT if job.device_type == "cuda" else None,
        timeout_s=limit_s,
        group_timeout_s=2 * job.timeout_s,
    )
    report: BenchReport = results[0]
    return report


def run_under_torchrun(job: BenchJob, rank: int, where: dict[str, Any]) -> BenchReport:
    """Run as ``rank`` of the world that torchrun made; its environment says where to meet."""
    if job.device_type == "cuda":
        os.environ.update(RANK_ENVIRONMENT)
        if job.shares_gpus:
            os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        torch.cuda.set_device(job.device(rank))
    else:
        torch.set_num_threads(1)
    dist.init_process_group(job.group_backend, timeout=timedelta(seconds=2 * job.timeout_s))
    try:
        return bench_rank(rank, job.tp_size, job, where)
    finally:
        dist.destroy_process_group()


def bench_rank(rank: int, world_size: int, job: BenchJob, where: dict[str, Any]) -> BenchReport:
    """The work of one rank in an initialised group. Rank 0 says how far it is, and keeps the JSON up to date."""
    group = dist.group.WORLD
    assert group is not None, "the caller made it"
    session = Session(job, group, rank)
    report = BenchReport({**where, "group_backend": dist.get_backend(group)}, [], [])
    progress = sys.stderr if rank == 0 else None
    for name in job.suites:
        _run_suite(session, name, report, progress)
    return report


def _run_suite(session: Session, name: str, report: BenchReport, progress: TextIO | None) -> None:
    suite = load_suite(name)
    items = suite.items(session.job)
    if not items or _left_out(session, name, items, report):
        return
    runner = suite.start(session, items)
    for number, item in enumerate(items):
        if number and _left_out(session, name, items[number:], report):
            break
        row: Row = runner.measure(item)
        report.rows.append(row)
        if progress is not None:
            print(f"[{number + 1}/{len(items)}] {name} {row['label']}{_problems(row)}", file=progress, flush=True)
            if session.job.json_path is not None:
                write_report(Path(session.job.json_path), report)
    runner.close()


def _left_out(session: Session, name: str, items: Sequence[Any], report: BenchReport) -> bool:
    """Whether time is up; then what is left goes into the report."""
    if not session.out_of_time():
        return False
    report.left_out += [f"{name} {item.label}" for item in items]
    return True


def _problems(row: Row) -> str:
    return "".join(f"  ! {problem[:200]}" for problem in row["problems"])
