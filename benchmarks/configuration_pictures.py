"""The pictures of docs/configuration.md.

python -m benchmarks.configuration_pictures

``methods.png``: pieces that compute and travel, ideal, R = 4, from `tpoverlap.tools.config.timeline`; not measured.
``reduce_scatter.png``: measured times from ``benchmarks/results``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from tpoverlap.config import resolve
from tpoverlap.tools.config.timeline import timeline

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
PEERS = ROOT / "benchmarks" / "results" / "2026-11-30_h200x2_peers_table.json"
RANKS, GEMM, COPY = 4, 1.0, 0.6
METHODS: list[tuple[str, str, dict[str, Any]]] = [
    ("fc1_fprop", "sequential (all-gather)", {"method": "sequential"}),
    ("fc1_fprop", "ring_exchange (all-gather)", {"method": "ring_exchange"}),
    ("fc1_fprop", "ring_exchange, aggregate", {"method": "ring_exchange", "aggregate": True}),
    ("fc2_fprop", "sequential (reduce-scatter)", {"method": "sequential"}),
    ("fc2_fprop", "ring_exchange (reduce-scatter)", {"method": "ring_exchange"}),
    ("fc2_fprop", "pipeline, num_splits 2", {"method": "pipeline", "num_splits": 2}),
    ("fc2_fprop", "pipeline, num_splits 4", {"method": "pipeline", "num_splits": 4}),
    ("fc1_dgrad", "bulk", {"method": "bulk"}),
]
COLOURS = {"GEMM": ("#356fb3", "#7aa6d8"), "copy": ("#c46a2b", "#e6a877")}
BARS = {
    "gemm": ("GEMM alone", "#bbbbbb"),
    "sequential_rs": ("GEMM, then NCCL reduce-scatter", "#777777"),
    "te_pipeline_rs_best": ("TE pipeline, best of its settings", "#bb5566"),
    "te_ring_rs": ("TE ring_exchange", "#356fb3"),
}


def methods(path: Path) -> None:
    """Two lanes a method; the line is the GEMM alone, so what is right of it is exposed."""
    figure = Figure(figsize=(9.0, 6.0), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for row, (name, _, options) in enumerate(METHODS):
        config = resolve({name: options}, RANKS).names[name]
        drawn = timeline(config, RANKS, GEMM, COPY)
        for number, span in enumerate(sorted(drawn.spans, key=lambda span: (span.lane, span.start))):
            offset = 0.0 if span.lane == "GEMM" else 0.36
            colour = COLOURS[span.lane][number % 2]
            axes.barh(row + offset, span.end - span.start, left=span.start, height=0.34, color=colour)
            text = {"=": "all", ">": "all"}.get(span.label, span.label)
            middle = 0.5 * (span.start + span.end)
            axes.text(middle, row + offset, text, ha="center", va="center", fontsize=7, color="white")
        axes.text(drawn.total + 0.01, row + 0.18, f"exposed {100 * drawn.exposed / GEMM:.0f} %", va="center", size=8)
    axes.axvline(GEMM, color="black", linewidth=1)
    axes.set_yticks([row + 0.18 for row in range(len(METHODS))], [label for _, label, _ in METHODS])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.85)
    axes.set_xticks([0, GEMM], ["0", "the GEMM alone"])
    axes.set_title(
        f"Ideal, not measured: {RANKS} ranks, moving takes {COPY:g} of the GEMM.\n"
        "Blue computes, orange travels, a number is a piece",
        fontsize=9,
    )
    figure.savefig(path, dpi=110, format="png", metadata={"Software": None})


def reduce_scatter(path: Path) -> None:
    """Bars for each shape that has all four times, relative to the GEMM alone."""
    rows = [row for row in json.loads(PEERS.read_text())["rows"] if all(key in row["time_us"] for key in BARS)]
    figure = Figure(figsize=(9.0, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for index, (key, (label, colour)) in enumerate(BARS.items()):
        ratios = [row["time_us"][key] / row["time_us"]["gemm"] for row in rows]
        axes.bar([place + 0.2 * index for place in range(len(rows))], ratios, width=0.19, label=label, color=colour)
    names = [f"{row['tokens']}\n{row['in_features']}\n{row['out_features']}" for row in rows]
    axes.set_xticks([place + 0.3 for place in range(len(rows))], names, fontsize=7)
    axes.set_ylabel("time / GEMM alone")
    axes.set_ylim(0.8, None)
    axes.set_title(f"GEMM + reduce-scatter, T / K / N, two H200s, TP 2, bf16 ({PEERS.name})", fontsize=9)
    axes.legend(fontsize=7, ncols=2)
    figure.savefig(path, dpi=110, format="png", metadata={"Software": None})


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    methods(IMAGES / "methods.png")
    reduce_scatter(IMAGES / "reduce_scatter.png")
