"""``tpoverlap predict``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from tpoverlap.errors import ConfigError
from tpoverlap.tools.missing import AllMissing
from tpoverlap.tools.numbers import FiniteRange

_SIZE = click.IntRange(1, 2**31 - 1)
_PLOT_POINTS = 40


@click.command(cls=AllMissing, short_help="Will overlap help on a GPU that is not here? A cost model's answer.")
@click.option("--hidden", type=_SIZE, required=True, help="H, the model's hidden size.")
@click.option("--ffn", type=_SIZE, required=True, help="F, the MLP's inner width.")
@click.option("--tp", "tp_size", type=click.IntRange(1, 1024), required=True, help="R, ranks of the TP group.")
@click.option(
    "--tokens", required=True, metavar="T[,T..]|A:B", help="Tokens of the TP group: some T, or the buckets of a range."
)
@click.option(
    "--gpu", required=True, metavar="NAME", help="h200 (measured), h100, gh200, b200, gb200-nvl72 (estimates)."
)
@click.option("--heads", type=_SIZE, help="Attention heads.")
@click.option("--kv-heads", type=_SIZE, help="Heads of keys and values; default as many as --heads.")
@click.option("--gated", is_flag=True, help="fc1 computes a gate as well (SwiGLU): twice the columns.")
@click.option("--capacity", "capacity_tokens", type=_SIZE, help="C, what padding pads to; default the largest T.")
@click.option("--dtype", type=click.Choice(["bf16", "fp16", "fp32"]), default="bf16", show_default=True)
@click.option("--fp8", is_flag=True, help="Layers under an FP8 recipe (current scaling); --dtype is of the rest.")
@click.option("--fp8-buf", is_flag=True, help="With --fp8: reduce-scatters move FP8 rows, as fp8_buf: true has it.")
@click.option(
    "--topology", metavar="FILE|PRESET", help="doctor's --json, or hgx-8, gh200-x1, gh200-x2, gh200-x4, nvl72."
)
@click.option("--network-gb-s", type=FiniteRange(min=0, min_open=True), default=50.0, show_default=True,
              help="Assumed rate between NVLink domains, 1e9 bytes/s.")  # fmt: skip
@click.option(
    "--launches",
    type=click.Choice(["counted", "hidden"]),
    default="counted",
    show_default=True,
    help="hidden: the processor is ahead of the GPU, its time does not count.",
)
@click.option("--json", "json_path", metavar="FILE|-", help="Write the answer as JSON; '-': to standard output, alone.")
@click.option("--plot", "plot_path", metavar="PNG", help="Draw the gain against T.")
def predict(
    hidden: int,
    ffn: int,
    tp_size: int,
    tokens: str,
    gpu: str,
    heads: int | None,
    kv_heads: int | None,
    gated: bool,
    dtype: str,
    fp8: bool,
    fp8_buf: bool,
    topology: str | None,
    json_path: str | None,
    plot_path: str | None,
    **options: Any,
) -> None:
    """Say for every GEMM of a layer which method is best at which T, what it gains, and how far to trust that.

    Nothing is measured here. Times come from a cost model fitted to measurements on two H200s; what they do not cover
    is called an estimate. With a range, T is cut into buckets by tiles per multiprocessor, as the dispatcher does.
    """
    from rich.console import Console

    from tpoverlap.tools.predict.plot import draw
    from tpoverlap.tools.predict.tables import show
    from tpoverlap.tools.train.outputs import require_writable, write_json
    from tpoverlap.tuning.layer import LayerShape

    try:
        layer = LayerShape(hidden, ffn, tp_size, heads, kv_heads, gated, dtype, fp8, fp8_buf)
        for option, path in (("--json", json_path), ("--plot", plot_path)):
            if path not in (None, "-"):
                require_writable(Path(str(path)), option)
        answer = _answer(layer, gpu, topology, tokens, options)
        dense = None if plot_path is None else _answer(layer, gpu, topology, _dense(answer.capacity_tokens), options)
    except ConfigError as error:
        raise click.UsageError(str(error)) from error
    if json_path == "-":
        click.echo(json.dumps(answer.to_dict(), indent=2))
    elif json_path is not None:
        write_json(Path(json_path), answer.to_dict())
    if dense is not None:
        draw(Path(str(plot_path)), dense)
    if json_path != "-":
        show(Console(soft_wrap=True, highlight=False, markup=False), answer)


def _answer(layer: Any, gpu: str, topology: str | None, tokens: str, options: dict[str, Any]) -> Any:
    from tpoverlap.tools.predict.prediction import predict as ask
    from tpoverlap.tools.predict.tokens import parse_tokens
    from tpoverlap.tools.predict.topology import topology_of
    from tpoverlap.tuning import load_device

    device = load_device(gpu)
    spec = parse_tokens(tokens)
    capacity = options["capacity_tokens"]
    if capacity is not None and capacity < spec.largest:
        raise ConfigError(f"T={spec.largest} of --tokens is beyond --capacity {capacity}; raise it")
    return ask(
        layer,
        device,
        topology_of(device, topology),
        spec,
        capacity_tokens=capacity,
        network_gb_s=options["network_gb_s"],
        launches_hidden=options["launches"] == "hidden",
    )


def _dense(capacity_tokens: int) -> str:
    """Many T up to the capacity, evenly spaced on a logarithmic axis."""
    low = min(16, capacity_tokens)
    ratio = capacity_tokens / low
    points = {round(low * ratio ** (index / (_PLOT_POINTS - 1))) for index in range(_PLOT_POINTS)}
    return ",".join(map(str, sorted(points)))
