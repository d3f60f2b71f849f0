"""From times to a choice: a winner has to be faster on average and slower nowhere, twice. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tpoverlap.tools.tune.job import Bucket
from tpoverlap.tuning import Candidate, Row

WORTH_IT: Final = 0.99
"""The most that a winner may take of the default's time, on average over the T that were looked at."""

Times = Sequence[Sequence[float]]
"""Microseconds on the slowest rank: a list a candidate, a value a T."""


def slowest(by_rank: Sequence[Times]) -> list[list[float]]:
    """A group is as fast as its slowest rank."""
    return [[max(values) for values in zip(*rows, strict=True)] for rows in zip(*by_rank, strict=True)]


def beats(times: Sequence[float], default: Sequence[float]) -> bool:
    """Whether ``times`` are worth replacing ``default``: slower at no T, and faster on average."""
    mean_log = sum(math.log(one / other) for one, other in zip(times, default, strict=True)) / len(times)
    return mean_log <= math.log(WORTH_IT) and all(one <= other for one, other in zip(times, default, strict=True))


def winner(times: Times, default: int) -> int:
    """The candidate with the least product of times among those that beat the default; the default where none does."""
    good = [index for index, row in enumerate(times) if index == default or beats(row, times[default])]
    return min(good, key=lambda index: (math.prod(times[index]), index))


@dataclass(frozen=True)
class Result:
    """One bucket, measured. ``confirmation``: default and winner in a separate run; None where the default won."""

    times: tuple[tuple[float, ...], ...]
    won: int
    chosen: int
    confirmation: tuple[tuple[float, ...], ...] | None

    def to_dict(self) -> dict[str, Any]:
        """For the state file."""
        confirmation = None if self.confirmation is None else [list(row) for row in self.confirmation]
        return {
            "times_us": [list(row) for row in self.times],
            "won": self.won,
            "chosen": self.chosen,
            "confirmation_us": confirmation,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Result:
        """The inverse of `to_dict`; raises KeyError, TypeError or ValueError for anything else."""
        confirmation = data["confirmation_us"]
        return cls(
            tuple(tuple(float(value) for value in row) for row in data["times_us"]),
            int(data["won"]),
            int(data["chosen"]),
            None if confirmation is None else tuple(tuple(float(value) for value in row) for row in confirmation),
        )


def verdict_of(bucket: Bucket, result: Result | None) -> str:
    """What the choice rests on, in two or three words for a table."""
    if result is None:
        return "not measured: default"
    if result.won == bucket.default:
        return "default kept"
    return "confirmed" if result.chosen == result.won else "not confirmed: default"


def row_of(bucket: Bucket, result: Result | None) -> Row:
    """The bucket's row of a table; the default without figures where nothing was measured."""
    if result is None:
        return Row(bucket.high, bucket.candidates[bucket.default])
    at_end = [row[-1] for row in result.times]
    sequential = bucket.candidates.index(Candidate("sequential"))
    overlap = min((time for index, time in enumerate(at_end) if index != sequential), default=None)
    chosen = bucket.candidates[result.chosen]
    figures = (at_end[result.chosen], at_end[sequential], overlap)
    return Row(bucket.high, chosen, *(None if value is None else round(value, 1) for value in figures))


def comment_of(bucket: Bucket, result: Result | None) -> str:
    """One line with everything that was measured of a bucket, in microseconds."""
    span = f"T {bucket.low + 1}..{bucket.high}"
    if result is None:
        return f"{span}: not measured, the time budget was used up; the default {bucket.candidates[bucket.default]}"
    points = "/".join(map(str, bucket.tokens))
    figures = ", ".join(
        f"{one} {'/'.join(f'{value:.1f}' for value in row)}"
        for one, row in zip(bucket.candidates, result.times, strict=True)
    )
    text = f"{span}, us at T = {points}: {figures}"
    if result.confirmation is None:
        return f"{text}; none beats the default {bucket.candidates[bucket.default]} at every T"
    default, won = ("/".join(f"{value:.1f}" for value in row) for row in result.confirmation)
    verdict = (
        "confirmed"
        if result.chosen == result.won
        else f"not confirmed, so the default {bucket.candidates[bucket.default]}"
    )
    return f"{text}; {bucket.candidates[result.won]} {won} against the default's {default} again: {verdict}"
