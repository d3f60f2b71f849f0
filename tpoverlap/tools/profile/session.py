"""``with tpo.profile("out"):`` round training steps, on every rank."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from tpoverlap.comm import Trace
from tpoverlap.config import OverlapConfig
from tpoverlap.errors import ConfigError, NotInitializedError
from tpoverlap.manager import UserBufferManager
from tpoverlap.memory.base import agree
from tpoverlap.tools.profile.advice import Setting, advise
from tpoverlap.tools.profile.chrome import CLOCK_MARK, chrome_events
from tpoverlap.tools.profile.figures import figures_of
from tpoverlap.tools.profile.model import Span, spans_of
from tpoverlap.tools.profile.picture import draw
from tpoverlap.tools.profile.report import Report, write_json

_LARGEST_MERGE_BYTES: Final = 256 * 2**20


@dataclass
class Profile:
    """What ``with tpo.profile(...) as result`` gives; filled when the block ends.

    Attributes:
        spans: of this rank; on rank 0 of all ranks.
        report: on rank 0, else None.
        files: written by this rank.
    """

    spans: list[Span] = field(default_factory=list)
    report: Report | None = None
    files: list[Path] = field(default_factory=list)


@contextmanager
def profile(
    out_dir: str | Path, *, manager: UserBufferManager | None = None, torch_profiler: bool = True
) -> Iterator[Profile]:
    """Record the operations inside the block and say where the time of each named GEMM went.

    Call it on every rank of the manager's group: the end of the block is collective. Writes ``trace-rank{r}.json``
    (torch.profiler's events and our lanes, for Perfetto) on every rank, and on rank 0 ``trace.json`` (our lanes of all
    ranks), ``timeline.png`` and ``report.json``. A block that raises writes its own rank's files and waits for nobody.

    Args:
        out_dir: created if it is missing.
        manager: None: the one open manager of this process.
        torch_profiler: False: our own marks only, which cost less.

    Raises:
        ConfigError: ``out_dir`` cannot be written, the manager is traced already, or which one is meant is not clear.
    """
    mgr = _only_manager() if manager is None else manager
    mgr.require_open()
    directory = _prepare(Path(out_dir), mgr.rank)
    if mgr.channel is not None and mgr.channel.trace is not None:
        raise ConfigError("this manager is being traced already; do not nest profiles")
    result = Profile()
    if mgr.device.type == "cuda":
        torch.cuda.synchronize(mgr.device)
    with ExitStack() as stack:
        profiler = stack.enter_context(_torch_profiler(mgr.device)) if torch_profiler else None
        for _ in range(2):  # the first range of a process takes milliseconds to enter and leave
            with torch.profiler.record_function(CLOCK_MARK):
                trace = Trace(mgr.device)
        if mgr.channel is not None:
            mgr.channel.record(trace)
        failed = True
        try:
            yield result
            failed = False
        finally:
            if mgr.channel is not None:
                mgr.channel.record(None)
            if mgr.device.type == "cuda":
                torch.cuda.synchronize(mgr.device)
            stack.close()  # torch.profiler stops here
            own = spans_of(trace.marks(), mgr.rank, trace.start_s * 1e6)
            result.files.append(_write_rank(directory, profiler, own, mgr.rank, trace.start_s * 1e6))
            result.spans = own
    if not failed:
        _finish(result, directory, mgr)


def _finish(result: Profile, directory: Path, mgr: UserBufferManager) -> None:
    """Collective: spans of all ranks go to rank 0, which writes the report."""
    every = agree(mgr.group, result.spans) if mgr.tp_size > 1 else [result.spans]
    if mgr.rank != 0:
        return
    result.spans = on_common_clock([span for spans in every for span in spans])
    report = make_report(result.spans, setting_of(mgr), f"tpoverlap profile: R = {mgr.tp_size} on {mgr.device.type}")
    result.report = report
    paths = [directory / name for name in ("trace.json", "timeline.png", "report.json")]
    _dump(paths[0], {"traceEvents": chrome_events(result.spans)})
    draw(paths[1], result.spans, report.title)
    write_json(paths[2], report.as_dict())
    result.files += paths


def make_report(spans: list[Span], setting: Setting, title: str) -> Report:
    """Figures and advice of one trace of all ranks."""
    figures = figures_of(spans)
    notes = ["communication alone is how long the transfers were busy; computing includes what they disturbed"]
    if setting.tp_size == 1:
        notes = ["R = 1: nothing is communicated, so there is nothing to attribute"]
    facts = {"tp_size": setting.tp_size, "torch": torch.__version__, "num_spans": len(spans)}
    return Report(title, tuple(figures), tuple(advise(figures, setting)), tuple(notes), facts)


def setting_of(mgr: UserBufferManager) -> Setting:
    """The manager's options."""
    return Setting(mgr.tp_size, configs_of(mgr))


def configs_of(mgr: UserBufferManager) -> dict[str, OverlapConfig]:
    """Options of every name that the manager has called."""
    configs = {}
    for name in mgr.stats():
        try:
            configs[name] = mgr.get(name).config
        except ConfigError:  # not registered: it runs without overlap and has no options
            continue
    return configs


def on_common_clock(spans: list[Span]) -> list[Span]:
    """The same with the earliest at 0. Ranks of one host share ``perf_counter``; of several hosts they do not."""
    from dataclasses import replace

    start = min((span.begin_us for span in spans), default=0.0)
    return [replace(span, begin_us=span.begin_us - start, end_us=span.end_us - start) for span in spans]


def _only_manager() -> UserBufferManager:
    # Looked for, not registered: the library keeps no list of managers, and this runs once a profile.
    found: list[UserBufferManager] = [
        one for one in gc.get_objects() if issubclass(type(one), UserBufferManager) and _is_open(one)
    ]
    if len(found) != 1:
        raise ConfigError(f"this process has {len(found)} open managers; say which one: profile(out, manager=mgr)")
    return found[0]


def _is_open(mgr: UserBufferManager) -> bool:
    try:
        mgr.require_open()
    except NotInitializedError:
        return False
    return True


def _prepare(directory: Path, rank: int) -> Path:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe = directory / f".rank{rank}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"cannot write to {directory}: {error.strerror or error}; give another directory") from error
    return directory


def _torch_profiler(device: torch.device) -> Any:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    return torch.profiler.profile(activities=activities)


def _write_rank(directory: Path, profiler: Any, spans: list[Span], rank: int, start_us: float) -> Path:
    """What torch recorded and what we marked in one file, on torch's clock."""
    path = directory / f"trace-rank{rank}.json"
    data: dict[str, Any] = {"traceEvents": []}
    shift_us = -start_us
    if profiler is not None:
        profiler.export_chrome_trace(str(path))
        if path.stat().st_size > _LARGEST_MERGE_BYTES:  # reading it back would take minutes and gigabytes
            sys.stderr.write(f"tpoverlap profile: {path} is large and keeps torch's events only; see trace.json\n")
            return path
        data = json.loads(path.read_text(encoding="utf-8", errors="replace"))
        clocks = [one for one in data["traceEvents"] if one.get("name") == CLOCK_MARK and one.get("ph") == "X"]
        if clocks:  # our time 0 lies in the last of these ranges
            clock = max(clocks, key=lambda one: float(one["ts"]))
            shift_us = float(clock["ts"]) + 0.5 * float(clock["dur"]) - start_us
    data["traceEvents"] += chrome_events(spans, shift_us)
    _dump(path, data)
    return path


def _dump(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data), encoding="utf-8")
