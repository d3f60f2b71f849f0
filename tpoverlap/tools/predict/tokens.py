"""``--tokens``: one T, several, or a range."""

from __future__ import annotations

from dataclasses import dataclass

from tpoverlap.errors import ConfigError
from tpoverlap.tuning import Problem, bucket_bounds, columns_of

_MAX_TOKENS = 1 << 24


@dataclass(frozen=True)
class TokenSpec:
    """Either every T in ``values``, or (``is_range``) the buckets from the first to the last of its two."""

    values: tuple[int, ...]
    is_range: bool

    @property
    def largest(self) -> int:
        """The most tokens that are asked about."""
        return max(self.values)

    def ends(self, problem: Problem, multiprocessors: int) -> list[tuple[int, int]]:
        """(low, high] of every row of ``problem``'s table; for a single T low is T - 1."""
        if not self.is_range:
            return [(tokens - 1, tokens) for tokens in self.values]
        low = min(self.values) - 1
        rows = []
        for high in bucket_bounds(columns_of(problem), multiprocessors, self.largest):
            if high > low:
                rows.append((low, high))
                low = high
        return rows


def parse_tokens(text: str) -> TokenSpec:
    """``"4096"``, ``"512,4096"`` or ``"512:8192"``.

    Raises:
        ConfigError: anything else; T is a positive whole number.
    """
    parts = text.split(":") if ":" in text else text.split(",")
    try:
        values = tuple(int(part) for part in parts)
    except ValueError:
        values = ()
    good = bool(values) and all(1 <= value <= _MAX_TOKENS for value in values)
    if not good or (":" in text and (len(values) != 2 or values[0] > values[1])):
        raise ConfigError(
            f"--tokens {text!r}: give T, several (512,4096) or a range (512:8192), whole "
            f"numbers from 1 to {_MAX_TOKENS}"
        )
    return TokenSpec(tuple(dict.fromkeys(values)) if ":" not in text else values, ":" in text)
