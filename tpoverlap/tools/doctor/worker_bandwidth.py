"""Probe processes that measure how fast ranks write into each other's memory: each pair alone, then all at once.

Standalone (see worker.py). Every rank owns one segment with a part for each source, and pushes from memory of its own:

======================  ==========================================================================================
``alone``               one rank pushes to one peer, everybody else waits
``both``                that rank and that peer push to each other
``all_at_once``         every rank pushes to all of its peers
======================  ==========================================================================================

On GPUs a push is a copy of symmetric memory by the copy engine, one stream a peer; on the CPU it is a memcpy through
shared pages, which says how fast this machine's memory is and nothing about a link between GPUs.
"""

from __future__ import annotations

import mmap
import os
import statistics
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

Emit = Callable[[str, dict[str, Any]], None]
Settings = dict[str, Any]
Push = Callable[[list[int]], float]
"""Push to these peers at once; seconds that it took."""

_ROUNDS = 5


def shared(settings: Settings, emit: Emit) -> None:
    """Over pages of ``settings["path"]``: ``num_ranks ** 2`` parts of ``part_bytes``, then a page of flags a rank."""
    rank, num_ranks, part_bytes = settings["rank"], settings["num_ranks"], settings["part_bytes"]
    flags_at = num_ranks * num_ranks * part_bytes
    with open(settings["path"], "r+b") as file:
        pages = mmap.mmap(file.fileno(), flags_at + num_ranks * mmap.PAGESIZE)
    source = bytes([rank + 1]) * part_bytes
    epoch = 0

    def meet() -> None:
        nonlocal epoch
        epoch += 1
        pages[flags_at + rank * mmap.PAGESIZE] = epoch % 256
        deadline = time.monotonic() + settings["timeout_s"]
        for peer in range(num_ranks):
            # A peer is at this epoch or already one further, never more: it waits for us there.
            while pages[flags_at + peer * mmap.PAGESIZE] not in (epoch % 256, (epoch + 1) % 256):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"rank {peer} did not come to meeting {epoch}")
                time.sleep(0)

    def push(peers: list[int]) -> float:
        begin_s = time.perf_counter()
        for peer in peers:
            at = (peer * num_ranks + rank) * part_bytes
            pages[at : at + part_bytes] = source
        return time.perf_counter() - begin_s

    emit("step", {"name": "push"})
    _measure(rank, num_ranks, part_bytes, push, meet, emit)
    for peer in range(num_ranks):
        at = (rank * num_ranks + peer) * part_bytes
        if peer != rank and pages[at : at + part_bytes] != bytes([peer + 1]) * part_bytes:
            raise RuntimeError(f"what rank {peer} wrote is not what arrived")


def cuda(settings: Settings, emit: Emit) -> None:
    """One rank a GPU, over torch symmetric memory."""
    if os.environ.get("TORCH_SYMM_MEM_DISABLE_MULTICAST") != "1":
        raise RuntimeError("refused: TORCH_SYMM_MEM_DISABLE_MULTICAST is not 1, rendezvous would create multicast")
    emit("step", {"name": "import torch"})
    import torch
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symm_mem

    rank, num_ranks, part_bytes = settings["rank"], settings["num_ranks"], settings["part_bytes"]
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    emit("step", {"name": "init_process_group('gloo')"})
    store = torch._C._distributed_c10d.FileStore(f"{settings['scratch']}/store", num_ranks)
    timeout = timedelta(seconds=settings["timeout_s"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timeout)
    group = dist.group.WORLD
    assert group is not None, "init_process_group did not set the default group"
    emit("step", {"name": "allocate and rendezvous"})
    mine = symm_mem.empty(num_ranks * part_bytes, dtype=torch.uint8, device=device)
    handle = symm_mem.rendezvous(mine, group.group_name)
    source = torch.full((part_bytes,), rank + 1, dtype=torch.uint8, device=device)
    peers = [peer for peer in range(num_ranks) if peer != rank]
    targets = {
        peer: handle.get_buffer(peer, (mine.numel(),), torch.uint8)[rank * part_bytes :][:part_bytes] for peer in peers
    }
    streams = {peer: torch.cuda.Stream(device) for peer in peers}  # type: ignore[no-untyped-call, unused-ignore]

    def meet() -> None:
        torch.cuda.synchronize(device)
        dist.barrier()

    def push(wanted: list[int]) -> float:
        begin_s = time.perf_counter()
        for peer in wanted:
            with torch.cuda.stream(streams[peer]):
                targets[peer].copy_(source, non_blocking=True)
        torch.cuda.synchronize(device)
        return time.perf_counter() - begin_s

    emit("step", {"name": "push"})
    _measure(rank, num_ranks, part_bytes, push, meet, emit)
    emit("step", {"name": "compare what arrived"})
    meet()
    for peer in peers:
        if not bool((mine[peer * part_bytes :][:part_bytes] == peer + 1).all()):
            raise RuntimeError(f"what rank {peer} wrote is not what arrived")
    emit("step", {"name": "leave"})
    meet()  # nobody's memory goes away while a peer may still write to it


def _measure(rank: int, num_ranks: int, part_bytes: int, push: Push, meet: Callable[[], None], emit: Emit) -> None:
    """Emit this rank's outgoing rates, 1e9 bytes/s: ``{"alone": {"1": ..}, "both": {"1": ..}, "all_at_once": ..}``."""

    def rate(pushers: Iterable[int], peers: list[int]) -> float | None:
        """Of this rank, the median over rounds; None where it does not push."""
        times = []
        for number in range(_ROUNDS + 1):
            meet()
            if rank in pushers:
                took_s = push(peers)
                if number:  # the first round touches the pages, and wakes the link
                    times.append(took_s)
        meet()
        return len(peers) * part_bytes / statistics.median(times) / 1e9 if times else None

    alone: dict[str, float] = {}
    both: dict[str, float] = {}
    for source in range(num_ranks):
        for target in range(num_ranks):
            if source == target:
                continue
            found = rate((source,), [target])
            if found is not None:
                alone[str(target)] = found
            if source < target:
                found = rate((source, target), [target if rank == source else source])
                if found is not None:
                    both[str(target if rank == source else source)] = found
    all_at_once = rate(range(num_ranks), [peer for peer in range(num_ranks) if peer != rank])
    emit("bandwidth", {"part_bytes": part_bytes, "alone": alone, "both": both, "all_at_once": all_at_once})
