"""``tpoverlap profile run`` and ``tpoverlap profile read``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from tpoverlap.errors import ConfigError, TpOverlapError
from tpoverlap.tools.missing import AllMissing
from tpoverlap.tools.numbers import FiniteRange

if TYPE_CHECKING:
    from rich.console import Console

    from tpoverlap.tools.profile.experiment import RunJob, TokensReport, Trial

_SIZE = click.IntRange(1, 2**31 - 1)


@click.group(short_help="Where the time of each GEMM goes, and what to change.")
def profile() -> None:
    """Compute alone, communication alone, overlapped and exposed time of every named GEMM, with advice.

    In a training script: ``with tpoverlap.profile("out"): step()`` on every rank.
    """


@profile.command(cls=AllMissing)
@click.option("--hidden", type=_SIZE, required=True, help="H, the model's hidden size.")
@click.option("--ffn", type=_SIZE, required=True, help="F, the MLP's inner width.")
@click.option("--tp", "tp_size", type=click.IntRange(2, 1024), help="R.  [default: 2, or torchrun's world size]")
@click.option("--tokens", metavar="T[,T...]", required=True, help="Tokens of the TP group; one report each.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option("--dtype", type=click.Choice(["bf16", "fp16", "fp32"]), help="[default: bf16 on cuda, fp32 on cpu]")
@click.option("--ub-cfg", "ub_cfg", metavar="FILE", help="Options by GEMM name, YAML.  [default: ours]")
@click.option("--rounds", type=click.IntRange(3, 1000), default=12, show_default=True, help="Steps that are measured.")
@click.option(
    "--try", "try_advice", is_flag=True, help="Measure the advised options too, in turns, and say what it gave."
)
@click.option("--minutes", type=FiniteRange(min=0.0, min_open=True), default=10.0, show_default=True,
              help="For all T together; fewer rounds where they do not fit.")  # fmt: skip
@click.option("-o", "--out", "out_dir", metavar="DIR", required=True, help="For traces, pictures and reports.")
@click.option("--timeout", "timeout_s", type=FiniteRange(min=10.0), default=600.0, show_default=True)
def run(
    hidden: int,
    ffn: int,
    tp_size: int | None,
    tokens: str,
    device: str,
    dtype: str | None,
    ub_cfg: str | None,
    rounds: int,
    try_advice: bool,
    minutes: float,
    out_dir: str,
    timeout_s: float,
) -> None:
    """Profile the GEMMs of one decoder layer, forward and backward, on this machine's ranks.

    Spawns its ranks; under torchrun it is one of them. Each T gets a directory with report.json, timeline.png,
    trace.json (all ranks) and trace-rank*.json (with torch.profiler's events).
    """
    import os

    import torch
    from rich.console import Console

    from tpoverlap.tools.profile.experiment import RunJob
    from tpoverlap.tools.profile.layer import LayerSizes
    from tpoverlap.tools.train.worker import torchrun_rank

    try:
        launched = torchrun_rank(os.environ)
        ranks = _ranks(tp_size, launched)
        device_type = _device(device)
        sizes = LayerSizes(hidden, ffn, ranks)
        sizes.validate()
        job = RunJob(
            sizes=sizes,
            tokens=_tokens(tokens),
            device_type=device_type,
            dtype={"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[
                dtype or ("bf16" if device_type == "cuda" else "fp32")
            ],
            ub_cfgs=_options(ub_cfg, ranks),
            rounds=rounds,
            try_advice=try_advice,
            out_dir=out_dir,
            timeout_s=timeout_s,
            limit_s=60.0 * minutes,
        )
        _require_directory(Path(out_dir))
        reports = _run(job, launched)
    except ConfigError as error:
        raise click.UsageError(str(error)) from error
    except TpOverlapError as error:
        raise click.ClickException(str(error)) from error
    console = Console()
    for one in reports:
        _show(console, one, Path(out_dir), try_advice)
    missing = job.tokens[len(reports) :] if launched is None or launched[0] == 0 else ()
    if missing:
        console.print(
            f"not profiled within --minutes {minutes:g}: T {', '.join(map(str, missing))}",
            markup=False,
            highlight=False,
        )


@profile.command()
@click.argument("traces", metavar="TRACE.json[.gz] ...", nargs=-1, required=True)
@click.option("--ub-cfg", "ub_cfg", metavar="FILE", help="The options it was recorded with: more can be advised.")
@click.option("--tp", "tp_size", type=click.IntRange(2, 1024), help="R.  [default: what the traces show, at least 2]")
@click.option("-o", "--out", "out_dir", metavar="DIR", help="Write report.json and timeline.png there.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.pass_context
def read(
    context: click.Context,
    traces: tuple[str, ...],
    ub_cfg: str | None,
    tp_size: int | None,
    out_dir: str | None,
    as_json: bool,
) -> None:
    """Report on torch.profiler traces, one a rank: ours, Transformer Engine's, or any with ranges named after GEMMs.

    Exit code 2: a file that cannot be read.
    """
    import json

    from rich.console import Console

    from tpoverlap.tools.profile.picture import draw
    from tpoverlap.tools.profile.read import options_of, report_of
    from tpoverlap.tools.profile.report import show, write_json
    from tpoverlap.tools.profile.trace_file import TraceError

    try:
        configs = options_of(ub_cfg, tp_size or 2) if ub_cfg is not None else None
        if out_dir is not None:
            _require_directory(Path(out_dir))
        report, spans = report_of([Path(trace) for trace in traces], tp_size, configs)
    except TraceError as error:
        click.echo(f"Error: {error}", err=True)
        context.exit(2)
    except ConfigError as error:
        raise click.UsageError(str(error)) from error
    if out_dir is not None:
        write_json(Path(out_dir) / "report.json", report.as_dict())
        draw(Path(out_dir) / "timeline.png", spans, report.title)
    if as_json:
        click.echo(json.dumps(report.as_dict(), indent=2))
    else:
        show(Console(), report)


def _tokens(text: str) -> tuple[int, ...]:
    try:
        tokens = tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(
            f"--tokens {text!r} must be whole numbers with commas between them, such as 512,4096"
        ) from error
    if min(tokens) < 1:
        raise ConfigError(f"--tokens {text!r}: every T must be at least 1")
    return tuple(dict.fromkeys(tokens))


def _ranks(tp_size: int | None, launched: tuple[int, int] | None) -> int:
    ranks = launched[1] if launched is not None else tp_size or 2
    if tp_size is not None and tp_size != ranks:
        raise ConfigError(f"--tp {tp_size}, but torchrun started WORLD_SIZE={ranks} ranks: make them equal")
    if ranks < 2:
        raise ConfigError("one rank communicates nothing; start at least 2")
    return ranks


def _device(wanted: str) -> str:
    import torch

    available = torch.cuda.is_available() and torch.cuda.device_count() > 0
    if wanted == "cuda" and not available:
        raise ConfigError("--device cuda, but torch sees no usable GPU here; use --device cpu or auto")
    return "cuda" if available and wanted != "cpu" else "cpu"


def _options(path: str | None, tp_size: int) -> dict[str, object]:
    from tpoverlap.config import resolve

    return resolve(path, tp_size).to_dict()


def _require_directory(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / ".tpoverlap"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"cannot write to {path}: {error.strerror or error}; give another directory") from error


def _run(job: RunJob, launched: tuple[int, int] | None) -> list[TokensReport]:
    from tpoverlap.tools.profile.experiment import profile_rank

    if launched is not None:
        return _under_torchrun(job, launched)
    from tpoverlap.testing import RankFailure, run_ranks

    try:
        results: list[list[TokensReport]] = run_ranks(
            profile_rank, job.sizes.tp_size, job, device=job.device_type, timeout_s=job.timeout_s * len(job.tokens)
        )
    except RankFailure as error:
        raise TpOverlapError(str(error)) from error
    return results[0]


def _under_torchrun(job: RunJob, launched: tuple[int, int]) -> list[TokensReport]:
    import os
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from tpoverlap.tools.profile.experiment import profile_rank

    backend = "gloo"
    if job.device_type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", launched[0])) % torch.cuda.device_count())
        backend = "cpu:gloo,cuda:nccl"
    else:
        torch.set_num_threads(1)
    dist.init_process_group(backend, timeout=timedelta(seconds=job.timeout_s))
    try:
        return profile_rank(*launched, job)
    finally:
        dist.destroy_process_group()


def _show(console: Console, one: TokensReport, out_dir: Path, try_advice: bool) -> None:
    from tpoverlap.tools.profile.report import show

    show(console, one.report)
    if one.trial is not None:
        for line in _trial_lines(one.trial):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    elif try_advice:
        console.print("nothing tried: no advice changes an option", markup=False, highlight=False, soft_wrap=True)
    console.print(f"wrote {out_dir / f'T{one.num_tokens}'}\n", markup=False, highlight=False, soft_wrap=True)


def _trial_lines(trial: Trial) -> list[str]:
    lines = [
        f"tried: {trial.verdict}. Step {trial.before_us:.0f} us before, {trial.after_us:.0f} after "
        f"({100 * (trial.after_us / trial.before_us - 1):+.1f} %), faster in {trial.wins} of {trial.rounds} rounds"
    ]
    changed = {line.partition(":")[0] for line in trial.lines}
    lines += [
        f"    {name}: {before:.0f} us -> {after:.0f} us"
        for name, (before, after) in trial.names.items()
        if name in changed
    ]
    return lines
