"""``profile read``: files in, report out."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tpoverlap.config import SUPPORTED, OverlapConfig, resolve
from tpoverlap.tools.profile.advice import Setting, advise
from tpoverlap.tools.profile.figures import figures_of
from tpoverlap.tools.profile.model import Span, ranks_of
from tpoverlap.tools.profile.report import Report
from tpoverlap.tools.profile.trace_file import ReadTrace, read_trace


def report_of(
    paths: Sequence[Path], tp_size: int | None = None, configs: Mapping[str, OverlapConfig] | None = None
) -> tuple[Report, list[Span]]:
    """Read the traces of one or more ranks.

    Args:
        paths: one file a rank; a file that does not say its rank takes its place in the list.
        tp_size: None: the number of ranks seen, or 2 where only one was.
        configs: options by name, for advice that depends on them.

    Raises:
        TraceError: a file cannot be read.
    """
    read = [read_trace(path) for path in paths]
    spans: list[Span] = []
    taken: set[int] = set()
    for index, one in enumerate(read):
        move = index if taken & set(ranks_of(one.spans)) else None
        moved = [replace(span, rank=move) for span in one.spans] if move is not None else one.spans
        taken |= set(ranks_of(moved))
        spans += moved
    library = "te" if any(one.library == "te" for one in read) else "tpoverlap"
    spans = [_with_options(span, configs or {}) for span in spans]
    ranks = ranks_of(spans)
    if tp_size is None:
        tp_size = max(2, len(ranks), *(rank + 1 for rank in ranks)) if ranks else 2
    setting = Setting(tp_size, configs or {}, library)  # type: ignore[arg-type]  # one of the two
    figures = figures_of(spans)
    notes = [note for path, one in zip(paths, read, strict=True) for note in _notes(path, one, len(paths) > 1)]
    if any(one.library != "tpoverlap" and one.spans for one in read):
        notes.append(
            "an operation is what a named range launched, first kernel to last; who waits for whom is not in the trace"
        )
    facts = {"files": [str(path) for path in paths], "library": sorted({one.library for one in read}), "ranks": ranks}
    title = f"tpoverlap profile read: {', '.join(path.name for path in paths)}"
    return Report(title, tuple(figures), tuple(advise(figures, setting)), tuple(notes), facts), spans


def options_of(path: str, tp_size: int) -> dict[str, OverlapConfig]:
    """Options by name of a UB file, with features that only other releases run.

    Raises:
        ConfigError: it cannot be read.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        later = SUPPORTED | {"fused", "atomic_gemm", "sm_copy", "fp8"}
        return dict(resolve(path, tp_size, supported=later, fp8=True).names)


def _with_options(span: Span, configs: Mapping[str, OverlapConfig]) -> Span:
    config = configs.get(span.name)
    if config is None or span.method:
        return span
    return replace(span, method=config.method, direction=config.direction)


def _notes(path: Path, one: ReadTrace, several: bool) -> list[str]:
    return [f"{path.name}: {note}" if several else note for note in one.notes]
