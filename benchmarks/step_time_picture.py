"""README's picture from the JSON of ``tpoverlap train --compare --json F``: step time against T for three variants.

python -m benchmarks.step_time_picture out/bench.json docs/images/step_time.png
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

STYLES = {
    "overlapped": {"color": "#4477aa", "marker": "o"},
    "not overlapped": {"color": "#ddaa33", "marker": "s"},
    "padded": {"color": "#bb5566", "marker": "^"},
}


@click.command()
@click.argument("source", type=click.Path(exists=True, path_type=Path))
@click.argument("target", type=click.Path(path_type=Path))
def main(source: Path, target: Path) -> None:
    """Draw SOURCE's comparison into the PNG file TARGET, and print the figures for its caption."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    report = json.loads(source.read_text())
    comparison = report.get("comparison")
    if not comparison:
        raise click.ClickException(f"{source} holds no comparison: run `tpoverlap train --compare --json {source}`")
    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for record in comparison:
        style = next((style for key, style in STYLES.items() if record["variant"].startswith(key)), {})
        points = sorted(zip(record["active_tokens"], record["times_ms"], strict=True))
        tokens, times = zip(*points, strict=True)
        axes.plot(tokens, times, linestyle="-", linewidth=1, markersize=4, label=record["variant"], **style)
    summary = report["summary"]
    axes.axvline(summary["capacity_tokens"], color="grey", linestyle=":", linewidth=1)
    axes.set_xlabel(f"active tokens T of the microbatch (capacity C = {summary['capacity_tokens']})")
    axes.set_ylabel("step time (ms, slowest rank)")
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=130, format="png")
    click.echo(_caption(comparison, summary))


def _caption(comparison: list[dict[str, Any]], summary: dict[str, Any]) -> str:
    totals = {record["variant"]: sum(record["times_ms"]) / 1e3 for record in comparison}
    figures = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in totals.items())
    return f"{summary['tp_size']} ranks on {summary['device']}, {summary['dtype']}; all steps together: {figures}"


if __name__ == "__main__":
    main()
