"""A timeline as two lanes of characters, and many of them as a PNG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tpoverlap.tools.config.timeline import Lane, Timeline

LANES: tuple[Lane, ...] = ("GEMM", "copy")


def lanes(drawn: Timeline, width: int = 64) -> list[str]:
    """Two lines: when pieces compute and when they travel. A piece shows its number, "." is an idle lane."""
    scale = width / drawn.total if drawn.total > 0 else 0.0
    lines = []
    for lane in LANES:
        cells = ["."] * width
        for span in drawn.spans:
            if span.lane == lane:
                first = min(width - 1, round(span.start * scale))
                last = max(first + 1, round(span.end * scale))
                cells[first:last] = [span.label] * (min(last, width) - first)
        lines.append(f"{lane} |{''.join(cells)}|")
    return lines


def plot(drawn: Sequence[tuple[str, Timeline]], path: Path, title: str, unit: str | None) -> None:
    """Write a PNG with two lanes a GEMM. ``unit`` None: the durations mean nothing and get no axis.

    Raises:
        OSError: ``path`` cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 1.0 + 0.62 * max(1, len(drawn))), layout="constrained")
    axes = figure.add_subplot()
    colours = {"GEMM": ("#356fb3", "#7aa6d8"), "copy": ("#c46a2b", "#e6a877")}
    for row, (_, one) in enumerate(drawn):
        for number, span in enumerate(sorted(one.spans, key=lambda span: (span.lane, span.start))):
            offset = 0.0 if span.lane == "GEMM" else 0.38
            colour = colours[span.lane][number % 2]
            axes.barh(row + offset, span.end - span.start, left=span.start, height=0.34, color=colour)
        axes.plot([one.gemm, one.gemm], [row - 0.2, row + 0.58], color="black", linewidth=1)
    axes.set_yticks([row + 0.19 for row in range(len(drawn))], [name for name, _ in drawn])
    axes.invert_yaxis()
    if unit is None:
        axes.set_xticks([])
    axes.set_xlabel("not to scale: no rates were given" if unit is None else f"{unit}, from the stated rates")
    axes.set_title(f"{title}\nblue: GEMM, orange: rows travelling, line: the GEMM alone", fontsize=9)
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=120, format="png")
