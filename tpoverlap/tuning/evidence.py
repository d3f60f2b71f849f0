"""Evidence: everything that a choice by T rests on. Agreed on by all ranks at set-up; from then on only looked up.

Order: the configuration's ``tpoverlap: by_tokens:``, what ``tpoverlap tune`` left in the cache, the cost model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tpoverlap.config import legal_methods
from tpoverlap.config.by_tokens import faults, rows_key
from tpoverlap.errors import ConfigError
from tpoverlap.tuning.by_tokens import ByTokens, Row
from tpoverlap.tuning.device import DeviceModel
from tpoverlap.tuning.heuristic import candidates_within, estimated_table
from tpoverlap.tuning.problem import Problem


def entry_key(problem: Problem) -> str:
    """What a measurement is filed under: everything of ``problem`` but T."""
    fp8 = (" fp8 rows" if problem.is_packed else " fp8") if problem.fp8 else ""
    return (
        f"{problem.kind} width {problem.width} features {problem.features} R {problem.tp_size} "
        f"itemsize {problem.itemsize_bytes}{fp8}"
    )


@dataclass(frozen=True)
class Evidence:
    """``section``: name -> entry of the configuration. ``cached``: `entry_key` -> rows. ``device``: None where unknown.

    ``cache_basis`` and ``why_no_device`` are for `explain`. The default knows nothing: every name keeps its default.
    """

    section: Mapping[str, Any] = field(default_factory=dict)
    cached: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    device: DeviceModel | None = None
    cache_basis: str = ""
    why_no_device: str = "no device was looked for"

    @property
    def is_empty(self) -> bool:
        """Whether no choice can come from here."""
        return not (self.section or self.cached or self.device)

    def table(
        self, name: str, problem: Problem, max_tokens: int, legal: Sequence[str], fixed: Mapping[str, Any]
    ) -> ByTokens | None:
        """The methods of ``name`` by T, from the first source that knows this very shape; None where none does.

        Pure. Args:
            problem: of one operation; its T does not matter.
            legal: methods that may run it here.
            fixed: options that somebody wrote; a measured row that contradicts them is of no use.
        """
        entry = self.section.get(name)
        rows = None if entry is None else entry.get(rows_key(problem.fp8))
        if rows and entry is not None and (entry["features"], entry["width"]) == (problem.features, problem.width):
            found = self._usable(rows, problem, legal, {}, "by_tokens", "the tpoverlap: section of ub_cfgs")
            if found is not None:
                return found
        measured = self.cached.get(entry_key(problem))
        if measured:
            found = self._usable(measured, problem, legal, fixed, "tuned cache", self.cache_basis)
            if found is not None:
                return found
        if self.device is None or (problem.fp8 and self.device.fp8 is None):
            return None
        return estimated_table(self.device, problem, max_tokens, legal, fixed)

    @staticmethod
    def _usable(
        rows: Sequence[Mapping[str, Any]],
        problem: Problem,
        legal: Sequence[str],
        fixed: Mapping[str, Any],
        source: str,
        basis: str,
    ) -> ByTokens | None:
        table = ByTokens(tuple(Row.from_dict(row) for row in rows), source, basis)
        allowed = candidates_within(problem, legal, fixed)
        for row in table.rows:
            if row.candidate.method not in ("sequential", *legal) or (fixed and row.candidate not in allowed):
                return None
        return table

    def to_dict(self) -> dict[str, Any]:
        """For a plan: plain data that gives the same choices on any machine."""
        return {
            "section": dict(self.section),
            "cached": dict(self.cached),
            "device": None if self.device is None else self.device.to_dict(),
            "cache_basis": self.cache_basis,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Evidence:
        """The inverse of `to_dict`.

        Raises:
            ConfigError: it is something else.
        """
        try:
            for where, what in faults(data["section"], legal_methods):
                raise ConfigError(f"plan= has choices by T that mgr.plan() did not write: {where} {what}")
            device = None if data["device"] is None else DeviceModel.from_dict(data["device"])
            evidence = cls(data["section"], data["cached"], device, data["cache_basis"], "the plan has none")
            entries = evidence.section.values()
            sections = [entry[rows_key(fp8)] for entry in entries for fp8 in (False, True) if rows_key(fp8) in entry]
            for rows in (*evidence.cached.values(), *sections):
                ByTokens(tuple(Row.from_dict(row) for row in rows), "plan")
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ConfigError(f"plan= has choices by T that mgr.plan() did not write: {error!r}") from error
        return evidence
