"""The cost model asked for a method a bucket of T. Pure: the same arguments give the same table on every rank."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from tpoverlap.tuning.buckets import bucket_bounds, columns_of, samples
from tpoverlap.tuning.by_tokens import ByTokens, Row, merged
from tpoverlap.tuning.device import DeviceModel
from tpoverlap.tuning.model import Candidate, candidates, estimate, methods_known
from tpoverlap.tuning.problem import Problem

WORTH_IT: Final = 0.99
"""Overlap has to be estimated at no more than this of sequential's time, else sequential runs."""

CLEARLY: Final = 0.9
"""What another method has to be estimated at, at most, of the ring: the model is not surer than that."""


def candidates_within(problem: Problem, legal: Sequence[str], fixed: Mapping[str, Any]) -> tuple[Candidate, ...]:
    """`candidates` that contradict none of the options that somebody wrote (``fixed``); sequential always stays."""
    found: list[Candidate] = []
    for one in candidates(problem, legal):
        splits = int(fixed.get("num_splits", 0))
        if one.method == "pipeline" and splits:
            one = Candidate("pipeline", num_splits=splits)
        if one.method == "ring_exchange" and "aggregate" in fixed:
            one = Candidate("ring_exchange", aggregate=bool(fixed["aggregate"]) and not problem.is_scatter)
        if one not in found:
            found.append(one)
    return tuple(found)


def best_in_bucket(
    device: DeviceModel, problem: Problem, low: int, high: int, choice: Sequence[Candidate]
) -> tuple[Candidate, float, float]:
    """The candidate for (``low``, ``high``], and its and sequential's estimated microseconds at ``high``.

    The best is the one with the least geometric mean over `samples`, so one that is good at one end only does not win.
    What is compared is the time in a layer (`Estimate.time_in_layer_us`): that is where operations are used.
    """
    points = [problem.at(tokens) for tokens in samples(low, high)]

    def mean_log(candidate: Candidate) -> float:
        return sum(math.log(max(estimate(device, at, candidate).time_in_layer_us, 0.1)) for at in points) / len(points)

    sequential = choice[0]
    assert sequential.method == "sequential", "candidates() begins with sequential"
    best, others = sequential, choice[1:]
    if others:
        first = others[0]
        best = min(others, key=lambda one: round(mean_log(one) - (0 if one is first else math.log(CLEARLY)), 4))
        if mean_log(best) > mean_log(sequential) + math.log(WORTH_IT):
            best = sequential
    return best, estimate(device, points[-1], best).time_us, estimate(device, points[-1], sequential).time_us


def estimated_table(
    device: DeviceModel, problem: Problem, max_tokens: int, legal: Sequence[str], fixed: Mapping[str, Any]
) -> ByTokens:
    """A row for each bucket of ``problem`` (its T does not matter) up to ``max_tokens``.

    Raises:
        ConfigError: it is FP8, of which ``device`` knows nothing.
    """
    rows: list[Row] = []
    legal = methods_known(device, problem, legal)
    low = 0
    for high in bucket_bounds(columns_of(problem), device.multiprocessors, max_tokens):
        choice = candidates_within(problem.at(high), legal, fixed)
        candidate, time_us, sequential_us = best_in_bucket(device, problem, low, high, choice)
        overlap_us = min((estimate(device, problem.at(high), one).time_us for one in choice[1:]), default=None)
        rows.append(Row(high, candidate, time_us, sequential_us, overlap_us))
        low = high
    return ByTokens(merged(rows), "cost model", basis_of(device, problem.tp_size, fp8=problem.fp8))


def basis_of(device: DeviceModel, tp_size: int, *, fp8: bool = False) -> str:
    """Whether the figures come from measurements, and how far off they are."""
    if not device.is_measured:
        return f"estimates for {device.name}: nothing was measured on it"
    beyond = f"; extrapolated to R = {tp_size}" if tp_size > 2 else ""
    if fp8:
        checked = None if device.fp8 is None else device.fp8.error.get("operations_median_percent")
        whole = "not from whole FP8 operations" if checked is None else f"{checked} % off whole ones in the median"
        return f"an estimate from FP8 GEMMs and links measured on {device.name}, {whole}{beyond}"
    error = device.error.get("median_percent")
    off = f", median error {error} % on shapes left out" if error is not None else ""
    return f"estimated by the model of {device.name}{off}{beyond}"


def break_even(device: DeviceModel, problem: Problem, legal: Sequence[str], max_tokens: int = 1 << 16) -> int | None:
    """The smallest T, in steps of 64, from which up to ``max_tokens`` overlap beats sequential in a layer; or None."""
    found: int | None = None
    for tokens in range(max_tokens, 0, -64):
        at = problem.at(tokens)
        sequential, *others = (estimate(device, at, one).time_in_layer_us for one in candidates(at, legal))
        if not others or min(others) > WORTH_IT * sequential:
            break
        found = tokens
    return found
