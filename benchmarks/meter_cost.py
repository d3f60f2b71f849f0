"""What ``meter=True`` costs: the same layer step with the manager's meter and without it, in turns.

``python -m benchmarks.meter_cost --out F`` on two GPUs, or ``--device cpu``. The outputs and gradients
of both have to be equal bit for bit before anything is timed. Three answers:

- *step*: wall time of a forward and backward with the device idle at its ends; the ratio of each round's two steps,
  their median, and the interval in which the true median lies with 95 % confidence (by order statistics);
- *host*: the same for the time until the calls return;
- *direct*: the meter's own calls of one step, made again and again without the step, over the step's time. It does not
  see caches or an event's cost on the device, but it does not drown in noise either.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch
import torch.distributed as dist

import tpoverlap as tpo
from tpoverlap.comm.descriptor import Descriptor
from tpoverlap.comm.meter import EVERY_ON_CUDA, Meter, MeteredOperation
from tpoverlap.testing import run_ranks
from tpoverlap.tools.bench.environment import environment

LIMIT_PERCENT = 1.0
_REPLAYS = 100
WARM_UP = EVERY_ON_CUDA + 4  # more than those of which one is measured: both paths are warm


def steps_of(rank: int, world_size: int, sizes: dict[str, Any]) -> dict[str, Any]:
    """Seconds of each round's steps, [without, with], and the time inside the meter; the group's slowest rank."""
    device = torch.device("cuda", torch.cuda.current_device()) if sizes["device"] == "cuda" else torch.device("cpu")
    tokens, hidden = sizes["tokens"], sizes["hidden"]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    # One manager whose meter is taken out and put back: two would differ in where their memory lies, too.
    manager = tpo.UserBufferManager(None, (tokens, hidden), dtype, device, meter=True, tuning_cache=False)
    channel = manager.channel
    assert channel is not None and channel.meter is not None, "two ranks and meter=True"
    in_use = [channel.meter]
    layer = tpo.nn.LayerNormMLP(hidden, sizes["ffn"], manager=manager)
    rows = tpo.TokenPartition.balanced(tokens, world_size).counts[rank]
    generator = torch.Generator(device).manual_seed(rank)
    x = torch.randn(rows, hidden, device=device, dtype=dtype, generator=generator).requires_grad_()
    ones = torch.ones_like(x)

    def step(with_meter: bool) -> list[torch.Tensor]:
        channel.meter = in_use[0] if with_meter else None
        x.grad = None
        layer.zero_grad(set_to_none=True)
        with manager.microbatch(tokens):
            out = layer(x)
        out.backward(ones)
        assert x.grad is not None, "x wants a gradient"
        return [out.detach(), x.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]

    def timed(with_meter: bool) -> tuple[float, float]:
        """(wall, host) seconds."""
        _idle(device)
        dist.barrier()
        begin_s = time.perf_counter()
        step(with_meter)
        host_s = time.perf_counter() - begin_s
        _idle(device)
        return time.perf_counter() - begin_s, host_s

    try:
        for _ in range(WARM_UP):
            plain, metered = step(False), step(True)
            if len(plain) != len(metered) or not all(map(torch.equal, plain, metered)):
                raise AssertionError("meter=True changed the result: not timing wrong numbers")
        wall: list[list[float]] = [[], []]
        host: list[list[float]] = [[], []]
        for number in range(sizes["rounds"]):
            for which in (0, 1) if number % 2 else (1, 0):
                one = timed(bool(which))
                wall[which].append(one[0])
                host[which].append(one[1])
        channel.meter = in_use[0]
        stats = manager.stats()
        in_use[0] = Meter(device, every=1)  # so that every operation says what it marks
        direct_s = _direct_s(device, lambda: step(True))
        manager.check()
    finally:
        manager.close()
    metered_calls = sum(int(row.get("metered_calls", 0)) for row in stats.values())
    if not metered_calls:
        raise AssertionError("the meter measured nothing, so its cost would be that of nothing")
    own = {"wall": wall, "host": host, "direct_s": direct_s, "metered_calls": metered_calls}
    every: list[Any] = [None] * world_size
    dist.all_gather_object(every, own)
    slowest = {
        key: [[max(values) for values in zip(*(one[key][which] for one in every), strict=True)] for which in (0, 1)]
        for key in ("wall", "host")
    }
    return slowest | {
        "direct_s": max(one["direct_s"] for one in every),
        "metered_calls": metered_calls,
        "operations": sum(int(row["calls"]) for row in stats.values()) // 2,  # the others ran without the meter
    }


def _direct_s(device: torch.device, step: Callable[[], object]) -> float:
    """Seconds of the meter's calls in one step: written down during one, then made again without it."""
    script: list[tuple[int, Descriptor | None, str, int]] = []
    numbers: dict[int, int] = {}  # id of an operation -> its place; operations may lie inside one another
    original = Meter.of, MeteredOperation.mark
    kept: list[MeteredOperation | None] = []  # ids of what is gone would come again

    def of(meter: Meter, descriptor: Descriptor) -> MeteredOperation | None:
        operation = original[0](meter, descriptor)
        kept.append(operation)
        numbers[id(operation)] = len(kept) - 1
        script.append((len(kept) - 1, descriptor, "", 0))
        return operation

    def mark(operation: MeteredOperation, what: str, peer: int) -> None:
        script.append((numbers[id(operation)], None, what, peer))
        original[1](operation, what, peer)

    Meter.of, MeteredOperation.mark = of, mark  # type: ignore[method-assign]
    try:
        step()
        _idle(device)
    finally:
        Meter.of, MeteredOperation.mark = original  # type: ignore[method-assign]
    meter = Meter(device)
    operations: list[MeteredOperation | None] = [None] * len(kept)
    times = []
    for _ in range(_REPLAYS):
        _idle(device)
        begin_s = time.perf_counter()
        for _ in range(meter.every):  # each operation is measured once in so many steps
            for number, descriptor, what, peer in script:
                if descriptor is not None:
                    operations[number] = meter.of(descriptor)
                elif (operation := operations[number]) is not None:
                    operation.mark(what, peer)
        times.append((time.perf_counter() - begin_s) / meter.every)
    measured = sum(int(row["metered_calls"]) for row in meter.stats().values())
    if measured < (_REPLAYS - 1) * len(kept):
        raise AssertionError(f"{measured} operations were measured of {_REPLAYS} times {len(kept)}: not their cost")
    return median(times)


