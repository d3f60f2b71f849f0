"""``--plot``: one picture, time against T for every method, and the limit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tpoverlap.tools.bench.report import BenchReport, headline

Row = dict[str, Any]

_STYLES: dict[str, tuple[str, str]] = {
    "auto": ("#000000", "o"),
    "fused": ("#228833", "D"),
    "ring_exchange": ("#4477aa", "s"),
    "ring aggregate": ("#66ccee", "s"),
    "pipeline 2": ("#aa3377", "v"),
    "pipeline 4": ("#cc79a7", "v"),
    "sequential": ("#bbbb55", "x"),
    "plain sequential": ("#ddaa33", "^"),
    "torch async-TP": ("#bb5566", "P"),
    "padded to capacity": ("#999999", "<"),
}


def draw(path: Path, report: BenchReport) -> bool:
    """Draw the shape with the most T of each direction into the PNG ``path``; False where there is no gemm row."""
    rows = report.rows_of("gemm")
    kinds = [(direction, fp8) for fp8 in (False, True) for direction in ("ag", "rs")]
    panels = [(direction, chosen) for direction, fp8 in kinds if (chosen := sweep(rows, direction, fp8))]
    if not panels:
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Figure and canvas by hand: pyplot would choose a back end for the whole process and keep the figure alive.
    figure = Figure(figsize=(6.2 * len(panels), 5.2), layout="constrained")
    FigureCanvasAgg(figure)
    all_axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (direction, chosen) in zip(all_axes, panels, strict=True):
        _panel(axes, direction, chosen)
    where = headline(report.where)
    figure.suptitle("\n".join([where[1], *where[3:]]), fontsize="small")
    figure.savefig(path, dpi=120, format="png")
    return True


def sweep(rows: Sequence[Row], direction: str, fp8: bool = False) -> list[Row]:
    """Rows of the (K, N) that was measured at the most T, by T."""
    mine = [row for row in rows if row["direction"] == direction and row["measured"]]
    mine = [row for row in mine if (row.get("numbers") == "fp8") == fp8]
    if not mine:
        return []
    ((features, _),) = Counter((row["in_features"], row["out_features"]) for row in mine).most_common(1)
    chosen = [row for row in mine if (row["in_features"], row["out_features"]) == features]
    return sorted(chosen, key=lambda row: int(row["num_tokens"]))


def _panel(axes: Any, direction: str, rows: list[Row]) -> None:
    mode = "queued" if any(one["queued_us"] is not None for row in rows for one in row["methods"].values()) else "eager"
    for label in dict.fromkeys(label for row in rows for label in row["methods"]):
        points = [
            (row["num_tokens"], value)
            for row in rows
            if label in row["methods"] and (value := row["methods"][label][f"{mode}_us"]) is not None
        ]
        if points:
            colour, marker = _STYLES.get(label, ("#000000", "."))
            axes.plot(*zip(*points, strict=True), label=label, color=colour, marker=marker, markersize=5, linewidth=1)
    limit = [
        (row["num_tokens"], max(gemm, transfer))
        for row in rows
        if (gemm := row["alone"].get("gemm alone", {}).get(f"{mode}_us")) is not None
        and (transfer := row["transfer_us"][mode]) is not None
    ]
    if limit:
        axes.plot(*zip(*limit, strict=True), label="limit: max(GEMM, transfer)", color="#ee3333", linestyle="--")
    first = rows[0]
    what = "all-gather + GEMM" if direction == "ag" else "GEMM + reduce-scatter"
    what += " in FP8" if first.get("numbers") == "fp8" else ""
    axes.set_title(f"{what}, K = {first['in_features']}, N = {first['out_features']}", fontsize="medium")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("tokens T")
    axes.set_ylabel(f"time of an operation (us, {mode}, slowest rank)")
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize="x-small")
