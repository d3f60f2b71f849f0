"""Spans as Chrome trace events, for Perfetto and chrome://tracing. One process a rank, one thread a stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from tpoverlap.tools.profile.model import Span

CATEGORY: Final = "tpoverlap"
CLOCK_MARK: Final = "tpoverlap::clock"
"""A range of torch.profiler in which our marks' time is 0."""
_FIRST_PID: Final = 900_000_000
"""Above any process number, so that our lanes do not mix with torch's."""


def chrome_events(spans: Sequence[Span], offset_us: float = 0.0) -> list[dict[str, Any]]:
    """Complete events ("ph": "X") and the metadata that names ranks and streams. Times are shifted by ``offset_us``."""
    streams = {
        rank: sorted({span.stream for span in spans if span.rank == rank}, key=lane_order) for rank in _ranks(spans)
    }
    events: list[dict[str, Any]] = []
    for rank, names in streams.items():
        events.append(_metadata("process_name", rank, 0, {"name": f"tpoverlap rank {rank}"}))
        for index, name in enumerate(names):
            events.append(_metadata("thread_name", rank, index, {"name": name}))
            events.append(_metadata("thread_sort_index", rank, index, {"sort_index": index}))
    for span in spans:
        events.append(
            {
                "ph": "X",
                "cat": CATEGORY,
                "name": f"{span.name} {span.phase}",
                "pid": _FIRST_PID + span.rank,
                "tid": streams[span.rank].index(span.stream),
                "ts": round(span.begin_us + offset_us, 3),
                "dur": round(span.end_us - span.begin_us, 3),
                "args": _arguments(span),
            }
        )
    return events


def span_of(event: Mapping[str, Any], threads: Mapping[tuple[Any, Any], str]) -> Span:
    """The inverse of `chrome_events` for one event.

    Raises:
        KeyError, TypeError, ValueError: it is not one of ours, or damaged.
    """
    arguments = event["args"]
    begin = float(event["ts"])
    return Span(
        name=str(arguments["gemm"]),
        phase=arguments["phase"],
        stream=threads.get((event["pid"], event["tid"]), str(event["tid"])),
        begin_us=begin,
        end_us=begin + float(event["dur"]),
        rank=int(arguments["rank"]),
        call=int(arguments["call"]),
        peer=int(arguments["peer"]),
        step=int(arguments["step"]),
        method=str(arguments["method"]),
        direction=str(arguments["direction"]),
        num_tokens=int(arguments["num_tokens"]),
    )


def lane_order(stream: str) -> tuple[int, str]:
    """The caller's stream, then those that compute, then those that move rows."""
    order = {"caller": 0, "comm": 8, "receive": 9}
    return order.get(stream, 1), stream


def _ranks(spans: Sequence[Span]) -> list[int]:
    return sorted({span.rank for span in spans})


def _arguments(span: Span) -> dict[str, Any]:
    return {
        "gemm": span.name,
        "phase": span.phase,
        "rank": span.rank,
        "call": span.call,
        "peer": span.peer,
        "step": span.step,
        "method": span.method,
        "direction": span.direction,
        "num_tokens": span.num_tokens,
    }


def _metadata(kind: str, rank: int, thread: int, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": _FIRST_PID + rank, "tid": thread, "args": dict(arguments)}
