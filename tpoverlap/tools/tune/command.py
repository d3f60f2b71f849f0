"""``tpoverlap tune``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tpoverlap.errors import BackendUnavailableError, ConfigError, TpOverlapError
from tpoverlap.tools.missing import AllMissing
from tpoverlap.tools.numbers import FiniteRange

if TYPE_CHECKING:
    from rich.console import Console

    from tpoverlap.testing import RankPool
    from tpoverlap.tools.tune.job import Ask, TuneJob
    from tpoverlap.tools.tune.session import Outcome
    from tpoverlap.tools.tune.state import State
    from tpoverlap.tuning import DeviceModel
    from tpoverlap.tuning.layer import LayerShape

_LEAST_GRACE_S = 2.0
_SIZE = click.IntRange(1, 2**31 - 1)
_FILE = click.Path(path_type=Path, dir_okay=False)


@click.command(
    cls=AllMissing, short_help="Measure which method is best for each GEMM and T on the devices of this host."
)
@click.option("--hidden", type=_SIZE, required=True, help="H, the model's hidden size.")
@click.option("--ffn", type=_SIZE, required=True, help="F, the MLP's inner width.")
@click.option("--heads", type=_SIZE, help="Attention heads; only --kv-heads needs it.")
@click.option("--kv-heads", type=_SIZE, help="Heads of keys and values; default as many as --heads.")
@click.option("--gated", is_flag=True, help="fc1 computes a gate as well (SwiGLU): twice the columns.")
@click.option("--tokens", metavar="T[,T..]|A:B", help="Tokens of the TP group: some T, or a range in buckets.")
@click.option(
    "--tokens-from", type=_FILE, metavar="LENGTHS.json", help="T of a recorded run: a list, or train's --json."
)
@click.option("-o", "--output", type=_FILE, required=True, metavar="UB.yaml", help="Where the configuration goes.")
@click.option("--tp", "tp_size", type=click.IntRange(2, 64), default=2, show_default=True, help="R, ranks to start.")
@click.option(
    "--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True, help="cpu: for trying it out."
)
@click.option("--dtype", type=click.Choice(["bf16", "fp16", "fp32"]), help="[default: bf16 on cuda, fp32 on cpu]")
@click.option("--minutes", type=FiniteRange(min=0), default=10.0, show_default=True,
              help="For everything, starting the ranks included; then the file has what is known.")  # fmt: skip
@click.option("--rounds", type=click.IntRange(3, 1000), default=15, show_default=True, help="Of each interleaved run.")
@click.option("--restart", is_flag=True, help="Forget what an interrupted run measured.")
@click.option("--topology", type=_FILE, help="What doctor --json wrote here: refuses a --tp that it found senseless.")
@click.option("--cache-dir", type=click.Path(path_type=Path, file_okay=False), help="[default: the user's cache]")
@click.option("--no-cache", is_flag=True, help="Write the file only.")
@click.option("--json", "json_path", type=_FILE, metavar="FILE", help="Everything that was measured, as JSON.")
@click.option("--timeout", "timeout_s", type=FiniteRange(min=5), default=120.0, show_default=True, metavar="S",
              help="Seconds after which a silent rank counts as hung.")  # fmt: skip
def tune(
    output: Path,
    minutes: float,
    restart: bool,
    cache_dir: Path | None,
    no_cache: bool,
    topology: Path | None,
    json_path: Path | None,
    **options: Any,
) -> None:
    """Measure every GEMM of a layer by every method, for buckets of T, and write what wins.

    Each bucket's candidates run in turn on all ranks. A winner other than the default is measured against it once more,
    and the default is written unless it wins again. An interrupted run, or one whose --minutes were used up, goes on
    from UB.yaml.state.json when it is started again.
    """
    from rich.console import Console

    from tpoverlap.testing import RankFailure
    from tpoverlap.tools.train.outputs import require_writable
    from tpoverlap.tuning import cache_folder

    console = Console(highlight=False, markup=False, soft_wrap=True)
    try:
        job = _job(options)
        require_writable(output, "-o")
        if json_path is not None:
            require_writable(json_path, "--json")
        remarks = () if topology is None else _remarks(topology, job)
        folder = None if no_cache else cache_folder(cache_dir)
        _tune(job, output, minutes, restart, folder, remarks, json_path, console)
    except (ConfigError, BackendUnavailableError) as error:
        raise click.UsageError(str(error)) from error
    except (TpOverlapError, RankFailure) as error:
        raise click.ClickException(str(error)) from error


def _job(options: dict[str, Any]) -> TuneJob:
    from tpoverlap.tools.predict.tokens import parse_tokens
    from tpoverlap.tools.tune.job import TuneJob
    from tpoverlap.tools.tune.lengths import read_lengths
    from tpoverlap.tuning.layer import LayerShape

    if (options["tokens"] is None) == (options["tokens_from"] is None):
        raise ConfigError("give --tokens or --tokens-from, one of them")
    lengths = () if options["tokens_from"] is None else read_lengths(options["tokens_from"])
    tokens = parse_tokens(f"{min(lengths)}:{max(lengths)}" if lengths else options["tokens"])
    device = options["device"]
    dtype = options["dtype"] or ("bf16" if device == "cuda" else "fp32")
    sizes = (options["hidden"], options["ffn"], options["tp_size"], options["heads"], options["kv_heads"])
    layer = LayerShape(*sizes, options["gated"], dtype)
    if device == "cuda":
        _require_gpus(layer, f"{min(lengths)}:{max(lengths)}" if lengths else options["tokens"])
    return TuneJob(layer, tokens, lengths, device, options["rounds"], options["timeout_s"])


def _remarks(topology: Path, job: TuneJob) -> list[str]:
    """Of the measured links, for the file's head. Raises ConfigError where ``--tp`` is more than makes sense there."""
    from tpoverlap.tools.predict.topology import probed_topology

    found = probed_topology(topology)
    if job.device_type == "cuda" and job.layer.tp_size > found.nvlink_domain:
        raise ConfigError(
            f"--tp {job.layer.tp_size} is more than {topology} says makes sense on this machine: {found.source}; "
            f"tune for --tp {found.nvlink_domain}, or leave --topology out to measure it all the same"
        )
    return [f"links, by doctor in {topology.name}: {found.source}"]


