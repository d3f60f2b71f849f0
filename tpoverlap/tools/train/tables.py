"""What the terminal shows: a progress bar while it runs, tables at the end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as ProgressBar
from rich.table import Table

from tpoverlap.tools.train.job import Progress, ProgressListener
from tpoverlap.tools.train.methods import VARIANTS
from tpoverlap.tools.train.report import Report, variants_loss_difference

_PHASES = {"train": "training", "compare": "comparing", "reference": "reference without TP"}


@contextmanager
def progress_bars(console: Console) -> Iterator[ProgressListener]:
    """One bar a phase, made when its first step is reported."""
    columns = (TextColumn("{task.description:<20}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with ProgressBar(*columns, console=console) as bars:
        tasks = {"train": bars.add_task(_PHASES["train"], total=None)}

        def listen(progress: Progress) -> None:
            if progress.phase not in tasks:
                tasks[progress.phase] = bars.add_task(_PHASES[progress.phase], total=progress.total)
            bars.update(tasks[progress.phase], completed=progress.done, total=progress.total)

        yield listen


def show(console: Console, report: Report) -> None:
    """Every step, then the summary, then what was compared."""
    console.print(_steps_table(report))
    console.print(_summary_table(report))
    if report.outcome.comparison:
        console.print(_comparison_table(report))
    for problem in report.problems:
        console.print(f"[bold red]FAILED[/] {problem}")


def _steps_table(report: Report) -> Table:
    # Narrow enough for 80 columns: a number that is cut off says nothing.
    table = _table("Steps")
    job = report.job
    times = "" if job.microbatches == 1 else f" a microbatch, of which T/C is the mean of {job.microbatches}"
    references = report.reference_losses
    against = "; off by: loss against the reference" if references else ""
    table.caption = f"C = {job.capacity_tokens}{times}; ms: the slowest rank{against}"
    off_by = ("off by",) if references else ()
    for heading in ("step", "T", "T/C", "docs", "rows a rank", "loss", *off_by, "ms", "tokens/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for index, record in enumerate(report.outcome.steps):
        table.add_row(
            str(record.step),
            str(record.active_tokens),
            f"{record.active_tokens / (job.capacity_tokens * job.microbatches):.2f}",
            str(record.num_sequences),
            _rows(record.rows_per_rank),
            f"{record.loss:.4f}",
            *([f"{abs(record.loss - references[index]):.1e}"] if references else []),
            _milliseconds(record.time_ms),
            f"{record.active_tokens / record.time_ms * 1e3:.0f}",
        )
    return table


def _table(title: str) -> Table:
    return Table(title=title, header_style="bold", box=SIMPLE_HEAD, pad_edge=False)


def _rows(counts: tuple[int, ...]) -> str:
    """Both counts of two ranks, fewest and most of more."""
    return "+".join(map(str, counts)) if len(counts) <= 2 else f"{min(counts)} to {max(counts)}"


def _milliseconds(time_ms: float) -> str:
    return f"{time_ms:.0f}" if time_ms >= 100 else f"{time_ms:.2f}"


def _summary_table(report: Report) -> Table:
    job, outcome, facts = report.job, report.outcome, report.corpus_facts()
    tokens = [record.active_tokens for record in outcome.steps]
    table = Table(title="Summary", show_header=False, box=None)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    fp8 = "" if job.fp8 is None else f", layers in FP8 ({job.fp8} scaling)"
    table.add_row(
        "ranks", f"{job.tp_size} on {job.device_type}, {job.dtype_name}{fp8}; buffers: {outcome.memory_backend}"
    )
    table.add_row(
        "corpus",
        f"{facts['documents']} documents in {facts['files']} files of {facts['source']}; "
        f"{facts['documents_skipped']} not within 2 to {job.capacity_tokens} bytes and skipped, never cut"
        + ("; reading stopped at the size cap" if facts["truncated"] else "")
        + (f"; {facts['binary_files_left_out']} binary files left out" if facts["binary_files_left_out"] else ""),
    )
    table.add_row(
        "T",
        f"{min(tokens)} to {max(tokens)} of "
        + (f"{job.microbatches} times " if job.microbatches > 1 else "")
        + f"C = {job.capacity_tokens}, mean {sum(tokens) / len(tokens):.0f}",
    )
    table.add_row("loss", f"{outcome.steps[0].loss:.4f} at step 1, {outcome.steps[-1].loss:.4f} at step {len(tokens)}")
    over = "over all steps but the first" if len(outcome.steps) > 1 else "in the only step, which also warms up"
    table.add_row("throughput", f"{report.tokens_per_s:.0f} tokens/s {over}")
    table.add_row(
        "padding", f"{report.padded_tokens} rows; symmetric allocations after set-up: {outcome.allocations_after_setup}"
    )
    if job.microbatches > 1:
        table.add_row("microbatches", f"{job.microbatches} a step, in 1F1B order; T above is their sum")
    table.add_row("layers", job.layer_style)
    table.add_row("methods", ", ".join(f"{name} {method}" for name, method in outcome.methods.items()))
    if report.verdict is not None:
        worst = max(report.verdict.gradient_differences.items(), key=lambda item: item[1])
        table.add_row(
            "reference", f"largest loss difference {report.verdict.max_abs_loss_difference:.1e} over all steps"
        )
        table.add_row(
            "gradients",
            f"{len(report.verdict.gradient_differences)} of step 1; worst {worst[0]}: {worst[1]:.1e} of its maximum",
        )
    return table


def _comparison_table(report: Report) -> Table:
    comparison = report.outcome.comparison
    sequential = next(r.times_ms for v, r in zip(VARIANTS, comparison, strict=True) if v.method == "sequential")
    table = _table(f"Comparison: the same {len(comparison[0].times_ms)} batches, taking turns")
    table.caption = (
        "ratio: time over that of not overlapped, median of the batches\n"
        f"losses of the three differ by at most {variants_loss_difference(comparison):.1e}"
    )
    for heading in ("variant", "rows", "of these padding", "median ms", "ratio", "tokens/s"):
        table.add_column(heading, justify="left" if heading == "variant" else "right", no_wrap=True)
    for record in comparison:
        rows, active = sum(record.communicated_rows), sum(record.active_tokens)
        ratio = median(a / b for a, b in zip(record.times_ms, sequential, strict=True))  # batch by batch: T differs
        table.add_row(
            record.variant,
            str(rows),
            str(rows - active),
            _milliseconds(median(record.times_ms)),
            f"{ratio:.2f}",
            f"{active / sum(record.times_ms) * 1e3:.0f}",
        )
    return table
