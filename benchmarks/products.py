"""Products by cublasLt itself beside torch's, on one GPU: device time, and the processor's time of a call.

``python -m benchmarks.products --out FILE [--minutes M]`` takes a minute and a half. Every result is checked before it
is timed. ``host_us``: of one call, enqueued while a delay kernel holds the stream.

==========================  ==========================================================================================
variant                     what is computed
==========================  ==========================================================================================
mm, lt                      left @ right
addmm, mm and add           received + left @ right, as torch has it: a copy first, or a sum behind
lt added                    the same by cublasLt, which reads ``received`` where it is
fp8 scaled_mm, fp8 lt       of E4M3 operands in the fast mode
fp8 and add, fp8 lt added   with ``received``
==========================  ==========================================================================================
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch

from benchmarks.environment import environment
from benchmarks.gemm_alone import (
    FAST_ADDS_OFF,
    ROUNDS_OFF,
    Quantizers,
    Variant,
    echo_problems,
    row_of,
    session_alone,
)
from tpoverlap.gemm.cublaslt import LtProducts, lt_products
from tpoverlap.gemm.fp8 import QuantizedTensor
from tpoverlap.tools.bench.session import Operands, Session

FEATURES = (
    *((8192, 4096), (8192, 1280), (1280, 8192), (8192, 2560), (8192, 3584), (3584, 8192)),
    *((4096, 8192), (8192, 8192), (4096, 6144), (4096, 3072)),
)
"""(K, N)."""
ROWS = (512, 1024, 2048, 4096, 8192, 256, 128, 24, 8)
_CALLS, _DELAY_CYCLES = 40, 30_000_000


def variants(left: torch.Tensor, weight: torch.Tensor, received: torch.Tensor, by: Quantizers) -> dict[str, Variant]:
    """Of ``left`` [M, K], ``weight`` [N, K] and ``received`` [M, N]."""
    lt, right, out = lt_products(left.get_device()), weight.t(), torch.empty_like(received)
    assert lt is not None, "the log says why there is no cublasLt"
    x8, w8 = by.input.local(left, record=False), by.weight.local(weight, record=False)
    right8, scales = w8.data.t(), (x8.scale, w8.scale)

    def exact(added: bool) -> Callable[[], torch.Tensor]:
        return lambda: left.float() @ right.float() + (received.float() if added else 0.0)

    def exact8(added: bool) -> Callable[[], torch.Tensor]:
        wide: Callable[[QuantizedTensor], torch.Tensor] = lambda one: one.data.float() * one.scale  # noqa: E731
        return lambda: wide(x8) @ wide(w8).t() + (received.float() if added else 0.0)

    def mm_and_add() -> None:
        torch.mm(left, right, out=out)
        torch.add(received, out, out=out)

    def scaled() -> None:
        torch._scaled_mm(x8.data, right8, *scales, out_dtype=out.dtype, use_fast_accum=True, out=out)

    def scaled_and_add() -> None:
        scaled()
        torch.add(received, out, out=out)

    runs: dict[str, tuple[Callable[[], Any], Callable[[], torch.Tensor], float]] = {
        "mm": (lambda: torch.mm(left, right, out=out), exact(False), ROUNDS_OFF),
        "lt": (lambda: _by(lt, left, right, out), exact(False), ROUNDS_OFF),
        "addmm": (lambda: torch.addmm(received, left, right, out=out), exact(True), ROUNDS_OFF),
        "mm and add": (mm_and_add, exact(True), ROUNDS_OFF),
        "lt added": (lambda: _by(lt, left, right, out, received), exact(True), ROUNDS_OFF),
        "fp8 scaled_mm": (scaled, exact8(False), FAST_ADDS_OFF),
        "fp8 lt": (lambda: _by(lt, x8.data, right8, out, None, scales), exact8(False), FAST_ADDS_OFF),
        "fp8 and add": (scaled_and_add, exact8(True), FAST_ADDS_OFF),
        "fp8 lt added": (lambda: _by(lt, x8.data, right8, out, received, scales), exact8(True), FAST_ADDS_OFF),
    }

    def variant(run: Callable[[], Any], exactly: Callable[[], torch.Tensor], bound: float) -> Variant:
        return Variant(run, lambda _: out, exactly, bound)

    return {name: variant(*one) for name, one in runs.items()}


def _by(
    lt: LtProducts,
    left: torch.Tensor,
    right: torch.Tensor,
    out: torch.Tensor,
    addend: torch.Tensor | None = None,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    if not lt.multiply(left, right, out, addend, None, scales, fast=scales is not None):
        raise RuntimeError("cublasLt has no algorithm for it")


def host_us(run: Callable[[], Any], rounds: int) -> float:
    """Processor time of a call whose work waits behind a delay."""
    found = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        torch.cuda._sleep(_DELAY_CYCLES)
        start = time.perf_counter()
        for _ in range(_CALLS):
            run()
        found.append((time.perf_counter() - start) / _CALLS * 1e6)
    return median(found)


@click.command()
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), required=True, help="A JSON file.")
@click.option("--rounds", default=5, show_default=True, help="Medians are over so many.")
@click.option("--minutes", type=float, help="Begin no row after so long.")
def main(out: Path, rounds: int, minutes: float | None) -> None:
    """Check and time every row."""
    if not torch.cuda.is_available():
        raise click.ClickException("it needs a GPU, torch sees none")
    with session_alone("cuda", rounds, minutes) as session, torch.no_grad():
        operands = Operands(session, max(ROWS) * 8192, max(k * n for k, n in FEATURES))
        result = {"environment": environment(), "rows": [], "left_out": 0}
        _measure(session, operands, Quantizers(session.device), result, out)


def _measure(session: Session, operands: Operands, by: Quantizers, result: dict[str, Any], out: Path) -> None:
    everything = [(rows, k, n) for rows in ROWS for k, n in FEATURES]
    for number, (rows, k, n) in enumerate(everything):
        if session.out_of_time():
            result["left_out"] = len(everything) - number
            break
        found = variants(
            operands.activation(rows, k), operands.weight(n, k), operands.own_activation(rows, n).clone(), by
        )
        row = row_of(session, "product", (rows, k, n), found)
        for name, times in row["times"].items():
            times["host_us"] = host_us(found[name].run, 3)
        result["rows"].append(row)
        shown = {name: f"{one['queued_us'] or 0:.1f}/{one['host_us']:.0f}" for name, one in row["times"].items()}
        click.echo(f"{rows}x{k}x{n}: " + ", ".join(f"{name} {text}" for name, text in shown.items()))
        echo_problems(row)
        out.write_text(json.dumps(result) + "\n")
    out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
