"""Where `benchmarks.tails` cuts rows. Pure functions; a tile is (rows, features) of a result."""

from __future__ import annotations

from collections.abc import Sequence

_STEP, _MIN_PIECE = 128, 64


def cut(count: int, parts: Sequence[int]) -> list[tuple[int, int]]:
    """``count`` rows in pieces as ``parts``: (start, stop) each, of whole tiles where there are enough; [] if small."""
    step = _STEP if count >= _STEP * sum(parts) else 16
    stops = [count * sum(parts[: number + 1]) // sum(parts) // step * step for number in range(len(parts))]
    pairs = list(zip([0, *stops[:-1]], [*stops[:-1], count], strict=True))
    return pairs if len(parts) == 1 or all(stop - start >= _MIN_PIECE for start, stop in pairs) else []


def waves(rows: int, features: int, processors: int, tile: tuple[int, int]) -> int:
    """Of tiles, one a multiprocessor at a time."""
    return -(-(-(-rows // tile[0]) * -(-features // tile[1])) // processors)


def full_waves(rows: int, features: int, processors: int, tile: tuple[int, int]) -> tuple[int, int] | None:
    """``rows`` in two parts, in tiles: the most whose waves leave no more than a row of tiles idle, and the rest."""
    across, down = -(-features // tile[1]), rows // tile[0]
    first = max((waves_ * processors // across for waves_ in range(1, down * across // processors + 1)), default=0)
    return (first, down - first) if 0 < first < down and rows % tile[0] == 0 else None


def spanning(rows: int, features: int, processors: int, tile: tuple[int, int]) -> tuple[int, int] | None:
    """(a, b): the fewest waves of [0, a), [a, b), [b, rows); of those the least that peers get late.

    At least as many own rows as peer's are in the middle: then the last GEMM needs nothing that peers send so late,
    where the rank whose own rows come first does the same from its other end. None: two halves have no more waves.
    """
    half = rows // 2

    def count(*parts: int) -> int:
        return sum(waves(part, features, processors, tile) for part in parts)

    pairs = [(a, b) for a in range(tile[0], half, tile[0]) for b in range(2 * half - a, rows, tile[0])]
    best = min(pairs, key=lambda p: (count(p[0], p[1] - p[0], rows - p[1]), half - p[0], p[1]), default=None)
    if best is None or count(best[0], best[1] - best[0], rows - best[1]) >= count(half, rows - half):
        return None
    return best
