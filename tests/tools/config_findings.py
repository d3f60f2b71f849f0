"""Findings about the published files as rows of a table. ``python -m tests.tools.config_findings`` writes them anew.

Column ``judged``: what a person who read the file holds of an error or a warning, "true" or "false" (a false positive).
Notes only inform and are not judged. Rewriting keeps earlier judgements and leaves new ones open ("").
"""

from __future__ import annotations

import csv
import os
import re
from pathlib import Path

from tpoverlap.config import check_file

DATA = Path(__file__).parents[1] / "data"
FOLDER = DATA / "ub_configs"
TABLE = DATA / "ub_config_findings.csv"
COLUMNS = ("file", "line", "gemm", "key", "level", "for", "rule", "judged")


def files() -> list[Path]:
    return sorted(FOLDER.glob("*.yaml"))


def variables() -> set[str]:
    """Environment variables that the files read; a test that compares findings must unset them."""
    return {name for path in files() for name in re.findall(r"oc\.env:(\w+)", path.read_text())}


def current() -> list[tuple[str, ...]]:
    """Rows without judgement, as this version finds them."""
    return sorted(
        (path.name, f"{note.line}", note.name, note.key, note.level, note.target, note.rule)
        for path in files()
        for note in check_file(path).notes
    )


def committed() -> dict[tuple[str, ...], str]:
    """Row -> judgement."""
    if not TABLE.exists():
        return {}
    with TABLE.open(newline="") as table:
        return {tuple(row[column] for column in COLUMNS[:-1]): row["judged"] for row in csv.DictReader(table)}


def main() -> None:
    for name in variables():
        os.environ.pop(name, None)
    known = committed()
    with TABLE.open("w", newline="") as table:
        writer = csv.writer(table, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows([*row, known.get(row, "")] for row in current())


if __name__ == "__main__":
    main()
