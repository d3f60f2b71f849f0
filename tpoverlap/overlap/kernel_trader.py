"""`sequential` for few rows: one kernel of a few programs does the whole exchange (see `tpoverlap.comm.trader`).

::

    all-gather, rank r:      caller | kernel: publish, credits?, rows -> everybody, same operation?, rows here? | GEMM |
                                                                                     kernel: credits, tell the host |
    reduce-scatter, rank r:  caller | GEMM | kernel: publish, credits?, rows -> owners, same operation?, rows here?,
                                             add, credits, tell the host |

Deadlock: what a rank sends it sends before any of its programs waits for rows (see the kernels), the programs are too
few to fill a GPU, and the GEMMs wait for nobody. Bounds: the watchdog's release satisfies the kernel's waits as it does
those of streams; their own bound is for a process whose watchdog is stuck.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from functools import partial
from typing import Any, Final

import torch

from tpoverlap.comm import Channel
from tpoverlap.comm.descriptor import Descriptor
from tpoverlap.comm.device_signals import DeviceSignals, SlotAddresses
from tpoverlap.comm.device_streams import MarkEvent
from tpoverlap.comm.outline import Outline
from tpoverlap.comm.trader import Trader
from tpoverlap.comm.transport import DeviceTransport
from tpoverlap.comm.word_sheet import DIGEST, ENTRY, EPOCH, MARK_ADDRESS, MARK_VALUE, RECORD
from tpoverlap.fused_form import choose_sequential_form
from tpoverlap.gemm.triton import kernels_missing
from tpoverlap.gemm.triton.gates import TradeSlot
from tpoverlap.gemm.triton.trade_launcher import DTYPES, Trade, TradeLauncher
from tpoverlap.memory.layout import DESCRIPTOR_BYTES, DESCRIPTOR_RING, MAX_PIECES, WORD_BYTES, require_fits
from tpoverlap.native import Recording, register
from tpoverlap.overlap.kernel_limit import kernel_limit_s, watch_kernels

logger = logging.getLogger("tpoverlap")
_MAX_PREPARED: Final = 1024
_ALIGNMENT: Final = 15
_EPOCH_MASK: Final = 0xFFFFFFFF


class KernelTrader(Trader):
    """One a channel. A launch is found again by outline, slot, alignment and stream."""

    def __init__(self, signals: DeviceSignals, launcher: TradeLauncher) -> None:
        self._signals, self._launcher = signals, launcher
        self._slots: dict[SlotAddresses, TradeSlot] = {}
        self._prepared: OrderedDict[tuple[Any, ...], Trade] = OrderedDict()

    def gather(
        self, outline: Outline, slot: SlotAddresses, epoch: int, descriptor: Descriptor, stream: int, own: torch.Tensor
    ) -> None:
        address = own.data_ptr()
        key = (outline, slot, address & _ALIGNMENT, stream)
        trade = self._prepared.get(key) or self._keep(key, self._new_gather(outline, slot, stream, own))
        entry = descriptor.sequence % DESCRIPTOR_RING * DESCRIPTOR_BYTES
        trade.start(address, epoch & _EPOCH_MASK, descriptor.record, descriptor.digest, entry)

    def add(
        self,
        outline: Outline,
        slot: SlotAddresses,
        epoch: int,
        descriptor: Descriptor,
        stream: int,
        summands: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        end: MarkEvent | None,
    ) -> None:
        address, result, added = summands.data_ptr(), out.data_ptr(), 0 if bias is None else bias.data_ptr()
        key = (outline, slot, (address | result) & _ALIGNMENT, stream, bias is None)
        trade = self._prepared.get(key) or self._keep(key, self._new_add(outline, slot, stream, summands, bias, out))
        entry = descriptor.sequence % DESCRIPTOR_RING * DESCRIPTOR_BYTES
        word, number, ends = (0, 0, 0) if end is None else (end.address, end.value, 1)
        trade.start(
            address, result, added, epoch & _EPOCH_MASK, descriptor.record, descriptor.digest, entry, word, number, ends
        )  # fmt: skip

    def record_gather(
        self, recording: Recording, outline: Outline, slot: SlotAddresses, stream: int, own: torch.Tensor, own_at: int
    ) -> bool:
        key = (outline, slot, own.data_ptr() & _ALIGNMENT, stream)
        trade = self._prepared.get(key) or self._keep(key, self._new_gather(outline, slot, stream, own))
        return trade.record(recording, own_at, *[register(one) for one in (EPOCH, RECORD, DIGEST, ENTRY)])

    def record_add(
        self,
        recording: Recording,
        outline: Outline,
        slot: SlotAddresses,
        stream: int,
        summands: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        places: tuple[int, int, int],
    ) -> bool:
        key = (outline, slot, (summands.data_ptr() | out.data_ptr()) & _ALIGNMENT, stream, bias is None)
        trade = self._prepared.get(key) or self._keep(key, self._new_add(outline, slot, stream, summands, bias, out))
        numbers = [register(one) for one in (EPOCH, RECORD, DIGEST, ENTRY, MARK_ADDRESS, MARK_VALUE)]
        return trade.record(recording, *places, *numbers, 1)

    # -- the first time ----------------------------------------------------------------------------------------------

    def _new_gather(self, outline: Outline, slot: SlotAddresses, stream: int, own: torch.Tensor) -> Trade:
        assert own.is_contiguous(), "the kernel moves contiguous bytes"
        row_bytes = own.shape[1] * own.element_size()
        require_fits(outline.partition.total * row_bytes, slot.size_bytes, f"{outline.label}: the gathered rows")
        aligned = not own.data_ptr() & _ALIGNMENT
        counts, itemsize = outline.partition.counts, own.element_size()
        return self._launcher.gather(counts, row_bytes, itemsize, self._slot(slot), aligned, stream)

    def _new_add(
        self,
        outline: Outline,
        slot: SlotAddresses,
        stream: int,
        summands: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
    ) -> Trade:
        assert summands.is_contiguous() and out.is_contiguous(), "the kernel moves contiguous bytes"
        counts, width = outline.partition.counts, summands.shape[1]
        size_bytes = (len(counts) - 1) * max(counts) * width * summands.element_size()
        require_fits(size_bytes, slot.size_bytes, f"{outline.label}: the peers' partial sums")
        aligned = not (summands.data_ptr() | out.data_ptr()) & _ALIGNMENT
        dtype, has_bias = summands.dtype, bias is not None
        return self._launcher.scatter(counts, width, dtype, self._slot(slot), aligned, has_bias, stream)

    def _slot(self, slot: SlotAddresses) -> TradeSlot:
        found = self._slots.get(slot)
        if found is None:
            told, descriptors = self._signals.descriptor_addresses()
            found = self._slots[slot] = TradeSlot(
                slot.rank,
                tuple(slot.data),
                tuple(slot.arrival_out),
                tuple(told),
                tuple(slot.credit_out),
                slot.arrival_in[0],
                slot.credit_in[0],
                descriptors,
                MAX_PIECES * WORD_BYTES,
                DESCRIPTOR_RING * DESCRIPTOR_BYTES,
                slot.depth,
                slot.size_bytes,
            )
        return found

    def _keep(self, key: tuple[Any, ...], trade: Trade) -> Trade:
        self._prepared[key] = trade
        if len(self._prepared) > _MAX_PREPARED:
            self._prepared.popitem(last=False)
        return trade


def kernel_trader(channel: Channel, counts: tuple[int, ...], row_bytes: int, sums: torch.dtype | None) -> Trader | None:
    """What `sequential` leaves its exchange to; None: to the copy engine.

    Args:
        counts, row_bytes: rows of each rank, and bytes of one.
        sums: the dtype in which a reduce-scatter adds; None: a gather.
    """
    if why := why_engine(channel, counts, row_bytes, sums):
        if channel.device.type == "cuda" and (missing := kernels_missing(channel.device)):
            channel.resource("kernel trader missing", partial(_tell, channel.rank, missing))
        logger.debug("method 'sequential' takes the copy engine: %s", why)
        return None
    return channel.resource("kernel trader", partial(_make_trader, channel))


def exchange_form(channel: Channel, counts: tuple[int, ...], row_bytes: int, sums: torch.dtype | None) -> str:
    """How `sequential` moves its rows, in words. Arguments as for `kernel_trader`."""
    why = why_engine(channel, counts, row_bytes, sums)
    return f"rows by copy engine and stream operations: {why}" if why else "one small kernel exchanges the rows"


def _tell(rank: int, missing: str) -> bool:
    logger.warning("rank %d: method 'sequential' moves few rows by copy engine, which takes longer: %s", rank, missing)
    return True


def why_engine(channel: Channel, counts: tuple[int, ...], row_bytes: int, sums: torch.dtype | None) -> str:
    """Why `kernel_trader` is None; "": it is not."""
    if not isinstance(channel.transport, DeviceTransport):
        return f"backend {channel.backend.name!r} is not driven by streams of a device"
    if sums is not None and sums not in DTYPES:
        return f"the kernel does not add in {sums}"
    most_bytes = max(counts) * row_bytes
    if choose_sequential_form(most_bytes, len(counts)) == "engine":
        return f"{most_bytes} bytes to a peer at R = {len(counts)} are more than the kernel is for"
    return kernels_missing(channel.device) or ""


def _make_trader(channel: Channel) -> KernelTrader:
    transport = channel.transport
    assert isinstance(transport, DeviceTransport), "checked before"
    launcher = TradeLauncher(channel.device, kernel_limit_s(channel))
    waits = "the kernel that exchanges rows of method 'sequential' waited more than {limit} s for a peer"
    watch_kernels(channel, launcher.error, waits)
    return KernelTrader(transport.signals, launcher)
