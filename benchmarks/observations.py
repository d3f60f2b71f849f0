"""Measured times from the files in ``benchmarks/results``, one row each, whatever file they stand in."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpoverlap.tuning import Candidate, Problem
from tpoverlap.tuning.model import launched_as
from tpoverlap.tuning.problem import scatter_parts

RESULTS = Path(__file__).parent / "results"
OURS = "tpoverlap"
FORMER = "tpoverlap before its lean host path"
SINCE = "2026-11-30T21:00"
"""Earlier files hold times of other code: streams that were kept from their GEMMs by words, other pieces, more calls.
What they say about anything but this library counts, except for the processor's time: they come from other machines,
and it is compared with ours."""
HOST_SINCE = "2026-12-01T00:30"
"""Times of the processor in earlier files, of whichever method, are not compared with later ones: another machine, and
operations that Python started call by call."""
CUT_SINCE = "2026-12-01T04:30"
"""Before, pieces of a ring's reduce-scatter were nearly equal."""
MULTIPROCESSORS = 132
"""Of the GPUs that were measured."""
BENCH_METHODS = (
    "plain sequential",
    "sequential",
    "ring_exchange",
    "ring aggregate",
    "pipeline 2",
    "pipeline 4",
    "fused",
)


@dataclass(frozen=True)
class Observation:
    """One measured time.

    ``quantity``: "gemm", "gather" or "scatter" (a collective alone), "plain" (both in turn), "copy", "method"
    (``candidate`` of ``problem``) or "host" (its launches alone; without a candidate those of "plain"). ``code``:
    whose launches the time contains, "" where they cannot have been the limit. ``size_bytes``: of a copy.
    ``current``, ``traded``: by this library as it is now, see `tpoverlap.tuning.estimate`.
    """

    source: str
    quantity: str
    time_us: float
    problem: Problem | None = None
    candidate: Candidate | None = None
    code: str = ""
    size_bytes: int = 0
    current: bool = False
    traded: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """T, K, N: what is left out as a whole in cross-validation; for a copy its size."""
        if self.problem is None:
            return (self.size_bytes,)
        problem = self.problem
        inner, columns = (problem.features, problem.width) if problem.is_scatter else (problem.width, problem.features)
        return (problem.num_tokens, inner, columns)


def read_observations(folder: Path = RESULTS, gpu: str = "H200") -> list[Observation]:
    """Every time in ``folder`` that was measured on two GPUs of which each name ends in ``gpu`` and none was shared."""
    found: list[Observation] = []
    for path in sorted(folder.glob("*.json")):
        data = json.loads(path.read_text(encoding="utf-8"))
        environment = data.get("environment", {})
        if not on_two(environment, gpu):
            continue
        if data.get("format") == "peers table":
            found += _peers(path.name, data)
        elif data.get("format") == "small tokens":
            found += _small_tokens(path.name, data)
        elif "schema" in data and "rows" in data:
            found += _bench(path.name, data)
        elif "checks" in data:
            found += _checks(path.name, data)
    return found


def on_two(environment: dict[str, Any], gpu: str) -> bool:
    """Whether it was measured on two GPUs of that name, of which none was shared."""
    gpus = environment.get("gpus", [])
    return len(gpus) == 2 and all(name.endswith(gpu) for name in gpus) and not environment.get("ranks_share_gpus")


def former(environment: dict[str, Any]) -> bool:
    """Whether what was measured of this library there is `SINCE` another one."""
    return bool(environment.get("date", SINCE) < SINCE)


def host_code(environment: dict[str, Any], code: str) -> str:
    """``code``, apart from that of runs whose processor's times are not compared with later ones."""
    return code if environment.get("date", HOST_SINCE) >= HOST_SINCE else f"{code} before tapes"


def was_cut_otherwise(environment: dict[str, Any], problem: Problem, candidate: Candidate) -> bool:
    """Whether it was measured of a ring that cut this reduce-scatter in other pieces than today's."""
    if candidate.method != "ring_exchange" or problem.kind != "scatter":
        return False
    is_equal = scatter_parts(problem, MULTIPROCESSORS) == scatter_parts(problem, 0)
    return not is_equal and environment.get("date", CUT_SINCE) < CUT_SINCE


def problem_of(direction: str, row: dict[str, Any], tp_size: int = 2) -> Problem:
    tokens, inner, columns = row["tokens"], row["in_features"], row["out_features"]
    if direction == "ag":
        return Problem("gather", tokens, inner, columns, tp_size)
    return Problem("scatter", tokens, columns, inner, tp_size)


