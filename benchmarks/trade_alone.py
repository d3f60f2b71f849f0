"""The kernels that exchange few rows, on one GPU: two ranks' buffers in one process, their launches on two streams.

``python -m benchmarks.trade_alone --out FILE`` takes half a minute. Both "ranks" write into the same GPU's memory, so
what is measured is what the kernels cost without a link: launch, flags, counters, copies and sums. Results are compared
first. Times are us of device time an exchange, queued behind a delay: median of ``--rounds``, and the least.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.environment import environment
from tpoverlap.comm.device_streams import DeviceStream
from tpoverlap.gemm.triton.gates import TradeSlot
from tpoverlap.gemm.triton.trade_launcher import TradeLauncher
from tpoverlap.memory.cuda_driver import CudaDriver

TOKENS, WIDTHS, CALLS = (16, 64, 128, 256, 512, 1024), (4096, 8192), 40
_WORDS, _RING_BYTES, _DELAY_CYCLES = 64, 1024, 20_000_000
Launch = Callable[[int], None]


def _give(words: DeviceStream, address: int, epoch: int) -> None:
    words.write32(address, epoch)
    words.flush()


class Pair:
    """Memory of two ranks of one region with one slot, and their streams."""

    def __init__(self, slot_bytes: int, device: torch.device) -> None:
        def zeros(count: int) -> list[torch.Tensor]:
            return [torch.zeros(count, dtype=torch.int32, device=device) for _ in range(2)]

        self.data = [torch.zeros(slot_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
        self.arrivals, self.credits = zeros(2 * _WORDS), zeros(2)
        self.descriptors, self.done = zeros(2 * _RING_BYTES // 4), zeros(1)
        self.streams = [torch.cuda.Stream(device) for _ in range(2)]
        self.launchers = [TradeLauncher(device, 5.0) for _ in range(2)]
        self.slots = [
            TradeSlot(
                rank,
                tuple(one.data_ptr() for one in self.data),
                tuple(words.data_ptr() + 4 * _WORDS * rank for words in self.arrivals),
                tuple(words.data_ptr() + _RING_BYTES * rank for words in self.descriptors),
                tuple(words.data_ptr() + 4 * rank for words in self.credits),
                self.arrivals[rank].data_ptr(),
                self.credits[rank].data_ptr(),
                self.descriptors[rank].data_ptr(),
                4 * _WORDS,
                _RING_BYTES,
                1,
                slot_bytes,
            )
            for rank in range(2)
        ]
        self.epoch = 0
        self.driver = CudaDriver(device)

    def gathers(self, x: torch.Tensor) -> list[Launch]:
        """Of both ranks: rows of ``x`` into both slots; then, of both, the credits: one hardware queue is enough."""
        half = x.shape[0] // 2
        launches: list[Launch] = []
        ends: list[Launch] = []
        for rank, (launcher, slot, stream) in enumerate(zip(self.launchers, self.slots, self.streams, strict=True)):
            own = x[rank * half : (rank + 1) * half]
            with torch.cuda.stream(stream):
                row_bytes, handle = x.shape[1] * x.element_size(), stream.cuda_stream
                trade = launcher.gather((half, half), row_bytes, x.element_size(), slot, True, handle)

            at, words = own.data_ptr(), DeviceStream(f"rank {rank}", self.driver, handle)
            launches.append(lambda e, start=trade.start, at=at: start(at, e, e, e + 7, e % 64 * 16))  # type: ignore[misc]
            ends.append(lambda e, words=words, to=slot.grants[1 - rank]: _give(words, to, e))  # type: ignore[misc]
        return launches + ends

    def scatters(self, partials: list[torch.Tensor], outs: list[torch.Tensor]) -> list[Launch]:
        """Of both ranks: ``outs`` become the sums of own rows."""
        half, width = outs[0].shape
        launches: list[Launch] = []
        for rank, (launcher, slot, stream) in enumerate(zip(self.launchers, self.slots, self.streams, strict=True)):
            with torch.cuda.stream(stream):
                dtype, handle = outs[0].dtype, stream.cuda_stream
                trade = launcher.scatter((half, half), width, dtype, slot, True, False, handle)
            places, word = (partials[rank].data_ptr(), outs[rank].data_ptr(), 0), self.done[rank].data_ptr()
            launches.append(
                lambda e, start=trade.start, places=places, word=word: start(
                    *places, e, e, e + 7, e % 64 * 16, word, e, 1
                )
            )
        return launches

    def time_us(self, launches: list[Launch], calls: int = CALLS) -> float:
        """Of one exchange, on the slower stream."""
        torch.cuda.synchronize()
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(2)]
        for stream, pair in zip(self.streams, events, strict=True):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(_DELAY_CYCLES)
                pair[0].record()
        for _ in range(calls):
            self.epoch += 1
            for launch in launches:
                launch(self.epoch)
        for stream, pair in zip(self.streams, events, strict=True):
            with torch.cuda.stream(stream):
                pair[1].record()
        torch.cuda.synchronize()
        return max(pair[0].elapsed_time(pair[1]) for pair in events) * 1e3 / calls


def row(tokens: int, width: int, rounds: int, device: torch.device) -> dict[str, Any]:
    """Both directions at one size, right numbers first."""
    pair = Pair(tokens * width * 2, device)
    x = torch.randn(tokens, width, device=device).bfloat16()
    partials = [torch.randn(tokens, width, device=device).bfloat16() for _ in range(2)]
    outs = [torch.full_like(x[: tokens // 2], float("nan")) for _ in range(2)]
    gathers, scatters = pair.gathers(x), pair.scatters(partials, outs)
    pair.time_us(gathers, 3)
    right = all(torch.equal(data.view(torch.bfloat16).view_as(x), x) for data in pair.data)
    pair.time_us(scatters, 3)
    wanted = (partials[0] + partials[1]).view(2, *outs[0].shape)
    right = right and all(torch.equal(out, want) for out, want in zip(outs, wanted, strict=True))
    given_up = any(int(launcher.error[0]) for launcher in pair.launchers)
    found: dict[str, Any] = {"T": tokens, "width": width, "right": right, "given_up": given_up}
    for name, launches in (("gather", gathers), ("scatter", scatters)):
        times = [pair.time_us(launches) for _ in range(rounds)]
        found |= {f"{name}_us": round(median(times), 2), f"{name}_least_us": round(min(times), 2)}
    return found


def main(given: Sequence[str] | None = None) -> int:
    """Run, print a line a size, write the file; 1 if a result was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args(given)
    started, device, rows = time.monotonic(), torch.device("cuda", 0), []
    for width in WIDTHS:
        for tokens in TOKENS:
            rows.append(row(tokens, width, arguments.rounds, device))
            print(rows[-1], flush=True)
    content = {"format": "trade alone", "environment": environment(), "rows": rows}
    content["seconds"] = round(time.monotonic() - started, 1)
    arguments.out.write_text(json.dumps(content, indent=1, default=str))
    return 0 if all(one["right"] and not one["given_up"] for one in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
