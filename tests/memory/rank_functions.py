"""What the tests of the memory backends run on ranks."""

from __future__ import annotations

import mmap
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import tpoverlap as tpo
from tpoverlap.memory import Backend, select_backend
from tpoverlap.memory.base import agree
from tpoverlap.memory.cuda import CudaSymmetricBackend
from tpoverlap.memory.process_group import ProcessGroupBackend
from tpoverlap.memory.shared import SHM_DIRECTORY, SharedMemoryBackend

BACKENDS: dict[str, type[Backend]] = {
    "shared": SharedMemoryBackend,
    "process_group": ProcessGroupBackend,
    "cuda": CudaSymmetricBackend,
}


def _device(name: str) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if name == "cuda" else torch.device("cpu")


def contract(rank: int, world_size: int, name: str) -> dict[str, Any]:
    """Everything that `Arena` and `Backend` promise; raises AssertionError where it is not so."""
    group, device = dist.group.WORLD, _device(name)
    kind = BACKENDS[name]
    assert kind.probe(group, device) is None
    backend = kind(group, device)
    assert (backend.name, backend.rank, backend.tp_size) == (name, rank, world_size)

    first, second = backend.allocate(5000), backend.allocate(100_000)
    for arena, asked in ((first, 5000), (second, 100_000)):
        assert (arena.rank, arena.tp_size) == (rank, world_size)
        own = arena.bytes_of(rank)
        assert own.dtype == torch.uint8 and own.device == device and own.numel() == arena.size_bytes >= asked
        assert int(own.count_nonzero()) == 0, "not zero-filled"
        assert own.data_ptr() % 64 == 0, "slots are aligned relative to the arena, so it must be aligned itself"
        sizes = agree(group, arena.size_bytes)
        assert len(set(sizes)) == 1, f"sizes differ: {sizes}"
    agree(group, None)  # nobody writes before all have looked

    view = first.view(rank, 256, (3, 4), torch.float32)
    assert view.shape == (3, 4) and view.is_contiguous() and view.dtype == torch.float32
    view.copy_(torch.arange(12.0).view(3, 4) + 100 * rank)
    assert first.view(rank, 256 + 4 * 4, (4,), torch.float32).tolist() == [100 * rank + v for v in (4.0, 5.0, 6.0, 7.0)]
    assert first.view(rank, 256, (24,), torch.bfloat16).data_ptr() == view.data_ptr(), "a view, not a copy"
    assert int(first.bytes_of(rank)[256 + 48 :].count_nonzero()) == 0, "it wrote outside its view"
    assert int(second.bytes_of(rank).count_nonzero()) == 0, "two allocations share memory"
    try:
        first.view(rank, first.size_bytes - 8, (3,), torch.float32)
    except AssertionError as error:
        assert "view ends" in str(error)
    else:
        raise AssertionError("a view that ends outside the arena was handed out")

    if device.type == "cuda":
        torch.cuda.synchronize()
    agree(group, None)
    peer = (rank + 1) % world_size
    if backend.one_sided:
        seen = first.view(peer, 256, (3, 4), torch.float32)
        assert torch.equal(seen.cpu(), torch.arange(12.0).view(3, 4) + 100 * peer), "what the peer wrote in its own"
        second.view(peer, 512, (2,), torch.int64).fill_(rank + 1)  # and what is written into the peer's
        if device.type == "cuda":
            torch.cuda.synchronize()
        agree(group, None)
        assert second.view(rank, 512, (2,), torch.int64).tolist() == [(rank - 1) % world_size + 1] * 2
    elif world_size > 1:
        try:
            first.bytes_of(peer)
        except tpo.BackendUnavailableError as error:
            assert f"rank {peer}" in str(error)
        else:
            raise AssertionError("a backend without mapped peers handed out a peer's bytes")
    agree(group, None)

    first.close()
    assert second.view(rank, 0, (1,), torch.uint8).numel() == 1, "closing one arena closed the other"
    first.close()
    second.close()
    second.close()
    return {"size_bytes": first.size_bytes}


def select(rank: int, world_size: int, name: str, device: str) -> tuple[str, str]:
    """(backend, reason), or (error type, message)."""
    try:
        choice = select_backend(name, dist.group.WORLD, torch.device(device))
    except tpo.TpOverlapError as error:
        return type(error).__name__, str(error)
    return choice.backend.name, choice.reason


def select_without(rank: int, world_size: int, broken: dict[str, int]) -> tuple[str, str]:
    """Choose by "auto" where ``broken[backend]`` is the one rank on which that backend cannot allocate."""
    with mock.patch.object(SharedMemoryBackend, "allocate", _broken(SharedMemoryBackend, broken.get("shared"))):
        failing = mock.patch.object(dist, "batch_isend_irecv", side_effect=RuntimeError("no route to host"))
        if "process_group" in broken:
            with failing:
                return select(rank, world_size, "auto", "cpu")
        return select(rank, world_size, "auto", "cpu")


def _broken(kind: type[Backend], bad_rank: int | None) -> Callable[..., Any]:
    original = kind.allocate

    def allocate(self: Backend, size_bytes: int) -> Any:
        if bad_rank is None:
            return original(self, size_bytes)
        from tpoverlap.memory.base import first_failure

        failed = first_failure(self.group, "a mount without shared memory" if self.rank == bad_rank else None)
        raise tpo.BackendUnavailableError(f"backend 'shared': {failed}")

    return allocate


def probe(rank: int, world_size: int, name: str, device: str) -> str | None:
    return BACKENDS[name].probe(dist.group.WORLD, torch.device(device))


