"""The table of few tokens in docs/design/0010, from the JSON of ``benchmarks.small_tokens``.

python -m benchmarks.few_tokens_table            # the tables, to stdout
python -m benchmarks.few_tokens_table --write    # put them between the documents' markers; a test compares
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from benchmarks import markdown

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results/2026-11-30_h200x2_exchange_kernel.json"
BEGIN, END = "<!-- few tokens: made by benchmarks/few_tokens_table.py -->", "<!-- few tokens: end -->"
DOCUMENTS: dict[str, tuple[int, int] | None] = {"docs/design/0010-exchange-kernel.md": None}
"""Each document, and its one K x N; None: all."""
COLUMNS = (("gemm", "GEMM"), ("plain", "NCCL + cuBLAS"), ("kernel", "by kernel"), ("sequential", "by engine"))


def table(results: dict[str, Any], shape: tuple[int, int] | None) -> str:
    """Markdown: a line a shape and T; device and host us of all-gather and reduce-scatter."""
    rows = {(row["direction"], row["T"], row["K"], row["N"]): row["times"] for row in results["rows"]}
    sizes = sorted({key[1:] for key in rows if shape in (None, key[2:])}, key=lambda one: (-one[1], -one[2], one[0]))
    heads = ["T x K x N"]
    for direction in ("AG", "RS"):
        heads += [f"{direction}: {shown}" for _, shown in COLUMNS] + [f"{direction} host: {COLUMNS[1][1]}", "by kernel"]
    lines = []
    for size in sizes:
        line = [" x ".join(map(str, size))]
        for direction in ("gather", "scatter"):
            times = rows[direction, *size]
            ahead = min(("plain", "kernel"), key=lambda label: times[label]["queued_us"])
            for label, _ in COLUMNS:
                text = f"{times[label]['queued_us']:.0f}"
                line.append(f"**{text}**" if label == ahead else text)
            line += [f"{times[label]['host_us']:.0f}" for label in ("plain", "kernel")]
        lines.append(line)
    return markdown.table(heads, lines)


def filled(text: str, wanted: str) -> str:
    """``text`` with ``wanted`` between its markers, which it has to have once each."""
    return markdown.filled(text, BEGIN, END, wanted)


@click.command()
@click.option("--write", is_flag=True, help="put the tables into the documents")
def main(write: bool) -> None:
    """Print the tables, or write them."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    for name, shape in DOCUMENTS.items():
        if write:
            path = ROOT / name
            path.write_text(filled(path.read_text(encoding="utf-8"), table(results, shape)), encoding="utf-8")
        else:
            click.echo(f"{name}\n{table(results, shape)}")


if __name__ == "__main__":
    main()
