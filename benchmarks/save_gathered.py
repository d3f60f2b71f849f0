"""What ``save_gathered`` costs in memory and saves in time: one TransformerLayer, forward and backward, at T = C.

``python -m benchmarks.save_gathered --out FILE`` on two GPUs, or with ``--device cpu`` (tiny: shows that it runs). For
each backward mode, in the manager's dtype and in FP8 where the device has it, with and without:

- ``saved_bytes``: what autograd keeps from forward to backward on this rank, parameters left out, shared memory once;
- ``held_bytes``: what the allocator has more after forward than before it (GPU only);
- ``peak_bytes``: the most it has more at any time of forward and backward, gradients included (GPU only);
- ``time_ms``: of forward and backward, the median over rounds on the slowest rank; variants take turns every round.

Correctness first: y, dx and every gradient are those of the layer without ``save_gathered``.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch
import torch.distributed as dist

import tpoverlap as tpo
from tpoverlap.errors import ConfigError
from tpoverlap.gemm.fp8 import require_device
from tpoverlap.testing import run_ranks
from tpoverlap.testing.numeric import relative_error
from tpoverlap.tools.bench.environment import environment
from tpoverlap.tools.bench.job import device_of

HEAD_DIM, SPACINGS = 128, 4
MODES: tuple[tuple[str, dict[str, Any]], ...] = (("bulk", {}), ("rs_dgrad", {"ub_overlap_rs_dgrad": True}))


class Variant:
    """One layer with one choice, and its numbers so far."""

    def __init__(self, label: str, layer: torch.nn.Module) -> None:
        self.label, self.layer = label, layer
        self.times_ms: list[float] = []

    def forward(self, x: torch.Tensor, sequences: tpo.nn.PackedSequences) -> torch.Tensor:
        y: torch.Tensor = self.layer(x, sequences)
        return y

    def saved_bytes(self, x: torch.Tensor, sequences: tpo.nn.PackedSequences) -> int:
        """Storages that autograd keeps, each once, without the parameters'."""
        parameters = {parameter.untyped_storage().data_ptr() for parameter in self.layer.parameters()}
        kept: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in parameters:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = self.forward(x, sequences)  # alive until the sum is made: a freed address could be given out again
        total = sum(kept.values())
        del y
        return total

    def results(self, x: torch.Tensor, dy: torch.Tensor, sequences: tpo.nn.PackedSequences) -> dict[str, torch.Tensor]:
        """Y, dx and the gradients of a forward and backward."""
        self.layer.zero_grad()
        x = x.detach().requires_grad_()
        y = self.forward(x, sequences)
        y.backward(dy)
        grads = {name: one.grad for name, one in self.layer.named_parameters() if one.grad is not None}
        self.layer.zero_grad()
        assert x.grad is not None, "it was asked for"
        return {"y": y.detach(), "dx": x.grad, **grads}

    def memory(self, x: torch.Tensor, dy: torch.Tensor, sequences: tpo.nn.PackedSequences) -> dict[str, int | None]:
        """``held_bytes`` and ``peak_bytes``."""
        if x.device.type != "cuda":
            return {"held_bytes": None, "peak_bytes": None}
        self.layer.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        y = self.forward(x, sequences)
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated() - before
        y.backward(dy)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        self.layer.zero_grad()
        return {"held_bytes": held, "peak_bytes": peak}

    def round_ms(self, x: torch.Tensor, dy: torch.Tensor, sequences: tpo.nn.PackedSequences, calls: int) -> float:
        """Milliseconds of a forward and backward, back to back."""
        self.layer.zero_grad()
        if x.device.type != "cuda":
            begin_s = time.perf_counter()
            for _ in range(calls):
                self.forward(x, sequences).backward(dy)
            return 1e3 * (time.perf_counter() - begin_s) / calls
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(calls):
            self.forward(x, sequences).backward(dy)
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) / calls


