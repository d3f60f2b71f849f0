"""The layers suite's tables in docs/layers.md and README.md, from the JSON of ``bench --suite layers --json F``.

python -m benchmarks.layers_table benchmarks/results/F.json            # the tables, to stdout
python -m benchmarks.layers_table benchmarks/results/F.json --check    # exit 1 if a document holds another one
python -m benchmarks.layers_table benchmarks/results/F.json --write    # put them between the documents' markers
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks import markdown

ROOT = Path(__file__).parents[1]
END = "<!-- layers table: end -->"
HEADLINES = (
    ("transformer", 4096, "bfloat16", 8192),
    ("transformer", 4096, "bfloat16", 4096),
    ("transformer", 4096, "fp8", 8192),
    ("transformer", 8192, "bfloat16", 8192),
)
"""README's rows: kind, hidden size, numbers, T."""
Row = dict[str, Any]


def begin(which: str) -> str:
    """The comment that opens the place of ``which`` table, "full" or "headlines"."""
    return f"<!-- layers table {which}: made by benchmarks/layers_table.py -->"


def full(results: Row) -> str:
    """Markdown: a line a layer and T; device, eager and host milliseconds, ratios, what of the targets was met."""
    rows = measured(results)
    heads = ["layer, numbers", "T", "auto", "no overlap", "padded to C", "compute only", "of compute", "of no overlap"]
    heads += ["auto, eager", "no overlap, eager", "compute only, eager", "host: auto", "no overlap", "compute only"]
    return markdown.table([*heads, "targets met"], [_full(row) for row in rows])


def headlines(results: Row) -> str:
    """Markdown: four lines for the README, device time."""
    by_key = {(row["kind"], row["hidden"], row["numbers"], row["num_tokens"]): row for row in measured(results)}
    heads = ["layer, forward + backward, ms", "T", "compute only", "auto", "no overlap", "padded to C"]
    heads += ["auto of compute only", "the same, eager"]
    return markdown.table(heads, [_headline(by_key[key]) for key in HEADLINES if key in by_key])


TABLES: dict[str, tuple[Callable[[Row], str], str]] = {
    "full": (full, "docs/layers.md"),
    "headlines": (headlines, "README.md"),
}
"""Of each table: its maker, and the document that holds it."""


def measured(results: Row) -> list[Row]:
    """The suite's rows that have times of all that the tables compare."""
    needed = ("auto", "no overlap", "compute only")
    rows = [row for row in results["rows"] if row["suite"] == "layers" and all(one in row["methods"] for one in needed)]
    if not rows:
        raise click.ClickException("these results hold no row of the layers suite")
    return rows


def _full(row: Row) -> list[str]:
    auto, twin, alone = (row["methods"][label] for label in ("auto", "no overlap", "compute only"))
    padded = row["methods"].get("padded to capacity")
    return [
        _name(row),
        str(row["num_tokens"]),
        *(_ms(one, "queued_us") for one in (auto, twin, padded, alone)),
        _ratio(auto["of_compute_only"]),
        _ratio(auto["of_twin"]),
        *(_ms(one, "eager_us") for one in (auto, twin, alone)),
        *(_ms(one, "host_us") for one in (auto, twin, alone)),
        _targets(row["targets"]),
    ]


def _headline(row: Row) -> list[str]:
    times = [row["methods"].get(one) for one in ("compute only", "auto", "no overlap", "padded to capacity")]
    of_compute = row["methods"]["auto"]["of_compute_only"]
    return [
        _name(row),
        str(row["num_tokens"]),
        *(_ms(one, "queued_us") for one in times),
        _ratio(of_compute),
        f"{of_compute['eager']:.2f}",
    ]


def _name(row: Row) -> str:
    numbers = {"bfloat16": "bf16", "fp8": "FP8"}.get(row["numbers"], row["numbers"])
    return f"{row['kind']} {row['hidden']}, {row['ffn']}, {numbers}"


def _ms(one: Row | None, key: str) -> str:
    """Queued time where there is one; without a queue (CPU) the eager time stands for it."""
    if one is None:
        return "-"
    value = one[key] if one[key] is not None else one["eager_us"]
    return f"{value / 1000.0:.2f}"


def _ratio(ratios: Row) -> str:
    value = ratios.get("queued", ratios["eager"])
    return f"{ratios['eager'] if value is None else value:.2f}"


def _targets(targets: Sequence[Row]) -> str:
    if not targets:
        return "none set"
    missed = [f"{one['rule']} {one['mode']}" for one in targets if not one["passed"]]
    met = f"{len(targets) - len(missed)} of {len(targets)}"
    return f"{met}; missed: {', '.join(missed)}" if missed else met


def filled(text: str, which: str, wanted: str) -> str:
    """``text`` with ``wanted`` between the markers of ``which`` table, which it has to have once each."""
    return markdown.filled(text, begin(which), END, wanted)


@click.command()
@click.argument("results", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--check", is_flag=True, help="compare with the documents instead of printing")
@click.option("--write", is_flag=True, help="put the tables into the documents")
@click.option("--root", type=click.Path(exists=True, path_type=Path), default=ROOT, help="where the documents are")
def main(results: Path, check: bool, write: bool, root: Path) -> None:
    """Print the tables of RESULTS, check that the documents hold them, or write them there."""
    data = json.loads(results.read_text(encoding="utf-8"))
    for which, (make, name) in TABLES.items():
        wanted, path = make(data), root / name
        if not (check or write):
            click.echo(f"{wanted}\n")
            continue
        text = path.read_text(encoding="utf-8")
        new = filled(text, which, wanted)
        if write:
            path.write_text(new, encoding="utf-8")
        elif new != text:
            click.echo(f"{path}: the table between its markers is another one: use --write", err=True)
            sys.exit(1)


if __name__ == "__main__":
    main()
