"""README's table of measured times, from the JSON of ``tpoverlap bench --suite gemm --json F``.

python -m benchmarks.readme_table benchmarks/results/F.json            # the table, to stdout
python -m benchmarks.readme_table benchmarks/results/F.json --check    # exit 1 if README.md holds another one
python -m benchmarks.readme_table benchmarks/results/F.json --write    # put it between README.md's markers
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from benchmarks import markdown

BEGIN = "<!-- bench table: made by benchmarks/readme_table.py -->"
END = "<!-- bench table: end -->"
COLUMNS = (("plain sequential", "NCCL + cuBLAS"), ("torch async-TP", "torch async-TP"), ("auto", "tpoverlap"))
TITLES = {"ag": "AG + GEMM", "rs": "GEMM + RS"}
Row = dict[str, Any]


def table(results: Row) -> str:
    """Markdown: one line a shape; microseconds, and what part of the physical limit tpoverlap reaches."""
    rows = [row for row in results["rows"] if row["suite"] == "gemm"]
    if not rows:
        raise click.ClickException("these results hold no row of the gemm suite")
    plain = "NCCL + cuBLAS" if results["environment"]["device"] == "cuda" else "Gloo + mm"
    heads = ["T x K x N", "GEMM alone"]
    for title in TITLES.values():
        heads += [f"{title}: {plain if label == 'plain sequential' else name}" for label, name in COLUMNS]
        heads.append("of limit")
    lines = []
    for shape in dict.fromkeys((row["num_tokens"], row["in_features"], row["out_features"]) for row in rows):
        by_direction = {
            row["direction"]: row
            for row in rows
            if (row["num_tokens"], row["in_features"], row["out_features"]) == shape
        }
        lines.append([" x ".join(map(str, shape)), _gemm(by_direction), *_cells(by_direction)])
    return markdown.table(heads, lines)


def _gemm(by_direction: dict[str, Row]) -> str:
    return _time(next(iter(by_direction.values()))["alone"]["gemm alone"])


def _cells(by_direction: dict[str, Row]) -> list[str]:
    cells: list[str] = []
    for direction in TITLES:
        methods = by_direction[direction]["methods"] if direction in by_direction else {}
        best = min((_number(methods[label]) for label, _ in COLUMNS if label in methods), default=None)
        for label, _ in COLUMNS:
            text = _time(methods.get(label))
            cells.append(f"**{text}**" if label in methods and _number(methods[label]) == best else text)
        limit = methods["auto"]["of_limit"] if "auto" in methods else {}
        value = limit.get("queued", limit.get("eager"))
        cells.append("-" if value is None else f"{value:.3f}")
    return cells


def _number(one: Row) -> float:
    """Queued where there is such a mode: the device alone."""
    return float(one["eager_us"] if one["queued_us"] is None else one["queued_us"])


def _time(one: Row | None) -> str:
    return "-" if one is None else f"{_number(one):.0f}"


def problem_in(readme: str, wanted: str) -> str | None:
    """Why README does not hold the table between its markers; None when it does."""
    if readme.count(BEGIN) != 1 or readme.count(END) != 1:
        return f"it needs {BEGIN} and {END}, each once, around the table"
    held = readme.partition(BEGIN)[2].partition(END)[0].strip()
    return None if held == wanted.strip() else "the table between its markers is another one: use --write"


@click.command()
@click.argument("results", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--check", is_flag=True, help="compare with the README instead of printing")
@click.option("--write", is_flag=True, help="put the table into the README")
@click.option("--readme", type=click.Path(exists=True, path_type=Path), default=Path("README.md"))
def main(results: Path, check: bool, write: bool, readme: Path) -> None:
    """Print README's table from RESULTS, write it there, or check that README holds it."""
    wanted = table(json.loads(results.read_text()))
    if not (check or write):
        click.echo(wanted)
        return
    text = readme.read_text()
    problem = problem_in(text, wanted)
    if write and text.count(BEGIN) == text.count(END) == 1:
        readme.write_text(markdown.filled(text, BEGIN, END, wanted))
        return
    if problem is not None:
        click.echo(f"{readme}: {problem}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
