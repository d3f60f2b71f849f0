"""What is wrong with a wrong result: which rows, columns and tiles, and what stands there instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

_TILE: Final = 128
_MOST: Final = 12
"""Ranges and tiles that are listed."""
_FAR: Final = 0.05
"""A rounding error of a value whose size is about 1 is far below, another value far above it."""


def describe(out: torch.Tensor, reference: torch.Tensor, candidates: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Where ``out`` [rows, columns] differs from ``reference``, in plain numbers.

    Args:
        candidates: what may stand there instead, each of the same shape (the own summand, the last call's result ...).

    Returns:
        ``rows`` and ``columns`` (ranges [start, stop) with something wrong), ``tiles`` of 128 x 128 with what
        is wrong in each, ``is``: of the wrong elements, the part that is NaN, and the part near each candidate (of two
        candidates that are near each other both count), and ``tile_error``: for the worst tile, its relative error
        against the reference and each candidate.
    """
    out, reference = out.float(), reference.float()
    wrong = ~((out - reference).abs() <= _FAR)  # NaN is wrong
    count = int(wrong.sum())
    if count == 0:
        return {"elements": 0}
    tiles = _tiles(wrong)
    row, column, _ = tiles[0]
    at = slice(row, row + _TILE), slice(column, column + _TILE)
    named = {"zero": torch.zeros_like(reference), **{name: value.float() for name, value in candidates.items()}}
    near = {name: _part((out - value).abs() <= _FAR, wrong) for name, value in named.items()}
    compared = {"reference": reference, **named}
    del compared["zero"]
    return {
        "elements": count,
        "part": count / wrong.numel(),
        "rows": _ranges(wrong.any(1)),
        "columns": _ranges(wrong.any(0)),
        "tiles": [_of_tile(wrong, *tile) for tile in tiles[:_MOST]],
        "number_of_tiles": len(tiles),
        "is": {"nan": _part(out.isnan(), wrong), **near},
        "tile_error": {name: _error(out[at], value[at]) for name, value in compared.items()},
    }


def missing_depth(out: torch.Tensor, x: torch.Tensor, matrix: torch.Tensor, rows: slice, columns: slice) -> int | None:
    """How many of the first columns of ``x`` [T, K] had not arrived when this part of ``x @ matrix`` was made.

    None if no multiple of 64 explains it: then something else than late rows is wrong, or they came in another order.
    """
    part = out[rows, columns].float()
    late = torch.zeros_like(part)
    whole = x[rows].float() @ matrix[:, columns].float()
    for depth in range(0, x.shape[1] + 1, 64):
        if (part - whole + late).abs().max() < _FAR:
            return depth
        late += x[rows, depth : depth + 64].float() @ matrix[depth : depth + 64, columns].float()
    return None


def _tiles(wrong: torch.Tensor) -> list[tuple[int, int, int]]:
    """(first row, first column, wrong elements) of tiles with some, the worst first."""
    found = []
    for row in range(0, wrong.shape[0], _TILE):
        for column in range(0, wrong.shape[1], _TILE):
            count = int(wrong[row : row + _TILE, column : column + _TILE].sum())
            if count:
                found.append((row, column, count))
    return sorted(found, key=lambda tile: -tile[2])


def _of_tile(wrong: torch.Tensor, row: int, column: int, count: int) -> dict[str, Any]:
    rows, columns = (wrong[row : row + _TILE, column : column + _TILE].any(axis).nonzero() for axis in (1, 0))
    return {
        "wrong": count,
        "rows": (row + int(rows[0]), row + int(rows[-1]) + 1),
        "columns": (column + int(columns[0]), column + int(columns[-1]) + 1),
    }


def _ranges(flags: torch.Tensor) -> list[tuple[int, int]]:
    """[start, stop) of the runs of True, the first few."""
    ends = torch.diff(flags.int(), prepend=flags.new_zeros(1).int(), append=flags.new_zeros(1).int()).nonzero()
    return [(int(ends[i]), int(ends[i + 1])) for i in range(0, min(len(ends), 2 * _MOST), 2)]


def _part(flags: torch.Tensor, of: torch.Tensor) -> float:
    return round(float(flags[of].float().mean()), 4)


def _error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm().clamp_min(1e-30))
