"""Bulk all-gather and reduce-scatter beside the GEMM that a layer puts there: what either costs the other.

``python -m benchmarks.bulk_beside --out FILE`` on a host with two GPUs takes a minute; ``--device cpu`` runs tiny
sizes in Triton's interpreter, which checks this script and no speed. Results are compared first. Every GEMM is timed by
events on its own stream, with the device queued behind a delay, so the host is out of it. A row that misses a bound is
listed with where its time goes. After every row the rows so far stand in ``FILE.rows``, and in the end in the file.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import bulk_beside_ranks as ranks
from benchmarks.environment import environment
from tpoverlap.testing import RankPool
from tpoverlap.tools.bench.job import BenchJob
from tpoverlap.tools.bench.tables import figure
from tpoverlap.tools.bench.targets import describe, targets
from tpoverlap.tools.bench.variants import COLLECTIVE, GEMM, PULL, PUSH
from tpoverlap.tools.bench.worker import RANK_ENVIRONMENT

Row = dict[str, Any]
_START_S = 45.0
"""Beyond the budget, for the first kernels to compile and for the row that is begun last."""


def job_on(device_type: str, rounds: int, budget_s: float) -> BenchJob:
    """Two ranks, a GPU each where there are two."""
    on_gpu = device_type == "cuda"
    return BenchJob(
        suites=(),
        device_type="cuda" if on_gpu else "cpu",
        num_gpus=torch.cuda.device_count() if on_gpu else 0,
        tp_size=2,
        ranks_per_host=2,
        rounds=rounds,
        minutes=budget_s / 60,
        timeout_s=20.0,
    )


def us(row: Row, label: str) -> float | None:
    """Microseconds of an operation of ``row``: queued where there are any."""
    times = row["times"].get(label)
    return None if times is None else times["eager_us"] if times["queued_us"] is None else times["queued_us"]


def collective_us(row: Row, variant: str) -> float | None:
    """Of what ``variant`` moves, with nothing beside it."""
    return us(row, COLLECTIVE if variant in (ranks.NCCL_BESIDE, ranks.NCCL_IN_TURN) else variant + ranks.NOTHING_BESIDE)


def beyond_us(row: Row, variant: str) -> float | None:
    """What the whole operation takes beyond its longer part alone."""
    parts = us(row, variant), us(row, GEMM), collective_us(row, variant)
    if any(part is None for part in parts):
        return None
    time_us, gemm_us, alone_us = (float(part) for part in parts if part is not None)
    return time_us - max(gemm_us, alone_us)


def judge(row: Row) -> list[Row]:
    """What ``data/targets.json`` says of one row; what was not timed is a miss.

    The collective alone is ours or NCCL's, whichever is faster: a slow one of ours must not widen its own bound.
    """
    rules = targets()["bulk"]
    variant = rules["variant"]
    time_us, gemm_us, own_us = us(row, variant), us(row, GEMM), collective_us(row, variant)
    if time_us is None or gemm_us is None or own_us is None:
        return [{"rule": "measured", "mode": "", "value": None, "bound": None, "passed": False}]
    plain_us = us(row, COLLECTIVE)
    alone_us = own_us if plain_us is None else min(own_us, plain_us)
    judged = [_at_most("GEMM beside / alone", row["gemm_ratio"].get(variant), rules["gemm_ratio"])]
    if alone_us < gemm_us:
        judged.append(_at_most("collective hidden", time_us, gemm_us + rules["extra_us"]))
    baselines = {label: us(row, label) for label in (ranks.NCCL_BESIDE, ranks.NCCL_IN_TURN)}
    timed = {label: value for label, value in baselines.items() if value is not None}
    if timed:
        best = min(timed, key=lambda label: timed[label])
        judged.append(_at_most("best baseline", time_us, rules["best_baseline"] * timed[best]) | {"baseline": best})
    return judged


def _at_most(rule: str, value: float | None, bound: float) -> Row:
    passed = value is not None and value <= bound
    return {"rule": rule, "mode": "queued", "value": value, "bound": bound, "passed": passed}


def where_time_goes(row: Row) -> str:
    """Of the judged variant, in a line: what the GEMM gained, and what is left outside it."""
    variant = targets()["bulk"]["variant"]
    time_us, gemm_us = us(row, variant), row["gemm_us"].get(variant)
    if time_us is None or gemm_us is None:
        return "not timed"
    parts = {"own collective": collective_us(row, variant), "push": us(row, PUSH), "pull": us(row, PULL)}
    parts["the add"] = us(row, ranks.ADD)
    alone = ", ".join(f"{label} {value:.1f}" for label, value in parts.items() if value is not None)
    return (
        f"{time_us:.1f} us = GEMM {gemm_us:.1f} ({row['gemm_us'][GEMM]:.1f} alone) + {time_us - gemm_us:.1f} "
        f"outside it; alone: {alone}"
    )


def missed(found: Row) -> list[str]:
    """A line a miss; none where the targets are not for this machine."""
    rows = [row for row in found["rows"] if found["judged"]]
    return [
        f"{row['label']}: {describe(one)}; {where_time_goes(row)}"
        for row in rows
        for one in row["targets"]
        if not one["passed"]
    ]


def print_table(found: Row) -> None:
    """A block a row: the parts alone, then each variant."""
    for row in found["rows"]:
        parts = (GEMM, COLLECTIVE, PUSH, PULL, ranks.ADD)
        alone = ", ".join(f"{label} {figure(us(row, label), 1)}" for label in parts if label in row["times"])
        print(f"{row['label']}: {alone}")
        print(f"  {'':20}{'operation':>10}{'eager':>9}{'nothing beside':>16}{'GEMM':>9}{'slower by':>11}{'beyond':>9}")
        for label in (*found["options"], ranks.NCCL_BESIDE, ranks.NCCL_IN_TURN):
            if label not in row["times"]:
                continue
            ratio = row["gemm_ratio"].get(label)
            percent = "-" if ratio is None else f"{100 * (ratio - 1):+.1f} %"
            cells = (
                f"{figure(us(row, label), 1):>10}{figure(row['times'][label]['eager_us'], 1):>9}",
                f"{figure(collective_us(row, label), 1):>16}{figure(row['gemm_us'].get(label), 1):>9}",
                f"{percent:>11}{figure(beyond_us(row, label), 1):>9}",
            )
            print(f"  {label:20}" + "".join(cells))
        for label, problem in row["errors"].items():
            print(f"  {label:20}ERROR: {problem}")
    for label, reason in found["not_honoured"].items():
        print(f"not measured: {label}: {reason}")
    print("us, queued; beyond: what the operation takes beyond the longer of the GEMM and the collective alone")
    judged = sum(len(row["targets"]) for row in found["rows"])
    lines = missed(found)
    print(f"targets missed: {len(lines)} of {judged}" if found["judged"] else "targets are for two GPUs: not judged")
    for line in lines:
        print(f"  {line}")
    if "error" in found:
        print(found["error"][:2000])
    print(f"{len(found['left_out'])} rows left out {found['left_out']}, {found['seconds']} s in all")


def main(given: Sequence[str] | None = None) -> int:
    """Run, write the file, print the table; 1 if something was wrong or nothing was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--budget-s", type=float, default=45.0, help="no row is begun later, counted from the first")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args(given)
    started = time.monotonic()
    job = job_on(arguments.device, arguments.rounds, arguments.budget_s)
    found: Row = {"format": "bulk beside", "environment": environment(), "device": arguments.device}
    found |= {"judged": job.is_judged, "options": {}, "not_honoured": {}, "rows": [], "left_out": []}
    progress = arguments.out.with_name(arguments.out.name + ".rows")
    progress.unlink(missing_ok=True)
    environment_of_ranks = {"TRITON_INTERPRET": "1"} if arguments.device == "cpu" else RANK_ENVIRONMENT
    try:
        with RankPool(2, device=arguments.device, env=environment_of_ranks, grace_s=8.0) as pool:
            limit_s = arguments.budget_s + _START_S
            found |= pool.run(ranks.measure_all, job, str(progress), timeout_s=limit_s)[0]
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}"[-6000:]
        if progress.exists():
            found |= json.loads(progress.read_text())
    for row in found["rows"]:
        row["targets"] = judge(row) if job.is_judged else []
    found["missed"] = missed(found)
    found["seconds"] = round(time.monotonic() - started, 1)
    arguments.out.write_text(json.dumps(found, indent=1, default=str))
    progress.unlink(missing_ok=True)
    print_table(found)
    return 1 if "error" in found or any(row["errors"] for row in found["rows"]) or not found["rows"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
