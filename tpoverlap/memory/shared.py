"""CPU shared memory: one memory-mapped file a rank, mapped by every rank, unlinked as soon as all have it.

Real shared pages: a store by one process is a load in another, with no collective in between. Files rather than
``multiprocessing.shared_memory``, whose resource tracker unlinks or warns depending on which process exits first;
unlinking at once means that not even SIGKILL leaves anything in /dev/shm, unless it comes within set-up itself.
"""

from __future__ import annotations

import mmap
import os
import secrets
import tempfile
from typing import TYPE_CHECKING

import numpy as np
import torch

from tpoverlap.errors import BackendUnavailableError
from tpoverlap.memory.base import Backend, CpuArena, agree, first_failure

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch.distributed import ProcessGroup

SHM_DIRECTORY = "/dev/shm"


class SharedArena(CpuArena):
    """Memory-mapped files; see `Arena` for the contract."""

    def __init__(self, rank: int, maps: list[mmap.mmap], size_bytes: int) -> None:
        self.rank = rank
        self.tp_size = len(maps)
        self.size_bytes = size_bytes
        self._maps: list[mmap.mmap] = maps
        self._words32 = [np.frombuffer(m, dtype=np.uint32) for m in maps]
        self._words64 = [np.frombuffer(m, dtype=np.uint64) for m in maps]
        self._bytes = [torch.frombuffer(m, dtype=torch.uint8) for m in maps]

    def bytes_of(self, rank: int) -> torch.Tensor:
        return self._bytes[rank]

    def words32(self, rank: int) -> NDArray[np.uint32]:
        return self._words32[rank]

    def words64(self, rank: int) -> NDArray[np.uint64]:
        return self._words64[rank]

    def close(self) -> None:
        # Only the references go: pages are unmapped when the last view of them is, so a view that somebody still
        # holds stays readable instead of becoming a segmentation fault.
        self._maps, self._words32, self._words64, self._bytes = [], [], [], []


class SharedMemoryBackend(Backend):
    """Arenas in CPU shared memory, for ranks on one host (and in one mount namespace)."""

    name = "shared"
    one_sided = True

    def allocate(self, size_bytes: int) -> SharedArena:
        size_bytes = -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        path, reason = None, None
        try:
            path = _create_file(size_bytes)
        except (OSError, OverflowError) as error:
            reason = f"cannot reserve {size_bytes} bytes of shared memory: {error}"
        maps: list[mmap.mmap] = []
        try:
            paths = agree(self.group, (path, reason))
            failed = next((f"rank {r}: {why}" for r, (_, why) in enumerate(paths) if why is not None), None)
            if failed is None:
                try:
                    maps = [_map_file(peer_path, size_bytes) for peer_path, _ in paths]
                except OSError as error:
                    reason = f"cannot map a peer's file: {error}; the ranks must share {SHM_DIRECTORY}"
                failed = first_failure(self.group, reason)
        finally:  # also when a peer dies meanwhile
            if path is not None:
                os.unlink(path)
        if failed is not None:
            raise BackendUnavailableError(
                f"backend 'shared': {failed}. Free or enlarge {SHM_DIRECTORY} (docker: --shm-size), lower the "
                "capacity, or use backend='process_group'"
            )
        return SharedArena(self.rank, maps, size_bytes)

    @classmethod
    def probe(cls, group: ProcessGroup, device: torch.device) -> str | None:
        if device.type != "cpu":
            return first_failure(group, f"device is {device}, shared memory is for cpu")
        try:
            arena = cls(group, device).allocate(mmap.PAGESIZE)
        except BackendUnavailableError as error:
            return str(error)
        token = secrets.randbits(63) | 1
        arena.words64(arena.rank)[0] = token
        tokens = agree(group, token)
        seen = [int(arena.words64(rank)[0]) for rank in range(arena.tp_size)]
        reason = None if seen == tokens else f"wrote {tokens}, but read {seen}: pages are not shared"
        failed = first_failure(group, reason)
        arena.close()
        return failed


def _create_file(size_bytes: int) -> str:
    directory = SHM_DIRECTORY if os.access(SHM_DIRECTORY, os.W_OK) else tempfile.gettempdir()
    descriptor, path = tempfile.mkstemp(prefix="tpoverlap-", dir=directory)
    try:
        # Reserve now: a sparse file in a full /dev/shm would be a SIGBUS at some later store.
        os.posix_fallocate(descriptor, 0, size_bytes)
    except (OSError, OverflowError):
        os.unlink(path)
        raise
    finally:
        os.close(descriptor)
    return path


def _map_file(path: str, size_bytes: int) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR)
    try:
        return mmap.mmap(descriptor, size_bytes)
    finally:
        os.close(descriptor)
