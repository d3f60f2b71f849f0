"""Findings about a configuration, as data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

Level = Literal["error", "warning", "note"]


class ConfigWarning(UserWarning):
    """A configuration was accepted, but part of it is probably not what was meant."""


@dataclass(frozen=True)
class Note:
    """One finding.

    ``rule`` is the id of the rule in ``legality.RULES`` (or of a reader's finding); ``name`` the GEMM or top-level
    key, "" for the whole file; ``key`` the option key, "" for all of them.
    """

    level: Level
    rule: str
    name: str
    key: str
    message: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.message}; {self.remedy}" if self.remedy else self.message

    def to_dict(self) -> dict[str, str]:
        """Plain data for JSON output."""
        return asdict(self)
