"""ByTokens: the method of one operation for every T up to the capacity. Plain data; a look-up is one bisection."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

from tpoverlap.tuning.model import Candidate

FIGURES: Final = ("time_us", "sequential_us", "overlap_us")


@dataclass(frozen=True)
class Row:
    """One bucket. The times are those of its largest T: of the method, of sequential, of the best overlap; None where
    nobody knows them.
    """

    up_to: int
    candidate: Candidate
    time_us: float | None = None
    sequential_us: float | None = None
    overlap_us: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """As a configuration's ``tpoverlap: by_tokens:`` and the cache have it."""
        known = {key: getattr(self, key) for key in FIGURES if getattr(self, key) is not None}
        return {"up_to": self.up_to, "method": self.candidate.method, **self.candidate.options, **known}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Row:
        """The inverse of `to_dict`; raises KeyError, TypeError or ValueError for anything else."""
        candidate = Candidate(str(data["method"]), int(data.get("num_splits", 0)), bool(data.get("aggregate", False)))
        times = [None if data.get(key) is None else float(data[key]) for key in FIGURES]
        return cls(int(data["up_to"]), candidate, *times)


@dataclass(frozen=True)
class ByTokens:
    """Rows with ascending ``up_to``. A T above the last one takes the last one's method.

    ``source``: "by_tokens" (the configuration), "tuned cache" or "cost model"; ``basis``: the rest of the sentence.
    """

    rows: tuple[Row, ...]
    source: str
    basis: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if not self.rows or self._ends[0] < 1 or list(self._ends) != sorted(set(self._ends)):
            raise ValueError(f"a table needs rows with ascending up_to of at least 1, got {list(self._ends)}")

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        return tuple(row.up_to for row in self.rows)

    def at(self, num_tokens: int) -> Row:
        """The row of T."""
        return self.rows[min(bisect_left(self._ends, num_tokens), len(self.rows) - 1)]

    def reason(self, row: Row) -> str:
        """Why ``row`` holds what it holds, with the figures that are known."""
        until = f"for T up to {row.up_to}"
        if row.sequential_us is None or row.time_us is None:
            return f"{until} ({self.basis})"
        sequential = f"sequential {row.sequential_us:.1f} us"
        if row.candidate.method == "sequential":
            other = "" if row.overlap_us is None else f", the best overlap {row.overlap_us:.1f} us"
            return f"{until} overlap does not pay: {sequential}{other} ({self.basis})"
        return f"{until} {row.candidate} takes {row.time_us:.1f} us, {sequential} ({self.basis})"

    def to_list(self) -> list[dict[str, Any]]:
        """The rows as plain data."""
        return [row.to_dict() for row in self.rows]


def merged(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Neighbours with the same candidate made one; what is left is the shortest table that says the same."""
    found: list[Row] = []
    for row in rows:
        if found and found[-1].candidate == row.candidate:
            found.pop()
        found.append(row)
    return tuple(found)
