"""What stands between two GEMMs of one stream costs the device: memory operations, events, small kernels.

``python -m benchmarks.gaps --out FILE`` takes 20 s on one GPU. A chain of GEMMs with one thing behind each, queued
behind a delay, so that no launch is waited for; reported is what the chain takes longer than the GEMMs alone, us a
boundary: median and range of the rounds.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from statistics import median

import click
import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from benchmarks.environment import environment
from tpoverlap.comm.device_streams import DeviceStream
from tpoverlap.memory.cuda_driver import CudaDriver

ROWS, INNER, FEATURES, CHAIN, DELAY_CYCLES = 1024, 8192, 1280, 40, 60_000_000


@triton.jit
def write_word(words, AHEAD: tl.constexpr):  # type: ignore[no-untyped-def]
    """As `tpoverlap.gemm.triton.trade_gather` begins."""
    if AHEAD:
        gdc_wait()
    tl.store(words, 1)


class Boundary:
    """Everything that may stand between two GEMMs."""

    def __init__(self, device: torch.device) -> None:
        self.driver = CudaDriver(device)
        self.stream = torch.cuda.Stream(device)
        self.other = torch.cuda.Stream(device, priority=-1)
        self.device = device
        self.own = DeviceStream("own", self.driver, self.stream.cuda_stream)
        self.comm = DeviceStream("comm", self.driver, self.other.cuda_stream)
        self.words = torch.zeros(1024, dtype=torch.int32, device=device)
        self.host = self.driver.host_words(64)
        self.count = 0
        self.a = torch.randn(ROWS, INNER, device=device).bfloat16()
        self.b = torch.randn(FEATURES, INNER, device=device).bfloat16().t()
        self.out = torch.empty(ROWS, FEATURES, device=device, dtype=torch.bfloat16)

    def kinds(self) -> dict[str, Callable[[], object]]:
        """By name; each is called on `stream`."""
        at, own, comm = self.words.data_ptr(), self.own, self.comm
        event = torch.cuda.Event()

        def writes(count: int, address: int = at) -> Callable[[], object]:
            def call() -> None:
                for index in range(count):
                    own.write32(address + 4 * index, 1)
                own.flush()

            return call

        def waits(count: int) -> Callable[[], object]:
            def call() -> None:
                for _ in range(count):
                    own.wait32(at + 512, 0)
                own.flush()

            return call

        def wait_and_end() -> None:
            own.wait32(at + 512, 0)
            own.write32(at, 1)
            own.write32(self.host.address, 1)
            own.flush()

        def fork_by_word() -> None:
            self.count += 1
            own.write32(at + 256, self.count)
            own.flush()
            comm.wait32(at + 256, self.count)
            comm.flush()

        def fork_by_event() -> None:
            event.record(self.stream)
            self.other.wait_event(event)

        def join_by_event() -> None:
            fork_by_event()
            event.record(self.other)
            self.stream.wait_event(event)

        return {
            "nothing": lambda: None,
            "1 write": writes(1),
            "3 writes": writes(3),
            "1 write to the host": writes(1, self.host.address),
            "1 wait": waits(1),
            "5 waits": waits(5),
            "wait, write, write to the host": wait_and_end,
            "event": lambda: event.record(self.stream),
            "fork by word": fork_by_word,
            "fork by event": fork_by_event,
            "fork and join by events": join_by_event,
            **self.kernels(),
        }

    def kernels(self) -> dict[str, Callable[[], object]]:
        """A kernel of one program that writes a word, in the ordinary way and launched ahead of its turn."""
        return {
            "kernel": lambda: write_word[(1,)](self.words, False, num_warps=1),
            "kernel, ahead": lambda: write_word[(1,)](self.words, True, num_warps=1, launch_pdl=True),
        }

    def chain_us(self, between: Callable[[], object]) -> float:
        """Of one GEMM and one boundary."""
        torch.cuda.synchronize()
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(DELAY_CYCLES)
            first.record()
            for _ in range(CHAIN):
                torch.mm(self.a, self.b, out=self.out)
                between()
            last.record()
        torch.cuda.synchronize()
        return first.elapsed_time(last) * 1e3 / CHAIN


@click.command()
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), required=True, help="A JSON file.")
@click.option("--rounds", default=7, show_default=True)
def main(out: Path, rounds: int) -> None:
    """Measure every kind of boundary."""
    device = torch.device("cuda", 0)
    boundary = Boundary(device)
    kinds = boundary.kinds()
    found: dict[str, list[float]] = {name: [] for name in kinds}
    for between in kinds.values():
        boundary.chain_us(between)
    for _ in range(rounds):
        for name, between in kinds.items():
            found[name].append(boundary.chain_us(between))
    alone = median(found["nothing"])
    rows = {
        name: {"us": median(times) - alone, "least": min(times) - alone, "most": max(times) - alone}
        for name, times in found.items()
    }
    for name, row in rows.items():
        click.echo(f"{name:32} {row['us']:6.2f}  ({row['least']:.2f} to {row['most']:.2f})")
    out.write_text(json.dumps({"environment": environment(), "gemm_us": alone, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
