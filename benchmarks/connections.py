"""Does CUDA_DEVICE_MAX_CONNECTIONS matter? The same operations in fresh processes with it unset, 1 and 8.

``python -m benchmarks.connections --out FILE`` on a host with two GPUs takes a minute; ``--device cpu`` runs tiny
sizes, which checks this script and nothing else. A process reads the variable once, so each setting has processes of
its own. All are started together, and then only those of one setting ever have work: unset, 1, 8, unset, 1, 8. Two
repetitions of one setting differ by noise and drift, and that stands beside the difference between settings.
``--one-at-a-time`` starts and ends processes for every repetition, which takes a minute longer.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import connections_ranks as ranks
from benchmarks.bulk_beside import job_on
from benchmarks.environment import environment
from tpoverlap.testing import RankPool
from tpoverlap.tools.bench.job import BenchJob
from tpoverlap.tools.bench.tables import figure
from tpoverlap.tools.bench.targets import targets
from tpoverlap.tools.bench.worker import RANK_ENVIRONMENT

Row = dict[str, Any]
_QUEUED = 30
_RUN_S = 60.0
"""Beyond the budget, for one repetition: kernels to compile, and the token count that is begun last."""


def pool_of(setting: str | None, device: str) -> RankPool:
    """Two ranks with that value of the variable, or without the variable."""
    return RankPool(2, device=device, env={**RANK_ENVIRONMENT, ranks.VARIABLE: setting}, grace_s=8.0)


def repeat(found: Row, job: BenchJob, arguments: argparse.Namespace) -> None:
    """Every setting in turn, so many times; the file is written after each. The budget begins when all are there."""
    settings: list[str | None] = targets()["connections"]["settings"]
    pools: dict[str | None, RankPool] = {}
    if not arguments.one_at_a_time:
        pools = {setting: pool_of(setting, arguments.device) for setting in settings}
    try:
        for pool in pools.values():
            pool.start()
        for pool in pools.values():
            pool.run(ranks.begin, job)
        until = time.monotonic() + arguments.budget_s
        for repetition in range(arguments.repetitions):
            for setting in settings:
                left_s = until - time.monotonic()
                if left_s <= 0:
                    found["left_out"].append(f"{ranks.VARIABLE}={setting}, repetition {repetition}")
                    continue
                asked = replace(job, minutes=left_s / 60)
                if arguments.one_at_a_time:
                    with pool_of(setting, arguments.device) as pool:
                        one = pool.run(ranks.measure_all, asked, timeout_s=left_s + _RUN_S)[0]
                else:
                    one = pools[setting].run(ranks.measure_all, asked, timeout_s=left_s + _RUN_S)[0]
                if one["setting"] != setting:
                    raise AssertionError(f"asked for {ranks.VARIABLE}={setting}, ranks have {one['setting']}")
                found["runs"].append(one | {"repetition": repetition})
                arguments.out.write_text(json.dumps(found, indent=1, default=str))
    finally:
        for pool in pools.values():
            pool.close()


def compare(runs: Sequence[Row]) -> list[Row]:
    """A row an operation: medians by setting, how far they lie apart, and how far two of one setting do.

    ``spread``, ``noise``: largest over smallest, less 1. ``agrees``: None where a setting was not measured.
    """
    rules = targets()["connections"]
    rows = []
    for label in dict.fromkeys(label for run in runs for label in run["rows"]):
        row: Row = {"label": label}
        for mode in ("eager", "queued"):
            samples: dict[str | None, list[float]] = {setting: [] for setting in rules["settings"]}
            for run in runs:
                time_us = run["rows"].get(label, {}).get(f"{mode}_us")
                if time_us is not None:
                    samples[run["setting"]].append(time_us)
            medians = [median(values) if values else None for values in samples.values()]
            known = [value for value in medians if value is not None]
            repeated = [values for values in samples.values() if len(values) > 1]
            row[mode] = {
                "us": medians,
                "spread": max(known) / min(known) - 1 if len(known) == len(medians) else None,
                "noise": max(max(values) / min(values) - 1 for values in repeated) if repeated else None,
            }
            if mode == rules["mode"]:
                complete = len(known) == len(medians)
                row["agrees"] = max(known) <= (1 + rules["spread"]) * min(known) if complete else None
        rows.append(row)
    return rows


def print_table(found: Row) -> None:
    """A line an operation, queued; eager beside it."""
    bound, mode = targets()["connections"]["spread"], targets()["connections"]["mode"]
    names = ["unset" if setting is None else setting for setting in targets()["connections"]["settings"]]
    heads = "".join(f"{name:>10}" for name in names)
    print(f"{ranks.VARIABLE}: {mode} us with it {', '.join(names)}; spread between them, noise within one; then eager")
    print(f"{'':44}{heads}{'spread':>9}{'noise':>9}  {'':12}{heads}{'spread':>9}{'noise':>9}")
    for row in found["compared"]:
        said = {True: "agree", False: "APART", None: "-"}[row["agrees"]]
        if row["agrees"] is False and (row[mode]["noise"] or 0.0) >= row[mode]["spread"]:
            said = "noise"
        print(f"{row['label']:44}{_cells(row['queued'])}  {said:12}{_cells(row['eager'])}")
    known = [row for row in found["compared"] if row["agrees"] is not None]
    agree = [row for row in known if row["agrees"]]
    print(f"{len(agree)} of {len(known)} rows within {bound:.0%}, {mode}; 'noise': no farther apart than repetitions")
    for error in found["errors"]:
        print(f"ERROR: {error}")
    print(f"left out: {found['left_out']}; {found['seconds']} s in all")


def _cells(one: Row) -> str:
    times = "".join(f"{figure(value, 1):>10}" for value in one["us"])
    return times + "".join(f"{'-' if one[key] is None else f'{one[key]:.1%}':>9}" for key in ("spread", "noise"))


def main(given: Sequence[str] | None = None) -> int:
    """Run, write the file, print the table; 1 if something was wrong or nothing was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument(
        "--budget-s", type=float, default=60.0, help="nothing is begun later, counted from when processes are there"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--one-at-a-time", action="store_true", help="no two settings' processes at the same time")
    arguments = parser.parse_args(given)
    started = time.monotonic()
    job = replace(job_on(arguments.device, arguments.rounds, arguments.budget_s), queued_operations=_QUEUED)
    found: Row = {
        "format": "connections",
        "environment": environment(),
        "device": arguments.device,
        "one_at_a_time": arguments.one_at_a_time,
        "runs": [],
        "left_out": [],
        "errors": [],
    }
    try:
        repeat(found, job, arguments)
    except Exception as error:
        found["errors"].append(f"{type(error).__name__}: {error}"[-6000:])
    found["errors"] += [
        f"{ranks.VARIABLE}={run['setting']}: {label}: {error}"
        for run in found["runs"]
        for label, error in run["errors"].items()
    ]
    found["left_out"] += [
        f"{ranks.VARIABLE}={run['setting']}, repetition {run['repetition']}: T={tokens}"
        for run in found["runs"]
        for tokens in run["left_out"]
    ]
    found["compared"] = compare(found["runs"])
    found["seconds"] = round(time.monotonic() - started, 1)
    arguments.out.write_text(json.dumps(found, indent=1, default=str))
    print_table(found)
    return 1 if found["errors"] or not found["compared"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
