"""What a method needs to know about the operation it runs. Built by the manager, and kept as long as T recurs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import torch

from tpoverlap.comm import (
    Channel,
    Exchange,
    Order,
    Outline,
    Step,
    Trace,
    Trader,
    all_gather_schedule,
    pipeline_schedule,
    reduce_scatter_schedule,
)
from tpoverlap.comm.quick_trade import QuickTrade
from tpoverlap.comm.transport import DeviceTransport
from tpoverlap.config import OverlapConfig
from tpoverlap.gemm.fp8 import SCALE_BYTES
from tpoverlap.pieces import Cut, FirstPiece, scatter_cut
from tpoverlap.tokens import TokenPartition

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


_VARIANTS: Final = 8


@dataclass(slots=True, eq=False)
class OperationContext:
    """One operation: where it communicates, by which method, over which partition.

    The manager keeps it for the operations that are the same but for their time, so nothing here is an operation's own.

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
        overflow: T or a rank's rows are above the capacity.
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
    overflow: bool = False
    own_rows: slice = field(init=False, repr=False)
    """This rank's rows."""
    _variants: dict[tuple[tuple[str, object], ...], OperationContext] = field(
        init=False, repr=False, default_factory=dict
    )
    _outlines: dict[tuple[bool, Cut | None, Order], Outline] = field(init=False, repr=False, default_factory=dict)
    _traders: dict[bool, Trader | None] = field(init=False, repr=False, default_factory=dict)
    _quick: dict[bool, QuickTrade | None] = field(init=False, repr=False, default_factory=dict)
    plans: dict[str | int, Any] = field(init=False, repr=False, default_factory=dict)
    """What methods have worked out for it."""

    def __post_init__(self) -> None:
        self.own_rows = self.partition.rows(self.rank)

    def variant(self, **changes: Any) -> OperationContext:
        """This operation with other fields; kept, like it."""
        key = tuple(changes.items())
        found = self._variants.get(key)
        if found is None:
            if len(self._variants) >= _VARIANTS:
                self._variants.clear()  # a detail may be new each time
            found = self._variants[key] = replace(self, **changes)
        return found

    @property
    def uses_buffers(self) -> bool:
        """Whether ``sequential`` goes through the registered buffers, too."""
        return not self.plain and self.channel is not None and self.channel.backend.one_sided

    @property
    def tells_pieces(self) -> bool:
        """Whether a chunk may be cut: each piece has its flag in mapped memory, and costs no message."""
        return self.channel is not None and self.channel.backend.one_sided

    def label(self, direction: str) -> str:
        """What all ranks must agree on: name, direction, method and the options that change the slot's layout."""
        config = self.config
        return _label(self.name, direction, self.method, config.num_splits, config.aggregate, self.tag)

    def open_gather(self, max_piece_rows: int | None = None, *, order: Order = "beside") -> Exchange:
        """Start an all-gather on this operation's region.

        Args:
            max_piece_rows: chunks are cut into pieces of at most that many rows; None: they are not.
            order: see `tpoverlap.comm.Order`.
        """
        return self._open(self.outline(max_piece_rows, scatter=False, order=order))

    def open_scatter(self, cut: Cut | None = None, *, order: Order = "beside") -> Exchange:
        """Start a reduce-scatter on this operation's region. ``cut``: how chunks are cut; order: see `open_gather`."""
        return self._open(self.outline(cut, scatter=True, order=order))

    def scatter_cut(self, operand_row_bytes: int) -> Cut | None:
        """How ring_exchange cuts a reduce-scatter. ``operand_row_bytes``: of a row of the GEMM's left operand."""
        channel = self.channel
        # Which tiles FP8 GEMMs get was not looked at.
        processors = 0 if channel is None or self.tag else channel.multiprocessors
        return scatter_cut(self.partition, self.width, self.dtype.itemsize, operand_row_bytes, processors)

    def open_trade(self, *, scatter: bool) -> Exchange:
        """Start an operation with nothing beside its transfers, for `Exchange.trade` or `Exchange.trade_and_add`."""
        traders = self._traders
        trader = traders[scatter] if scatter in traders else self._new_trader(scatter)
        order: Order = "at_once" if trader is None else "traded"
        outline = self._outlines.get((scatter, None, order)) or self._new_outline(scatter, None, order)
        channel = self.channel
        assert channel is not None, "nothing to exchange when R = 1"
        exchange = channel.open(outline)
        exchange.trader = trader
        return exchange

    def quick_trade(self, *, scatter: bool) -> QuickTrade | None:
        """What does such an operation in few calls, if it can; `open_trade` always can."""
        quick = self._quick
        return quick[scatter] if scatter in quick else self._new_quick_trade(scatter)

    def _new_quick_trade(self, scatter: bool) -> QuickTrade | None:
        channel, made = self.channel, None
        trader = self._new_trader(scatter) if self.uses_buffers else None
        if trader is not None:
            assert channel is not None and isinstance(channel.transport, DeviceTransport), "who brings a trader"
            outline = self._new_outline(scatter, None, "traded")
            made = QuickTrade(channel, channel.transport.signals, outline, trader, self.width)
        self._quick[scatter] = made
        return made

    def _new_trader(self, scatter: bool) -> Trader | None:
        from tpoverlap.overlap.kernel_trader import kernel_trader

        channel = self.channel
        assert channel is not None, "nothing to exchange when R = 1"
        row_bytes = self.width * self.dtype.itemsize
        made = kernel_trader(channel, self.partition.counts, row_bytes, self.dtype if scatter else None)
        self._traders[scatter] = made
        return made

    def outline(self, cut: Cut | None, *, scatter: bool, order: Order) -> Outline:
        """What an exchange of this operation is, kept."""
        found = self._outlines.get((scatter, cut, order))
        return found or self._new_outline(scatter, cut, order)

    def plainly(self, direction: str) -> Outline:
        """For `Channel.announced`: the operation through the group's own collective."""
        return Outline(self.label(direction), self.partition, self.dtype, self.detail)

    def _new_outline(self, scatter: bool, cut: Cut | None, order: Order) -> Outline:
        found = self._outlines[scatter, cut, order] = Outline(
            self.label("reduce-scatter" if scatter else "all-gather"),
            self.partition,
            self.dtype,
            # Pieces of a scatter depend on the GEMM's inner size, which the rest says nothing about.
            self.detail if cut is None else hash((self.detail, cut)),
            region=self.region,
            steps=self._scatter_steps(cut) if scatter else self._gather_steps(cut),
            order=order,
        )
        return found

    def _gather_steps(self, cut: Cut | None) -> tuple[Step, ...]:
        assert not isinstance(cut, FirstPiece), "of a reduce-scatter"
        return all_gather_schedule(self.partition, self.width, self.rank, cut)

    def _scatter_steps(self, cut: Cut | None) -> tuple[Step, ...]:
        trailer = 0 if self.packed_format is None else SCALE_BYTES
        if self.method == "pipeline":
            splits = self.config.num_splits
            return pipeline_schedule(self.partition, self.width, self.rank, splits, self.column_granule, trailer)
        return reduce_scatter_schedule(self.partition, self.width + trailer, self.rank, cut)

    def _open(self, outline: Outline) -> Exchange:
        channel, config = self.channel, self.config
        assert channel is not None, "nothing to exchange when R = 1"
        if config.use_ce or self.method not in ("ring_exchange", "bulk", "fused"):
            return channel.open(outline)
        from tpoverlap.overlap.program_copier import program_copier

        copier = program_copier(channel, config.num_sm)  # raises before any rank waits where it cannot run
        exchange = channel.open(outline)
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
