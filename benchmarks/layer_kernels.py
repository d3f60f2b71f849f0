"""The layers' own kernels on one GPU: right first, then microseconds and GB/s beside torch's operations.

``python -m benchmarks.layer_kernels --out FILE``; ``--device cpu`` runs tiny sizes in Triton's interpreter, to check
this script and no speed. Sizes are those of a rank of the layers suite at TP 2 (H 4096, ffn 14336, 32 heads, 8 groups).
The host's microseconds are those of a call that nothing waits for, on a few rows.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch

from benchmarks.environment import environment
from tpoverlap.nn import PackedSequences
from tpoverlap.nn.attention import packed_attention
from tpoverlap.nn.elementwise import HeadLayout, gated, norms, qkv_heads
from tpoverlap.nn.qkv_attention import qkv_attention
from tpoverlap.nn.split_qkv import split_qkv
from tpoverlap.testing.numeric import assert_close_to_twin

Tensors = torch.Tensor | tuple[torch.Tensor, ...]
Work = Callable[[], Tensors]
_FEW_ROWS = 16


@dataclass(frozen=True)
class Sizes:
    """Of one run."""

    num_tokens: int
    hidden: int
    ffn: int
    layout: HeadLayout
    rounds: int


FULL = Sizes(8192, 4096, 7168, HeadLayout(4, 4, 128), 30)
TINY = Sizes(6, 32, 48, HeadLayout(2, 2, 16), 2)


@dataclass(frozen=True)
class Row:
    """One operation.

    Attributes:
        ours: by one kernel; None: there is none of ours, torch's is measured alone.
        torch: the same by torch's operations (the twin).
        exact: the same on float64 inputs; None: nothing to compare.
        size_bytes: read and written once, the least that has to move.
    """

    ours: Work | None
    torch: Work
    exact: Work | None
    size_bytes: int


def rows(sizes: Sizes, num_tokens: int, device: torch.device, dtype: torch.dtype) -> dict[str, Row]:
    """Every operation for T = ``num_tokens``."""
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    found: dict[str, Row] = {}
    item, layout = dtype.itemsize, sizes.layout
    h, dy = draw(num_tokens, 2 * sizes.ffn), draw(num_tokens, sizes.ffn)
    for gate, name in (("silu", "swiglu"), ("gelu", "geglu"), ("relu", "reglu")):
        found[f"{name} forward"] = Row(
            lambda gate=gate: gated.gated_forward_kernel(h, gate),
            lambda gate=gate: gated.gated_forward_twin(h, gate),
            lambda gate=gate: gated.gated_forward_twin(h.double(), gate),
            3 * dy.numel() * item,
        )
        found[f"{name} backward"] = Row(
            lambda gate=gate: gated.gated_backward_kernel(dy, h, gate),
            lambda gate=gate: gated.gated_backward_twin(dy, h, gate),
            lambda gate=gate: gated.gated_backward_twin(dy.double(), h.double(), gate),
            5 * dy.numel() * item,
        )
    sequences = PackedSequences((0, num_tokens // 2, num_tokens), num_tokens, device)
    table = sequences.rotary(layout.head_dim, 1e4)
    heads = (table.cos, table.sin, layout)
    mixed = draw(num_tokens, layout.width)
    parts = qkv_heads.split_rotate_twin(mixed, *heads)
    moved = 2 * mixed.numel() * item + 2 * table.cos.numel() * 4
    found["split and rotate"] = Row(
        lambda: qkv_heads.split_rotate_kernel(mixed, *heads),
        lambda: qkv_heads.split_rotate_twin(mixed, *heads),
        lambda: qkv_heads.split_rotate_twin(mixed.double(), *heads),
        moved,
    )
    found["merge and rotate back"] = Row(
        lambda: qkv_heads.merge_rotate_kernel(*parts, *heads),
        lambda: qkv_heads.merge_rotate_twin(*parts, *heads),
        lambda: qkv_heads.merge_rotate_twin(*(part.double() for part in parts), *heads),
        moved,
    )
    found |= _norms(sizes, max(1, num_tokens // 2), draw, item)
    if device.type == "cuda":
        wanted, weight = mixed.clone().requires_grad_(), draw(num_tokens, parts[0][0].numel())

        def one_node() -> Tensors:
            return torch.autograd.grad(qkv_attention(wanted, table, layout, sequences, causal=True), wanted, weight)

        def three_nodes() -> Tensors:
            attended = packed_attention(*split_qkv(wanted, table, layout), sequences, causal=True)
            return torch.autograd.grad(attended.flatten(1), wanted, weight)

        found["attention forward + backward"] = Row(one_node, three_nodes, None, 0)
    return found


def _norms(sizes: Sizes, num_rows: int, draw: Callable[..., torch.Tensor], item: int) -> dict[str, Row]:
    """On a shard's rows; and the residual's sum, torch's alone."""
    x, dy = draw(num_rows, sizes.hidden), draw(num_rows, sizes.hidden)
    moved = dy.numel() * item
    found = {"residual": Row(None, lambda: x + dy, None, 3 * moved)}
    for name, centred in (("rms_norm", False), ("layer_norm", True)):
        kind = norms.NormKind(centred, False, 1e-5)
        parameters = [draw(sizes.hidden) for _ in range(2 if centred else 1)]
        weight, bias = parameters[0], parameters[1] if centred else None
        _, mean, rstd = norms.norm_forward(x, weight, bias, kind)
        found[f"{name} forward"] = Row(
            partial(_norm_kernel, x, weight, bias, kind),
            partial(norms.norm_twin, x, weight, bias, kind),
            partial(norms.norm_twin, *_doubled(x, weight, bias), kind),
            2 * moved,
        )
        inputs, doubles = [x, *parameters], _doubled(x, *parameters)
        found[f"{name} backward"] = Row(
            partial(_norm_kernel_backward, dy, x, weight, mean, rstd, kind),
            _recorded(inputs, kind, dy),
            _recorded(doubles, kind, dy.double()),
            3 * moved,
        )
    return found


