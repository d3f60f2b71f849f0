"""One operation's traffic: what a method sees of the transport.

A method sends the steps of its schedule, waits for steps, reads its slot and finishes; it does not know whether rows
are pushed into a mapped peer (`OneSidedExchange`) or travel as messages (`MessageExchange` in ``messages.py``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

import torch

from tpoverlap.comm.copier import ENGINE, Copier, CopyJob
from tpoverlap.comm.in_flight import Flight
from tpoverlap.comm.meter import MeteredOperation
from tpoverlap.comm.outline import Outline
from tpoverlap.comm.region import Region
from tpoverlap.comm.schedule import Step, Transfer
from tpoverlap.comm.signals import Signals, SlotRef
from tpoverlap.comm.streams import Event, Stream
from tpoverlap.comm.trader import Trader
from tpoverlap.memory.layout import MAX_PIECES

if TYPE_CHECKING:
    from tpoverlap.comm.channel import Channel

COMPUTED_PIECE = MAX_PIECES - 1
"""Its arrival flag carries no data; methods that use it have fewer pieces."""
REFRESH_EVERY = 1 << 20
"""Uses of a region between two refreshes of all its arrival flags; far below the 2**31 that one may stay unwritten."""


Gate = Callable[[Stream, Transfer], None]


@dataclass(frozen=True)
class ArrivalWords:
    """Arrival flags of one use of a slot, for kernels: int32 at ``address``, indexed by `word`."""

    address: int
    epoch: int

    @staticmethod
    def word(source: int, piece: int) -> int:
        """Index of the flag of ``piece`` from ``source``."""
        return source * MAX_PIECES + piece


class Claim(NamedTuple):
    """What an operation has claimed when it starts.

    Attributes:
        outline: what it is.
        epoch: which use of ``region`` it is.
        flight: it, as the watchdog sees it; its descriptor is what the peers will be told.
        caller: the stream that the caller's tensors are ordered on.
    """

    outline: Outline
    region: Region
    epoch: int
    flight: Flight
    caller: Stream


class Exchange(ABC):
    """Use it as a context manager: leaving finishes the operation, leaving with an exception ends the channel.

    Attributes:
        steps: this rank's schedule.
        partition: rows of each rank.
        caller: the stream that the caller's tensors are ordered on.
        copier: what moves rows into mapped peers; the copy engine unless a method sets another.
        trader: what does `trade` and `trade_and_add` in one kernel, where a method set it and nobody looks closer.
        descriptor: what the peers were told about it.
        finished: on a device, set at the end: an event after everything that the operation enqueued.
    """

    def __init__(self, channel: Channel, claim: Claim) -> None:
        outline, region, epoch, flight, caller = claim
        self._outline = outline
        self.steps = outline.steps
        self.partition = outline.partition
        self.rank = channel.rank
        self.tp_size = channel.tp_size
        self.caller = caller
        self.compute_streams = channel.compute_streams
        self.dtype = outline.dtype
        self._order = outline.order
        self.hands_out_slot = epoch in region.held
        self.copier: Copier = ENGINE
        self.trader: Trader | None = None
        self.finished: Event | None = None
        self._own_copy_done: Event | None = None
        self._previous_reader = region.last_reader.get(epoch % region.depth)
        self._channel = channel
        self._region = region
        self._epoch = epoch
        self.flight = flight
        self.descriptor = flight.descriptor
        self._comm = channel.comm_stream
        self._call = None if channel.trace is None else channel.trace.current()
        self._metered: MeteredOperation | None = None
        if channel.meter is not None and channel.trace is None:
            self._metered = channel.meter.of(self.descriptor)
            if self._metered is not None:
                self._metered.mark("begin", -1)
        self._is_marked = channel.trace is not None or self._metered is not None

    # -- what methods call ---------------------------------------------------------------------------------------

    def send(
        self, step: Step, source: torch.Tensor, base_row: int, ready: Event | None = None, gate: Gate | None = None
    ) -> None:
        """Move this rank's rows of ``step`` to their destinations, on the comm stream.

        Args:
            step: one of `steps`.
            source: rows of the activation (columns of the step's split only), starting with row ``base_row``.
            base_row: the activation's row that ``source[0]`` is.
            ready: event after which ``source`` may be read; None: now, in the caller's order.
            gate: called on the comm stream before each transfer; makes that stream wait until its rows are computed.
                One-sided transports only.
        """
        self._comm.wait(self.caller.record() if ready is None else ready)
        self._comm.enqueue(partial(self._explained, lambda: self._send(step, source, base_row, gate)))

    def copy_own(self, source: torch.Tensor, first_element: int) -> None:
        """Copy own rows into the local slot too, on the comm stream (for readers of the whole activation)."""
        view = self.view(first_element, tuple(source.shape))
        if source.numel() == 0 or view.data_ptr() == source.data_ptr():
            return  # no row, or the caller wrote them straight into the slot
        if self._previous_reader is not None:
            self._comm.wait(self._previous_reader)
        self._comm.enqueue(lambda: self._comm.copy(view, source))
        self._own_copy_done = self._comm.record()

    def wait_own(self, stream: Stream) -> None:
        """``stream`` goes on after `copy_own` (at once if there was nothing to copy)."""
        if self._own_copy_done is not None:
            self._mark(stream, "wait", -1)
            stream.wait(self._own_copy_done)
            self._mark(stream, "arrived", -1)

    def wait(self, step: Step, stream: Stream) -> None:
        """``stream`` goes on once everything that ``step`` receives is in the local slot."""
        stream.enqueue(lambda: self._wait(step, stream))

    def trade(self, source: torch.Tensor, base_row: int, own_element: int | None = None) -> None:
        """Send every step's rows and wait for those of all peers: what a method does beside nothing.

        Args:
            source, base_row: as for `send`.
            own_element: copy ``source`` into the local slot, too, at this element; None: no copy.
        """
        for step in self.steps:
            self.send(step, source, base_row)
        if own_element is not None:
            self.copy_own(source, own_element)
        for step in self.steps:
            self.wait(step, self.caller)
        self.wait_own(self.caller)

    def trade_and_add(self, summands: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> bool:
        """`trade` and the sum of own rows by the `trader`, see `Trader.add`. False: nothing was done."""
        return False

    def view(self, first_element: int, shape: tuple[int, ...]) -> torch.Tensor:
        """Part of the local slot, typed. Valid until `finish`."""
        return self._region.view(self.rank, self._epoch, first_element, shape, self.dtype)

    def run(self, stream: Stream, work: Callable[[], object], what: str, step: int = -1) -> None:
        """Run a GEMM (or another computation) on ``stream``, marked in the trace if there is one."""
        trace, hook = self._channel.trace, self._channel.before_gemm
        if hook is not None and what == "gemm":
            work = partial(_hooked, hook, stream, work)
        if stream is not self.caller:  # elsewhere an error does not reach the caller by itself
            work = partial(self._explained, work)
        if trace is None:
            stream.run(work)
            return

        def traced() -> None:
            trace.mark(stream, f"{what}_begin", step, call=self._call)
            work()
            trace.mark(stream, f"{what}_end", step, call=self._call)

        stream.run(traced)

    def _explained(self, work: Callable[[], object]) -> None:
        """Run ``work``; what it raises says in which operation it happened."""
        try:
            work()
        except Exception as error:
            raise self._channel.explained(error, self.descriptor) from error

    # -- life time -----------------------------------------------------------------------------------------------

    def __enter__(self) -> Exchange:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is not None:
                self._fail(error)
                return
            try:
                self._finish()
            except BaseException as failure:
                self._fail(failure)
                raise
            if self._metered is not None:
                self._metered.mark("end", -1)
            self._channel.in_flight.land(self.flight, self.finished)
        finally:
            self._channel.leave()

    def _fail(self, error: BaseException) -> None:
        if self._metered is not None:
            self._metered.failed = True
        self._channel.fail(error, self.descriptor)

    # -- what a transport implements -----------------------------------------------------------------------------

    @abstractmethod
    def start(self) -> None:
        """Announce the operation. Called once, right after construction, under the channel's lock."""

    @abstractmethod
    def _send(self, step: Step, source: torch.Tensor, base_row: int, gate: Gate | None) -> None: ...

    @abstractmethod
    def _wait(self, step: Step, stream: Stream) -> None: ...

    @abstractmethod
    def _finish(self) -> None:
        """Join the comm stream, after which the caller may do what it likes with its tensors; give credits."""

    def _mark(self, stream: Stream, what: str, step: int, peer: int = -1) -> None:
        if self._is_marked:
            self._note(stream, what, step, peer)

    def _note(self, stream: Stream, what: str, step: int, peer: int) -> None:
        """`_mark` inside work of ``stream``."""
        if self._metered is not None:
            self._metered.mark(what, peer)
        elif self._channel.trace is not None:
            self._channel.trace.mark(stream, what, step, peer, self._call)

    def _describe(self, transfer: Transfer) -> str:
        rows = f"rows {transfer.row_start}:{transfer.row_stop}"
        return f"{self.descriptor.label} (T={self.partition.total}), step {transfer.step}, {rows}"


def _hooked(hook: Callable[[Stream], None], stream: Stream, work: Callable[[], object]) -> None:
    hook(stream)
    work()


class OneSidedExchange(Exchange):
    """Copies into mapped peers, with the flags of `tpoverlap.comm.signals`."""

    signals: Signals
    _expected: set[int]

    @property
    def _ref(self) -> SlotRef:
        return self._region.ref(self._epoch)

    def start(self) -> None:
        self._expected = set()
        signals, comm = self.signals, self._comm
        region = self._region
        previous = self._epoch - region.depth
        if previous in region.held:
            region.held.discard(previous)
            self._grant(region.ref(previous))
        comm.wait(self.caller.record())

        def publish() -> None:
            for peer in self._peers():
                signals.publish(comm, peer, self.descriptor)

        comm.enqueue(publish)

    def _peers(self) -> list[int]:
        return [(self.rank + offset) % self.tp_size for offset in range(1, self.tp_size)]

    def wait_entered(self, stream: Stream) -> None:
        """``stream`` goes on once every peer is in this operation: a kernel that waits for their rows may start."""
        stream.enqueue(lambda: self._expect_all(stream))

    def announce_computed(self, transfer: Transfer) -> None:
        """From the gate of the last transfer to a destination: all its rows are computed, only copies are left."""
        self.signals.set_arrival(self._comm, transfer.destination, self._ref, COMPUTED_PIECE)

    def wait_computed(self, stream: Stream) -> None:
        """``stream`` goes on once every peer has computed what it sends here in this operation.

        A kernel that then waits for the rows themselves waits for nothing that needs a multiprocessor of a peer.
        """

        def wait() -> None:
            for step in self.steps:
                for transfer in step.receives[-1:]:
                    self._expect(transfer.source, stream)
                    what = self._describe(transfer) + " (to be computed)"
                    self.signals.wait_arrival(stream, transfer.source, self._ref, COMPUTED_PIECE, what)

        stream.enqueue(wait)

    def sent(self) -> Event:
        """An event after everything that was sent so far."""
        return self._comm.record()

    @property
    def arrivals(self) -> ArrivalWords:
        """The words that a gated kernel reads."""
        ref = self._ref
        offset = ref.layout.arrival_offset(ref.region, ref.slot, 0, 0)
        return ArrivalWords(ref.arena.bytes_of(self.rank).data_ptr() + offset, self._epoch)

    def _send(self, step: Step, source: torch.Tensor, base_row: int, gate: Gate | None) -> None:
        signals, comm, ref = self.signals, self._comm, self._ref
        for transfer in step.sends:
            peer = transfer.destination
            what = self._describe(transfer) + " (a free slot)"
            signals.wait_credit(comm, peer, ref, self._epoch - self._region.depth, what)
            if self._channel.before_copy is not None:
                self._channel.before_copy(comm, transfer)
            if gate is not None:
                gate(comm, transfer)
            self._mark(comm, "send", transfer.step, peer)
            rows = source[transfer.row_start - base_row : transfer.row_stop - base_row]
            target = self._region.view(peer, self._epoch, transfer.slot_element, tuple(rows.shape), self.dtype)
            self.copier.push(signals, comm, CopyJob(target, rows, peer, ref, transfer.piece))
            self._mark(comm, "sent", transfer.step, peer)

    def _wait(self, step: Step, stream: Stream) -> None:
        signals = self.signals
        if step.peer >= 0 and not step.receives:  # no row comes, but the peer's operation is compared
            self._mark(stream, "wait", step.number, step.peer)
            self._expect(step.peer, stream)
            self._mark(stream, "arrived", step.number, step.peer)
        for transfer in step.receives:
            self._mark(stream, "wait", transfer.step, transfer.source)
            self._expect(transfer.source, stream)
            signals.wait_arrival(stream, transfer.source, self._ref, transfer.piece, self._describe(transfer))
            self._mark(stream, "arrived", transfer.step, transfer.source)

    def _expect_all(self, stream: Stream) -> None:
        for peer in self._peers():
            self._expect(peer, stream)

    def _expect(self, peer: int, stream: Stream) -> None:
        if peer not in self._expected:
            self._expected.add(peer)
            self.signals.expect(stream, peer, self.descriptor)

    def _finish(self) -> None:
        if self._epoch % REFRESH_EVERY < self._region.depth:
            self._comm.wait(self.caller.record())  # a kernel on the caller's stream may send the rows
            self._comm.enqueue(self._refresh_flags)
        self._mark(self.caller, "wait", -1)  # for own sends, and for peers that sent nothing
        self.caller.enqueue(lambda: self._expect_all(self.caller))
        self.caller.wait(self._comm.record())
        self._mark(self.caller, "arrived", -1)
        self._region.last_reader[self._ref.slot] = self.caller.record()
        if self._epoch not in self._region.held:
            self._grant(self._ref)

    def _refresh_flags(self) -> None:
        # A flag that is left alone for 2**31 uses would compare as "in the future". So now and then all are written,
        # those of pieces that this operation did not have, too; nobody waits for them. After the rows, whoever sends
        # them: a flag that this writes before them says that they have arrived.
        for peer in self._peers():
            for piece in range(MAX_PIECES):
                self.signals.set_arrival(self._comm, peer, self._ref, piece)

    def _grant(self, ref: SlotRef) -> None:
        signals, caller = self.signals, self.caller

        def grant() -> None:
            for peer in self._peers():
                signals.grant_credit(caller, peer, ref)

        caller.enqueue(grant)
