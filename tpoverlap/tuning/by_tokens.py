"""ByTokens: the method of one operation for every T up to the capacity. Plain data; a look-up is one bisection."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tpoverlap.tuning.model import Candidate


@dataclass(frozen=True)
class Row:
    """One bucket. ``time_us`` and ``sequential_us`` are those of its largest T, None where nobody knows them."""

    up_to: int
    candidate: Candidate
    time_us: float | None = None
    sequential_us: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """As a configuration's ``tpoverlap: by_tokens:`` and the cache have it."""
        figures = {"time_us": self.time_us, "sequential_us": self.sequential_us}
        known = {key: value for key, value in figures.items() if value is not None}
        return {"up_to": self.up_to, "method": self.candidate.method, **self.candidate.options, **known}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Row:
        """The inverse of `to_dict`; raises KeyError, TypeError or ValueError for anything else."""
        candidate = Candidate(str(data["method"]), int(data.get("num_splits", 0)), bool(data.get("aggregate", False)))
        times = [None if data.get(key) is None else float(data[key]) for key in ("time_us", "sequential_us")]
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
        assert self.rows, "a table has at least one row"
        assert list(self._ends) == sorted(set(self._ends)), f"up_to must ascend, got {self._ends}"

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        return tuple(row.up_to for row in self.rows)

    def at(self, num_tokens: int) -> Row:
        """The row of T."""
        return self.rows[min(bisect_left(self._ends, num_tokens), len(self.rows) - 1)]

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
