"""NVIDIA GPUs: torch symmetric memory. Every call of that alpha API in tpoverlap is in this file.

One allocation of fixed size an arena, sliced by `ArenaLayout`; never a memory pool, whose reuse order can corrupt
data silently (pytorch#190977). Multicast is not used.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from tpoverlap.errors import BackendUnavailableError
from tpoverlap.memory.base import Arena, Backend, agree, first_failure

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class CudaArena(Arena):
    """Peer-mapped device memory; see `Arena` for the contract."""

    def __init__(self, allocation: torch.Tensor, handle: Any) -> None:
        self.rank = handle.rank
        self.tp_size = handle.world_size
        self.size_bytes = allocation.numel()
        self._allocation: torch.Tensor | None = allocation
        self._handle: Any = handle
        self._bytes = [
            allocation if rank == handle.rank else handle.get_buffer(rank, (self.size_bytes,), torch.uint8)
            for rank in range(handle.world_size)
        ]
        self._addresses = [int(view.data_ptr()) for view in self._bytes]

    def bytes_of(self, rank: int) -> torch.Tensor:
        return self._bytes[rank]

    def address(self, rank: int) -> int:
        return self._addresses[rank]

    @property
    def multicast(self) -> bool:
        """Whether the handle has a multicast mapping (tpoverlap does not use it; `doctor` reports it)."""
        return bool(self._handle is not None and self._handle.multicast_ptr)

    def close(self) -> None:
        self._bytes, self._addresses, self._handle, self._allocation = [], [], None, None


class CudaSymmetricBackend(Backend):
    """Arenas in torch symmetric memory, for GPUs that can map each other's memory (one NVLink domain)."""

    name = "cuda"
    one_sided = True

    def allocate(self, size_bytes: int) -> CudaArena:
        import torch.distributed._symmetric_memory as symm_mem

        allocation, reason = None, None
        try:
            with torch.cuda.device(self.device):
                allocation = symm_mem.empty(size_bytes, dtype=torch.uint8, device=self.device)
                allocation.zero_()
                torch.cuda.synchronize(self.device)
        except RuntimeError as error:
            reason = f"cannot allocate {size_bytes} bytes of symmetric memory on {self.device}: {error}"
        failed = first_failure(self.group, reason)
        arena = None
        if failed is None and allocation is not None:
            try:
                with _no_multicast():
                    arena = CudaArena(allocation, symm_mem.rendezvous(allocation, self.group.group_name))
            except RuntimeError as error:
                reason = f"rendezvous failed on {self.device}: {error}"
            failed = first_failure(self.group, reason)
        if failed is not None or arena is None:
            raise BackendUnavailableError(
                f"backend 'cuda': {failed}. `tpoverlap doctor` shows what works here; "
                "backend='process_group' needs no peer memory"
            )
        return arena

    @classmethod
    def probe(cls, group: ProcessGroup, device: torch.device) -> str | None:
        """Write a token into every peer's memory, with a copy and with a stream memory operation, and read it back."""
        if device.type != "cuda":
            return first_failure(group, f"device is {device}, symmetric memory is for cuda")
        reason = None
        try:
            from cuda.bindings import driver  # noqa: F401  (stream memory operations need it)
        except ImportError as error:
            reason = f"cuda.bindings is missing ({error}); pip install cuda-bindings"
        failed = first_failure(group, reason)
        if failed is not None:
            return failed
        try:
            arena = cls(group, device).allocate(4096)
        except BackendUnavailableError as error:
            return str(error)
        try:
            reason = _exchange_tokens(arena, device, group)
        except RuntimeError as error:
            reason = str(error)
        failed = first_failure(group, reason)
        arena.close()
        return failed


@contextmanager
def _no_multicast() -> Iterator[None]:
    # Rendezvous makes a multicast object wherever the device can; nothing here uses it, and on shared hosts it has put
    # GPUs out of service. This variable is torch's only switch.
    name = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _exchange_tokens(arena: CudaArena, device: torch.device, group: ProcessGroup) -> str | None:
    from cuda.bindings import driver

    stream = torch.cuda.current_stream(device)
    for peer in range(arena.tp_size):
        token = torch.tensor([1000 + arena.rank], dtype=torch.int32, device=device)
        arena.view(peer, 4 * arena.rank, (1,), torch.int32).copy_(token)
        (status,) = driver.cuStreamWriteValue32(
            driver.CUstream(stream.cuda_stream), arena.address(peer) + 2048 + 4 * arena.rank, 2000 + arena.rank, 0
        )
        if status != driver.CUresult.CUDA_SUCCESS:
            return f"cuStreamWriteValue32 into the memory of rank {peer} failed: {status}"
    torch.cuda.synchronize(device)
    agree(group, None)
    for offset, base in ((0, 1000), (2048, 2000)):
        seen = arena.view(arena.rank, offset, (arena.tp_size,), torch.int32).tolist()
        wanted = [base + rank for rank in range(arena.tp_size)]
        if seen != wanted:
            return f"peers wrote {wanted}, but {seen} was read"
    return None