@contextmanager
def no_collectives() -> Iterator[list[str]]:
    """Every collective and point-to-point function of torch.distributed raises; yields the names that were patched."""

    def refuse(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            raise AssertionError(f"torch.distributed.{name} was called: this should go through shared pages")

        return call

    words = ("all_", "gather", "scatter", "reduce", "broadcast", "barrier", "send", "recv", "monitored", "irecv")
    names = [n for n in dir(dist) if n.startswith(words) or "isend" in n or n.endswith(("_object", "_object_list"))]
    names = [n for n in names if callable(getattr(dist, n)) and not isinstance(getattr(dist, n), type)]
    with mock.patch.multiple(dist, **{name: refuse(name) for name in names}):
        modules = [dist.distributed_c10d]
        inner = {n: refuse(n) for n in names if hasattr(modules[0], n)}
        with mock.patch.multiple(modules[0], **inner):
            yield names


def write_and_read(rank: int, world_size: int) -> dict[str, Any]:
    """Rank 0 writes, the others see it, answer, and rank 0 sees that; nothing but memory in between."""
    arena = SharedMemoryBackend(dist.group.WORLD, torch.device("cpu")).allocate(4096)
    agree(dist.group.WORLD, "ready")
    with no_collectives() as names:
        try:
            dist.barrier()
        except AssertionError:
            pass
        else:
            raise AssertionError("the patch does not patch")
        if rank == 0:
            time.sleep(0.1)  # the readers are polling by now
            arena.view(0, 64, (4,), torch.float64).copy_(torch.tensor([1.5, -2.0, 3.25, 1e300], dtype=torch.float64))
            arena.words32(0)[0] = 7
            _poll(lambda: all(int(arena.words64(peer)[8]) == 100 + peer for peer in range(1, world_size)))
            seen = arena.view(0, 64, (4,), torch.float64).tolist()
        else:
            _poll(lambda: int(arena.words32(0)[0]) == 7)
            seen = arena.view(0, 64, (4,), torch.float64).tolist()
            arena.words64(rank)[8] = 100 + rank
    agree(dist.group.WORLD, "done")
    arena.close()
    return {"seen": seen, "patched": names}


def exchange_without_collectives(rank: int, world_size: int) -> list[float]:
    """A whole all-gather + GEMM and GEMM + reduce-scatter over shared memory, every collective patched to raise."""
    mgr = tpo.UserBufferManager(dist.group.WORLD, (12, 4), torch.float32, "cpu", backend="shared", timeout_s=20)
    x, eye = torch.full((2, 4), rank + 1.0), torch.eye(4)
    with no_collectives():
        y = tpo.all_gather_gemm(x, eye, mgr.layer("qkv"))
        z = tpo.gemm_reduce_scatter(y, eye, mgr.layer("proj"))
        mgr.close()
    assert z.shape == (2, 4)
    return [*y[:, 0].tolist(), *z[:, 0].tolist()]


def _poll(condition: Callable[[], bool], within_s: float = 10.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "what was written in one process does not appear in another"
        time.sleep(0.001)


def hold(rank: int, world_size: int, die: bool) -> dict[str, Any]:
    """What is mapped, and which of it still has a name, while an arena is in use; the last rank may be killed then."""
    before = _mapped_files()  # of an earlier test that failed, say
    arena = SharedMemoryBackend(dist.group.WORLD, torch.device("cpu")).allocate(10 * mmap.PAGESIZE)
    arena.bytes_of(rank).fill_(3)
    agree(dist.group.WORLD, None)
    mapped = sorted(_mapped_files() - before)
    agree(dist.group.WORLD, None)
    if die and rank == world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    named = [path for path in mapped if os.path.exists(path)]
    arena.close()
    return {"mapped": mapped, "named": named, "after_close": sorted(_mapped_files() - before)}


def _mapped_files() -> set[str]:
    """Files of the shared backend that this process maps, by the name they have or had."""
    paths = set()
    with open("/proc/self/maps", encoding="utf-8") as maps:
        for line in maps:
            if f"{SHM_DIRECTORY}/tpoverlap-" in line:
                paths.add(line.split(maxsplit=5)[5].strip().removesuffix(" (deleted)"))
    return paths


def allocate_too_much(rank: int, world_size: int, size_bytes: int, only_rank: int | None) -> tuple[str, str, list[str]]:
    """(error, message, files left); with ``only_rank`` the memory runs out on that rank alone."""
    backend = SharedMemoryBackend(dist.group.WORLD, torch.device("cpu"))
    created: list[str] = []
    original = tempfile.mkstemp

    def mkstemp(**kwargs: Any) -> tuple[int, str]:
        descriptor, path = original(**kwargs)
        created.append(path)
        return descriptor, path

    full = OSError(28, "No space left on device")
    outcome = "none", ""
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(tempfile, "mkstemp", mkstemp))
        if rank == only_rank:
            patches.enter_context(mock.patch.object(os, "posix_fallocate", side_effect=full))
        try:
            backend.allocate(size_bytes).close()
        except tpo.TpOverlapError as error:
            outcome = type(error).__name__, str(error)
    assert created, "no file was made: the test tests nothing"
    return *outcome, [path for path in created if os.path.exists(path)]


def memory_report(rank: int, world_size: int, backend: str, capacity: int, width: int) -> dict[str, Any]:
    with tpo.UserBufferManager(
        dist.group.WORLD, (capacity, width), torch.bfloat16, "cpu", backend=backend, timeout_s=30
    ) as mgr:
        report = mgr.memory_report()
        assert mgr.channel is not None
        report["arena_bytes"] = [arena.size_bytes for arena in mgr.channel.arenas]
        return report