def measure(rank: int, size: int, sizes: dict[str, int], device_type: str, rounds: int, calls: int) -> dict[str, Any]:
    """One rank's figures by variant."""
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    dtype = torch.bfloat16 if device_type == "cuda" else torch.float32
    try:
        require_device(device)
        numbers = ["wide", "fp8"]
    except ConfigError:
        numbers = ["wide"]
    tokens, hidden = sizes["tokens"], sizes["hidden"]
    found: dict[str, Any] = {}
    with tpo.UserBufferManager(
        None, (tokens, hidden), dtype=dtype, device=device, quantization_modes=["none", "fp8"][: len(numbers)]
    ) as manager:
        generator = torch.Generator(device).manual_seed(rank)
        draw = {"device": device, "dtype": dtype, "generator": generator}
        for number in numbers:
            for mode, flags in MODES:
                pair = _pair(
                    manager, sizes, {**flags, "fp8_recipe": tpo.Float8CurrentScaling()} if number == "fp8" else flags
                )
                with manager.microbatch(tokens) as partition:
                    rows = partition.counts[rank]
                    x = torch.randn(rows, hidden, **draw).requires_grad_()  # type: ignore[call-overload]
                    dy = torch.randn(rows, hidden, **draw)  # type: ignore[call-overload]
                    sequences = tpo.nn.PackedSequences([0, tokens // 3, tokens], tokens, device)
                    off = _difference(
                        pair, x, dy, sequences, 0.0 if device_type == "cpu" else SPACINGS * torch.finfo(dtype).eps
                    )
                    for one in pair:
                        figures = {"saved_bytes": one.saved_bytes(x, sequences), **one.memory(x, dy, sequences)}
                        found[f"{number} {mode} {one.label}"] = {**figures, "off": off}
                    for turn in range(rounds + 1):  # the first warms up
                        for one in pair[turn % 2 :] + pair[: turn % 2]:
                            dist.barrier()
                            one.times_ms.append(one.round_ms(x, dy, sequences, calls))
                    x.grad = None
                for one in pair:
                    found[f"{number} {mode} {one.label}"]["times_ms"] = one.times_ms[1:]
                manager.check()
                del pair
    return found


def _pair(manager: tpo.UserBufferManager, sizes: dict[str, int], options: dict[str, Any]) -> list[Variant]:
    torch.manual_seed(7)
    layers = [
        tpo.nn.TransformerLayer(
            sizes["hidden"],
            sizes["ffn"],
            sizes["heads"],
            num_gqa_groups=sizes["groups"],
            kv_channels=min(HEAD_DIM, sizes["hidden"] // sizes["heads"]),
            normalization="RMSNorm",
            activation="swiglu",
            bias=False,
            manager=manager,
            save_gathered=saves,
            **options,
        )
        for saves in (False, True)
    ]
    layers[1].load_state_dict(layers[0].state_dict())
    return [Variant(label, layer) for label, layer in zip(("gathers again", "save_gathered"), layers, strict=True)]


def _difference(
    pair: list[Variant], x: torch.Tensor, dy: torch.Tensor, sequences: tpo.nn.PackedSequences, allowed: float
) -> float:
    """The largest relative difference of any result. Raises AssertionError above ``allowed``."""
    expected, found = (one.results(x, dy, sequences) for one in pair)
    assert expected.keys() == found.keys() and len(found) > 6, "a gradient is missing"
    off = {name: relative_error(found[name], value) for name, value in expected.items() if value.numel()}
    assert all(value <= allowed for value in off.values()), f"save_gathered changes the numbers: {off}"
    return max(off.values())


@click.command()
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True, help="JSON to write.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option("--tp", type=click.IntRange(min=2), default=2, show_default=True)
@click.option("--hidden", type=int, help="H.  [default: 4096; 128 on a CPU]")
@click.option("--tokens", type=int, help="T = C.  [default: 8192; 96 on a CPU]")
@click.option("--rounds", type=click.IntRange(min=1), default=7, show_default=True)
@click.option("--calls", type=click.IntRange(min=1), default=5, show_default=True, help="Of a round.")
def main(out: Path, device: str, tp: int, hidden: int | None, tokens: int | None, rounds: int, calls: int) -> None:
    """Measure, print a table, write --out."""
    device_type, _ = device_of(device)
    cuda = device_type == "cuda"
    hidden = hidden or (4096 if cuda else 128)
    heads = max(2 * tp, hidden // HEAD_DIM)
    sizes = {
        "tokens": tokens or (8192 if cuda else 96),
        "hidden": hidden,
        "ffn": hidden * 7 // 2,
        "heads": heads,
        "groups": max(tp, heads // 4),
    }
    ranks = run_ranks(measure, tp, sizes, device_type, rounds, calls, device=device_type, timeout_s=600.0)
    rows = {label: _row([one[label] for one in ranks]) for label in ranks[0]}
    out.write_text(
        json.dumps(
            {"environment": environment(), "device": device_type, "tp_size": tp, **sizes, "rows": rows}, indent=1
        )
    )
    for label, row in rows.items():
        memory = "  ".join(
            f"{name} {row[f'{name}_bytes'] / 2**20:9.2f} MiB"
            for name in ("saved", "held", "peak")
            if row[f"{name}_bytes"] is not None
        )
        click.echo(f"{label:32}  {memory}  {row['time_ms']:9.3f} ms  off {row['off']:.1e}")
    click.echo(f"wrote {out}")


def _row(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """The most memory of any rank, and the median round of the slowest."""
    largest = {
        name: None if ranks[0][name] is None else max(one[name] for one in ranks)
        for name in ("saved_bytes", "held_bytes", "peak_bytes", "off")
    }
    return {**largest, "time_ms": max(median(one["times_ms"]) for one in ranks)}


if __name__ == "__main__":
    main()