def _norm_kernel(*arguments: Any) -> Tensors:
    return norms.norm_forward(*arguments)[0]


def _norm_kernel_backward(*arguments: Any) -> Tensors:
    return tuple(one for one in norms.norm_backward(*arguments, needs_weight=True) if one is not None)


def _doubled(*tensors: torch.Tensor | None) -> list[Any]:
    return [None if tensor is None else tensor.double() for tensor in tensors]


def _recorded(given: list[torch.Tensor], kind: norms.NormKind, dy: torch.Tensor) -> Work:
    """Backward of torch's norm, whose forward was run here."""
    inputs = [tensor.detach().clone().requires_grad_() for tensor in given]
    y = norms.norm_twin(inputs[0], inputs[1], inputs[2] if kind.centred else None, kind)
    return lambda: torch.autograd.grad(y, inputs, dy, retain_graph=True)


def check(name: str, row: Row) -> None:
    """Raise AssertionError unless ours is as near to float64 as torch's."""
    if row.ours is None or row.exact is None:
        return
    for ours, twin, exact in zip(_tuple(row.ours()), _tuple(row.torch()), _tuple(row.exact()), strict=True):
        assert_close_to_twin(ours, twin, exact, what=name)


def gpu_us(work: Work, rounds: int, flush: torch.Tensor | None) -> float:
    """Median us on the device, with a cold cache."""
    if flush is None:
        return 1e6 * median(_seconds(work) for _ in range(rounds))
    times = []
    for _ in range(rounds + 3):
        flush.zero_()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        work()
        events[1].record()
        times.append(events)
    torch.cuda.synchronize()
    return median(1e3 * first.elapsed_time(second) for first, second in times[3:])


def host_us(work: Work, rounds: int) -> float:
    """Median us until the call returns, the device idle before each."""
    times = []
    for _ in range(rounds + 3):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(1e6 * _seconds(work))
    return median(times[3:])


def _seconds(work: Work) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _tuple(tensors: Tensors) -> tuple[torch.Tensor, ...]:
    return (tensors,) if isinstance(tensors, torch.Tensor) else tensors


def measure(device: torch.device, sizes: Sizes, dtype: torch.dtype) -> dict[str, dict[str, float | None]]:
    """By operation: us, GB/s and host us of ours and of torch's. Everything is checked before anything is timed."""
    large, small = (
        rows(sizes, sizes.num_tokens, device, dtype),
        rows(sizes, min(_FEW_ROWS, sizes.num_tokens), device, dtype),
    )
    for kind in (large, small):
        for name, row in kind.items():
            check(name, row)
    flush = torch.empty(256 << 20, dtype=torch.uint8, device=device) if device.type == "cuda" else None
    found: dict[str, dict[str, float | None]] = {}
    for name, row in large.items():
        numbers: dict[str, float | None] = {"size_bytes": row.size_bytes}
        for who, work, few in (("ours", row.ours, small[name].ours), ("torch", row.torch, small[name].torch)):
            if work is None or few is None:
                continue
            us = gpu_us(work, sizes.rounds, flush)
            numbers[f"{who}_us"] = us
            numbers[f"{who}_gb_per_s"] = row.size_bytes / us / 1e3 if row.size_bytes else None
            numbers[f"{who}_host_us"] = host_us(few, sizes.rounds)
        found[name] = numbers
    return found


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True)
@click.option("--device", "device_type", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
def main(out: Path, device_type: str) -> None:
    """Check, measure and write OUT."""
    on_cpu = device_type == "cpu"
    if on_cpu:
        os.environ["TRITON_INTERPRET"] = "1"  # before the kernels' modules are imported
    elif not torch.cuda.is_available():
        raise click.ClickException("it needs a GPU, torch sees none; --device cpu checks the script alone")
    sizes, dtype = (TINY, torch.float32) if on_cpu else (FULL, torch.bfloat16)
    where = environment()
    found = measure(torch.device(device_type), sizes, dtype)
    result: dict[str, Any] = {
        "environment": where,
        "device": "cpu, Triton's interpreter: no speeds" if on_cpu else device_type,
        "sizes": {"num_tokens": sizes.num_tokens, "hidden": sizes.hidden, "ffn": sizes.ffn, "layout": sizes.layout},
        "rows": found,
    }
    out.write_text(json.dumps(result, indent=1) + "\n")
    click.echo(f"{'operation':30} {'us':>9} {'GB/s':>7} {'torch us':>9} {'GB/s':>7} {'host us':>8} {'torch':>8}")
    for name, numbers in found.items():
        keys = ("ours_us", "ours_gb_per_s", "torch_us", "torch_gb_per_s", "ours_host_us", "torch_host_us")
        shown = ["-" if numbers.get(key) is None else f"{numbers[key]:.0f}" for key in keys]
        widths = (9, 7, 9, 7, 8, 8)
        click.echo(f"{name:30} " + " ".join(f"{one:>{width}}" for one, width in zip(shown, widths, strict=True)))


if __name__ == "__main__":
    main()
