"""``profile read``: a torch.profiler (Chrome) trace, ours or another library's, as spans by GEMM name.

Ours: the events that `chrome` wrote, taken as they are. Others: kernels are sorted by their names (`kernels`) and given
to a GEMM, in this order, by

1. the GPU-side copy of a range (``gpu_user_annotation``) round it on its stream,
2. the CPU-side ranges round its launch (same ``correlation``), the innermost one whose name says a GEMM,
3. for communication alone: the GEMM whose time it overlaps most.

What none of the three places is counted and reported, not guessed.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tpoverlap.errors import TpOverlapError
from tpoverlap.tools.profile.chrome import CATEGORY, span_of
from tpoverlap.tools.profile.kernels import Kind, gemm_of, is_layer_function, is_userbuffers, kind_of
from tpoverlap.tools.profile.model import PHASES, Phase, Span

_DEVICE: Final = ("kernel", "gpu_memcpy", "gpu_memset")
_RANGES: Final = ("user_annotation", "cpu_op", "user_defined", "nvtx", "python_function")
_LAUNCHES: Final = ("cuda_runtime", "cuda_driver", "runtime", "driver")
_PHASE_OF: Final[Mapping[Kind, Phase]] = {"gemm": "gemm", "comm": "transfer", "reduce": "reduce", "other": "read"}


class TraceError(TpOverlapError):
    """The file is not a trace that can be read."""


@dataclass
class ReadTrace:
    """Spans of one file, and what could not be used."""

    spans: list[Span] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    library: str = "unknown"


@dataclass(frozen=True)
class _Timed:
    """A complete event with sound times. ``lane`` is (pid, tid)."""

    name: str
    category: str
    lane: tuple[Any, Any]
    begin: float
    end: float
    arguments: Mapping[str, Any]


@dataclass
class _Place:
    """Where a kernel belongs: a GEMM, and which instance of its range."""

    name: str
    instance: int


def read_trace(path: Path, rank: int | None = None) -> ReadTrace:
    """Read one file, plain or gzipped.

    Args:
        path: of the trace.
        rank: None: the rank that the file itself names, else 0.

    Raises:
        TraceError: unreadable, not JSON, or not a trace.
    """
    data = _load(path)
    events = data.get("traceEvents") if isinstance(data, Mapping) else data
    if not isinstance(events, list):
        raise TraceError(f"{path} is JSON but no trace: it has no list traceEvents; export it with torch.profiler")
    if rank is None:
        rank = _stated_rank(data)
    threads = _thread_names(events)
    result = ReadTrace()
    ours = [event for event in events if isinstance(event, Mapping) and event.get("cat") == CATEGORY]
    if ours:
        _read_ours(ours, threads, result)
    else:
        timed, damaged = _timed(events)
        _note(result, damaged, "event(s) with a damaged time or name left out")
        _read_kernels(timed, rank, result)
    return result


def _load(path: Path) -> Any:
    try:
        content = path.read_bytes()
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
        return json.loads(content)
    except OSError as error:  # BadGzipFile is one too
        raise TraceError(f"cannot read {path}: {error.strerror or error}") from error
    except (EOFError, zlib.error) as error:
        raise TraceError(
            f"{path} is a damaged gzip file: {error}; was the run cut off while it was written?"
        ) from error
    except (ValueError, RecursionError) as error:  # not UTF-8 is a ValueError
        raise TraceError(f"{path} is not JSON: {error}; was the run cut off while it was written?") from error


def _stated_rank(data: Any) -> int:
    info = data.get("distributedInfo") if isinstance(data, Mapping) else None
    rank = info.get("rank") if isinstance(info, Mapping) else None
    return rank if isinstance(rank, int) and not isinstance(rank, bool) else 0


def _thread_names(events: Iterable[Any]) -> dict[tuple[Any, Any], str]:
    names = {}
    for event in events:
        if isinstance(event, Mapping) and event.get("ph") == "M" and event.get("name") == "thread_name":
            arguments = event.get("args")
            lane = _lane(event)
            if isinstance(arguments, Mapping) and lane is not None:
                names[lane] = str(arguments.get("name", ""))
    return names


def _lane(event: Mapping[str, Any]) -> tuple[Any, Any] | None:
    lane = (event.get("pid"), event.get("tid"))
    return lane if all(isinstance(part, (int, str)) for part in lane) else None


def _note(result: ReadTrace, count: int, what: str) -> None:
    if count:
        result.notes.append(f"{count} {what}")


# -- our own events --------------------------------------------------------------------------------------------------


def _read_ours(events: Sequence[Mapping[str, Any]], threads: Mapping[tuple[Any, Any], str], result: ReadTrace) -> None:
    result.library = CATEGORY
    damaged = 0
    for event in events:
        try:
            span = span_of(event, threads)
            if span.phase not in PHASES or not math.isfinite(span.begin_us) or not math.isfinite(span.end_us):
                raise ValueError(span.phase)
            result.spans.append(span)
        except (KeyError, TypeError, ValueError, OverflowError):
            damaged += 1
    result.spans.sort(key=lambda span: (span.begin_us, -span.end_us))
    _note(result, damaged, "damaged event(s) of tpoverlap left out")


# -- kernels of any library --------------------------------------------------------------------------------------------


def _timed(events: Iterable[Any]) -> tuple[list[_Timed], int]:
    """Complete events; events of other kinds (flows, counters, metadata) are none and not counted as damaged."""
    timed, damaged = [], 0
    for event in events:
        if not isinstance(event, Mapping):
            damaged += 1
            continue
        if event.get("ph") != "X":
            continue
        begin, duration, lane = _number(event.get("ts")), _number(event.get("dur", 0.0)), _lane(event)
        name, arguments = event.get("name"), event.get("args")
        if begin is None or duration is None or duration < 0 or lane is None or not isinstance(name, str):
            damaged += 1
            continue
        category = str(event.get("cat", "")).lower()
        arguments = arguments if isinstance(arguments, Mapping) else {}
        timed.append(_Timed(name, category, lane, begin, begin + duration, arguments))
    return timed, damaged


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _read_kernels(timed: Sequence[_Timed], rank: int, result: ReadTrace) -> None:
    device = [event for event in timed if event.category in _DEVICE]
    if not device:
        result.notes.append("no GPU kernel in this trace: record it with ProfilerActivity.CUDA; nothing was attributed")
        return
    kinds = {id(event): kind_of(event.name, event.category) for event in device}
    if any(is_userbuffers(event.name) for event in device):
        result.library = "te"
    places = _places(timed, device)
    spans, unplaced = _spans(device, kinds, places, rank)
    late = [event for event in unplaced if kinds[id(event)] == "comm"]
    by_time = _by_time(late, spans, rank)
    spans += by_time.values()
    result.spans = sorted(_with_operations(spans), key=lambda span: (span.begin_us, -span.end_us))
    _note(result, len(by_time), "communication kernel(s) without a launch or range of their own, placed by time")
    _note_unplaced([event for event in unplaced if id(event) not in by_time], kinds, result)
    if not spans:
        result.notes.append(
            "no range names a GEMM: wrap calls in torch.profiler.record_function('fc1_fprop') and record again"
        )


def _note_unplaced(unplaced: Sequence[_Timed], kinds: Mapping[int, Kind], result: ReadTrace) -> None:
    for kind, what in (("gemm", "GEMM"), ("comm", "communication")):
        left = [event for event in unplaced if kinds[id(event)] == kind]
        if left:
            time_us = sum(event.end - event.begin for event in left)
            often = Counter(event.name[:60] for event in left).most_common(1)[0][0]
            result.notes.append(
                f"{len(left)} {what} kernel(s) not attributed to a name, {time_us:.0f} us, most often {often}"
            )


def _places(timed: Sequence[_Timed], device: Sequence[_Timed]) -> dict[int, _Place]:
    """id(kernel) -> where it belongs, for kernels that a range encloses on the GPU or at their launch."""
    launches = {
        event.arguments.get("correlation"): event
        for event in timed
        if event.category in _LAUNCHES and isinstance(event.arguments.get("correlation"), int)
    }
    queries: dict[tuple[Any, Any], list[tuple[float, int]]] = defaultdict(list)
    on_gpu: dict[tuple[Any, Any], list[tuple[float, int]]] = defaultdict(list)
    for event in device:
        on_gpu[event.lane].append((0.5 * (event.begin + event.end), id(event)))
        correlation = event.arguments.get("correlation")
        launch = launches.get(correlation) if isinstance(correlation, int) else None
        if launch is not None:
            queries[launch.lane].append((launch.begin, id(event)))
    places = _enclosing([event for event in timed if event.category in _RANGES], queries)
    annotations = [event for event in timed if event.category == "gpu_user_annotation"]
    return places | _enclosing(annotations, on_gpu)


def _enclosing(
    ranges: Sequence[_Timed], queries: Mapping[tuple[Any, Any], list[tuple[float, int]]]
) -> dict[int, _Place]:
    """For each (time, key) of a lane the innermost range that names a GEMM, else the innermost layer function."""
    by_lane: dict[tuple[Any, Any], list[_Timed]] = defaultdict(list)
    for one in ranges:
        by_lane[one.lane].append(one)
    places = {}
    for lane, wanted in queries.items():
        waiting = sorted(by_lane.get(lane, ()), key=lambda one: (one.begin, -one.end))
        stack: list[_Timed] = []
        position = 0
        for time, key in sorted(wanted):
            while position < len(waiting) and waiting[position].begin <= time:
                stack.append(waiting[position])
                position += 1
            stack = [one for one in stack if one.end >= time]
            place = _innermost(stack)
            if place is not None:
                places[key] = place
    return places


def _innermost(stack: Sequence[_Timed]) -> _Place | None:
    for one in reversed(stack):
        gemm = gemm_of(one.name)
        if gemm is not None:
            # Ranges inside ranges of one GEMM (a label, and the library's own) are one instance: the outermost's.
            outermost = next(outer for outer in stack if gemm_of(outer.name) == gemm)
            return _Place(gemm, id(outermost))
    for one in reversed(stack):
        if is_layer_function(one.name):
            return _Place(one.name, id(one))
    return None


def _spans(
    device: Sequence[_Timed], kinds: Mapping[int, Kind], places: Mapping[int, _Place], rank: int
) -> tuple[list[Span], list[_Timed]]:
    spans, unplaced = [], []
    for event in device:
        place = places.get(id(event))
        if place is None:
            unplaced.append(event)
        else:
            spans.append(_span(event, kinds[id(event)], place, rank))
    return spans, unplaced


def _span(event: _Timed, kind: Kind, place: _Place, rank: int) -> Span:
    stream = event.arguments.get("stream", event.lane[1])
    name, call = place.name, place.instance
    return Span(name, _PHASE_OF[kind], f"stream {stream}", event.begin, event.end, rank, call)


def _by_time(events: Sequence[_Timed], spans: Sequence[Span], rank: int) -> dict[int, Span]:
    """Communication that nothing else places: to the operation whose GEMMs it overlaps most. By id of the event."""
    gemms = sorted((span for span in spans if span.phase == "gemm"), key=lambda span: span.begin_us)
    begins = [span.begin_us for span in gemms]
    longest = max((span.end_us - span.begin_us for span in gemms), default=0.0)
    placed = {}
    for event in events:
        overlaps: Counter[tuple[str, int]] = Counter()
        first, last = bisect_left(begins, event.begin - longest), bisect_left(begins, event.end)
        for span in gemms[first:last]:
            shared = min(span.end_us, event.end) - max(span.begin_us, event.begin)
            if shared > 0:
                overlaps[span.name, span.call] += math.ceil(1000 * shared)
        if overlaps:
            (name, call), _ = overlaps.most_common(1)[0]
            placed[id(event)] = _span(event, "comm", _Place(name, call), rank)
    return placed


def _with_operations(spans: Sequence[Span]) -> list[Span]:
    """Add the operation round each range instance: from its first kernel to its last. Calls are numbered by time."""
    instances: dict[tuple[str, int], list[Span]] = defaultdict(list)
    for span in spans:
        instances[span.name, span.call].append(span)
    by_time = sorted(instances.values(), key=lambda group: min(span.begin_us for span in group))
    numbered = []
    for number, group in enumerate(by_time):
        first = group[0]
        begin, end = min(span.begin_us for span in group), max(span.end_us for span in group)
        numbered.append(Span(first.name, "operation", "caller", begin, end, first.rank, number))
        numbered += [
            Span(span.name, span.phase, span.stream, span.begin_us, span.end_us, span.rank, number) for span in group
        ]
    return numbered
