"""Counts a manager keeps for each GEMM name. Cheap enough to be always on."""

from __future__ import annotations

from collections import Counter

NUM_BUCKETS = 8


class NameStatistics:
    """Calls, methods, overflow and a histogram of T / C in eighths, for one name."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.calls = 0
        self.overflow = 0
        self.methods: Counter[str] = Counter()
        self.tokens = 0
        self._histogram = [0] * (NUM_BUCKETS + 1)

    def record(self, method: str, num_tokens: int, *, overflow: bool) -> None:
        """Count one operation."""
        self.calls += 1
        self.methods[method] += 1
        self.tokens += num_tokens
        self.overflow += overflow
        bucket = -(-num_tokens * NUM_BUCKETS // self.max_tokens) - 1
        self._histogram[bucket if bucket < NUM_BUCKETS else NUM_BUCKETS] += 1

    def as_dict(self) -> dict[str, int]:
        """Flat: calls, calls a method, sequential and overflow counts, tokens, and one count a bucket of T."""
        row = {"calls": self.calls, "tokens": self.tokens, "overflow": self.overflow}
        row |= {f"method_{method}": count for method, count in sorted(self.methods.items())}
        row.setdefault("method_sequential", 0)
        for index, count in enumerate(self._histogram[:NUM_BUCKETS]):
            bound = f"tokens_le_{self.max_tokens * (index + 1) // NUM_BUCKETS}"
            row[bound] = row.get(bound, 0) + count  # small capacities have fewer bounds than buckets
        row["tokens_above_capacity"] = self._histogram[NUM_BUCKETS]
        return row
