"""Recorded token counts: ``data/walks.json``, made by ``python -m benchmarks.record_walks``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Walk:
    """T of successive microbatches of real text.

    ``rule``: how they were packed. Every T is at most ``capacity_tokens``.
    """

    name: str
    rule: str
    capacity_tokens: int
    num_tokens: tuple[int, ...]

    @property
    def mean_tokens(self) -> float:
        """Mean T."""
        return sum(self.num_tokens) / len(self.num_tokens)

    @property
    def capacity_over_mean(self) -> float:
        """C / mean(T): what padding to capacity costs where time goes with T."""
        return self.capacity_tokens / self.mean_tokens

    def scaled_to(self, capacity_tokens: int, least_tokens: int) -> Walk:
        """The same walk under another capacity; no T below ``least_tokens``."""
        if capacity_tokens == self.capacity_tokens:
            return self
        factor = capacity_tokens / self.capacity_tokens
        tokens = tuple(min(capacity_tokens, max(least_tokens, round(t * factor))) for t in self.num_tokens)
        return Walk(self.name, f"{self.rule}, scaled by {factor:g}", capacity_tokens, tokens)

    def probes(self) -> tuple[int, ...]:
        """The smallest, the middle and the largest T, each once."""
        ordered = sorted(self.num_tokens)
        return tuple(dict.fromkeys((ordered[0], ordered[len(ordered) // 2], ordered[-1])))


def recorded_walks() -> tuple[Walk, ...]:
    """Both walks as recorded."""
    data = json.loads((Path(__file__).parent / "data" / "walks.json").read_text())
    return tuple(
        Walk(name, walk["rule"], data["capacity_tokens"], tuple(walk["num_tokens"]))
        for name, walk in data["walks"].items()
    )
