"""A PNG timeline: one lane a stream of a rank, one colour a phase."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final

from tpoverlap.tools.profile.chrome import lane_order
from tpoverlap.tools.profile.model import Phase, Span

COLOURS: Final[Mapping[Phase, str]] = MappingProxyType(
    {
        "operation": "#e8e8e8",
        "gemm": "#356fb3",
        "read": "#7aa6d8",
        "reduce": "#8a63a8",
        "transfer": "#c46a2b",
        "collective": "#e6a877",
        "wait": "#d33a3a",
    }
)
MAX_OPERATIONS: Final = 40
"""Of one rank: the last ones are drawn, since the first ones warm up."""
_LABELS: Final[Mapping[Phase, str]] = MappingProxyType(
    {
        "operation": "launches",
        "gemm": "GEMM",
        "read": "reads what was gathered",
        "reduce": "adds what arrived",
        "transfer": "rows travel",
        "collective": "plain collective",
        "wait": "waits",
    }
)


def window(spans: Sequence[Span], max_operations: int = MAX_OPERATIONS) -> list[Span]:
    """The spans of each rank's last operations."""
    kept: list[Span] = []
    for rank in sorted({span.rank for span in spans}):
        own = [span for span in spans if span.rank == rank]
        calls = sorted({span.call for span in own})[-max_operations:]
        kept += [span for span in own if span.call in set(calls)]
    return kept


def draw(path: Path, spans: Sequence[Span], title: str) -> None:
    """Write the PNG. Without spans it says so.

    Raises:
        OSError: ``path`` cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    shown = window(spans)
    lanes = sorted({(span.rank, span.stream) for span in shown}, key=lambda lane: (lane[0], lane_order(lane[1])))
    figure = Figure(figsize=(14.0, 1.8 + 0.55 * max(1, len(lanes))), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    start = min((span.begin_us for span in shown), default=0.0)
    for span in sorted(shown, key=lambda span: span.phase != "operation"):  # operations first: they are behind
        row = lanes.index((span.rank, span.stream))
        whole = span.phase == "operation"
        axes.broken_barh(
            [(span.begin_us - start, span.end_us - span.begin_us)],
            (row - 0.45 if whole else row - 0.3, 0.9 if whole else 0.6),
            facecolors=COLOURS[span.phase],
            edgecolor="#999999" if whole else "none",
            linewidth=0.5,
        )
    _name_operations(axes, shown, lanes, start)
    axes.set_yticks(range(len(lanes)), [f"rank {rank} {stream}" for rank, stream in lanes])
    axes.set_ylim(len(lanes) - 0.4, -1.0)
    axes.set_xlabel("us")
    axes.set_title(title if shown else f"{title}\nno operation was traced", fontsize=10)
    used = [phase for phase in COLOURS if any(span.phase == phase for span in shown)]
    if used:
        patches = [Patch(color=COLOURS[phase], label=_LABELS[phase]) for phase in used]
        figure.legend(handles=patches, loc="outside lower center", ncols=len(used), fontsize="small", frameon=False)
    figure.savefig(path, dpi=120, format="png")


def _name_operations(axes: object, spans: Sequence[Span], lanes: Sequence[tuple[int, str]], start: float) -> None:
    """Above the first rank's lanes, where there is room."""
    if not lanes:
        return
    first, total = lanes[0][0], max(span.end_us for span in spans) - start
    for span in spans:
        if span.rank == first and span.phase == "operation" and span.end_us - span.begin_us > 0.02 * total:
            axes.text(span.begin_us - start, -0.5, span.name, fontsize=7, rotation=25, va="bottom")  # type: ignore[attr-defined]