def _idle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def overhead(without: list[float], with_meter: list[float]) -> dict[str, Any]:
    """Percent by which a round's step with the meter is longer: median, its 95 % interval, and what that says."""
    percent = sorted(100.0 * (b / a - 1.0) for a, b in zip(without, with_meter, strict=True))
    count = len(percent)
    reach = math.ceil(0.98 * math.sqrt(count))  # 1.96 standard deviations of a fair coin's heads
    low, high = (percent[min(count - 1, max(0, count // 2 + sign * reach))] for sign in (-1, 1))
    verdict = "not decided: the rounds differ by more"
    if high < LIMIT_PERCENT:
        verdict = f"below {LIMIT_PERCENT:g} %"
    elif low > LIMIT_PERCENT:
        verdict = f"above {LIMIT_PERCENT:g} %"
    return {
        "without_us": round(1e6 * median(without), 1),
        "with_us": round(1e6 * median(with_meter), 1),
        "overhead_percent": round(median(percent), 3),
        "interval_percent": [round(low, 3), round(high, 3)],
        "verdict": verdict,
    }


def row_of(measured: dict[str, Any], sizes: dict[str, Any]) -> dict[str, Any]:
    """One T's row of the results file."""
    step = overhead(*measured["wall"])
    direct = 100.0 * 1e6 * measured["direct_s"] / step["without_us"]
    return {
        "num_tokens": sizes["tokens"],
        "rounds": sizes["rounds"],
        "bitwise_equal": True,
        "metered_calls": measured["metered_calls"],
        "operations": measured["operations"],
        "step": step,
        "host": overhead(*measured["host"]),
        "direct_us": round(1e6 * measured["direct_s"], 2),
        "direct_percent": round(direct, 3),
        "direct_is_below_limit": direct < LIMIT_PERCENT,
    }


def line_of(row: dict[str, Any]) -> str:
    """For the terminal."""
    parts = [
        f"{key} {row[key]['without_us']:.0f} us without, {row[key]['with_us']:.0f} with: "
        f"{row[key]['overhead_percent']:+.2f} % ({row[key]['interval_percent'][0]:+.2f} to "
        f"{row[key]['interval_percent'][1]:+.2f}), {row[key]['verdict']}"
        for key in ("step", "host")
    ]
    return (
        f"T {row['num_tokens']}: {'; '.join(parts)}; inside the meter {row['direct_us']:.1f} us a step, "
        f"{row['direct_percent']:.2f} %; {row['metered_calls']} of {row['operations']} operations metered"
    )


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Results, JSON.")
@click.option("--device", "device_type", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option("--hidden", type=int, help="[default: 8192 on cuda, 128 on cpu]")
@click.option("--ffn", type=int, help="[default: 28672 on cuda, 256 on cpu]")
@click.option("--tokens", default=None, metavar="T[,T..]", help="[default: 512,8192 on cuda, 64,1024 on cpu]")
@click.option("--rounds", type=click.IntRange(10, 100_000), default=200, show_default=True)
@click.option("--timeout", "timeout_s", type=float, default=240.0, show_default=True, metavar="S", help="For each T.")
def main(
    out: Path,
    device_type: str,
    hidden: int | None,
    ffn: int | None,
    tokens: str | None,
    rounds: int,
    timeout_s: float,
) -> None:
    """Measure the overhead of meter=True on two ranks."""
    on_gpu = device_type == "cuda"
    sizes = {
        "device": device_type,
        "hidden": hidden or (8192 if on_gpu else 128),
        "ffn": ffn or (28672 if on_gpu else 256),
        "rounds": rounds,
    }
    rows = []
    for one in (tokens or ("512,8192" if on_gpu else "64,1024")).split(","):
        asked = sizes | {"tokens": int(one)}
        measured = run_ranks(steps_of, 2, asked, device=device_type, timeout_s=timeout_s)[0]
        rows.append(row_of(measured, asked))
        click.echo(line_of(rows[-1]))
        data = {"suite": "meter cost", "environment": environment() | sizes, "rows": rows}
        out.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")  # after each T: the next one may fail


if __name__ == "__main__":
    main()
