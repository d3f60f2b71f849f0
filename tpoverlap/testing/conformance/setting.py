"""Where and at which sizes a check runs, and the random numbers it runs on."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tpoverlap.manager import UserBufferManager
from tpoverlap.testing.specs import token_counts, uneven_partitions
from tpoverlap.tokens import TokenPartition


@dataclass(frozen=True)
class Setting:
    """What all checks take as their first own argument; picklable.

    Attributes:
        device: "cpu", or "cuda": rank r then uses GPU ``r % device_count``.
        dtype: of activations and weights.
        backend: of the manager: "auto", "shared", "cuda" or "process_group".
        capacity: C. Large enough for a tile of rows and one more.
        hidden: H, the communicated width.
        features: the other feature size of a GEMM, on one rank.
        timeout_s: of the manager.
    """

    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    backend: str = "auto"
    capacity: int = 260
    hidden: int = 24
    features: int = 20
    timeout_s: float = 30.0

    @property
    def reference_dtype(self) -> torch.dtype:
        """float64 for float32, else float32."""
        return torch.float64 if self.dtype == torch.float32 else torch.float32

    def rank_device(self, rank: int) -> torch.device:
        """The device of ``rank``; makes it the current one."""
        if self.device == "cpu":
            return torch.device("cpu")
        # By process, not by rank in a group: two TP groups in one world may have the same rank on different GPUs.
        process = dist.get_rank() if dist.is_initialized() else rank
        device = torch.device("cuda", process % torch.cuda.device_count())
        torch.cuda.set_device(device)
        # cuBLAS may add partial products in half precision, ours or the twin's, depending on the shape: far outside one
        # rounding. Off, so that the tolerances speak of tpoverlap.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        return device

    def partitions(self, tp_size: int) -> list[TokenPartition]:
        """Every named T, balanced, and every named uneven partition; large and small alternate, so T jumps."""
        balanced = [TokenPartition.balanced(t, tp_size) for t in token_counts(self.capacity, tp_size).values()]
        uneven = uneven_partitions(self.capacity, tp_size).values()
        named = sorted({*balanced, *uneven}, key=lambda partition: (partition.total, partition.counts))
        middle = len(named) // 2
        return [p for pair in zip(named[middle:], [*reversed(named[:middle]), None], strict=False) for p in pair if p]

    def open_manager(
        self, rank: int, group: Any = None, ub_cfgs: Mapping[str, Any] | None = None, **options: Any
    ) -> UserBufferManager:
        """A manager of this device, dtype, backend and capacity. Collective over ``group``."""
        return UserBufferManager(
            group,
            options.pop("capacity_shape", (self.capacity, self.hidden)),
            dtype=options.pop("dtype", self.dtype),
            device=self.rank_device(rank),
            ub_cfgs=ub_cfgs,
            backend=self.backend,
            timeout_s=self.timeout_s,
            tuning_cache=options.pop("tuning_cache", False),  # the default methods are to be checked, at any size
            **options,
        )

    def draw(self, rank: int, shape: Sequence[int], *key: object, scale: float = 1.0) -> torch.Tensor:
        """Normal numbers on this rank's device; the same on every rank for the same ``key``, other ones for another."""
        generator = torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))
        return (torch.randn(*shape, generator=generator) * scale).to(self.rank_device(rank), self.dtype)


@contextmanager
def said(manager: UserBufferManager, partition: TokenPartition, turn: int) -> Iterator[TokenPartition | None]:
    """Tell ``manager`` the partition in one of the ways there are, by ``turn``; yields what to pass as ``partition=``.

    Where a stronger way is used, a weaker one holds another T, which must lose.
    """
    other = TokenPartition.balanced(partition.total % manager.capacity_shape[0] + 1, manager.tp_size)
    how = turn % 4
    if how == 0:
        manager.set_active_shape(other)
        yield partition
    elif how == 1:
        manager.set_active_shape(other)
        with manager.microbatch(partition):
            yield None
    elif how == 2 or min(partition.counts) != max(partition.counts):
        manager.set_active_shape((partition.total, manager.capacity_shape[1]), partition)
        yield None
    else:
        manager.set_active_shape()  # equal shards: T is inferred from the input
        yield None


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, not contiguous in memory (columns of a wider tensor)."""
    wide = x.new_full((x.shape[0], 2 * x.shape[1]), float("nan"))
    wide[:, ::2] = x
    return wide[:, ::2]
