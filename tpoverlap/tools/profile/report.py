"""The report: figures and advice as JSON and as a table."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tpoverlap.tools.profile.advice import Advice
from tpoverlap.tools.profile.figures import Figures

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


_TABLE_WIDTH: Final = 144


@dataclass(frozen=True)
class Report:
    """What was found.

    Attributes:
        title: what was profiled.
        figures, advice: one row a name; at most one advice a name.
        notes: what the reader has to know: what was not attributed, what a figure includes.
        facts: ranks, device, versions, sizes; for the JSON file.
    """

    title: str
    figures: tuple[Figures, ...]
    advice: tuple[Advice, ...]
    notes: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "title": self.title,
            **self.facts,
            "gemms": [row.as_dict() for row in self.figures],
            "advice": [one.as_dict() for one in self.advice],
            "notes": list(self.notes),
        }


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Indented UTF-8."""
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def table(figures: Sequence[Figures], title: str) -> Table:
    """One row a name. Columns that nobody measured are left out."""
    from rich.box import SIMPLE
    from rich.table import Table

    alone = any(row.compute_alone_us is not None for row in figures)
    made = Table(title=title, title_justify="left", box=SIMPLE)
    made.add_column("GEMM", no_wrap=True)
    made.add_column("method", no_wrap=True)
    for column in ("calls", "T", "wall us", "compute", *(("alone",) if alone else ()), "comm"):
        made.add_column(column, justify="right", no_wrap=True)
    for column in (*(("alone",) if alone else ()), "overlapped", "exposed", "%", "waited for, us"):
        made.add_column(column, justify="right", no_wrap=True)
    for row in figures:
        least, most = row.tokens
        cells = [row.name, row.method or "?", str(row.calls), f"{most}" if least == most else f"{least}..{most}"]
        cells += [_us(row.wall_us), _us(row.compute_us), *((_us(row.compute_alone_us),) if alone else ())]
        cells += [_us(row.comm_us), *((_us(row.comm_alone_us),) if alone else ()), _us(row.overlapped_us)]
        late = row.waited_for_rank
        waited = "-" if late is None else f"rank {late} {row.wait_us[late]:.0f}"
        made.add_row(*cells, _us(row.exposed_us), f"{row.exposed_percent:.1f}", waited)
    return made


def advice_lines(advice: Sequence[Advice]) -> Iterator[str]:
    """Each advice in words, and the lines to change below it."""
    if not advice:
        yield "no advice: nothing is exposed that an option of this name would hide"
    for one in advice:
        yield f"{one.name}: {one.text}"
        yield from (f"    {line}" for line in one.lines)


def show(console: Console, report: Report) -> None:
    """Table, advice and notes. A narrow terminal wraps the lines: cut numbers would be worse."""
    if report.figures:
        console.width = max(console.width, _TABLE_WIDTH)
        console.print(table(report.figures, report.title))
    else:
        console.print(f"{report.title}: no named GEMM", markup=False)
    for line in advice_lines(report.advice) if report.figures else ():
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    for note in report.notes:
        console.print(f"note: {note}", markup=False, highlight=False, soft_wrap=True)


def _us(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"
