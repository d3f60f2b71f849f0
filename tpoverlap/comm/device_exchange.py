"""`OneSidedExchange` on a device: the same flags in the same order, in few calls of the driver and of Python.

The caller's stream is given GEMMs and events, no words: a word between two kernels keeps the second one waiting for as
long as a small kernel takes. At R = 2 an all-gather by ring is, with one line a call of the driver; ``<-``: the stream
follows another one (an event, two calls)::

    caller's stream           comm stream                          word stream
                              <- caller
                              digest, record | wait credit
                              copy
                              write arrival
    (GEMM of own rows)
                                                                   wait record, digest | wait arrival
    <- words
    (GEMM of the peer's rows)
    <- comm
                                                                   <- caller
                                                                   write credit | tell the host

What the word stream is given is what the caller's stream would be, in the same order.

Where nothing runs beside the transfers (order "at_once") there is one stream, the caller's, and no such word::

    digest, record | wait credit
    copies to the peers, and of own rows
    write arrivals | wait record, digest | wait arrivals
    (GEMM)
    write credits | tell the host

Few rows (order "traded") are left to a `Trader`, each line one kernel::

    digest, record | wait credit | rows to the peers, own rows | write arrivals | wait record, digest | wait arrivals
    (GEMM)
    write credits | tell the host

and of a reduce-scatter the second one follows the first one's waits, with the sum of own rows between them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from tpoverlap.comm.copier import ENGINE, CopyJob
from tpoverlap.comm.device_signals import DeviceSignals
from tpoverlap.comm.device_streams import DeviceStream, MarkEvent, device_stream
from tpoverlap.comm.exchange import REFRESH_EVERY, Gate, OneSidedExchange
from tpoverlap.comm.schedule import Step, Transfer
from tpoverlap.comm.streams import Event, Stream
from tpoverlap.errors import TpOverlapError
from tpoverlap.memory.layout import require_fits

logger = logging.getLogger("tpoverlap")
_SMALL_BYTES = 4 << 20
"""Own rows that are copied before the arrivals are told: sooner done than one more call of the driver."""


class DeviceExchange(OneSidedExchange):
    """Between `send` and the next wait, run or end, the comm stream may hold collected operations back."""

    signals: DeviceSignals
    caller: DeviceStream
    _comm: DeviceStream
    _words: DeviceStream

    def start(self) -> None:
        signals, region, epoch = self.signals, self._region, self._epoch
        self._expected = set()
        self._slot = signals.slot_addresses(region, epoch % region.depth)
        self._own_copied = False
        self._unsent = 0
        for step in self.steps:
            self._unsent += len(step.sends)
        self._moved = self._silent = True
        previous = epoch - region.depth
        self._ended: MarkEvent | None = None
        self._at_once = self._order in ("at_once", "traded")
        if self._at_once:
            self._comm = self.caller
            self._moved = False
        # In an exchange of order "at_once" the caller's words travel with its transfers' in one call.
        self._words = self.caller if self._order == "at_once" else device_stream(self._channel.word_stream)
        if self._at_once and (previous in region.held or 0 in self.partition.counts):
            # The credit of the slot's last use may still be on its way on the word stream, to a peer that sends nothing
            # now and so has not waited for it: it must not follow a later one.
            self.caller.follow(device_stream(self._channel.word_stream))
        if previous in region.held:
            region.held.discard(previous)
            self._words.follow(self.caller)
            self._collect_credits(previous)
            self._words.flush()  # now: everybody's sends may wait for such a credit
        if self._order in ("beside", "at_once"):
            self._publish()

    def _publish(self) -> None:
        """Tell the peers, before the first flag or wait."""
        if self._moved and not self._at_once:
            self._caller_mark()
        self._silent = False
        self.signals.publish_all(self._comm, self.descriptor)

    def _caller_mark(self) -> None:
        """The comm stream goes on once the caller's stream has got here."""
        self._comm.follow(self.caller)
        self._moved = False

    def _collect_credits(self, epoch: int) -> None:
        words, credit_out = self._words, self._slot.credit_out  # `depth` uses ago the slot was the same
        for peer in self.signals.peers:
            words.write32(credit_out[peer], epoch)

    # -- sends ---------------------------------------------------------------------------------------------------

    def send(
        self, step: Step, source: torch.Tensor, base_row: int, ready: Event | None = None, gate: Gate | None = None
    ) -> None:
        comm = self._comm
        if self._silent:
            self._publish()
        if ready is not None:
            comm.wait(ready)
        elif self._moved and not self._at_once:
            self._caller_mark()
        sends = step.sends
        if sends:
            self._push_all(sends, source, base_row, gate)
            self._unsent -= len(sends)

    def _push_all(
        self, transfers: tuple[Transfer, ...], source: torch.Tensor, base_row: int, gate: Gate | None
    ) -> None:
        comm, slot, epoch, channel = self._comm, self._slot, self._epoch, self._channel
        by_engine = self.copier is ENGINE
        assert source.is_contiguous(), "a copy engine moves contiguous bytes"
        itemsize, slot_bytes = self.dtype.itemsize, self._region.slot_bytes
        source_address = source.data_ptr()
        for transfer in transfers:
            step, _, peer, piece, start, stop, element, col_start, col_stop = transfer
            row_bytes = (col_stop - col_start) * itemsize
            size_bytes = (stop - start) * row_bytes
            offset = element * itemsize
            if offset + size_bytes > slot_bytes:
                require_fits(offset + size_bytes, slot_bytes, self._describe(transfer))
            comm.wait32(slot.credit_in[peer], epoch - self._region.depth)
            if channel.before_copy is not None:
                comm.flush()
                channel.before_copy(comm, transfer)
            if gate is not None:
                gate(comm, transfer)
            if channel.trace is not None:
                self._mark(comm, "send", step, peer)
            if by_engine:
                first = source_address + (start - base_row) * row_bytes
                comm.copy_bytes(slot.data[peer] + offset, first, size_bytes)
                comm.write32(slot.arrival_out[peer] + 4 * piece, epoch)
            else:
                comm.flush()
                rows = source[start - base_row : stop - base_row]
                target = self._region.view(peer, epoch, element, tuple(rows.shape), self.dtype)
                self.copier.push(self.signals, comm, CopyJob(target, rows, peer, self._ref, piece))
            if channel.trace is not None:
                self._mark(comm, "sent", step, peer)

    def copy_own(self, source: torch.Tensor, first_element: int) -> None:
        target = self._slot.data[self.rank] + first_element * self.dtype.itemsize
        size_bytes = source.numel() * self.dtype.itemsize
        if size_bytes == 0 or target == source.data_ptr():
            return  # no row, or the caller wrote them straight into the slot
        if self._silent:
            self._publish()
        assert source.is_contiguous(), "a copy engine moves contiguous bytes"
        require_fits(first_element * self.dtype.itemsize + size_bytes, self._region.slot_bytes, "own rows")
        self._wait_for_previous_reader()
        self._comm.copy_bytes(target, source.data_ptr(), size_bytes)
        self._own_copied = not self._at_once

    def _wait_for_previous_reader(self) -> None:
        """Before own rows are written into the slot."""
        reader = self._previous_reader
        if isinstance(reader, MarkEvent) and reader.stream == self.caller.handle:
            return  # the comm stream has waited for the caller's, where that reader was
        if reader is not None:
            self._comm.wait(reader)

    # -- all at once ---------------------------------------------------------------------------------------------

    def collect_credit_waits(self) -> None:
        """Collect, on the caller's stream: wait for the credit of every peer that rows go to, one a step of a ring."""
        credit_in, due = self._slot.credit_in, self._epoch - self._region.depth
        for step in self.steps:
            if step.sends:
                self.caller.wait32(credit_in[step.sends[0].destination], due)

    def trade(self, source: torch.Tensor, base_row: int, own_element: int | None = None) -> None:
        trader = self.trader
        if trader is not None and own_element is not None and self._leaves_to_trader():
            self._wait_for_previous_reader()
            stream = self._caller_for_kernel()
            trader.gather(self._outline, self._slot, self._epoch, self.descriptor, stream, source)
            self._was_traded()
            return
        if self._silent:
            self._publish()
        if not self._at_once or self.copier is not ENGINE or self._is_marked:
            super().trade(source, base_row, own_element)
            return
        caller, slot, epoch, channel = self.caller, self._slot, self._epoch, self._channel
        assert source.is_contiguous(), "a copy engine moves contiguous bytes"
        itemsize, source_address = self.dtype.itemsize, source.data_ptr()
        transfers = [transfer for step in self.steps for transfer in step.sends]
        self.collect_credit_waits()
        for transfer in transfers:
            _, _, peer, _, start, stop, element, col_start, col_stop = transfer
            row_bytes = (col_stop - col_start) * itemsize
            size_bytes, offset = (stop - start) * row_bytes, element * itemsize
            if offset + size_bytes > self._region.slot_bytes:
                require_fits(offset + size_bytes, self._region.slot_bytes, self._describe(transfer))
            if channel.before_copy is not None:
                caller.flush()
                channel.before_copy(caller, transfer)
            caller.copy_bytes(slot.data[peer] + offset, source_address + (start - base_row) * row_bytes, size_bytes)
        self._unsent = 0
        own_first = own_element is not None and source.numel() * itemsize < _SMALL_BYTES
        if own_element is not None and own_first:
            self.copy_own(source, own_element)
        for transfer in transfers:
            caller.write32(slot.arrival_out[transfer.destination] + 4 * transfer.piece, epoch)
        if own_element is not None and not own_first:
            self.copy_own(source, own_element)
        for step in self.steps:
            if step.peer >= 0 and not step.receives and step.peer not in self._expected:
                self._expect_on(caller, step.peer)
            for transfer in step.receives:
                if transfer.source not in self._expected:
                    self._expect_on(caller, transfer.source)
                caller.wait32(slot.arrival_in[transfer.source] + 4 * transfer.piece, epoch)
        caller.flush()

    def trade_and_add(self, summands: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> bool:
        trader = self.trader
        if trader is None or not self._leaves_to_trader():
            return False
        stream = self._caller_for_kernel()
        end = self.signals.next_mark(stream) if self._ends_with_kernel() else None
        trader.add(self._outline, self._slot, self._epoch, self.descriptor, stream, summands, bias, out, end)
        self._was_traded()
        self._ended = end
        return True

    def _leaves_to_trader(self) -> bool:
        """Whether nobody wants to see, or to disturb, the single transfers."""
        return not self._is_marked and self._channel.before_copy is None and self.copier is ENGINE

    def _caller_for_kernel(self) -> int:
        """Hand over what the caller's stream holds back; its handle, for a kernel."""
        caller = self.caller
        if caller.pending:
            caller.flush()
        if caller.disturb is not None:
            caller.disturb()
        return caller.handle

    def _was_traded(self) -> None:
        """A kernel was launched that publishes, sends, compares and waits."""
        self._silent, self._unsent = False, 0
        self._expected.update(self.signals.peers)

    def _ends_with_kernel(self) -> bool:
        """Whether the end is credits and a word for the host, as always but for held slots and refreshed flags."""
        region, epoch = self._region, self._epoch
        return epoch % REFRESH_EVERY >= region.depth and epoch not in region.held

    # -- waits ---------------------------------------------------------------------------------------------------

    def wait_own(self, stream: Stream) -> None:
        if self._own_copied:
            self._mark(stream, "wait", -1)
            device_stream(stream).follow(self._comm)
            self._mark(stream, "arrived", -1)

    def wait(self, step: Step, stream: Stream) -> None:
        device = self.caller if stream is self.caller else device_stream(stream)
        if self._silent:
            self._publish()
        if self._comm.pending and not self._at_once:
            self._comm.flush()
        expected, peer, marked, words = self._expected, step.peer, self._is_marked, self._words
        if peer >= 0 and not step.receives and peer not in expected:  # no row comes: only its operation is compared
            if marked:
                self._mark(stream, "wait", step.number, peer)
            self._expect_on(words, peer)
            if marked:
                device.follow(words)
                self._mark(stream, "arrived", step.number, peer)
        arrival_in = self._slot.arrival_in
        for transfer in step.receives:
            source = transfer.source
            if marked:
                self._mark(stream, "wait", transfer.step, source)
            if source not in expected:
                self._expect_on(words, source)
            words.wait32(arrival_in[source] + 4 * transfer.piece, self._epoch)
            if marked:
                device.follow(words)
                self._mark(stream, "arrived", transfer.step, source)
        if words.pending:
            device.follow(words)

    def wait_entered(self, stream: Stream) -> None:
        if self._silent:
            self._publish()
        self._comm.flush()
        super().wait_entered(self._words)
        device_stream(stream).follow(self._words)

    def wait_computed(self, stream: Stream) -> None:
        if self._silent:
            self._publish()
        self._comm.flush()
        super().wait_computed(self._words)
        device_stream(stream).follow(self._words)

    # -- the rest ------------------------------------------------------------------------------------------------

    def run(self, stream: Stream, work: Callable[[], object], what: str, step: int = -1) -> None:
        self._moved = True
        if not self._unsent and self._comm.pending:  # before that, arrivals travel with the next send
            self._comm.flush()
        channel = self._channel
        if stream is self.caller and channel.trace is None and channel.before_gemm is None and not self.caller.disturb:
            work()  # the caller's stream holds nothing back between two calls of an exchange
        else:
            super().run(stream, work, what, step)

    def _mark(self, stream: Stream, what: str, step: int, peer: int = -1) -> None:
        if self._is_marked:
            stream.run(lambda: self._note(stream, what, step, peer))

    def _finish(self) -> None:
        caller, at_once = self.caller, self._at_once
        if self._ended is not None:
            self.finished = self._region.last_reader[self._epoch % self._region.depth] = self._ended
            return
        if self._silent:
            self._publish()
        if self._epoch % REFRESH_EVERY < self._region.depth:
            if not at_once:
                self._comm.flush()
                self._caller_mark()  # a kernel there may still be sending the rows that the flags stand for
            self._refresh_flags()
        marked = self._is_marked
        if marked:
            self._mark(caller, "wait", -1)
        peers, expected = self.signals.peers, self._expected
        if len(expected) < len(peers):
            for peer in peers:
                if peer not in expected:
                    self._expect_on(self._words, peer)
            if not at_once:
                caller.follow(self._words)
        if not at_once:
            caller.follow(self._comm)
        if marked:
            self._mark(caller, "arrived", -1)
        self._end(gives_credits=self._epoch not in self._region.held)

    def _expect_on(self, stream: DeviceStream, peer: int) -> None:
        self._expected.add(peer)
        self.signals.expect_on(stream, peer, self.descriptor)

    def _end(self, *, gives_credits: bool) -> None:
        """After the last reader of the slot, and after the last transfer."""
        region, words = self._region, self._words
        if words is not self.caller:
            words.follow(self.caller)
            self.signals.words_behind = self.descriptor.sequence
        if gives_credits:
            self._collect_credits(self._epoch)
        self.finished = region.last_reader[self._epoch % region.depth] = self.signals.mark_done(self.caller, words)
        words.flush()

    def _fail(self, error: BaseException) -> None:
        try:
            if self._silent:
                self._publish()
            self._comm.flush()  # the descriptor may be among it, and peers want to name it
        finally:
            super()._fail(error)
            self._abandon()

    def _abandon(self) -> None:
        """After an error: join what was sent, so that the host learns when the device has no part in this any more."""
        try:
            if not self._at_once:
                self.caller.follow(self._comm)
            self._end(gives_credits=False)
            self._channel.in_flight.land(self.flight, self.finished)
        except TpOverlapError:
            logger.exception("the driver refused the end of an operation that had failed")
