"""The contract of a memory backend.

A backend gives every rank of a group one *arena* of equal size. One-sided backends (``shared``, ``cuda``) map every
rank's arena into every process, so a rank writes straight into its peers' memory. The ``process_group`` backend has
no such mapping: its arena is local, and `comm` moves rows with point-to-point messages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tpoverlap.errors import PeerTimeoutError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch.distributed import ProcessGroup

    from tpoverlap.memory.driver import DeviceDriver


class Arena(ABC):
    """Equal allocations, one a rank, zero-filled when the constructor returns on any rank.

    Attributes:
        rank: this rank in the group.
        tp_size: R, ranks of the group.
        size_bytes: size of one rank's allocation.
    """

    rank: int
    tp_size: int
    size_bytes: int

    @abstractmethod
    def bytes_of(self, rank: int) -> torch.Tensor:
        """The allocation of ``rank`` as a flat uint8 tensor, without copying.

        Raises:
            BackendUnavailableError: ``rank`` is a peer and this backend does not map peers.
        """

    def address(self, rank: int) -> int:
        """Address, in this process and for its device, of the first byte of the allocation of ``rank``."""
        return self.bytes_of(rank).data_ptr()

    @abstractmethod
    def close(self) -> None:
        """Release the mapping. Local and idempotent; views handed out before must not be used after."""

    def view(self, rank: int, offset_bytes: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A typed, contiguous view of ``shape`` that starts ``offset_bytes`` into the allocation of ``rank``."""
        size_bytes = dtype.itemsize
        for length in shape:
            size_bytes *= length
        end = offset_bytes + size_bytes
        assert end <= self.size_bytes, f"view ends at byte {end} of an arena of {self.size_bytes}"
        return self.bytes_of(rank)[offset_bytes:end].view(dtype).view(shape)


class CpuArena(Arena):
    """An arena in host memory: its control words are also numpy arrays, which are cheap to poll."""

    @abstractmethod
    def words32(self, rank: int) -> NDArray[np.uint32]:
        """The allocation of ``rank`` as 32-bit words."""

    @abstractmethod
    def words64(self, rank: int) -> NDArray[np.uint64]:
        """The allocation of ``rank`` as 64-bit words."""


class Backend(ABC):
    """Allocates arenas for the ranks of one process group.

    Attributes:
        name: "shared", "cuda" or "process_group".
        one_sided: whether peers' memory is mapped (and the flag protocol of docs/protocol.md applies).
    """

    name: str
    one_sided: bool

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.device = device
        self.rank = group.rank()
        self.tp_size = group.size()

    @abstractmethod
    def allocate(self, size_bytes: int) -> Arena:
        """A new arena. Collective: every rank calls it with the same size, and no rank returns before all have it.

        Raises:
            BackendUnavailableError: the memory cannot be had or shared; on every rank alike.
        """

    @property
    def ranges(self) -> bool:
        """Whether somebody takes NVTX ranges."""
        if self.device.type != "cuda":
            return False
        from tpoverlap.memory.cuda_driver import is_profiled

        return is_profiled()

    def driver(self) -> DeviceDriver | None:
        """The driver of the device that this backend's memory is on; None on a CPU. Made once a manager.

        Raises:
            BackendUnavailableError: it cannot do what the flags need.
        """
        if self.device.type != "cuda":
            return None
        from tpoverlap.memory.cuda_driver import CudaDriver

        return CudaDriver(self.device)

    @classmethod
    @abstractmethod
    def probe(cls, group: ProcessGroup, device: torch.device) -> str | None:
        """Try it for real, on a few bytes. None when it works, else the reason. Collective; all ranks answer alike."""


def agree(group: ProcessGroup, value: Any) -> list[Any]:
    """``value`` of every rank, in rank order. Collective, host-side, only used at set-up.

    Raises:
        PeerTimeoutError: a rank died, or the group's own time-out ended the wait for it. (No ``timeout_s`` yet.)
    """
    import torch.distributed as dist

    values: list[Any] = [None] * group.size()
    try:
        dist.all_gather_object(values, value, group=group)
    except RuntimeError as error:
        ranks = dist.get_process_group_ranks(group)
        raise PeerTimeoutError(
            f"rank {group.rank()} waited for the other ranks of its group (global ranks {ranks}) in a step of the "
            f"set-up (a new manager, register), and one of them died or did not come; its log has the cause: {error}"
        ) from error
    return values


def first_failure(group: ProcessGroup, reason: str | None) -> str | None:
    """The first rank's reason for not working, with its rank, or None when it works everywhere. Collective."""
    for rank, other in enumerate(agree(group, reason)):
        if other is not None:
            return f"rank {rank}: {other}"
    return None
