"""The report: rows of what was probed, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA_VERSION = 1


class Status(StrEnum):
    """What became of a probe."""

    OK = "ok"
    FAILED = "failed"
    TIMEOUT = "timeout"  # it was killed at its deadline: something hangs
    SKIPPED = "skipped"  # it does not apply here, e.g. no GPU
    UNKNOWN = "unknown"  # nothing that could tell is installed


@dataclass(frozen=True)
class Row:
    """One probe: what it found, how it was found out and, where it is not ok, what to do about it."""

    section: str
    name: str
    status: Status
    detail: str
    how: str
    remedy: str = ""
    data: dict[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether the probe passed."""
        return self.status is Status.OK


@dataclass(frozen=True)
class Report:
    """All rows, in printing order, and how long they took."""

    rows: tuple[Row, ...]
    elapsed_s: float

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def section(self, name: str) -> dict[str, Row]:
        """Rows of one section by name."""
        return {row.name: row for row in self.rows if row.section == name}

    @property
    def works(self) -> bool:
        """Whether any method works on any backend here; the exit code of the command says the same."""
        return any(row.ok for row in self.section("methods").values())

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: ``schema, works, elapsed_s, backends {name: status}, methods {name: status}, rows [..]``."""
        return {
            "schema": SCHEMA_VERSION,
            "works": self.works,
            "elapsed_s": round(self.elapsed_s, 3),
            "backends": {name: str(row.status) for name, row in self.section("backends").items()},
            "methods": {name: str(row.status) for name, row in self.section("methods").items()},
            "rows": [asdict(row) for row in self.rows],
        }


def render(report: Report, console: Console) -> None:
    """Print the table, then one line a remedy, then the verdict."""
    from rich.markup import escape
    from rich.table import Table

    styles = {Status.OK: "green", Status.SKIPPED: "dim", Status.UNKNOWN: "yellow"}
    table = Table(title="tpoverlap doctor", title_justify="left", pad_edge=False)
    for heading, ratio in (("probe", None), ("status", None), ("what was found", 3), ("how it was found out", 2)):
        table.add_column(heading, ratio=ratio, overflow="fold", no_wrap=ratio is None)
    previous = None
    for row in report:
        if row.section != previous:
            table.add_section()
            table.add_row(f"[bold]{escape(row.section)}[/bold]", "", "", "")
            previous = row.section
        style = styles.get(row.status, "bold red")
        table.add_row(f"  {escape(row.name)}", f"[{style}]{row.status}[/{style}]", escape(row.detail), escape(row.how))
    console.print(table)
    for row in report:
        if row.remedy and row.status is not Status.SKIPPED:
            console.print(f"[bold]{escape(row.name)}:[/bold] {escape(row.remedy)}", highlight=False)
    verdict = "nothing works here"
    if report.works:
        methods = [name for name, row in report.section("methods").items() if row.ok]
        backends = [name for name, row in report.section("backends").items() if row.ok]
        verdict = f"works here: {', '.join(methods)}; backends without a fault: {', '.join(backends) or 'none'}"
    console.print(f"{verdict} ({report.elapsed_s:.1f} s)", style="bold green" if report.works else "bold red")
