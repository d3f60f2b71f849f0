"""What single calls cost the host on this machine: driver calls, torch calls, NCCL; before and after NCCL's first use.

``python -m benchmarks.driver_costs --out FILE`` on a host with two GPUs. The figures in docs/design/0005 come from this
script's throw-away predecessor (benchmarks/results/2026-11-30_h200x2_driver_costs.json), which did not measure twice.
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
import torch.distributed as dist

import tpoverlap as tpo
from tpoverlap.comm.device_streams import DeviceStream
from tpoverlap.testing import run_ranks
from tpoverlap.tools.bench.environment import environment

CALLS, CALLS_A_SYNC = 300, 40


def timed(call: Callable[[], object], synchronize: Callable[[], object]) -> float:
    """Median microseconds until ``call`` returns; the device is let idle now and then, so that no queue fills."""
    samples = []
    for number in range(CALLS):
        begin = time.perf_counter()
        call()
        samples.append(1e6 * (time.perf_counter() - begin))
        if number % CALLS_A_SYNC == 0:
            synchronize()
    synchronize()
    return round(median(samples), 2)


def driver_calls(manager: tpo.UserBufferManager) -> dict[str, Callable[[], object]]:
    """Calls on the caller's stream: memory operations, collected and submitted, and copies."""
    channel = manager.channel
    assert channel is not None and channel.transport.driver is not None, "two ranks on devices"
    driver, arena = channel.transport.driver, channel.arenas[0]
    stream = channel.caller_stream()
    assert isinstance(stream, DeviceStream), "a device's caller"
    words = driver.device_words(64).data_ptr()
    own, peer = arena.address(manager.rank), arena.address(1 - manager.rank)
    spare = arena.size_bytes - 4096  # the end of the last slot: no operation runs meanwhile

    def writes(address: int, count: int) -> Callable[[], object]:
        def call() -> None:
            for index in range(count):
                stream.write32(address + 4 * index, 1)
            stream.flush()

        return call

    def waits(count: int) -> Callable[[], object]:
        def call() -> None:
            for _ in range(count):
                stream.wait32(words, 0)
            stream.flush()

        return call

    return {
        "1 write, own": writes(words, 1),
        "4 writes, own": writes(words, 4),
        "1 write, peer": writes(peer + spare, 1),
        "4 writes, peer": writes(peer + spare, 4),
        "1 wait": waits(1),
        "4 waits": waits(4),
        "copy of 4 KiB to the peer": lambda: stream.copy_bytes(peer + spare, own + spare - 4096, 4096),
    }


def torch_calls(device: torch.device) -> dict[str, Callable[[], object]]:
    """What a method calls of torch."""
    a, b = (torch.randn(*shape, device=device, dtype=torch.bfloat16) for shape in ((256, 512), (512, 256)))
    out = torch.empty(256, 256, device=device, dtype=torch.bfloat16)
    calls: dict[str, Callable[[], object]] = {
        "torch.mm(out=)": lambda: torch.mm(a, b, out=out),
        "torch.addmm(out=)": lambda: torch.addmm(out, a, b, out=out),
        "new_empty": lambda: a.new_empty(256, 256),
        "slice": lambda: a[3:100],
    }
    if device.type == "cuda":
        event, other = torch.cuda.Event(), torch.cuda.Stream(device)
        event.record()
        calls |= {"event record": event.record, "wait for an event": lambda: other.wait_event(event)}
    return calls


def measure(rank: int, world_size: int) -> dict[str, dict[str, float]]:
    """Every call, before and after the first collective of NCCL, and that collective."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    found: dict[str, dict[str, float]] = {}
    with tpo.UserBufferManager(None, (4096, 512), device=device, tuning_cache=False, timeout_s=30.0) as manager:
        calls = driver_calls(manager) | torch_calls(device)
        found["before NCCL"] = {name: timed(call, torch.cuda.synchronize) for name, call in calls.items()}
        x, y = torch.ones(256, 512, device=device), torch.empty(512, 512, device=device)
        found["NCCL"] = {"all-gather": timed(lambda: dist.all_gather_into_tensor(y, x), torch.cuda.synchronize)}
        found["after NCCL"] = {name: timed(call, torch.cuda.synchronize) for name, call in calls.items()}
    return found


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True)
def main(out: Path) -> None:
    """Measure on two GPUs and write OUT."""
    if torch.cuda.device_count() < 2:
        raise click.ClickException(f"it needs two GPUs, torch sees {torch.cuda.device_count()}")
    ranks: list[Any] = run_ranks(measure, 2, device="cuda", timeout_s=120)
    out.write_text(json.dumps({"environment": environment(), "us_a_call": ranks}, indent=1) + "\n")
    for when, row in ranks[0].items():
        for name, value in row.items():
            click.echo(f"{when:12} {name:28} {value:8.2f} us")


if __name__ == "__main__":
    main()
