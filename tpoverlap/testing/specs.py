"""One list of shapes, token counts and partitions for tests, benchmarks and the tuner (R = tp_size, C = capacity)."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass

from tpoverlap.tokens import TokenPartition

TILE_ROWS = 128
"""Rows of a GEMM tile: T is also taken one above a multiple of it."""


@dataclass(frozen=True)
class GemmShape:
    """One GEMM on one rank: x [T, K] times weight [N, K]; an AG gathers x, an RS scatters y [T, N]."""

    name: str
    num_tokens: int
    in_features: int
    out_features: int

    @property
    def flops(self) -> int:
        """Floating-point operations of the GEMM, 2 T K N."""
        return 2 * self.num_tokens * self.in_features * self.out_features


def _shape(num_tokens: int, in_features: int, out_features: int) -> GemmShape:
    return GemmShape(f"{num_tokens}x{in_features}x{out_features}", num_tokens, in_features, out_features)


GEMM_SHAPES: tuple[GemmShape, ...] = (
    _shape(4096, 8192, 4096),
    _shape(8192, 8192, 8192),
    _shape(8192, 8192, 14336),
    _shape(16384, 4096, 6144),
    _shape(8192, 8192, 5120),
    _shape(8192, 4096, 8192),
    _shape(8192, 14336, 8192),
    _shape(8192, 8192, 2560),
    _shape(8192, 8192, 1280),
)
"""T x K x N at TP = 2, bf16: the table of shared/FACTS.md that peers were measured on."""

TP8_SHAPES: tuple[GemmShape, ...] = (
    _shape(8192, 8192, 1280),  # qkv: (8192 + 2 * 1024) / 8
    _shape(8192, 1280, 8192),
    _shape(8192, 8192, 3584),  # fc1, one of two: 28672 / 8
    _shape(8192, 3584, 8192),
)
"""What one of eight ranks computes: as many rows to communicate, an eighth of the GEMM to hide them behind."""

CPU_SHAPES: tuple[GemmShape, ...] = (
    _shape(96, 32, 48),
    _shape(257, 64, 40),
    _shape(64, 24, 8),
)
"""Small enough for 2 cores; the token number is the capacity C. Features are no multiples of a tile."""


def token_counts(capacity: int, tp_size: int) -> dict[str, int]:
    """Named T with 1 <= T <= C, each value once: edges of the group, of a tile and of the capacity."""
    candidates = {
        "capacity": capacity,
        "one": 1,
        "ranks_minus_one": tp_size - 1,
        "ranks_plus_one": tp_size + 1,
        "prime": _prime_below(max(2, capacity * 5 // 8)),
        "tile_plus_one": max(1, capacity // (2 * TILE_ROWS)) * TILE_ROWS + 1,
        "eighth": capacity // 8,
        "capacity_minus_one": capacity - 1,
    }
    named: dict[str, int] = {}
    for name, num_tokens in candidates.items():
        if 1 <= num_tokens <= capacity and num_tokens not in named.values():
            named[name] = num_tokens
    return dict(sorted(named.items(), key=lambda item: item[1]))


def uneven_partitions(capacity: int, tp_size: int, max_rows_per_rank: int | None = None) -> dict[str, TokenPartition]:
    """Named partitions that ``balanced`` would not give; none has more than C rows or ``max_rows_per_rank`` on a rank.

    ``max_rows_per_rank`` is ceil(C / R) unless given, as in the manager, so each of them is legal there. Partitions
    that turn out equal are listed once; with R = 1 only ``first_only`` is left.
    """
    most = math.ceil(capacity / tp_size) if max_rows_per_rank is None else max_rows_per_rank
    last = tp_size - 1
    rows = {
        "first_only": [most] + [0] * last,
        "last_only": [0] * last + [most],
        "one_row_on_last": [0] * last + [1],
        "first_empty": [0] + [most] * last,
        "last_empty": [most] * last + [0],
        "every_other_empty": [most if rank % 2 else 0 for rank in range(tp_size)],
        "one_row_but_first_full": [most] + [1] * last,
        "descending": [most * (tp_size - rank) // tp_size for rank in range(tp_size)],
        "ascending": [most * (rank + 1) // tp_size for rank in range(tp_size)],
    }
    named: dict[str, TokenPartition] = {}
    for name, counts in rows.items():
        fitted = _cut_to(counts, capacity)
        if sum(fitted) and fitted not in [partition.counts for partition in named.values()]:
            named[name] = TokenPartition.from_counts(fitted)
    return named


def random_walk(capacity: int, steps: int = 200, seed: int = 0) -> list[int]:
    """``steps`` values of T in 1..C that grow and shrink: small steps, and one in eight a jump; C is among them."""
    generator = random.Random(seed)
    num_tokens, walk = capacity, []
    for step in range(steps):
        if step and generator.random() < 0.125:
            num_tokens = generator.randint(1, capacity)
        elif step:
            num_tokens += round(generator.gauss(0.0, capacity / 8))
        num_tokens = min(max(num_tokens, 1), capacity)
        walk.append(num_tokens)
    return walk


def _cut_to(counts: Iterable[int], capacity: int) -> tuple[int, ...]:
    """The counts, the last ones made smaller until they sum to at most C."""
    left, cut = capacity, []
    for count in counts:
        cut.append(min(count, left))
        left -= cut[-1]
    return tuple(cut)


def _prime_below(limit: int) -> int:
    """The largest prime that is at most ``limit`` (which is at least 2)."""
    for candidate in range(limit, 2, -1):
        if all(candidate % divisor for divisor in range(2, math.isqrt(candidate) + 1)):
            return candidate
    return 2
