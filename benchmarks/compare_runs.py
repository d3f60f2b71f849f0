"""Do two runs of ``tpoverlap bench --suite gemm`` agree? Ratios within a run are compared, never microseconds.

python -m benchmarks.compare_runs benchmarks/results/A.json benchmarks/results/B.json --tolerance 0.03
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

Row = dict[str, Any]


def differences(one: Row, other: Row) -> list[tuple[float, str]]:
    """(relative difference, row and method) of ``of_sequential`` in queued (else eager) mode, largest first."""
    others = {row["label"]: row for row in other["rows"] if row["suite"] == "gemm"}
    found: list[tuple[float, str]] = []
    for row in one["rows"]:
        if row["suite"] != "gemm" or row["label"] not in others:
            continue
        theirs = others[row["label"]]["methods"]
        for label, method in row["methods"].items():
            for mode in ("queued", "eager"):
                mine = method["of_sequential"].get(mode)
                their = theirs.get(label, {}).get("of_sequential", {}).get(mode)
                if mine is not None and their is not None:
                    found.append((abs(mine / their - 1.0), f"{row['label']}, {label}, {mode}: {mine:.3f} {their:.3f}"))
                    break
    return sorted(found, reverse=True)


@click.command()
@click.argument("one", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("other", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--tolerance", type=click.FloatRange(min=0), default=0.03, show_default=True)
@click.option("--method", default="auto", show_default=True, help="whose rows decide; all are listed")
def main(one: Path, other: Path, tolerance: float, method: str) -> None:
    """List what differs by more than the tolerance; exit 1 when a row of METHOD does, or none was compared."""
    found = differences(json.loads(one.read_text()), json.loads(other.read_text()))
    too_far = [text for difference, text in found if difference > tolerance]
    for text in too_far:
        click.echo(text)
    mine = [text for _, text in found if f", {method}, " in text]
    decisive = [text for text in too_far if f", {method}, " in text]
    click.echo(f"{method}: {len(mine) - len(decisive)} of {len(mine)} rows agree within {tolerance:.0%}")
    if decisive or not mine:
        sys.exit(1)


if __name__ == "__main__":
    main()
