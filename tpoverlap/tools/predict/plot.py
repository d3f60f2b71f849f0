"""``--plot``: gain over sequential and over padding against T, one line a GEMM."""

from __future__ import annotations

from pathlib import Path

from tpoverlap.tools.predict.prediction import Prediction


def draw(path: Path, answer: Prediction) -> None:
    """Write a PNG with two panels, of FP8 with a third one. Expects a prediction at many T."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Figure and canvas by hand: pyplot would choose a back end for the whole process and keep the figure alive.
    kinds = [
        ("gain_over_sequential", "over no overlap at the same T"),
        ("gain_over_padding", f"over padding to C = {answer.capacity_tokens}"),
    ]
    if answer.layer.fp8:
        kinds.append(("gain_over_wide", f"over {answer.layer.dtype} at the same T"))
    figure = Figure(figsize=(4.5 * len(kinds), 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(kinds))
    for axes, (key, heading) in zip(panels, kinds, strict=True):
        for gemm in answer.gemms:
            rows = sorted(gemm.rows, key=lambda row: row.tokens)
            axes.plot(
                [row.tokens for row in rows],
                [getattr(row, key) for row in rows],
                label=gemm.name,
                linestyle="--" if gemm.problem.is_beside else "-",
            )
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.set_xlabel("T, tokens of the TP group")
        axes.set_title(heading, fontsize="medium")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("times as fast")
    panels[1].set_yscale("log", base=2)
    panels[1].legend(fontsize="x-small", ncols=2)
    layer = answer.layer
    figure.suptitle(
        f"{answer.label}: hidden {layer.hidden}, ffn {layer.ffn}, TP {layer.tp_size}, {layer.numbers}, "
        f"{answer.device.name}"
    )
    figure.savefig(path, dpi=120, format="png")
