"""GEMMs of one rank in bfloat16 and FP8, and what quantising costs, on one GPU: what the cost model is fitted to.

``python -m benchmarks.gemm_alone --out FILE [--minutes M]``; ``--device cpu`` runs tiny sizes, which tests the script
and measures nothing worth knowing. Every result is checked before it is timed; one that is wrong is listed and not
timed. Rounds are interleaved over the variants of a row; ``queued_us`` is the device alone, ``eager_us`` back-to-back
calls. FILE is rewritten after every row, so a run that is cut off leaves what it had.

========  ==================================  ======================================================================
kind      operands                            variants
========  ==================================  ======================================================================
forward   x [T, K], weight [N, K] -> [T, N]   bfloat16 · e4m3 x e4m3 (fprop) · e5m2 x e4m3 (dgrad); accumulating in
                                              the fast mode and in float32 (`gemm.fp8.scaled_mm`: which is used where)
weight    dy [T, N], x [T, K] -> [N, K]       bfloat16 · e5m2 x e4m3 in float32 (wgrad)
quantise  x [rows, width]                     steps of current scaling, and of ``fp8_buf``: `quantise`
========  ==================================  ======================================================================
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist

from benchmarks.environment import environment
from tpoverlap.gemm.fp8 import Float8CurrentScaling, QuantizedTensor, Quantizer, scaled_mm
from tpoverlap.gemm.fp8.quantize import SCALE_BYTES, pack_rows, unpack_rows
from tpoverlap.testing.numeric import relative_error
from tpoverlap.testing.specs import GEMM_SHAPES, TP8_SHAPES
from tpoverlap.tools.bench.job import BenchJob
from tpoverlap.tools.bench.session import Operands, Session
from tpoverlap.tools.bench.timing import measure

E4M3 = torch.float8_e4m3fn
Row = dict[str, Any]
Item = tuple[str, tuple[int, ...]]
"""A kind and its sizes: (T, K, N), or (rows, width)."""

TOKENS = (8192, 1024, 256, 4096, 2048, 512, 16384, 128, 64, 16)
"""The outer loop: a run that is cut off has every shape at some T."""
SUITE_FEATURES = tuple(dict.fromkeys((s.in_features, s.out_features) for s in (*GEMM_SHAPES, *TP8_SHAPES)))
"""(K, N) of the gemm suite, which are one rank's."""
LAYER_FEATURES = (
    *((4096, 3072), (2048, 4096), (4096, 14336), (7168, 4096)),
    *((8192, 5120), (4096, 8192), (8192, 28672), (14336, 8192)),
)
"""(K, N) of the layers suite's qkv, proj, fc1 (both halves) and fc2 for H 4096 and 8192, halved by TP 2."""
WIDTHS = (4096, 7168, 8192, 14336)
TINY_TOKENS, TINY_FEATURES, TINY_WIDTHS = (16, 48), ((64, 48),), (32,)

ROUNDS_OFF = 0.01  # bfloat16 results are rounded by at most 2**-9 each; sums of split products once more
FAST_ADDS_OFF = 0.03  # partial sums keep some 14 bits of what they have grown to
QUANTISED_OFF = 0.05  # half a step of e4m3's three bits is at most 2**-4 of a number


@dataclass(frozen=True)
class Variant:
    """One call.

    Attributes:
        run: what is timed.
        read: the numbers that its result stands for.
        exact: what these should be, in float32.
        bound: relative error allowed.
    """

    run: Callable[[], Any]
    read: Callable[[Any], torch.Tensor]
    exact: Callable[[], torch.Tensor]
    bound: float


def items(
    tokens: tuple[int, ...],
    features: tuple[tuple[int, int], ...],
    layers: tuple[tuple[int, int], ...],
    widths: tuple[int, ...],
) -> Iterator[Item]:
    """Everything to measure, in order."""
    for num_tokens in tokens:
        yield from (("quantise", (num_tokens, width)) for width in widths)
        yield from (("forward", (num_tokens, *one)) for one in dict.fromkeys((*features, *layers)))
        yield from (("weight", (num_tokens, *one)) for one in layers)


class Quantizers:
    """Current scaling, as layers use it."""

    def __init__(self, device: torch.device) -> None:
        recipe = Float8CurrentScaling()
        self.input = Quantizer(recipe, "input", device)
        self.weight = Quantizer(recipe, "weight", device)
        self.grad = Quantizer(recipe, "grad", device)


