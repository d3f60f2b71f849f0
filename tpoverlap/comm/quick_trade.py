"""A whole operation that a `Trader` does, in few calls of Python: what `Exchange` does where nobody looks closer.

Few rows cost the device so little that the host decides how long an operation takes. Claim, descriptor, flight, credits
and the host's word are those of `DeviceExchange`, in the same order; whatever is out of the ordinary
(`tpoverlap.comm.quick_operation`) is left to it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from tpoverlap.comm.device_signals import DeviceSignals, SlotAddresses
from tpoverlap.comm.device_streams import DeviceStream
from tpoverlap.comm.epochs import MASK
from tpoverlap.comm.outline import Outline
from tpoverlap.comm.quick_operation import QuickOperation
from tpoverlap.comm.trader import Trader
from tpoverlap.comm.word_sheet import WordSheet

if TYPE_CHECKING:
    from tpoverlap.comm.channel import Channel

logger = logging.getLogger("tpoverlap")


class EndSheet(WordSheet):
    """The words behind the last reader of a gathered slot: credits to ``peers``, then the host's."""

    def __init__(self, peers: Sequence[int], slot: SlotAddresses) -> None:
        super().__init__()
        for peer in peers:
            self.write_epoch(slot.credit_out[peer])
        self.mark_done()
        self.batch = self.end_batch()


class QuickTrade(QuickOperation):
    """Operations of one outline, one after the other. `gather` and `add` repeat a frame that would cost two calls.

    Args:
        channel: on a device.
        outline: of order "traded".
        trader: launches their kernels.
        width: H, columns of the communicated activation.
    """

    def __init__(self, channel: Channel, signals: DeviceSignals, outline: Outline, trader: Trader, width: int) -> None:
        super().__init__(channel, signals, outline)
        self._trader, region = trader, self.region
        words, driver = channel.word_stream, channel.transport.driver
        assert isinstance(words, DeviceStream) and driver is not None, "a device"
        self._words, self._submit, self._follow = words, driver.submit, driver.follow
        self._slots = [signals.slot_addresses(region, slot) for slot in range(region.depth)]
        self._ends = [EndSheet(signals.peers, slot) for slot in self._slots]
        self._whole = (outline.partition.total, width)
        self._some_send_nothing = 0 in outline.partition.counts

    def gather(
        self,
        own: torch.Tensor,
        multiply: Callable[[torch.Tensor, int], object] | None,
        read: Callable[[torch.Tensor], object] | None,
    ) -> bool:
        """All-gather ``own`` [T_r, H], then ``multiply(whole, 0)`` and ``read(whole)`` on the caller's stream.

        ``whole`` [T, H] is a view of the slot. False: it is out of the ordinary, and nothing was done.
        """
        claimed = self._claim()
        if claimed is None:
            return False
        caller, epoch, flight = claimed
        try:
            region, trader, stream = self.region, self._trader, caller.handle
            slot = self._slots[epoch % region.depth]
            trader.gather(self._outline, slot, epoch, flight.descriptor, stream, own)
            whole = region.view(slot.rank, epoch, 0, self._whole, self._outline.dtype)
            if multiply is not None:
                multiply(whole, 0)
            if read is not None:
                read(whole)
            end, words, sheet = self._signals.next_mark(stream), self._words.handle, self._ends[epoch % region.depth]
            sheet.fill(epoch & MASK, 0, 0, 0, 0, end.address, end.value)
            self._follow(words, stream)
            self._submit(words, sheet.batch)
            self._signals.words_behind = flight.descriptor.sequence
            region.last_reader[epoch % region.depth] = end
            self._channel.in_flight.land(flight, end)
        except BaseException as error:
            self._fail_claimed(error, claimed, caller)
            raise
        finally:
            self._channel.leave()
        return True

    def add(
        self,
        summands: torch.Tensor,
        multiply: Callable[[int, int, torch.Tensor], object] | None,
        bias: torch.Tensor | None,
        out: torch.Tensor,
    ) -> bool:
        """``multiply(0, T, summands)``; then the reduce-scatter of ``summands``, see `Trader.add`. False as above."""
        claimed = self._claim()
        if claimed is None:
            return False
        caller, epoch, flight = claimed
        try:
            if multiply is not None:
                multiply(0, self._whole[0], summands)
            region, stream = self.region, caller.handle
            slot = self._slots[epoch % region.depth]
            end = self._signals.next_mark(stream)
            if self._some_send_nothing:  # see `DeviceExchange.start`
                self._follow(stream, self._words.handle)
            self._trader.add(self._outline, slot, epoch, flight.descriptor, stream, summands, bias, out, end)
            region.last_reader[epoch % region.depth] = end
            self._channel.in_flight.land(flight, end)
        except BaseException as error:
            self._fail_claimed(error, claimed, caller)
            raise
        finally:
            self._channel.leave()
        return True
