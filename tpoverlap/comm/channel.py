"""The communication engine of one manager: arenas, regions, streams, signals and the order of operations.

Three kinds of transport share this class: one-sided on the CPU, one-sided on the GPU, and messages. `open` starts an
operation on a region and returns its `Exchange`; `announced` only checks that all ranks are at the same operation
(for methods that communicate through plain collectives).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, TypeVar

import torch

from tpoverlap.comm.descriptor import CLOSE, Descriptor
from tpoverlap.comm.diagnosis import AbortReason, Diagnosis
from tpoverlap.comm.exchange import Claim, Exchange
from tpoverlap.comm.fault import Fault
from tpoverlap.comm.gpus import common_multiprocessors, gpu_of
from tpoverlap.comm.in_flight import Flight, InFlight
from tpoverlap.comm.liveness import ProcessIdentity
from tpoverlap.comm.meter import Meter
from tpoverlap.comm.outline import Outline
from tpoverlap.comm.region import Region
from tpoverlap.comm.schedule import Transfer
from tpoverlap.comm.streams import Stream
from tpoverlap.comm.trace import Trace
from tpoverlap.comm.transport import Transport, make_transport
from tpoverlap.comm.watchdog import Watchdog, abort_word
from tpoverlap.errors import NotInitializedError, TpOverlapError
from tpoverlap.memory.base import Arena, Backend, agree
from tpoverlap.memory.layout import ArenaLayout, RegionSpec
from tpoverlap.tokens import TokenPartition

logger = logging.getLogger("tpoverlap")
_DRAIN_S = 5.0
_SPINS = 100
T = TypeVar("T")


class Channel:
    """Construction and `close` are collective; everything else is local.

    Args:
        backend: where memory comes from.
        regions: the regions of the first arena.
        timeout_s: bound of every wait for a peer.
        num_compute_streams: extra compute streams (pipeline's ``num_max_streams``).
    """

    def __init__(
        self, backend: Backend, regions: Sequence[RegionSpec], timeout_s: float, num_compute_streams: int = 0
    ) -> None:
        self.backend = backend
        self.device = backend.device
        self.rank = backend.rank
        self.tp_size = backend.tp_size
        self.peers = [(self.rank + offset) % self.tp_size for offset in range(1, self.tp_size)]
        self.timeout_s = timeout_s
        self.fault = Fault()
        self.trace: Trace | None = None
        self.meter: Meter | None = None
        self.before_copy: Callable[[Stream, Transfer], None] | None = None
        """Test hook: called before each transfer with the stream that makes it (``testing.faults`` delays it)."""
        self.before_gemm: Callable[[Stream], None] | None = None
        """Test hook: called on a GEMM's stream, inside the operation, before each GEMM of a method."""
        self.ranges = backend.ranges
        """Whether to name operations to a profiler (NVTX) or a trace."""
        self.arenas: list[Arena] = []
        self.regions: dict[str, Region] = {}
        self.num_allocations = 0
        self.probes: list[Callable[[], BaseException | None]] = []
        """Asked at every `check`: what only device memory knows, such as a kernel that gave up."""
        self._resources: dict[str, Any] = {}
        self._own_bytes: list[tuple[int, int]] = []
        self._sequence = 0
        self.lock = threading.Lock()
        """Of whoever claims a slot or a number."""
        self.turn = threading.RLock()  # re-entrant: backward gathers and scatters at the same time, in one thread
        """Of the thread whose operations are open; see `enter`."""
        self.num_open = 0
        """Operations of that thread."""
        self._ends_with_operation = False
        self.in_flight = InFlight()
        self._closed = False
        self._pid = os.getpid()
        self._release_lock = threading.Lock()
        self._told_peers = False
        arena, layout = self._allocate(regions)
        places = agree(backend.group, (ProcessIdentity.own(), gpu_of(backend.device)))
        self.identities, gpus = [identity for identity, _ in places], [gpu for _, gpu in places]
        self.shares_gpu = gpus.count(gpus[self.rank]) > 1 and self.device.type == "cuda"
        """Ranks on one GPU (tests): its copies are kernels there, so a kernel that waits for them may not fill it."""
        self.multiprocessors = common_multiprocessors(gpus)
        self.transport: Transport = make_transport(backend, arena, layout, self.fault, timeout_s)
        self.diagnosis.know(CLOSE)
        self.comm_stream: Stream = self.transport.new_stream("comm", high_priority=True)
        self.word_stream: Stream = self.transport.new_word_stream(self.comm_stream)
        self.compute_streams: list[Stream] = []
        self.add_compute_streams(num_compute_streams)
        self._watchdog = Watchdog(self)

    # -- set-up --------------------------------------------------------------------------------------------------

    def _allocate(self, regions: Sequence[RegionSpec]) -> tuple[Arena, ArenaLayout]:
        layout = ArenaLayout(self.tp_size, tuple(regions))
        arena = self.backend.allocate(layout.total_bytes)
        self.arenas.append(arena)
        start = arena.bytes_of(self.rank).data_ptr()
        self._own_bytes.append((start, start + arena.size_bytes))
        self.num_allocations += 1
        for index, spec in enumerate(layout.regions):
            assert spec.name not in self.regions, f"region {spec.name} exists"
            self.regions[spec.name] = Region(spec.name, arena, layout, index)
        return arena, layout

    def add_regions(self, regions: Sequence[RegionSpec]) -> None:
        """Allocate a further arena for more regions. Collective."""
        self.check()
        arena, layout = self._allocate(regions)
        self.transport.add_arena(arena, layout)

    def add_compute_streams(self, count: int) -> None:
        """Have at least ``count`` extra compute streams."""
        while len(self.compute_streams) < count:
            label = f"compute{len(self.compute_streams)}"
            self.compute_streams.append(self.transport.new_stream(label, high_priority=False))

    # -- operations ----------------------------------------------------------------------------------------------

    def open(self, outline: Outline) -> Exchange:
        """Start an operation: claim its number and its slot, and tell the peers. Never waits for them.

        It does wait for an operation that another thread of this process has open: two that take turns on the slots
        of one region could each wait for a credit that the other has yet to grant. Leaving the exchange ends the turn.
        """
        self.enter()
        try:
            exchange = self._claim(outline)
            try:
                exchange.start()
            except BaseException as error:
                self.fail(error, exchange.descriptor)
                raise
        except BaseException:
            self.leave()
            raise
        return exchange

    def record(self, trace: Trace | None) -> None:
        """Have operations mark ``trace`` from now on; None: no longer."""
        self.trace = trace
        self.ranges = self.backend.ranges or trace is not None

    def enter(self) -> None:
        """Wait until no other thread has an operation open; in the end comes `leave`."""
        self.turn.acquire()
        self.num_open += 1

    def leave(self) -> None:
        """The operation that `open` started is over: another thread may start one."""
        self.num_open -= 1
        self.turn.release()
        if self._ends_with_operation:
            self._shut_down_between_operations()

    def _claim(self, outline: Outline) -> Exchange:
        region = self.regions[outline.region]
        with self.lock:
            self.check()
            caller = self.transport.caller_stream()  # first: it may refuse, and nothing has been claimed yet
            use = region.uses = region.uses + 1
            flight = self.next_flight(outline, region.index + 1, use)
            return self.transport.new_exchange(self, Claim(outline, region, use, flight, caller))

    def announced(self, outline: Outline) -> Announced:
        """An operation without a slot: inside the block, every rank is known to be at it."""
        return Announced(self, outline)

    def meet(self, outline: Outline) -> tuple[Flight, Stream]:
        """The start of `announced`. In the end come `part` and `leave`."""
        self.enter()
        try:
            with self.lock:
                self.check()
                caller = self.transport.caller_stream()
                flight = self.next_flight(outline, 0, 0)
            try:
                self.transport.meet(flight.descriptor, caller)
            except BaseException as error:
                self.part(flight, caller, error)
                raise
        except BaseException:
            self.leave()
            raise
        return flight, caller

    def part(self, flight: Flight, caller: Stream, error: BaseException | None) -> None:
        """The end of `announced`; ``error``: it failed."""
        if error is not None:
            self.fail(error, flight.descriptor)
            if not self.transport.asynchronous:
                return
        self.in_flight.land(flight, self.transport.finished(caller))

    def hand_out_slot(self, region_name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """View of the slot that the region's next operation uses; its credit then waits for the next-but-one."""
        region = self.regions[region_name]
        with self.lock:
            self.check()
            epoch = region.uses + 1
            region.held.add(epoch)
            reader = region.last_reader.get(epoch % region.depth)
            if reader is not None:
                self.caller_stream().wait(reader)
        return region.view(self.rank, epoch, 0, shape, dtype).detach()  # the region keeps the view itself

    def next_slot_addresses(self, region_name: str, own_offset_bytes: int) -> tuple[int, int, int]:
        """(first byte, end, byte ``own_offset_bytes`` into it) of the slot that the region's next operation uses."""
        region = self.regions[region_name]
        offset = region.layout.slot_offset(region.index, (region.uses + 1) % region.depth)
        start = region.arena.bytes_of(self.rank).data_ptr() + offset
        return start, start + region.slot_bytes, start + own_offset_bytes

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` lies in this rank's registered memory, which later operations overwrite."""
        address = tensor.data_ptr()
        for start, end in self._own_bytes:  # noqa: SIM110  (a generator costs more than the look)
            if start <= address < end:
                return True
        return False

    def also_holds(self, buffer: torch.Tensor) -> None:
        """``buffer`` is memory that later calls overwrite, too."""
        start = buffer.data_ptr()
        self._own_bytes.append((start, start + buffer.numel() * buffer.element_size()))

    def caller_stream(self) -> Stream:
        """The stream that the caller's tensors are ordered on."""
        return self.transport.caller_stream()

    def next_flight(self, outline: Outline, region: int, epoch: int) -> Flight:
        """The next operation, which begins. Under the lock."""
        sequence = self._sequence = self._sequence + 1
        descriptor = outline.descriptor(sequence, region, epoch)
        self.transport.diagnosis.remember(descriptor)
        return self.in_flight.start(descriptor)

    # -- errors --------------------------------------------------------------------------------------------------

    @property
    def diagnosis(self) -> Diagnosis:
        """Own operations beside the peers'."""
        return self.transport.diagnosis

    @property
    def bounds_waits(self) -> bool:
        """Whether the watchdog must end waits at the time-out (waiters on the CPU bound themselves)."""
        return self.transport.asynchronous

    def oldest_in_flight(self) -> Flight | None:
        """The operation that has been running longest, or None. For the watchdog."""
        return self.in_flight.oldest()

    def refresh_peer_state(self) -> None:
        """Fetch what peers published. For the watchdog."""
        self.transport.refresh()

    def abort_word(self, peer: int) -> int:
        """0, or why ``peer`` gave up."""
        return self.transport.abort_word(peer)

    def check(self) -> None:
        """Raise what went wrong, if anything; NotInitializedError after `close`."""
        if os.getpid() != self._pid:
            raise NotInitializedError(
                f"this manager belongs to process {self._pid}, this is a fork of it ({os.getpid()}): it has no part in "
                "the group; create a manager after forking, or spawn instead"
            )
        if self.fault.error is not None:
            self.fault.check()
        if self._closed:
            raise NotInitializedError("this manager was closed; create a new one")
        for probe in self.probes:
            error = probe()
            if error is not None:
                self.fault.set(error)  # the watchdog tells the peers
                self.fault.check()

    def resource(self, name: str, make: Callable[[], T]) -> T:
        """What a method keeps as long as this channel lives: made on first use. Local."""
        if name not in self._resources:
            with torch.inference_mode(False):  # it outlives the caller's mode
                self._resources[name] = make()
        found: T = self._resources[name]
        return found

    def fail(self, error: BaseException, descriptor: Descriptor) -> None:
        """An operation ended with ``error``: later calls raise, peers are told, waiters are released."""
        self.fault.note(error)
        self.end(self.explained(error, descriptor), descriptor.sequence)
        self.release_waiters()

    def explained(self, error: BaseException, descriptor: Descriptor) -> TpOverlapError:
        """``error`` if it is one of ours, else one that says in which operation it happened."""
        if isinstance(error, TpOverlapError):
            return error
        return TpOverlapError(
            f"rank {self.rank} failed inside {descriptor.label} (T={descriptor.num_tokens}): {error!r}. "
            "The manager cannot go on; close it"
        )

    def end(self, error: BaseException, sequence: int | None = None) -> None:
        """Store the first error and tell the peers, once, whichever thread it came from."""
        self.fault.set(error)
        with self.lock:
            if self._told_peers:
                return
            self._told_peers = True
        if sequence is None:
            oldest = self.oldest_in_flight()
            sequence = self._sequence if oldest is None else oldest.descriptor.sequence
        first = self.fault.error
        assert first is not None, "just set"
        self._tell_peers(abort_word(first, sequence))

    def _tell_peers(self, word: int) -> None:
        try:
            self.transport.announce_abort(word)
        except Exception:
            logger.exception("could not tell the peers that rank %d gave up", self.rank)

    def release_waiters(self) -> None:
        """Let every local wait go; only after the fault was stored. Repeated by the watchdog until all have gone."""
        assert self.fault.error is not None, "release without a fault would let waiters read what is not there"
        with self._release_lock:
            self.transport.release(self.in_flight.descriptors())

    def finish_collective(self, descriptor: Descriptor, work: Any) -> None:
        """Wait for a plain collective. On the CPU within ``timeout_s``, and no longer than every peer is in it."""
        if self.device.type == "cpu":
            started, turns = time.monotonic(), 0
            what = f"{descriptor.label} (T={descriptor.num_tokens})"
            while not work.is_completed():
                turns += 1
                if turns < _SPINS:
                    time.sleep(0)
                    continue
                self.check_peers()
                waited_s = time.monotonic() - started
                if waited_s > self.timeout_s:
                    raise self.diagnosis.late(self.peers[0], waited_s, f"{what}; every rank has started it")
                time.sleep(1e-4 if turns < 10 * _SPINS else 2e-3)
        work.wait()

    def check_peers(self) -> None:
        """Raise if a peer has given up. After an error there, its streams may have sent poisoned rows for operations
        that finished here without a complaint.
        """
        self.check()
        self.transport.refresh()
        for peer in self.peers:
            word = self.transport.abort_word(peer)
            if word:
                self.end(self.diagnosis.gave_up(peer, word, "mgr.check()"))
        self.check()

    # -- end of life ---------------------------------------------------------------------------------------------

    def abort(self) -> None:
        """Give up at once, locally: peers are told, nothing is waited for. Idempotent."""
        if self._closed or os.getpid() != self._pid:  # a fork must not speak for this rank
            return
        if self.fault.error is None:
            self.fault.set(NotInitializedError("this manager was aborted; create a new one"))
            if not self._told_peers:
                self._told_peers = True
                self._tell_peers(AbortReason.CLOSED.word(self._sequence))
        self.release_waiters()
        self._shut_down_between_operations()

    def close(self) -> None:
        """Free everything. Collective, unless there was an error; idempotent."""
        if self._closed or os.getpid() != self._pid:  # a fork must not speak for this rank
            return
        if self.fault.error is not None:
            self._shut_down_between_operations()
            return
        own_error = self.diagnosis.own_error()
        try:
            # The last operation: no rank may unmap while a peer can still write a credit into its arena. It goes
            # through the signals rather than the group, so it is bounded, it names a rank that does something else,
            # and it works after the process group was destroyed.
            with self.announced(Outline(CLOSE, TokenPartition((1,) * self.tp_size), torch.uint8)):
                pass
            self.transport.synchronize()
            self.fault.check()
        except TpOverlapError as error:
            if own_error:
                error.args = (f"{error}. The first error of rank {self.rank}, before it closed: {own_error}",)
            raise
        finally:
            self._shut_down()

    def _shut_down_between_operations(self) -> None:
        """At once, unless a thread is inside an operation: it goes on with the memory after this, and where it is the
        calling thread (in a signal handler, say) nobody could wait for it. Then `leave` does it.
        """
        self._closed = self._ends_with_operation = True  # before the look: who leaves meanwhile sees it after releasing
        if not self.turn.acquire(blocking=False):
            return
        try:
            if self._ends_with_operation and not self.num_open:
                self._ends_with_operation = False
                self._shut_down()
        finally:
            self.turn.release()

    def _shut_down(self) -> None:
        self._closed = True
        idle = self._device_is_idle()  # before the watchdog ends: it keeps releasing waiters until then
        self._watchdog.stop()
        if self.fault.error is not None:
            self.transport.cancel()
        for stream in {self.comm_stream, self.word_stream, *self.compute_streams}:
            stream.close()
        self.transport.close()
        if idle:
            for region in self.regions.values():
                region.forget_views()
            for arena in self.arenas:
                arena.close()
            self.fault.let_go()
        else:
            logger.error("rank %d: the device is still busy after an error; its buffers are not freed", self.rank)
        self.in_flight.clear()

    def _device_is_idle(self) -> bool:
        # After an error the waits were released, but the work behind them may still run, and must not lose its memory.
        deadline = time.monotonic() + _DRAIN_S
        while self.oldest_in_flight() is not None and self.transport.asynchronous:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True


class Announced:
    """`Channel.announced`: a context manager that gives the descriptor."""

    __slots__ = ("_caller", "_channel", "_flight", "_outline")

    def __init__(self, channel: Channel, outline: Outline) -> None:
        self._channel = channel
        self._outline = outline

    def __enter__(self) -> Descriptor:
        self._flight, self._caller = self._channel.meet(self._outline)
        return self._flight.descriptor

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._channel.part(self._flight, self._caller, error)
        finally:
            self._channel.leave()