def forward(x: torch.Tensor, weight: torch.Tensor, by: Quantizers) -> dict[str, Variant]:
    """GEMMs of ``x`` [T, K] and ``weight`` [N, K]."""
    w4, out = by.weight.local(weight, record=False), x.new_empty(x.shape[0], weight.shape[0])
    found = {"bfloat16": _plain(x, weight.t(), out)}
    for name, left in (("e4m3", by.input.local(x, record=False)), ("e5m2", by.grad.local(x, record=False))):
        found[f"{name} fast"] = _in_fp8(left, w4, out, fast=True)
        found[name] = _in_fp8(left, w4, out, fast=False)
    return found


def weight_grad(dy: torch.Tensor, x: torch.Tensor, by: Quantizers) -> dict[str, Variant]:
    """GEMMs of ``dy`` [T, N] and ``x`` [T, K], summed over tokens; FP8 operands were transposed before."""
    dy_t, x_t = (one.local(of, record=False).padded_transposed() for one, of in ((by.grad, dy), (by.input, x)))
    out = x.new_empty(dy.shape[1], x.shape[1])
    return {"bfloat16": _plain(dy.t(), x, out), "e5m2": _in_fp8(dy_t, x_t, out, fast=False)}


def quantise(x: torch.Tensor, by: Quantizers) -> dict[str, Variant]:
    """What FP8 layers do to ``x`` [rows, width] besides GEMMs.

    ``measure``: its magnitude; ``by maxima``: FP8 under a magnitude that is there; ``local``: both in turn; ``local and
    transposed``: with the other orientation; ``transpose``: bytes that were gathered; ``pack``, ``unpack``: the rows of
    ``fp8_buf``.
    """
    maxima, made = by.input.measure(x).expand(2, 1).contiguous(), by.input.local(x, record=False)
    packed = torch.empty(x.shape[0], x.shape[1] + SCALE_BYTES, dtype=torch.uint8, device=x.device)
    pack_rows(x, E4M3, packed)

    def turned_back(turned: QuantizedTensor) -> torch.Tensor:
        return (turned.data.float() * turned.scale)[:, : x.shape[0]].t()

    return {
        "measure": Variant(lambda: by.input.measure(x), lambda m: m, lambda: x.float().abs().max().view(1, 1), 0.0),
        "by maxima": Variant(lambda: by.input.by_maxima(x, maxima), _wide, x.float, QUANTISED_OFF),
        "local": Variant(lambda: by.input.local(x, record=False), _wide, x.float, QUANTISED_OFF),
        "local and transposed": Variant(
            lambda: by.input.local(x, record=False, transposes=True),
            lambda both: turned_back(both.padded_transposed()),  # made along: nothing is transposed here
            x.float,
            QUANTISED_OFF,
        ),
        "transpose": Variant(made.padded_transposed, turned_back, lambda: _wide(made), 0.0),
        "pack": Variant(
            lambda: pack_rows(x, E4M3, packed), lambda _: unpack_rows(packed, E4M3), x.float, QUANTISED_OFF
        ),
        "unpack": Variant(lambda: unpack_rows(packed, E4M3), lambda rows: rows, x.float, QUANTISED_OFF),
    }


