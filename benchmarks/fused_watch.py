"""A thread that notices when a rank's GPU work stops, writes down what every word holds, and ends the process.

For `benchmarks.fused_probe`: a hang of spinning kernels leaves nothing behind unless somebody looks while it lasts.
"""

from __future__ import annotations

import faulthandler
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tpoverlap.manager import UserBufferManager

STALLED_EXIT_CODE = 71
_TICK_S = 0.2
_PEER_LOOKS_S = 4.0
"""The other rank has stalled too, at nearly the same time; nobody leaves before both have looked."""


class StallWatch:
    """Call `beat` whenever work has finished; ``stall_s`` without one is a stall.

    Args:
        path: a file of this rank's own for what was seen.
    """

    def __init__(self, rank: int, path: Path, stall_s: float) -> None:
        self._rank, self._path, self._stall_s = rank, path, stall_s
        self._last, self._what = time.monotonic(), "start"
        self._managers: list[UserBufferManager] = []
        self._stopped = threading.Event()
        self._stacks = path.with_suffix(".stacks").open("w")
        # Even if this thread cannot run because native code holds the GIL.
        faulthandler.dump_traceback_later(stall_s + 8.0, file=self._stacks, repeat=False)
        threading.Thread(target=self._run, daemon=True).start()

    def look_at(self, manager: UserBufferManager) -> None:
        """Its words, and no other manager's, are written down if there is a stall."""
        self._managers = [manager]

    def beat(self, what: str) -> None:
        """Everything before ``what`` is done."""
        self._last, self._what = time.monotonic(), what
        faulthandler.cancel_dump_traceback_later()
        faulthandler.dump_traceback_later(self._stall_s + 8.0, file=self._stacks, repeat=False)

    def stop(self) -> None:
        """All is done."""
        self._stopped.set()
        faulthandler.cancel_dump_traceback_later()

    def _run(self) -> None:
        while not self._stopped.wait(_TICK_S):
            if time.monotonic() - self._last > self._stall_s:
                faulthandler.dump_traceback(self._stacks, all_threads=True)
                self._stacks.flush()
                seen: dict[str, Any] = {"rank": self._rank, "during": self._what, "stall_s": self._stall_s}
                self._path.write_text(json.dumps(seen, indent=1))
                seen["managers"] = [_looked(lambda m=m: words_of(m)) for m in self._managers]
                self._path.write_text(json.dumps(seen, indent=1))
                time.sleep(_PEER_LOOKS_S)
                os._exit(STALLED_EXIT_CODE)


def words_of(manager: UserBufferManager) -> dict[str, Any]:
    """Host's and device's view of one manager, read beside the blocked streams."""
    channel = manager.channel
    assert channel is not None, "R = 1 does not stall"
    read = _reader(channel.device)
    seen: dict[str, Any] = {
        "in flight": [
            (entry.descriptor.sequence, entry.descriptor.label, entry.descriptor.num_tokens)
            for entry in list(channel._in_flight.values())
        ][-4:],
        "fault": repr(channel.fault.error),
    }
    if channel.device.type == "cuda":
        streams = {"default": torch.cuda.default_stream(channel.device)}
        seen["streams idle"] = {name: stream.query() for name, stream in streams.items()}
    seen["regions"] = {name: _looked(lambda n=name: _region_words(channel, n, read)) for name in channel.regions}
    seen["descriptors"] = _looked(lambda: _descriptors(channel, read))
    for name, resource in channel._resources.items():
        if hasattr(resource, "counters"):
            seen[name] = _looked(lambda r=resource: _counters(r, read))
    return seen


def _looked(look: Callable[[], Any]) -> Any:
    try:
        return look()
    except Exception as error:
        return repr(error)


def _reader(device: torch.device) -> Callable[[int, int], list[int]]:
    """(address, number of words) -> 32-bit words there, whatever the streams do."""
    if device.type == "cpu":
        import ctypes

        return lambda address, count: list((ctypes.c_uint32 * count).from_address(address))
    from tpoverlap.memory.cuda_side_channel import SideChannel

    side = SideChannel(device)

    def read(address: int, count: int) -> list[int]:
        into = torch.zeros(4 * count, dtype=torch.uint8, pin_memory=True)
        side.read(address, into)
        return [word % (1 << 32) for word in into.view(torch.int32).tolist()]

    return read


def _region_words(channel: Any, name: str, read: Callable[[int, int], list[int]]) -> dict[str, Any]:
    region = channel.regions[name]
    layout, base = region.layout, region.arena.bytes_of(channel.rank).data_ptr()
    found: dict[str, Any] = {"uses": region.uses, "slot of the last use": region.uses % region.depth}
    for slot in range(region.depth):
        for source in range(channel.tp_size):
            if source != channel.rank:
                arrived = read(base + layout.arrival_offset(region.index, slot, source, 0), 64)
                found[f"slot {slot}, arrivals from {source}"] = arrived
                (credit,) = read(base + layout.credit_offset(region.index, slot, source), 1)
                found[f"slot {slot}, credit of {source}"] = credit
    return found


def _descriptors(channel: Any, read: Callable[[int, int], list[int]]) -> dict[str, Any]:
    layout = channel.arenas[0]
    region = next(iter(channel.regions.values()))
    layout, base = region.layout, channel.arenas[0].bytes_of(channel.rank).data_ptr()
    found = {}
    for sequence in range(max(1, channel._sequence - 2), channel._sequence + 1):
        for source in range(channel.tp_size):
            if source != channel.rank:
                words = read(base + layout.descriptor_offset(source, sequence), 4)
                found[f"{sequence} of {source}"] = [f"{word:08x}" for word in words]
    return found


def _counters(resource: Any, read: Callable[[int, int], list[int]]) -> dict[str, Any]:
    counters = resource.counters
    turn = (counters._uses - 1) % len(counters._totals)
    row = counters._counters[turn]
    words = read(row.data_ptr(), row.numel())
    wanted = counters._totals[turn]
    return {
        "uses": counters._uses,
        "word: (counted, wanted)": {
            str(word): (words[word], wanted[word]) for word in range(len(words)) if words[word] or wanted[word]
        },
        "gave up": resource.launcher.gave_up,
    }
