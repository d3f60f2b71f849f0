"""When the pieces of one overlapped GEMM compute and travel, from two durations: ideal, not measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tpoverlap.config import OverlapConfig

Lane = Literal["GEMM", "copy"]


@dataclass(frozen=True)
class Span:
    """One piece on one lane, in the unit of the durations; ``label`` is one character."""

    lane: Lane
    start: float
    end: float
    label: str


@dataclass(frozen=True)
class Timeline:
    """All spans of rank 0. ``exposed``: what the whole takes longer than the GEMM alone."""

    spans: tuple[Span, ...]
    gemm: float
    copy: float

    @property
    def total(self) -> float:
        """When everything is done."""
        return max((span.end for span in self.spans), default=0.0)

    @property
    def exposed(self) -> float:
        """Communication that no computation hides."""
        return max(0.0, self.total - self.gemm)


def timeline(config: OverlapConfig, tp_size: int, gemm: float, copy: float) -> Timeline:
    """``gemm``: the whole GEMM alone; ``copy``: all that a rank sends, alone. Any unit, the same for both."""
    method = "ring_exchange" if config.method in ("auto", "fused") else config.method
    if tp_size == 1:
        spans = [Span("GEMM", 0.0, gemm, "=")]
    elif method == "bulk":
        spans = [Span("GEMM", 0.0, gemm, "="), Span("copy", 0.0, copy, ">")]
    elif method == "pipeline":
        spans = _produced_in_turn(config.num_splits, gemm / config.num_splits, copy / config.num_splits, own_last=False)
    elif method == "ring_exchange" and config.is_reduce_scatter:
        spans = _produced_in_turn(tp_size, gemm / tp_size, copy / (tp_size - 1), own_last=True)
    elif method == "ring_exchange":
        spans = _consumed_in_turn(tp_size, gemm / tp_size, copy / (tp_size - 1), config.aggregate)
    elif config.is_reduce_scatter:
        spans = [Span("GEMM", 0.0, gemm, "="), Span("copy", gemm, gemm + copy, ">")]
    else:
        spans = [Span("copy", 0.0, copy, ">"), Span("GEMM", copy, copy + gemm, "=")]
    return Timeline(tuple(spans), gemm, copy if tp_size > 1 else 0.0)


def _consumed_in_turn(chunks: int, gemm: float, copy: float, aggregate: bool) -> list[Span]:
    """All-gather: chunk 0 is here, chunk i has arrived after i copies; ``aggregate`` multiplies two at a time."""
    spans = [Span("copy", (i - 1) * copy, i * copy, _label(i)) for i in range(1, chunks)]
    at_once = 2 if aggregate else 1
    free = 0.0
    for first in range(0, chunks, at_once):
        last = min(first + at_once, chunks) - 1
        start = max(free, last * copy)
        free = start + gemm * (last - first + 1)
        spans.append(Span("GEMM", start, free, _label(first)))
    return spans


def _produced_in_turn(pieces: int, gemm: float, copy: float, own_last: bool) -> list[Span]:
    """Reduce-scatter: a piece travels once it is computed; with ``own_last`` the last one stays here."""
    spans, free = [], 0.0
    for piece in range(pieces):
        spans.append(Span("GEMM", piece * gemm, (piece + 1) * gemm, _label(piece)))
        if own_last and piece == pieces - 1:
            break
        start = max(free, (piece + 1) * gemm)
        free = start + copy
        spans.append(Span("copy", start, free, _label(piece)))
    return spans


def _label(index: int) -> str:
    return "0123456789abcdefghijklmnopqrstuvwxyz"[index % 36]
