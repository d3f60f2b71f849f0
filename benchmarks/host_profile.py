"""Where the host's time goes in a layer's forward and backward: time a step, and the functions it is spent in.

``python -m benchmarks.host_profile --out F``. Two ranks, which may share one GPU: nothing here waits for the device
inside a step, so its speed does not matter; that of the
processor does, and is told by an empty loop. The backward runs in the calling thread, or a profiler would not see it.
``host_us`` is without the profiler; the profiler's own shares are those of its (slower) run.
"""

from __future__ import annotations

import cProfile
import json
import pstats
import time
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch
import torch.distributed as dist

import tpoverlap as tpo
from benchmarks.environment import environment
from tpoverlap.gemm.fp8 import Float8CurrentScaling
from tpoverlap.testing import run_ranks
from tpoverlap.tools.bench.compute_only import Resident, without_collectives

WARM_UP, REPEATS, PROFILED = 20, 40, 20
KINDS = ("overlapped", "compute only")
Row = dict[str, Any]


def profile_layer(rank: int, world_size: int, sizes: dict[str, Any]) -> list[Row]:
    """Rows of each numbers, T and kind; of rank 0."""
    device = torch.device(sizes["device"], torch.cuda.current_device() if sizes["device"] == "cuda" else None)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    hidden, rows = sizes["hidden"], []
    capacity = max(sizes["tokens"])
    with (
        torch.autograd.set_multithreading_enabled(False),
        tpo.UserBufferManager(
            None, (capacity, hidden), dtype, device, quantization_modes=["none", "fp8"], tuning_cache=False
        ) as mgr,
    ):
        resident = Resident(*(torch.randn(capacity, hidden, device=device, dtype=dtype) for _ in range(2)))
        for numbers in sizes["numbers"]:
            recipe = Float8CurrentScaling() if numbers == "fp8" else None
            for kind in KINDS:
                layer = tpo.nn.TransformerLayer(
                    hidden, sizes["ffn"], sizes["heads"], sizes["heads"] // 2, normalization="RMSNorm",
                    activation="swiglu", bias=False, manager=mgr, fp8_recipe=recipe,
                )  # fmt: skip
                if kind == "compute only":
                    without_collectives(layer, resident)
                for tokens in sizes["tokens"]:
                    rows.append(
                        {"numbers": numbers, "kind": kind, "T": tokens} | _measure(layer, mgr, tokens, hidden, rank)
                    )
                dist.barrier()
    return rows if rank == 0 else []


def _measure(layer: torch.nn.Module, mgr: tpo.UserBufferManager, tokens: int, hidden: int, rank: int) -> Row:
    partition = tpo.TokenPartition.even(tokens, mgr.tp_size)
    cu_seqlens = torch.tensor([0, tokens], dtype=torch.int32, device=mgr.device)
    x = torch.randn(partition.counts[rank], hidden, device=mgr.device, dtype=mgr.dtype).requires_grad_()
    dy, parameters = torch.ones_like(x), tuple(layer.parameters())

    def step() -> float:
        begin_s = time.perf_counter()
        y = layer(x, cu_seqlens, max_seqlen=tokens, partition=partition)
        torch.autograd.grad(y, (x, *parameters), dy)
        return time.perf_counter() - begin_s

    def settle() -> None:
        if mgr.device.type == "cuda":
            torch.cuda.synchronize(mgr.device)
        dist.barrier()

    for _ in range(WARM_UP):
        step()
    times, loops = [], []
    for _ in range(REPEATS):
        settle()
        times.append(1e6 * step())
        loops.append(_empty_loop_us())
    profiler = cProfile.Profile()
    for _ in range(PROFILED):
        settle()
        profiler.runcall(step)
    stats: Any = pstats.Stats(profiler)
    places = sorted(
        (
            (f"{'/'.join(file.split('/')[-2:])}:{line} {name}", calls / PROFILED, 1e6 * own_s / PROFILED)
            for (file, line, name), (_, calls, own_s, _, _) in stats.stats.items()
        ),
        key=lambda place: -place[2],
    )
    return {
        "host_us": round(median(times), 1),
        "empty_loop_us": round(median(loops), 2),
        "calls": round(sum(place[1] for place in places), 1),
        "places": [{"where": name, "calls": calls, "own_us": round(us, 1)} for name, calls, us in places[:70]],
    }


def _empty_loop_us() -> float:
    """200 turns: how fast the processor is just now, which on some machines changes by a factor of two."""
    begin_s = time.perf_counter()
    for _ in range(200):
        pass
    return 1e6 * (time.perf_counter() - begin_s)


@click.command()
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), required=True, help="Results, JSON.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option("--tokens", default="1024,4096", show_default=True, metavar="T[,T..]")
@click.option("--numbers", multiple=True, type=click.Choice(["bf16", "fp8"]), default=("bf16", "fp8"))
def main(out: Path, device: str, tokens: str, numbers: tuple[str, ...]) -> None:
    """Profile a TransformerLayer's forward and backward on two ranks."""
    on_gpu = device == "cuda"
    sizes = {
        "device": device, "numbers": list(numbers), "tokens": [int(one) for one in tokens.split(",")],
        "hidden": 4096 if on_gpu else 64, "ffn": 14336 if on_gpu else 128, "heads": 32 if on_gpu else 4,
    }  # fmt: skip
    rows = run_ranks(profile_layer, 2, sizes, device=device, timeout_s=200)[0]
    for row in rows:
        click.echo(
            f"{row['numbers']} {row['kind']}, T {row['T']}: {row['host_us']:.0f} us (200 empty turns: "
            f"{row['empty_loop_us']:.2f}), {row['calls']:.0f} calls"
        )
        for place in row["places"][:12]:
            click.echo(f"    {place['own_us']:8.1f} us {place['calls']:7.1f}  {place['where']}")
    out.write_text(json.dumps({"environment": environment() | sizes, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
