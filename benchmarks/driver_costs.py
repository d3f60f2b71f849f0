"""What single calls cost the host on this machine: driver calls, torch calls, NCCL; before and after NCCL's first use.

``python -m benchmarks.driver_costs --out FILE`` on a host with two GPUs; ``--env NAME=VALUE`` measures once more with
that variable. Beside the calls stand a loop of Python alone (is the processor itself slower?), a system call, and what
each thread of the process consumed meanwhile (who else runs?).

What was found stands in docs/design/0009, from benchmarks/results/2026-11-30_h200x2_driver_costs.json.
"""

from __future__ import annotations

import ctypes
import json
import os
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
    assert channel is not None, "two ranks on devices"
    arena = channel.arenas[0]
    stream = channel.caller_stream()
    assert isinstance(stream, DeviceStream), "a device's caller"
    words_kept = torch.zeros(64, dtype=torch.int32, device=channel.device)
    torch.cuda.synchronize()  # zeroed before any stream writes
    words = words_kept.data_ptr()
    own, peer = arena.address(manager.rank), arena.address(1 - manager.rank)
    spare = arena.size_bytes - 4096  # the end of the last slot: no operation runs meanwhile

    def writes(address: int, count: int) -> Callable[[], object]:
        def call() -> None:
            for index in range(count):
                stream.write32(address + 4 * index, 1)
            stream.flush()

        return call

    def waits(count: int) -> Callable[[], object]:
        def call(_holds: torch.Tensor = words_kept) -> None:
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


def host_calls() -> dict[str, Callable[[], object]]:
    """Calls that need no GPU: they tell a slow processor or a contended interpreter lock from a slow driver."""
    libc = ctypes.CDLL(None)

    def loop() -> None:
        for _ in range(200):
            pass

    return {"200 turns of an empty loop": loop, "getppid": os.getppid, "ctypes getpid": libc.getpid}


def threads() -> dict[str, float]:
    """Seconds that each thread of this process has run, by its name and number."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            name = (task / "comm").read_text().strip()
            fields = (task / "stat").read_text().rsplit(")", 1)[1].split()
        except (OSError, IndexError):  # ended meanwhile, or a kernel that does not tell
            continue
        found[f"{name} {task.name}"] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return found


def throttled() -> str:
    """The control group's account of processor time withheld, where the kernel tells."""
    for file in ("/sys/fs/cgroup/cpu.stat", "/sys/fs/cgroup/cpu/cpu.stat"):
        if Path(file).exists():
            return Path(file).read_text()
    return "unknown"


def phase(calls: dict[str, Callable[[], object]]) -> dict[str, Any]:
    """Every call's median, and what the threads and the clock did meanwhile."""
    before, begin = threads(), time.perf_counter()
    medians: dict[str, Any] = {name: timed(call, torch.cuda.synchronize) for name, call in calls.items()}
    spent = {name: round(value - before.get(name, 0.0), 2) for name, value in threads().items()}
    medians["seconds of threads"] = {name: value for name, value in spent.items() if value > 0}
    medians["seconds"] = round(time.perf_counter() - begin, 2)
    medians["processors"] = len(os.sched_getaffinity(0))
    medians["throttled"] = throttled()
    return medians


def measure(rank: int, world_size: int) -> dict[str, dict[str, Any]]:
    """Every call, before and after the first collective of NCCL, and that collective."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    found: dict[str, dict[str, Any]] = {"alone": phase(host_calls() | torch_calls(device))}
    with tpo.UserBufferManager(None, (4096, 512), device=device, tuning_cache=False, timeout_s=30.0) as manager:
        calls = host_calls() | driver_calls(manager) | torch_calls(device)
        found["before NCCL"] = phase(calls)
        x, y = torch.ones(256, 512, device=device), torch.empty(512, 512, device=device)
        found["NCCL"] = phase({"all-gather": lambda: dist.all_gather_into_tensor(y, x)})
        found["after NCCL"] = phase(calls)
        time.sleep(1.0)
        found["a second later"] = phase(calls)
    found["manager closed"] = phase(host_calls() | torch_calls(device))
    return found


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True)
@click.option("--env", "variables", multiple=True, help="Measure once more with NAME=VALUE,NAME=VALUE...")
def main(out: Path, variables: tuple[str, ...]) -> None:
    """Measure on two GPUs and write OUT."""
    if torch.cuda.device_count() < 2:
        raise click.ClickException(f"it needs two GPUs, torch sees {torch.cuda.device_count()}")
    found: dict[str, Any] = {}
    for variant in ("", *variables):
        env = dict(item.split("=", 1) for item in variant.split(",") if item)
        ranks: list[Any] = run_ranks(measure, 2, device="cuda", timeout_s=120, env=env)
        found[variant or "as it is"] = ranks
        out.write_text(json.dumps({"environment": environment(), "us_a_call": found}, indent=1) + "\n")
        for when, row in ranks[0].items():
            for name, value in row.items():
                click.echo(f"{variant[:20]:20} {when:14} {name:28} {value}")


if __name__ == "__main__":
    main()
