"""Spans: what was going on, for which GEMM, on which stream of which rank, and when. From marks or a file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

from tpoverlap.comm import Mark

Phase = Literal["operation", "gemm", "read", "reduce", "transfer", "wait", "collective"]
PHASES: Final[tuple[Phase, ...]] = get_args(Phase)
COMPUTING: Final = ("gemm", "read")
"""What counts as computing. ``reduce`` does not: without communication there would be nothing to add."""
GEMM_NAME: Final = re.compile(r"(?<![a-z0-9])(qkv|proj|fc1|fc2)_(fprop|dgrad|wgrad)(?![a-z0-9])")


@dataclass(frozen=True)
class Span:
    """One thing that one stream did.

    Attributes:
        name: GEMM name, such as "fc1_fprop".
        phase: "operation" is the whole, from the caller's first to its last; the others lie inside, except that a
            transfer may be done by the comm stream while the caller is elsewhere.
        stream: "caller", "comm", "compute0", or a stream's number in a file.
        call: which operation of that rank; spans of one operation share it.
        peer: the rank sent to or waited for; -1 if there is none.
        method: what dispatch chose; "" when unknown.
        direction: "all-gather", "reduce-scatter" or "".
        num_tokens: T; 0 when unknown.
    """

    name: str
    phase: Phase
    stream: str
    begin_us: float
    end_us: float
    rank: int
    call: int = 0
    peer: int = -1
    step: int = -1
    method: str = ""
    direction: str = ""
    num_tokens: int = 0

    @property
    def interval(self) -> tuple[float, float]:
        """(begin, end)."""
        return self.begin_us, self.end_us


_BEGINS: Final[dict[str, Phase]] = {
    "begin": "operation",
    "gemm_begin": "gemm",
    "read_begin": "read",
    "reduce_begin": "reduce",
    "collective_begin": "collective",
    "send": "transfer",
    "wait": "wait",
}
_ENDS: Final[dict[str, Phase]] = {
    "end": "operation",
    "gemm_end": "gemm",
    "read_end": "read",
    "reduce_end": "reduce",
    "collective_end": "collective",
    "sent": "transfer",
    "arrived": "wait",
}


def spans_of(marks: Iterable[Mark], rank: int, offset_us: float = 0.0) -> list[Span]:
    """Pair the marks of one rank's trace. A mark without its other half, or of no operation, gives nothing.

    Args:
        marks: `Trace.marks`: by time, which within a stream is the order of its work.
        rank: whose they are.
        offset_us: added to every time, so that ranks share one clock.
    """
    begun: dict[tuple[int, str, Phase], Mark] = {}
    spans: list[Span] = []
    for mark in marks:
        if mark.call is None:
            continue
        begins, ends = _BEGINS.get(mark.what), _ENDS.get(mark.what)
        if begins is not None:
            begun[mark.call.number, mark.stream, begins] = mark
        elif ends is not None:
            begin = begun.pop((mark.call.number, mark.stream, ends), None)
            if begin is not None:
                spans.append(_span(begin, mark, ends, rank, offset_us))
    return sorted(spans, key=lambda span: (span.begin_us, -span.end_us))


def _span(begin: Mark, end: Mark, phase: Phase, rank: int, offset_us: float) -> Span:
    assert begin.call is not None, "spans_of skips marks of no operation"
    name, direction, method = parse_label(begin.call.label)
    return Span(
        name=name,
        phase=phase,
        stream=begin.stream,
        begin_us=begin.time_us + offset_us,
        end_us=end.time_us + offset_us,
        rank=rank,
        call=begin.call.number,
        peer=begin.peer,
        step=begin.step,
        method=method,
        direction=direction,
        num_tokens=begin.call.num_tokens,
    )


def parse_label(label: str) -> tuple[str, str, str]:
    """(name, direction, method) of `OperationContext.label`: "fc1_fprop all-gather ring_exchange/aggregate"."""
    name, _, rest = label.partition(" ")
    direction, _, method = rest.partition(" ")
    return name, direction, method.partition("/")[0]


def ranks_of(spans: Sequence[Span]) -> list[int]:
    """Ranks that have spans."""
    return sorted({span.rank for span in spans})
