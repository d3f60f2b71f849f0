"""``--plot``: T, loss and step time over the steps, as a PNG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tpoverlap.tools.train.job import StepRecord


def draw(
    path: Path,
    steps: Sequence[StepRecord],
    reference_losses: Sequence[float] | None,
    capacity_tokens: int,
    title: str,
) -> None:
    """Write three panels, one above the other, that share the axis of steps."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    # Figure and canvas by hand: pyplot would choose a back end for the whole process and keep the figure alive.
    figure = Figure(figsize=(8.0, 7.5), layout="constrained")
    FigureCanvasAgg(figure)
    numbers = [record.step for record in steps]
    tokens_axes, loss_axes, time_axes = figure.subplots(3, 1, sharex=True)

    tokens_axes.bar(numbers, [record.active_tokens for record in steps], color="#4477aa", label="active tokens T")
    tokens_axes.axhline(capacity_tokens, color="#bb5566", linestyle="--", label=f"capacity C = {capacity_tokens}")
    tokens_axes.set_ylabel("tokens")
    tokens_axes.set_ylim(0, capacity_tokens * 1.3)

    loss_axes.plot(numbers, [record.loss for record in steps], color="#4477aa", marker="o", label="tensor parallel")
    if reference_losses is not None:
        loss_axes.plot(numbers, reference_losses, color="#ddaa33", linestyle=":", linewidth=3, label="reference, no TP")
    loss_axes.set_ylabel("loss (nats per byte)")

    # The first step warms everything up and would flatten the others: its bar is cut and its time is written out.
    times = [record.time_ms for record in steps]
    time_axes.bar(numbers, times, color="#4477aa", label="slowest rank")
    highest = max(times[1:], default=times[0]) * 1.35
    if times[0] > highest:
        time_axes.text(
            numbers[0], highest * 0.97, f"{times[0]:.0f} ms", rotation=90, ha="center", va="top", color="white"
        )
    time_axes.set_ylim(0, highest)
    time_axes.set_ylabel("step time (ms)")
    time_axes.set_xlabel("step")
    time_axes.set_xlim(0.4, len(numbers) + 0.6)
    time_axes.xaxis.set_major_locator(MaxNLocator(integer=True))

    for axes in (tokens_axes, loss_axes, time_axes):
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
        axes.legend(loc="upper right", ncols=2, fontsize="small")
    figure.suptitle(title)
    figure.savefig(path, dpi=120, format="png")
