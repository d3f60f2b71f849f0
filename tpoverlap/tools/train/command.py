"""``tpoverlap train``: the options, and the order in which things happen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from tpoverlap.errors import BackendUnavailableError, ConfigError, TpOverlapError
from tpoverlap.tools.numbers import FiniteRange
from tpoverlap.tools.train.methods import METHOD_CHOICES

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from tpoverlap.tools.train.corpus import Corpus
    from tpoverlap.tools.train.job import LayerStyle, ProgressListener, TrainJob
    from tpoverlap.tools.train.report import Report


def _path_type() -> click.Path:
    import pathlib

    return click.Path(path_type=pathlib.Path)


_POSITIVE = click.IntRange(min=1)


class _LayersType(click.ParamType):  # type: ignore[type-arg]  # generic in newer releases only
    """How many layers, or which kind."""

    name = "layers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        if value in ("te-style", "plain"):
            return str(value)
        number: int = _POSITIVE.convert(value, param, ctx)
        return number


def _layers(given: tuple[int | str, ...]) -> tuple[int, LayerStyle]:
    """(how many, which kind); the last of each counts, as in any option given twice."""
    numbers = [value for value in given if isinstance(value, int)]
    style: LayerStyle = "te-style" if [v for v in given if isinstance(v, str)][-1:] == ["te-style"] else "plain"
    return numbers[-1] if numbers else 4, style


@click.command(short_help="Train a small decoder on real text with another T at every step.")
@click.argument("more_corpus", metavar="", nargs=-1, type=_path_type())
@click.option(
    "--corpus",
    metavar="PATH ...",
    multiple=True,
    type=_path_type(),
    help="Files or directories with text, one or more.  [default: this Python's standard library]",
)
@click.option(
    "--tp", type=_POSITIVE, help="Ranks of the tensor-parallel group.  [default: 2, or torchrun's world size]"
)
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    help="[default: bfloat16 on cuda without --check-reference, else float32]",
)
@click.option(
    "--capacity",
    metavar="C",
    type=click.IntRange(min=2),
    default=2048,
    show_default=True,
    help="Most tokens of a step: what the buffers are registered for.",
)
@click.option("--steps", type=_POSITIVE, default=20, show_default=True)
@click.option("--sequences-per-step", type=_POSITIVE, default=4, show_default=True, help="Most documents of a step.")
@click.option(
    "--method",
    type=click.Choice(METHOD_CHOICES),
    default="auto",
    show_default=True,
    help="Overlap method of every GEMM for which it is legal.",
)
@click.option("--hidden", type=_POSITIVE, default=256, show_default=True)
@click.option(
    "--layers",
    metavar="N|te-style|plain",
    type=_LayersType(),
    multiple=True,
    help="A number: how many. te-style: tpo.nn.TransformerLayer and vocabulary-parallel ends; plain: linear layers and "
    "functions. May be given twice.  [default: 4, plain]",
)
@click.option(
    "--backward-mode",
    type=click.Choice(["auto", "bulk", "rs_dgrad"]),
    default="auto",
    show_default=True,
    help="Where qkv and fc1 scatter their input gradient: beside wgrad (bulk) or in dgrad.  [auto: as --method has it]",
)
@click.option(
    "--pipeline-microbatches",
    metavar="N",
    type=_POSITIVE,
    default=1,
    show_default=True,
    help="Microbatches of different T a step, in 1F1B order: up to four in flight.",
)
@click.option(
    "--fp8",
    type=click.Choice(["current", "delayed", "rowwise"]),
    is_flag=False,
    flag_value="current",
    help="The layers' GEMMs and gathers in FP8 by this recipe; with --layers te-style.  [no value: current]",
)
@click.option("--heads", type=_POSITIVE, default=8, show_default=True)
@click.option("--ffn", type=_POSITIVE, default=768, show_default=True)
@click.option("--learning-rate", type=FiniteRange(min=0, min_open=True), default=1e-3, show_default=True)
@click.option("--seed", type=click.IntRange(min=0), default=1, show_default=True, help="Of weights and document order.")
@click.option(
    "--check-reference", is_flag=True, help="Train the same model without TP too; differences end in exit code 1."
)
@click.option("--compare", is_flag=True, help="Time overlapped, not overlapped and padded to C on the same batches.")
@click.option("--compare-steps", type=_POSITIVE, default=6, show_default=True, help="Batches that --compare times.")
@click.option("--json", "json_path", metavar="F", type=_path_type(), help="Write steps and summary as JSON.")
@click.option("--plot", "plot_path", metavar="F", type=_path_type(), help="Draw T, loss and step time as PNG.")
@click.option(
    "--timeout",
    "timeout_s",
    metavar="S",
    type=FiniteRange(min=1),
    default=120.0,
    show_default=True,
    help="Seconds after which a silent rank counts as hung.",
)
def train(
    more_corpus: tuple[Path, ...],
    corpus: tuple[Path, ...],
    hidden: int,
    layers: tuple[int | str, ...],
    heads: int,
    ffn: int,
    json_path: Path | None,
    plot_path: Path | None,
    **options: Any,
) -> None:
    """Train a small Llama-style decoder with tensor and sequence parallelism on real text, byte by byte.

    A step packs a few whole documents (a top-level def or class, elsewhere a paragraph), so the token count T changes
    at every step; nothing is padded. Every fifth step deals whole documents to the ranks and leaves one without a row.
    Documents that do not fit in C are skipped, never cut.

    Spawns its ranks; under torchrun it is one of them.
    """
    import os

    from rich.console import Console

    from tpoverlap.tools.train.options import TrainOptions, make_job
    from tpoverlap.tools.train.weights import ModelConfig
    from tpoverlap.tools.train.worker import torchrun_rank

    if more_corpus and not corpus:
        raise click.UsageError(f"unexpected argument {more_corpus[0]}; text files are given as --corpus PATH ...")
    try:
        num_layers, style = _layers(layers)
        model = ModelConfig(hidden=hidden, layers=num_layers, heads=heads, ffn=ffn)
        settings = TrainOptions(
            corpus=(*corpus, *more_corpus),
            model=model,
            json=json_path,
            plot=plot_path,
            layer_style=style,
            **options,
        )
        job, text = make_job(settings, os.environ)
        launched = torchrun_rank(os.environ)
        console = Console(quiet=launched is not None and launched[0] != 0)
        report = _run(job, text, launched[0] if launched else None, check=settings.check_reference, console=console)
    except (ConfigError, BackendUnavailableError) as error:
        raise click.UsageError(str(error)) from error
    except TpOverlapError as error:
        raise click.ClickException(str(error)) from error
    if report is None:  # another rank reports
        return
    _finish(report, console, settings.json, settings.plot)
    if report.problems:
        raise SystemExit(1)


def _run(job: TrainJob, corpus: Corpus, rank: int | None, *, check: bool, console: Console) -> Report | None:
    """Train on all ranks, then the reference here; None on every rank of torchrun but the first."""
    from tpoverlap.tools.train.methods import choose
    from tpoverlap.tools.train.report import Report
    from tpoverlap.tools.train.tables import progress_bars
    from tpoverlap.tools.train.verdict import judge
    from tpoverlap.tools.train.worker import run_under_torchrun, spawn

    if note := choose(job.method, job.backward_mode).note:
        console.print(f"--method {note}", markup=False)
    with progress_bars(console) as on_progress:
        outcome = spawn(job, on_progress) if rank is None else run_under_torchrun(job, rank, on_progress)
        if rank:
            return None
        if not check:
            return Report(job, corpus, outcome, None, None)
        reference_losses, reference_gradients = _reference(job, on_progress)
    losses = [record.loss for record in outcome.steps]
    verdict = judge(losses, reference_losses, outcome.first_gradients, reference_gradients, job.numbers)
    return Report(job, corpus, outcome, reference_losses, verdict)


def _reference(job: TrainJob, on_progress: ProgressListener) -> tuple[tuple[float, ...], dict[str, Any]]:
    import torch

    from tpoverlap.tools.train.fp8 import RECIPES, Fp8Linears
    from tpoverlap.tools.train.job import Progress
    from tpoverlap.tools.train.reference import run_reference
    from tpoverlap.tools.train.weights import full_weights

    num_threads = torch.get_num_threads()
    # One thread, like every rank; and more than one is slower, by multiples, as soon as the machine is busy.
    torch.set_num_threads(1)
    try:
        run = run_reference(
            job.model,
            full_weights(job.model, job.seed),
            job.steps,
            device=job.device(0),
            dtype=job.dtype,
            learning_rate=job.learning_rate,
            microbatches=job.microbatches,
            fp8=None if job.fp8 is None else Fp8Linears(RECIPES[job.fp8], job.tp_size),
            on_step=lambda index: on_progress(Progress("reference", index + 1, len(job.step_groups))),
        )
    finally:
        torch.set_num_threads(num_threads)
    return run.losses, run.first_gradients


def _finish(report: Report, console: Console, json_path: Path | None, plot_path: Path | None) -> None:
    """Show the tables and write the files. The JSON comes first: a terminal that goes away must not lose it."""
    from tpoverlap.tools.train.outputs import write_json
    from tpoverlap.tools.train.tables import show

    if json_path is not None:
        write_json(json_path, report.to_dict())
    if plot_path is not None:
        from tpoverlap.tools.train.plot import draw

        job = report.job
        title = f"tpoverlap train: tp {job.tp_size} on {job.device_type}, {job.numbers}, method {job.method}"
        draw(plot_path, report.outcome.steps, report.reference_losses, job.capacity_tokens, title)
    show(console, report)
    for path in (json_path, plot_path):
        if path is not None:
            console.print(f"wrote {path}", markup=False)
