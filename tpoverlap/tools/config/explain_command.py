"""``tpoverlap config explain``."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tpoverlap.errors import ConfigError
from tpoverlap.tools.config.text import printable
from tpoverlap.tools.missing import AllMissing

if TYPE_CHECKING:
    from tpoverlap.config import FileReport, ResolvedConfig

_SIZE = click.IntRange(1, 2**31 - 1)


@click.command(cls=AllMissing)
@click.argument("source", metavar="FILE|PRESET|default")
@click.option("--hidden", type=_SIZE, required=True, help="H, the model's hidden size.")
@click.option("--ffn", type=_SIZE, required=True, help="F, the MLP's inner width.")
@click.option("--tp", "tp_size", type=click.IntRange(1, 65536), required=True, help="R, ranks in the TP group.")
@click.option("--tokens", type=_SIZE, required=True, help="T, tokens of the TP group in one microbatch.")
@click.option("--dtype", type=click.Choice(["bf16", "fp16", "fp32", "fp8"]), default="bf16", show_default=True)
@click.option("--gated", is_flag=True, help="fc1 computes a gate as well (SwiGLU): twice the columns.")
@click.option("--qkv-width", type=_SIZE, help="Q, K and V together; default 3 H.")
@click.option("--gemm", "only", multiple=True, metavar="NAME", help="Explain this name only; may be repeated.")
@click.option("--tflops", type=float, help="Assumed GEMM rate of one GPU, TFLOP/s.")
@click.option("--link-gb-s", type=float, help="Assumed rate at which a rank sends, 1e9 bytes/s.")
@click.option("--rates", "rates_path", metavar="JSON", help="Measured rates: gemm_tflops, link_gb_s, source.")
@click.option("--plot", "plot_path", metavar="PNG", help="Draw all timelines.")
@click.pass_context
def explain(
    context: click.Context,
    source: str,
    hidden: int,
    ffn: int,
    tp_size: int,
    tokens: int,
    dtype: str,
    gated: bool,
    qkv_width: int | None,
    only: tuple[str, ...],
    tflops: float | None,
    link_gb_s: float | None,
    rates_path: str | None,
    plot_path: str | None,
) -> None:
    """Say for each GEMM what moves, how much, behind what, and what every line of the file does.

    Without rates it says in words what is left exposed, with them how long. Exit code 1: a wrong file or argument; 2: a
    file that cannot be read.
    """
    from rich.console import Console

    from tpoverlap.tools.config.explain import explained, paragraph
    from tpoverlap.tools.config.picture import plot
    from tpoverlap.tools.config.rates import rates_from
    from tpoverlap.tools.config.sizes import Layer

    layer = Layer(hidden, ffn, tp_size, tokens, dtype, gated, qkv_width)
    console = Console(soft_wrap=True, highlight=False, markup=False)
    try:
        rates = rates_from(tflops, link_gb_s, rates_path)
        report, config = _load(context, source, tp_size, dtype)
    except ConfigError as error:
        raise click.ClickException(printable(str(error))) from error
    every = explained(config, layer, rates)
    unknown = sorted(set(only) - {one.name for one in every})
    if unknown:
        raise click.ClickException(f"no GEMM {', '.join(unknown)} communicates; names: {', '.join(config.names)}")
    chosen = [one for one in every if not only or one.name in only]
    title = f"{source}: H {hidden}, F {ffn}, TP {tp_size}, T {tokens}, {dtype}"
    console.print(printable(title), style="bold")
    for one in chosen:
        console.print()
        for number, line in enumerate(paragraph(one, layer, rates, _lines(report))):
            console.print(printable(line), style="bold cyan" if number == 0 else None)
    for note in report.notes if report is not None else ():
        if note.level == "error":
            console.print()
            console.print(printable(f"refused ({note.target}): {note}"), style="bold red")
    if plot_path is not None:
        try:
            plot([(one.name, one.drawn) for one in chosen], Path(plot_path), title, None if rates is None else "us")
        except OSError as error:
            raise click.ClickException(f"--plot {plot_path}: {error.strerror or error}") from error


def _load(context: click.Context, source: str, tp_size: int, dtype: str) -> tuple[FileReport | None, ResolvedConfig]:
    """Findings and options of a file, a preset or the defaults, with features that only later releases run."""
    from tpoverlap.config import SUPPORTED, check_file, resolve
    from tpoverlap.tools.config.presets import find_preset

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if source == "default":
            return None, resolve(None, tp_size)
        path = find_preset(source) or source
        report = check_file(path, tp_size, "fp8" if dtype == "fp8" else None)
        if not report.readable:
            hint = "" if os.path.exists(path) else "; nor is it a preset: tpoverlap config presets lists them"
            click.echo(printable(f"Error: {report.notes[-1]}{hint}"), err=True)
            context.exit(2)
        later = SUPPORTED | {"fused", "atomic_gemm", "sm_copy", "fp8"}
        return report, resolve(path, tp_size, supported=later, fp8=dtype == "fp8")


def _lines(report: FileReport | None) -> Callable[[str, str], int]:
    raw = None if report is None else report.raw
    return (lambda name, key: 0) if raw is None else raw.line_of
