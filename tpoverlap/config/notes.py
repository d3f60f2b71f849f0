"""Findings about a configuration, as data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

Level = Literal["error", "warning", "note"]

Target = Literal["te", "tpoverlap", "both"]
"""Whom a finding concerns: what Transformer Engine makes of the file, what this release makes of it, or either."""


class ConfigWarning(UserWarning):
    """A configuration was accepted, but part of it is probably not what was meant."""


@dataclass(frozen=True)
class Note:
    """One finding.

    ``rule`` is the id of the rule in ``legality.RULES`` (or of a reader's finding); ``name`` the GEMM or top-level
    key, "" for the whole file; ``key`` the option key, "" for all of them. ``line`` counts from 1; 0 where there is no
    file or the finding is about all of it.
    """

    level: Level
    rule: str
    name: str
    key: str
    message: str
    remedy: str
    target: Target = "both"
    line: int = 0

    def __str__(self) -> str:
        return f"{self.message}; {self.remedy}" if self.remedy else self.message

    def to_dict(self) -> dict[str, str | int]:
        """Plain data for JSON output; ``target`` is called ``for`` there."""
        values = asdict(self)
        return {("for" if key == "target" else key): value for key, value in values.items()}