def _plain(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> Variant:
    """``out[:] = left @ right``."""
    exact: Callable[[], torch.Tensor] = lambda: torch.mm(left.float(), right.float())  # noqa: E731
    return Variant(lambda: torch.mm(left, right, out=out), lambda result: result, exact, ROUNDS_OFF)


def _in_fp8(left: QuantizedTensor, right: QuantizedTensor, out: torch.Tensor, *, fast: bool) -> Variant:
    """``out[:] = left @ right.T``."""

    def run() -> torch.Tensor:
        scaled_mm(left.data, right.data.t(), left.scale, right.scale, out, fast_accumulation=fast)
        return out

    bound = FAST_ADDS_OFF if fast else ROUNDS_OFF
    return Variant(run, lambda result: result, lambda: torch.mm(_wide(left), _wide(right).t()), bound)


def _wide(tensor: QuantizedTensor) -> torch.Tensor:
    return tensor.data.float() * tensor.scale


def row_of(session: Session, kind: str, sizes: tuple[int, ...], variants: dict[str, Variant]) -> Row:
    """Check ``variants``, then time those that are right."""
    errors: dict[str, float] = {}
    problems: dict[str, str] = {}
    runs: dict[str, Callable[[], Any]] = {}
    for name, variant in variants.items():
        try:
            errors[name] = relative_error(variant.read(variant.run()), variant.exact())
        except RuntimeError as error:  # what this installation refuses
            problems[name] = str(error)[:200]
            continue
        if errors[name] <= variant.bound:  # false for NaN
            runs[name] = variant.run
        else:
            problems[name] = f"relative error {errors[name]:.3e}, allowed {variant.bound}; not timed"
    times = measure(session, runs) if runs else {}
    timed = {
        name: {"queued_us": one.queued_us, "eager_us": one.eager_us, "queued_operations": one.queued_operations}
        for name, one in times.items()
    }
    return {"kind": kind, "sizes": list(sizes), "times": timed, "relative_errors": errors, "problems": problems}


def variants_of(operands: Operands, by: Quantizers, kind: str, sizes: tuple[int, ...]) -> dict[str, Variant]:
    """The calls of an `Item`."""
    if kind == "quantise":
        return quantise(operands.activation(*sizes), by)
    num_tokens, k, n = sizes
    if kind == "forward":
        return forward(operands.activation(num_tokens, k), operands.weight(n, k), by)
    return weight_grad(operands.own_activation(num_tokens, n), operands.activation(num_tokens, k), by)


@click.command()
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), required=True, help="A JSON file.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option("--rounds", default=5, show_default=True, help="Medians are over so many.")
@click.option("--minutes", type=float, help="Begin no row after so long.")
def main(out: Path, device: str, rounds: int, minutes: float | None) -> None:
    """Check and time every row."""
    if device == "cuda" and not torch.cuda.is_available():
        raise click.ClickException("it needs a GPU, torch sees none; --device cpu checks the script alone")
    with session_alone(device, rounds, minutes) as session:
        measure_all(session, out)


@contextmanager
def session_alone(device: str, rounds: int, minutes: float | None) -> Iterator[Session]:
    """This process by itself, in a group of one rank."""
    job = job_on(device, rounds, minutes)
    dist.init_process_group(job.group_backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None, "just made"
        yield Session(job, dist.group.WORLD, 0)
    finally:
        dist.destroy_process_group()


def echo_problems(row: Row) -> None:
    """What was not timed, and why."""
    for name, problem in row["problems"].items():
        click.echo(f"    ! {name}: {problem}")


def job_on(device: str, rounds: int, minutes: float | None) -> BenchJob:
    """One rank on one GPU, or on the CPU."""
    on_gpu = device == "cuda"
    return BenchJob(("gemm",), "cuda" if on_gpu else "cpu", int(on_gpu), 1, 1, rounds=rounds, minutes=minutes)


def measure_all(session: Session, out: Path) -> None:
    """Every item in turn, by this process alone."""
    job = session.job
    on_gpu = job.device_type == "cuda"
    everything = list(
        items(TOKENS, SUITE_FEATURES, LAYER_FEATURES, WIDTHS)
        if on_gpu
        else items(TINY_TOKENS, TINY_FEATURES, TINY_FEATURES, TINY_WIDTHS)
    )
    gemms = [sizes for kind, sizes in everything if kind != "quantise"]
    most = max(sizes[0] * max(sizes[1:]) for _, sizes in everything)
    operands = Operands(session, most, max(k * n for _, k, n in gemms))
    by, where = Quantizers(session.device), environment()
    result: dict[str, Any] = {"environment": where, "device": job.device_type, "rows": [], "left_out": 0}
    with torch.no_grad():
        for number, (kind, sizes) in enumerate(everything):
            if session.out_of_time():
                result["left_out"] = len(everything) - number
                break
            row = row_of(session, kind, sizes, variants_of(operands, by, kind, sizes))
            result["rows"].append(row)
            shown = {name: times["queued_us"] or times["eager_us"] for name, times in row["times"].items()}
            label = f"[{number + 1}/{len(everything)}] {kind} {'x'.join(map(str, sizes))}"
            click.echo(f"{label}: " + ", ".join(f"{name} {us:.1f}" for name, us in shown.items()))
            echo_problems(row)
            out.write_text(json.dumps(result) + "\n")
    out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
