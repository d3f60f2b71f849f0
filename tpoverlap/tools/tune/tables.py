"""What the terminal shows: a progress bar while it measures, one table at the end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tpoverlap.tools.tune.decide import row_of, verdict_of
from tpoverlap.tools.tune.output import by_name, unmeasured_names
from tpoverlap.tools.tune.session import Listener, Outcome

_WIDTH = 112  # a pipe is 80 columns wide and would hide the verdicts


@contextmanager
def progress_bar(console: Console) -> Iterator[Listener]:
    """One bar over all buckets, with what is being measured beside it."""
    columns = (
        TextColumn("tuning"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console) as bars:
        task = bars.add_task("", total=None)

        def listen(done: int, total: int, what: str) -> None:
            bars.update(task, completed=done, total=total, description=what)

        yield listen


def show(console: Console, outcome: Outcome) -> None:
    """Per GEMM and bucket: the choice, its time and the others'."""
    table = Table(
        title="us at the largest T of a bucket, slowest rank: choice, sequential, best overlap, default",
        title_justify="left",
        pad_edge=False,
    )
    for heading in ("GEMM", "T", "choice", "us", "seq.", "overlap", "default", "verdict"):
        justify = "left" if heading in ("GEMM", "choice", "verdict") else "right"
        table.add_column(heading, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for name, buckets in by_name(outcome).items():
        table.add_section()
        for number, bucket in enumerate(buckets):
            result = outcome.result(bucket)
            row = row_of(bucket, result)
            default = None if result is None else result.times[bucket.default][-1]
            figures = [row.time_us, row.sequential_us, row.overlap_us, default]
            cells = ["-" if value is None else f"{value:.1f}" for value in figures]
            verdict = verdict_of(bucket, result)
            span = f"{bucket.low + 1}..{bucket.high}"
            table.add_row(name if number == 0 else "", span, str(row.candidate), *cells, verdict)
    console.width = max(console.width, _WIDTH)
    console.print(table)
    if missing := unmeasured_names(outcome):
        console.print(f"nothing was measured of {', '.join(missing)}: these names keep their defaults")
