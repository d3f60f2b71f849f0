"""``tpoverlap bench``: the options, and the order in which things happen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from tpoverlap.errors import BackendUnavailableError, ConfigError, TpOverlapError
from tpoverlap.tools.numbers import FiniteRange

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from tpoverlap.tools.bench.job import BenchJob, Numbers
    from tpoverlap.tools.bench.report import BenchReport

_SUITES = ("gemm", "dynamic", "host", "layers")
_FILE_WIDTH = 150


def _path_type() -> click.Path:
    import pathlib

    return click.Path(path_type=pathlib.Path)


_POSITIVE = click.IntRange(min=1)


@click.command(short_help="Time every method beside NCCL + cuBLAS, torch async-TP and padding.")
@click.option("--suite", "suites", type=click.Choice(_SUITES), multiple=True, help="One or more.  [default: gemm]")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option("--tp", type=click.IntRange(min=2), help="Ranks.  [default: 2, or torchrun's world size]")
@click.option("--only-direction", "direction", type=click.Choice(["ag", "rs"]), help="Leave the other one out.")
@click.option("--tokens", metavar="T,T,...", help="Token counts instead of the suite's own.")
@click.option("--shape", "shapes", metavar="TxKxN", multiple=True, help="Shapes instead of the suite's own.")
@click.option(
    "--numbers",
    type=click.Choice(["bfloat16", "fp8"]),
    multiple=True,
    help="What suite gemm multiplies; one or both. On CPUs bfloat16 is float32.  [default: bfloat16]",
)
@click.option("--quick", is_flag=True, help="Fewer shapes.")
@click.option("--rounds", type=_POSITIVE, default=5, show_default=True, help="Interleaved rounds; the median counts.")
@click.option(
    "--queued",
    "queued_operations",
    metavar="N",
    type=_POSITIVE,
    default=50,
    show_default=True,
    help="Operations queued behind a delay kernel (GPU only).",
)
@click.option(
    "--minutes", type=FiniteRange(min=0, min_open=True), help="Begin no row after so long; say what is left out."
)
@click.option("--json", "json_path", metavar="F", type=_path_type(), help="Results; rewritten after every row.")
@click.option("--plot", "plot_path", metavar="F", type=_path_type(), help="PNG: time against T, and the limit.")
@click.option(
    "--timeout",
    "timeout_s",
    metavar="S",
    type=FiniteRange(min=1),
    default=60.0,
    show_default=True,
    help="Seconds after which a silent peer counts as dead.",
)
def bench(
    suites: tuple[str, ...],
    device: str,
    tp: int | None,
    direction: str | None,
    tokens: str | None,
    shapes: tuple[str, ...],
    numbers: tuple[Numbers, ...],
    json_path: Path | None,
    plot_path: Path | None,
    **settings: Any,
) -> None:
    """Time every method and everything a user could pick instead, in one run, correctness first.

    Methods take turns round by round; a row is the median over rounds on the slowest rank, eager and queued behind a
    delay kernel. A result that is wrong is an error row and is not timed. docs/benchmarking.md explains the columns.

    Exit code 1: nothing was measured, or one of our methods failed or gave wrong numbers. A missed target is none.

    Spawns its ranks; under torchrun it is one of them.
    """
    import os

    from rich.console import Console

    from tpoverlap.testing import RankFailure
    from tpoverlap.tools.bench.job import (
        DIRECTIONS,
        BenchJob,
        device_of,
        parse_shape,
        parse_tokens,
        ranks_of,
        require_files,
        require_numbers,
        unique,
    )
    from tpoverlap.tools.bench.suites import load_suite
    from tpoverlap.tools.bench.worker import run_under_torchrun, spawn
    from tpoverlap.tools.train.worker import torchrun_rank

    try:
        require_files(json_path, plot_path)
        before = _changed_at(json_path)
        tp_size, ranks_per_host = ranks_of(tp, os.environ)
        device_type, num_gpus = device_of(device)
        require_numbers(numbers, suites or ("gemm",), device_type)
        job = BenchJob(
            suites=unique(suites or ("gemm",)),
            device_type=device_type,
            num_gpus=num_gpus,
            tp_size=tp_size,
            ranks_per_host=ranks_per_host,
            directions=tuple(one for one in DIRECTIONS if direction in (None, one)),
            tokens=parse_tokens(tokens) if tokens is not None else (),
            shapes=tuple(parse_shape(shape) for shape in shapes),
            numbers=unique(numbers or ("bfloat16",)),
            json_path=None if json_path is None else str(json_path),
            **settings,
        )
        for name in job.suites:
            load_suite(name).items(job)
        launched = torchrun_rank(os.environ)
        console = Console(quiet=launched is not None and launched[0] != 0)
        if not console.is_terminal:
            console.width = max(console.width, _FILE_WIDTH)  # into a file or a pipe: no reason to cut anything
        where = _where(job)
        _print_headline(console, where)
        report = spawn(job, where) if launched is None else run_under_torchrun(job, launched[0], where)
    except (ConfigError, BackendUnavailableError) as error:
        raise click.UsageError(str(error)) from error
    except RankFailure as error:
        kept = f"\nthe rows until then are in {json_path}" if _changed_at(json_path) != before else ""
        raise click.ClickException(f"{error}{kept}") from error
    except TpOverlapError as error:
        raise click.ClickException(str(error)) from error
    if launched is None or launched[0] == 0:
        _finish(report, console, json_path, plot_path)
    if report.problems:
        raise SystemExit(1)


def _changed_at(path: Path | None) -> int | None:
    return path.stat().st_mtime_ns if path is not None and path.exists() else None


def _where(job: BenchJob) -> dict[str, Any]:
    from tpoverlap.tools.bench.environment import environment

    return environment() | {
        "device": job.device_type,
        "dtype": str(job.dtype).removeprefix("torch."),
        "numbers": list(job.numbers),
        "tp_size": job.tp_size,
        "ranks_share_gpus": job.shares_gpus,
        "rounds": job.rounds,
        "queued_operations": job.queued_operations,
        "suites": list(job.suites),
    }


def _print_headline(console: Console, where: dict[str, Any]) -> None:
    from tpoverlap.tools.bench.report import headline

    for line in headline(where):
        console.print(line, markup=False, highlight=False)


def _finish(report: BenchReport, console: Console, json_path: Path | None, plot_path: Path | None) -> None:
    """Write the files, then show the tables: a terminal that goes away must not lose the figures."""
    from tpoverlap.tools.bench.report import write_report
    from tpoverlap.tools.bench.suites import load_suite

    if json_path is not None:
        write_report(json_path, report)
    drawn = False
    if plot_path is not None:
        from tpoverlap.tools.bench.plot import draw

        drawn = draw(plot_path, report)
    for name in report.suites:
        suite = load_suite(name)
        rows = report.rows_of(name)
        console.print(suite.table(rows))
        for line in suite.conclusions(rows):
            console.print(line, markup=False, highlight=False)
    for line in report.left_out:
        console.print(f"left out, no time: {line}", markup=False)
    for line in report.problems:
        console.print(f"PROBLEM: {line}", markup=False)
    if json_path is not None:
        console.print(f"wrote {json_path}", markup=False)
    if plot_path is not None:
        text = f"wrote {plot_path}" if drawn else f"no picture: the gemm suite has no rows, so {plot_path} was not made"
        console.print(text, markup=False)
