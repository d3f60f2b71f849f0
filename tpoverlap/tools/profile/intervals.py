"""Sets of times as sorted, disjoint (begin, end) pairs."""

from __future__ import annotations

from collections.abc import Iterable

Intervals = list[tuple[float, float]]


def union(pieces: Iterable[tuple[float, float]]) -> Intervals:
    """Sorted and merged; empty and reversed pieces are dropped."""
    merged: Intervals = []
    for begin, end in sorted(piece for piece in pieces if piece[1] > piece[0]):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def intersect(a: Intervals, b: Intervals) -> Intervals:
    """Times in both; ``a`` and ``b`` come from `union`."""
    common: Intervals = []
    i = j = 0
    while i < len(a) and j < len(b):
        begin, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if begin < end:
            common.append((begin, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return common


def subtract(a: Intervals, b: Intervals) -> Intervals:
    """Times in ``a`` and not in ``b``; both come from `union`."""
    left: Intervals = []
    j = 0
    for begin, end in a:
        while j < len(b) and b[j][1] <= begin:
            j += 1
        k, at = j, begin
        while k < len(b) and b[k][0] < end:
            if b[k][0] > at:
                left.append((at, b[k][0]))
            at = max(at, b[k][1])
            k += 1
        if at < end:
            left.append((at, end))
    return left


def length(a: Intervals) -> float:
    """Total time."""
    return sum(end - begin for begin, end in a)
