"""For ranks that share no memory: a local arena; rows move by ``torch.distributed`` point-to-point (NCCL or Gloo)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tpoverlap.errors import BackendUnavailableError
from tpoverlap.memory.base import Arena, Backend, first_failure

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class LocalArena(Arena):
    """This rank's allocation only: peers' bytes cannot be reached."""

    def __init__(self, rank: int, tp_size: int, size_bytes: int, device: torch.device) -> None:
        self.rank = rank
        self.tp_size = tp_size
        self.size_bytes = size_bytes
        self._bytes: torch.Tensor | None = torch.zeros(size_bytes, dtype=torch.uint8, device=device)

    def bytes_of(self, rank: int) -> torch.Tensor:
        if rank != self.rank:
            raise BackendUnavailableError(
                f"backend 'process_group' maps no peer memory: rank {self.rank} cannot reach the bytes of rank {rank}"
            )
        assert self._bytes is not None, "arena used after close"
        return self._bytes

    def close(self) -> None:
        self._bytes = None


class ProcessGroupBackend(Backend):
    """Point-to-point messages over an existing process group."""

    name = "process_group"
    one_sided = False

    def allocate(self, size_bytes: int) -> LocalArena:
        arena, reason = None, None
        try:
            arena = LocalArena(self.rank, self.tp_size, size_bytes, self.device)
        except (RuntimeError, MemoryError) as error:
            reason = f"cannot allocate {size_bytes} bytes on {self.device}: {error}"
        failed = first_failure(self.group, reason)
        if failed is not None or arena is None:
            raise BackendUnavailableError(f"backend 'process_group': {failed}; lower the capacity")
        return arena

    @classmethod
    def probe(cls, group: ProcessGroup, device: torch.device) -> str | None:
        """Pass a byte round the ring."""
        import torch.distributed as dist

        rank, size = group.rank(), group.size()
        reason = None
        if size > 1:
            try:
                outgoing = torch.full((1,), rank, dtype=torch.int64, device=device)
                incoming = torch.full_like(outgoing, -1)
                works = dist.batch_isend_irecv(
                    [
                        dist.P2POp(dist.isend, outgoing, group=group, group_peer=(rank + 1) % size),
                        dist.P2POp(dist.irecv, incoming, group=group, group_peer=(rank - 1) % size),
                    ]
                )
                for work in works:
                    work.wait()
                if int(incoming.item()) != (rank - 1) % size:
                    reason = f"received {int(incoming.item())} from rank {(rank - 1) % size}"
            except (RuntimeError, ValueError) as error:
                reason = f"point-to-point messages fail on {device}: {error}"
        return first_failure(group, reason)