def _peers(source: str, data: dict[str, Any]) -> Iterator[Observation]:
    """What is not this library's. Transformer Engine's ring has our schedule (copy engine, one chunk a rank), but what
    keeps its streams apart takes longer than our events, so it stays out like its pipeline and torch's async-TP.
    """
    columns = {
        "nccl_ag": ("ag", "gather"),
        "nccl_rs": ("rs", "scatter"),
        "sequential_ag": ("ag", "plain"),
        "sequential_rs": ("rs", "plain"),
    }
    tables = ("trial_one_launch_all_gather", "trial_fused_all_gather")
    for row in [*data["rows"], *(row for table in tables for row in data[table]["rows"])]:
        times = row["time_us"]
        if times.get("gemm"):
            yield Observation(source, "gemm", times["gemm"], problem_of("ag", row))
        for column, (direction, quantity) in columns.items():
            if times.get(column):
                code = "trial" if quantity == "plain" and row["tokens"] <= 1024 else ""
                yield Observation(source, quantity, times[column], problem_of(direction, row), code=code)
    for row in data["copy_engine"]["rows"]:
        time_us = row["size_bytes"] / row["gb_s"] * 1e-3
        yield Observation(source, "copy", time_us, size_bytes=row["size_bytes"])


def _checks(source: str, data: dict[str, Any]) -> Iterator[Observation]:
    """``scripts/gpu_check``'s file: this library's methods, called one after the other from Python."""
    for check in data["checks"]:
        row = check.get("result")
        if not isinstance(row, dict) or "time_ms" not in row or "direction" not in row:
            continue
        problem = problem_of(row["direction"], row)
        for label, time_ms in row["time_ms"].items():
            if label == "gemm alone":
                yield Observation(source, "gemm", 1000 * time_ms, problem)
            else:
                yield Observation(source, "method", 1000 * time_ms, problem, candidate_of(label), FORMER)


def _bench(source: str, data: dict[str, Any]) -> Iterator[Observation]:
    """``tpoverlap bench``'s suite gemm: queued behind a delay launches cost nothing, eager they may be the limit."""
    tp_size, is_former = data["environment"].get("tp_size", 2), former(data["environment"])
    traded = "most_traded_bytes" in data["environment"]
    for row in data["rows"]:
        if row.get("suite") != "gemm" or row.get("numbers", "bfloat16") != "bfloat16":
            continue  # FP8 rows: `benchmarks.fp8_operations`
        problem = problem_of(row["direction"], row | {"tokens": row["num_tokens"]}, tp_size)
        alone = row.get("alone", {})
        collective = "scatter" if problem.is_scatter else "gather"
        parts = (("gemm alone", "gemm"), ("collective alone", collective), ("transfer alone, push", "copy"))
        for label, quantity in parts:
            times = alone.get(label, {})
            time_us = times.get("queued_us") or times.get("eager_us")
            if time_us:
                size = problem.bytes_sent if quantity == "copy" else 0
                yield Observation(source, quantity, time_us, None if size else problem, size_bytes=size)
        for label, times in row["methods"].items():
            is_plain = label == "plain sequential"
            if label not in BENCH_METHODS or (is_former and not is_plain):
                continue
            launches = host_code(data["environment"], "plain" if is_plain else OURS)
            for mode, whose in (("queued_us", ""), ("eager_us", launches)):
                if not times.get(mode) or (is_former and whose):
                    continue
                if is_plain:
                    yield Observation(source, "plain", times[mode], problem, code=whose)
                else:
                    candidate = candidate_of(label)
                    if was_cut_otherwise(data["environment"], problem, candidate):
                        continue
                    yield Observation(
                        source, "method", times[mode], problem, candidate, whose, current=True, traded=traded
                    )


def _small_tokens(source: str, data: dict[str, Any]) -> Iterator[Observation]:
    """``benchmarks/small_tokens``: few tokens, where it matters what the launches cost the processor.

    Its labels "engine" and "one_launch" are the forms of ``fused``: what the method would not take is left out.
    """
    is_former = former(data["environment"])
    for row in data["rows"]:
        direction = {"gather": "ag", "scatter": "rs"}[row["direction"]]
        sizes = {"tokens": row["T"], "in_features": row["K"], "out_features": row["N"]}
        problem = problem_of(direction, sizes)
        form = launched_as(problem, Candidate("fused"))
        fused = "engine" if form == "fused" else form
        for label, times in row["times"].items():
            if label == "gemm":
                if direction == "ag":  # the other direction has the same one: few tokens must not count twice
                    yield Observation(source, "gemm", times["queued_us"], problem)
            elif label == "plain":
                yield Observation(source, "plain", times["queued_us"], problem)
                if not is_former:
                    code = host_code(data["environment"], "plain")
                    yield Observation(source, "host", times["host_us"], problem, code=code)
            elif is_former:
                continue
            elif label in ("sequential", "kernel", "ring", fused):
                traded = label == "kernel"  # beside it, "sequential" is by copy engine
                candidate = candidate_of("sequential" if traded else "fused" if label == fused else label)
                form = {"current": True, "traded": traded}
                yield Observation(source, "method", times["queued_us"], problem, candidate, **form)
                code = host_code(data["environment"], OURS)
                yield Observation(source, "host", times["host_us"], problem, candidate, code, **form)


def candidate_of(label: str) -> Candidate:
    """``pipeline 4``: pipeline in four; ``ring_exchange aggregate``, ``ring aggregate``: with ``aggregate``."""
    method, _, option = label.partition(" ")
    method = "ring_exchange" if method == "ring" else method
    if method == "pipeline":
        return Candidate(method, num_splits=int(option or 4))
    return Candidate(method, aggregate=option == "aggregate")