def _require_gpus(layer: LayerShape, tokens: str) -> None:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count >= layer.tp_size:
        return
    heads = "" if layer.heads is None else f" --heads {layer.heads}"
    heads += "" if layer.kv_heads is None else f" --kv-heads {layer.kv_heads}"
    raise ConfigError(
        f"tune measures on this host's GPUs: --tp {layer.tp_size} needs as many, torch sees {count}. Without them ask "
        f"the cost model: tpoverlap predict --hidden {layer.hidden} --ffn {layer.ffn}{heads}"
        f"{' --gated' if layer.gated else ''} --tp {layer.tp_size} --tokens {tokens} --gpu h200; or measure this "
        "machine's processors with --device cpu"
    )


def _tune(
    job: TuneJob,
    output: Path,
    minutes: float,
    restart: bool,
    folder: Path | None,
    remarks: Sequence[str],
    json_path: Path | None,
    console: Console,
) -> None:
    from tpoverlap.testing import RankPool
    from tpoverlap.tools.train.outputs import write_json
    from tpoverlap.tools.tune.measure import describe
    from tpoverlap.tools.tune.output import cache_entries, results, yaml_text
    from tpoverlap.tools.tune.state import State
    from tpoverlap.tools.tune.tables import show
    from tpoverlap.tuning import cache_folder, write_entries

    begin_s = time.monotonic()
    group_timeout_s = max(60.0, job.timeout_s)  # one rank may compile while the others wait for it
    with RankPool(job.layer.tp_size, device=job.device_type, group_timeout_s=group_timeout_s) as pool:
        machine = pool.run(describe, job.device_type, timeout_s=job.timeout_s)[0]
        state = State(output.with_name(output.name + ".state.json"), job.key(machine), restart=restart)
        try:
            outcome = _search(job, machine, pool, state, begin_s, 60.0 * minutes, console)
        except KeyboardInterrupt:
            console.print(
                f"interrupted: {len(state.results)} buckets are in {state.path}; the same command goes on from there"
            )
            raise
    output.write_text(yaml_text(job, machine, outcome, remarks), encoding="utf-8")
    _read_back(output, job.layer.tp_size)
    console.print(f"wrote {output}")
    show(console, outcome)
    if folder is not None and (entries := cache_entries(outcome)):
        found = job.device_type == "cuda" and folder == cache_folder()
        readers = "managers on this machine read it" if found else f"managers with tuning_cache={str(folder)!r} read it"
        console.print(f"wrote {write_entries(folder, machine, entries)}: {readers}")
    took_s = time.monotonic() - begin_s
    console.print(f"took {took_s / 60.0:.1f} of {minutes:g} minutes")
    if json_path is not None:
        seconds = {"took_s": round(took_s, 1), "budget_s": 60.0 * minutes}
        write_json(json_path, results(job, machine, outcome, seconds))
        console.print(f"wrote {json_path}")
    if outcome.is_complete:
        state.forget()
    else:
        console.print(
            f"{outcome.num_measured} of {len(outcome.buckets)} buckets measured within --minutes {minutes:g}, the "
            "others have their defaults; the same command goes on from there"
        )


def _search(
    job: TuneJob,
    machine: dict[str, Any],
    pool: RankPool,
    state: State,
    begin_s: float,
    budget_s: float,
    console: Console,
) -> Outcome:
    from tpoverlap.testing import RankFailure
    from tpoverlap.tools.tune.measure import measure
    from tpoverlap.tools.tune.session import tune as search
    from tpoverlap.tools.tune.tables import progress_bar

    longest_s = 10 * job.timeout_s
    grace_s = max(_LEAST_GRACE_S, 0.05 * budget_s)

    def measured(ask: Ask) -> list[Any] | None:
        """The ranks give up by themselves at ``ask.limit_s``; a compiler that does not is ended a little later."""
        try:
            answers = pool.run(measure, ask, timeout_s=min(longest_s, ask.limit_s + grace_s))
        except RankFailure as failure:
            if ask.limit_s + grace_s < longest_s and set(failure.hung) == set(failure.errors):
                return None
            raise
        return None if answers[0] is None else answers

    buckets = job.buckets(machine.get("multiprocessors", 1), _untuned_model(machine))
    with progress_bar(console) as listen:
        return search(job, buckets, measured, state, budget_s=budget_s, listen=listen, begin_s=begin_s)


def _untuned_model(machine: dict[str, Any]) -> DeviceModel | None:
    """The cost model that a manager asks on this machine where nothing is tuned; None where it knows none."""
    from tpoverlap.tuning import recognise

    if machine["link"] != "cuda" or "capability" not in machine:
        return None
    return recognise(tuple(machine["capability"]), machine["multiprocessors"], machine["memory_gib"] << 30)


def _read_back(output: Path, tp_size: int) -> None:
    """What was written must be a configuration; a fault here is this program's, so it is loud."""
    import warnings

    from tpoverlap.config import resolve

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        resolve(output, tp_size)
