"""What a method needs to know about the operation it runs. Built by the manager, one an operation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from tpoverlap.comm import (
    Channel,
    Copier,
    Exchange,
    Step,
    Trace,
    all_gather_schedule,
    pipeline_schedule,
    reduce_scatter_schedule,
)
from tpoverlap.config import OverlapConfig
from tpoverlap.gemm.fp8 import SCALE_BYTES
from tpoverlap.tokens import TokenPartition

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(slots=True, eq=False)  # not frozen: one is made an operation, and that takes several times as long
class OperationContext:
    """One operation: where it communicates, by which method, over which partition.

    Attributes:
        channel: None when R = 1, where nothing is communicated.
        method: the one chosen by dispatch.
        name: GEMM name, for labels, traces and errors.
        region: "ag", "rs" or the name's own region.
        width: H, columns of the communicated activation.
        dtype: of what moves; uint8 for FP8 rows.
        column_granule: pipeline cuts columns in multiples of it (FP8 GEMMs want 16).
        packed_format: reduce-scatter: the FP8 dtype of the rows that move, each with its scale behind it; else None.
        tag: ends the label: "/e4m3" and the like, see `tpoverlap.overlap.fp8`.
        detail: hash of what else all ranks must agree on: an FP8 recipe, the size of a vocabulary.
        plain: no registered buffer takes it (T above the capacity, or a name without one): sequential, on the group's
            own collectives.
    """

    channel: Channel | None
    group: ProcessGroup
    rank: int
    method: str
    config: OverlapConfig
    name: str
    region: str
    partition: TokenPartition
    width: int
    dtype: torch.dtype
    plain: bool = False
    column_granule: int = 1
    packed_format: torch.dtype | None = None
    tag: str = ""
    detail: int = 0

    @property
    def uses_buffers(self) -> bool:
        """Whether ``sequential`` goes through the registered buffers, too."""
        return not self.plain and self.channel is not None and self.channel.backend.one_sided

    @property
    def own_rows(self) -> slice:
        """This rank's rows."""
        return self.partition.rows(self.rank)

    @property
    def tells_pieces(self) -> bool:
        """Whether a chunk may be cut: each piece has its flag in mapped memory, and costs no message."""
        return self.channel is not None and self.channel.backend.one_sided

    def label(self, direction: str) -> str:
        """What all ranks must agree on: name, direction, method and the options that change the slot's layout."""
        config = self.config
        return _label(self.name, direction, self.method, config.num_splits, config.aggregate, self.tag)

    def open_gather(self, max_piece_rows: int | None = None) -> Exchange:
        """Start an all-gather on this operation's region, its chunks cut into pieces of at most that many rows."""
        return self._open("all-gather", all_gather_schedule(self.partition, self.width, self.rank, max_piece_rows))

    def open_scatter(self, max_piece_rows: int | None = None) -> Exchange:
        """Start a reduce-scatter on this operation's region, its chunks cut into pieces of at most that many rows."""
        trailer = 0 if self.packed_format is None else SCALE_BYTES
        if self.method == "pipeline":
            steps = pipeline_schedule(
                self.partition, self.width, self.rank, self.config.num_splits, self.column_granule, trailer
            )
        else:
            steps = reduce_scatter_schedule(self.partition, self.width + trailer, self.rank, max_piece_rows)
        return self._open("reduce-scatter", steps)

    def _open(self, direction: str, steps: tuple[Step, ...]) -> Exchange:
        channel, config = self.channel, self.config
        assert channel is not None, "nothing to exchange when R = 1"
        copier: Copier | None = None
        if not config.use_ce and self.method in ("ring_exchange", "bulk", "fused"):
            from tpoverlap.overlap.program_copier import program_copier

            copier = program_copier(channel, config.num_sm)  # raises before any rank waits where it cannot run
        label = _label(self.name, direction, self.method, config.num_splits, config.aggregate, self.tag)
        exchange = channel.open(self.region, label, steps, self.partition, self.dtype, self.detail)
        if copier is not None:
            exchange.copier = copier
        return exchange

    def nvtx_range(self, direction: str) -> AbstractContextManager[object]:
        """A range named by GEMM, direction, method and T, where somebody listens: NVTX, or the trace's."""
        channel = self.channel
        if channel is None or not channel.ranges:  # a range that nobody reads costs as much as a launch
            return nullcontext()
        label = self.label(direction)
        if channel.trace is None:
            return torch.cuda.nvtx.range(f"{label} T={self.partition.total}")
        return _traced(channel, channel.trace, label, self.partition.total)


@contextmanager
def _traced(channel: Channel, trace: Trace, label: str, num_tokens: int) -> Iterator[None]:
    """`record_function` is seen by torch.profiler, and on CUDA as NVTX under ``emit_nvtx``."""
    with (
        torch.profiler.record_function(f"{label} T={num_tokens}"),
        trace.operation(label, num_tokens, channel.caller_stream()),
    ):
        yield


def possible_labels(name: str, config: OverlapConfig, tags: tuple[str, ...] = ("",)) -> Iterator[str]:
    """Every label that operations of ``name`` can have: how a peer's operation gets its name in an error."""
    for direction in ("all-gather", "reduce-scatter"):
        for method in ("ring_exchange", "pipeline", "bulk", "fused", "sequential"):
            for tag in tags:
                yield _label(name, direction, method, config.num_splits, config.aggregate, tag)


@lru_cache(maxsize=1024)
def _label(name: str, direction: str, method: str, num_splits: int, aggregate: bool, tag: str) -> str:
    detail = ""
    if method == "pipeline":
        detail = f"/{num_splits}"
    elif method == "ring_exchange" and aggregate:
        detail = "/aggregate"
    return f"{name} {direction} {method}{detail}{tag}"
