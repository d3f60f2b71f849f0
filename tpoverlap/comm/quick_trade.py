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
from tpoverlap.comm.device_streams import CallerDeviceStream, DeviceStream, MarkEvent
from tpoverlap.comm.epochs import MASK
from tpoverlap.comm.in_flight import Flight
from tpoverlap.comm.outline import Outline
from tpoverlap.comm.quick_operation import QuickOperation
from tpoverlap.comm.trader import Trader
from tpoverlap.comm.word_sheet import WordSheet
from tpoverlap.memory.layout import DESCRIPTOR_BYTES, DESCRIPTOR_RING
from tpoverlap.native import Recording

if TYPE_CHECKING:
    from tpoverlap.comm.channel import Channel

logger = logging.getLogger("tpoverlap")


TradeTurn = tuple[CallerDeviceStream, int, Flight, SlotAddresses, MarkEvent]
"""An operation that is open: the caller's stream, the epoch, what the watchdog sees, the slot, and its end."""
Played = Callable[[TradeTurn], bool]
"""Does all of an operation, by tape; False: it did nothing."""


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
        played: Played | None = None,
    ) -> bool:
        """All-gather ``own`` [T_r, H], then ``multiply(whole, 0)`` and ``read(whole)`` on the caller's stream.

        ``whole`` [T, H] is a view of the slot. ``played`` is asked first. False: it is out of the ordinary, and nothing
        was done.
        """
        claimed = self._claim()
        if claimed is None:
            return False
        caller, epoch, flight = claimed
        try:
            region, trader, stream = self.region, self._trader, caller.handle
            slot, end = self._slots[epoch % region.depth], self._signals.next_mark(stream)
            if played is not None and played((caller, epoch, flight, slot, end)):
                self._land(epoch, flight, end)
                return True
            trader.gather(self._outline, slot, epoch, flight.descriptor, stream, own)
            whole = region.view(slot.rank, epoch, 0, self._whole, self._outline.dtype)
            if multiply is not None:
                multiply(whole, 0)
            if read is not None:
                read(whole)
            self.finish((caller, epoch, flight, slot, end))
            self._land(epoch, flight, end)
        except BaseException as error:
            self._fail_claimed(error, claimed, caller)
            raise
        finally:
            self._channel.leave()
        return True

    # -- a gather that stays open ------------------------------------------------------------------------------------

    def open(self) -> TradeTurn | None:
        """Claim the next use for a gather. In the end come `land` or `fail`, then `leave`. None as for `gather`."""
        claimed = self._claim()
        if claimed is None:
            return None
        caller, epoch, flight = claimed
        return caller, epoch, flight, self._slots[epoch % self.region.depth], self._signals.next_mark(caller.handle)

    def start(self, turn: TradeTurn, own: torch.Tensor) -> None:
        """Everybody's rows, in `gathered`, on the caller's stream."""
        caller, epoch, flight, slot, _ = turn
        self._trader.gather(self._outline, slot, epoch, flight.descriptor, caller.handle, own)

    def finish(self, turn: TradeTurn) -> None:
        """After the last reader: give the credits, tell the host."""
        caller, epoch, _, _, end = turn
        sheet = self._ends[epoch % self.region.depth]
        sheet.fill(epoch & MASK, 0, 0, 0, 0, end.address, end.value)
        self._follow(self._words.handle, caller.handle)
        self._submit(self._words.handle, sheet.batch)

    def land(self, turn: TradeTurn) -> None:
        """The end, once all is enqueued."""
        self._land(turn[1], turn[2], turn[4])

    def fail(self, error: BaseException, turn: TradeTurn) -> None:
        """Instead of `land`."""
        self._fail_claimed(error, turn[:3], turn[0])

    def leave(self) -> None:
        """The end of the turn."""
        self._channel.leave()

    def _land(self, epoch: int, flight: Flight, end: MarkEvent) -> None:
        """A gather: the word stream goes on behind it."""
        self._signals.words_behind = flight.descriptor.sequence
        self.region.last_reader[epoch % self.region.depth] = end
        self._channel.in_flight.land(flight, end)

    def numbers(self, turn: TradeTurn) -> tuple[int, int, int, int, int, int, int]:
        """A tape's first registers, see `tpoverlap.comm.word_sheet`; nothing is due, kernels wait for credits."""
        _, epoch, flight, _, end = turn
        descriptor = flight.descriptor
        entry = descriptor.sequence % DESCRIPTOR_RING * DESCRIPTOR_BYTES
        return epoch & MASK, 0, entry, descriptor.record, descriptor.digest, end.address, end.value

    def record_gather(self, recording: Recording, turn: TradeTurn, own: torch.Tensor, own_at: int) -> bool:
        """Write the exchange of rows like ``own``, at ``own_at``, down. False: only Python launches it."""
        caller, slot = turn[0], turn[3]
        recording.patch(self._ends[turn[1] % self.region.depth].patches)
        return self._trader.record_gather(recording, self._outline, slot, caller.handle, own, own_at)

    def gathered(self, turn: TradeTurn) -> torch.Tensor:
        """What an all-gather makes: [T, H], a view of the slot."""
        return self.region.view(turn[3].rank, turn[1], 0, self._whole, self._outline.dtype)

    def record_end(self, recording: Recording, turn: TradeTurn) -> None:
        """Write down what comes behind the last reader of a gather."""
        recording.follow(self._words.handle, turn[0].handle)
        recording.submit(self._words.handle, self._ends[turn[1] % self.region.depth].batch)

    def record_add(
        self,
        recording: Recording,
        turn: TradeTurn,
        summands: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        places: tuple[int, int, int],
    ) -> bool:
        """Write the reduce-scatter of tensors like these down, see `Trader.record_add`. False as above."""
        caller, slot = turn[0], turn[3]
        if self._some_send_nothing:
            recording.follow(caller.handle, self._words.handle)
        return self._trader.record_add(recording, self._outline, slot, caller.handle, summands, bias, out, places)

    def add(
        self,
        summands: torch.Tensor,
        multiply: Callable[[int, int, torch.Tensor], object] | None,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        played: Played | None = None,
    ) -> bool:
        """``multiply(0, T, summands)``; then the reduce-scatter of ``summands``, see `Trader.add`. False as above."""
        claimed = self._claim()
        if claimed is None:
            return False
        caller, epoch, flight = claimed
        try:
            region, stream = self.region, caller.handle
            slot = self._slots[epoch % region.depth]
            end = self._signals.next_mark(stream)
            if played is not None and played((caller, epoch, flight, slot, end)):
                region.last_reader[epoch % region.depth] = end
                self._channel.in_flight.land(flight, end)
                return True
            if multiply is not None:
                multiply(0, self._whole[0], summands)
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
