"""What differs between the three transports, behind one interface that `Channel` drives."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch

from tpoverlap.comm.descriptor import Descriptor
from tpoverlap.comm.device_exchange import DeviceExchange
from tpoverlap.comm.device_signals import DeviceSignals
from tpoverlap.comm.device_streams import CallerDeviceStream, DeviceStream, device_stream
from tpoverlap.comm.diagnosis import Diagnosis
from tpoverlap.comm.exchange import Claim, Exchange, OneSidedExchange
from tpoverlap.comm.fault import Fault
from tpoverlap.comm.signals import Signals
from tpoverlap.comm.streams import CallerStream, Event, HostStream, Stream
from tpoverlap.memory.base import Arena, Backend, CpuArena
from tpoverlap.memory.driver import DeviceDriver
from tpoverlap.memory.layout import ArenaLayout

if TYPE_CHECKING:
    from tpoverlap.comm.channel import Channel

_CALLERS = 64
_SPINS = 200


class Transport(ABC):
    """Streams, exchanges and the peers' state for one backend."""

    diagnosis: Diagnosis

    def __init__(self, device: torch.device, fault: Fault, driver: DeviceDriver | None) -> None:
        self.device = device
        self.fault = fault
        self.driver = driver
        self._caller = CallerStream(fault)
        self._callers: dict[int, CallerDeviceStream] = {}

    @property
    def asynchronous(self) -> bool:
        """Whether operations end on a device, long after the call, and waits there must be ended from outside."""
        return self.driver is not None

    def new_stream(self, label: str, *, high_priority: bool) -> Stream:
        """A stream of this device."""
        if self.driver is not None:
            return DeviceStream.create(label, self.driver, high_priority=high_priority)
        return HostStream(label, self.fault)

    def caller_stream(self) -> Stream:
        """The stream that the caller's tensors are ordered on."""
        driver = self.driver
        if driver is None:
            return self._caller
        handle = driver.caller_stream()
        stream = self._callers.get(handle)
        if stream is None:
            if len(self._callers) >= _CALLERS:
                self._callers.clear()  # they hold nothing between two calls
            stream = self._callers[handle] = CallerDeviceStream("caller", driver, handle)
        return stream

    def synchronize(self) -> None:
        """Wait until the device is idle; nothing on a CPU."""
        if self.driver is not None:
            self.driver.synchronize()

    def finished(self, caller: Stream) -> Event | None:
        """An event after what ``caller`` was given so far; None where work is done when its call returns."""
        return None if self.driver is None else caller.record()

    def new_word_stream(self, comm: Stream) -> Stream:
        """Where the caller's stream has words read and written; ``comm``: nowhere, for it does that itself."""
        return comm

    @abstractmethod
    def new_exchange(self, channel: Channel, claim: Claim) -> Exchange:
        """An exchange that has not started."""

    @abstractmethod
    def meet(self, descriptor: Descriptor, caller: Stream) -> None:
        """Publish ``descriptor``, wait for every peer's and compare. Returns when all ranks are at it."""

    def add_arena(self, arena: Arena, layout: ArenaLayout) -> None:  # noqa: B027  (not every transport cares)
        """A further arena was allocated."""

    @abstractmethod
    def refresh(self) -> None:
        """Fetch what peers published."""

    @abstractmethod
    def abort_word(self, peer: int) -> int:
        """0, or why ``peer`` gave up."""

    @abstractmethod
    def announce_abort(self, word: int) -> None:
        """Tell the peers that this rank gave up."""

    @abstractmethod
    def release(self, pending: list[Descriptor]) -> None:
        """Let local waiters go."""

    def cancel(self) -> None:  # noqa: B027  (not every transport has waits that only this ends)
        """End the waits of this rank's worker threads; after an error, before the streams are closed."""

    def close(self) -> None:
        """Local; after the streams were closed."""
        if self.driver is not None:
            self.driver.close()


def wait_on_host(event: Event) -> None:
    """Wait until ``event`` is over. The watchdog bounds it: it releases the streams at the time-out."""
    turns = 0
    while not event.done():
        turns += 1
        time.sleep(0 if turns < _SPINS else 5e-5)


def require_peers(transport: Transport, descriptor: Descriptor) -> None:
    """Raise if a peer was at ``descriptor`` but has given up since: it will not come to the collective that follows."""
    diagnosis = transport.diagnosis
    transport.refresh()
    for peer in range(diagnosis.tp_size):
        if peer != diagnosis.rank and (word := transport.abort_word(peer)):
            raise diagnosis.gave_up(peer, word, f"{descriptor.label} (T={descriptor.num_tokens})")


class OneSidedTransport(Transport):
    """Peers' memory is mapped: copies and `Signals`."""

    _exchange_type: type[OneSidedExchange] = OneSidedExchange

    def __init__(
        self, device: torch.device, fault: Fault, signals: Signals, driver: DeviceDriver | None = None
    ) -> None:
        super().__init__(device, fault, driver)
        self.signals = signals
        self.diagnosis = signals.diagnosis
        self._peers = [r for r in range(self.diagnosis.tp_size) if r != self.diagnosis.rank]

    def new_exchange(self, channel: Channel, claim: Claim) -> Exchange:
        exchange = self._exchange_type(channel, claim)
        exchange.signals = self.signals
        return exchange

    def meet(self, descriptor: Descriptor, caller: Stream) -> None:
        def publish_and_expect() -> None:
            for peer in self._peers:
                self.signals.publish(caller, peer, descriptor)
            for peer in self._peers:
                self.signals.expect(caller, peer, descriptor)

        caller.enqueue(publish_and_expect)
        require_peers(self, descriptor)

    def add_arena(self, arena: Arena, layout: ArenaLayout) -> None:
        self.signals.add_arena(arena, layout)

    def refresh(self) -> None:
        self.signals.snapshot()

    def abort_word(self, peer: int) -> int:
        return self.signals.abort_word(peer)

    def announce_abort(self, word: int) -> None:
        self.signals.announce_abort(word)

    def release(self, pending: list[Descriptor]) -> None:
        self.signals.release(pending)

    def close(self) -> None:
        self.signals.close()
        super().close()


class DeviceTransport(OneSidedTransport):
    """Peers' memory is mapped, and stream memory operations keep the order."""

    signals: DeviceSignals
    _exchange_type = DeviceExchange

    def __init__(self, device: torch.device, fault: Fault, signals: DeviceSignals, driver: DeviceDriver) -> None:
        super().__init__(device, fault, signals, driver)
        self._simulated = driver.simulated

    def new_word_stream(self, comm: Stream) -> Stream:
        return self.new_stream("words", high_priority=True)

    def meet(self, descriptor: Descriptor, caller: Stream) -> None:
        stream = device_stream(caller)
        self.signals.publish_all(stream, descriptor)
        for peer in self._peers:
            self.signals.expect_on(stream, peer, descriptor)
        stream.flush()
        if self._simulated:  # the collective that follows blocks the host
            self.fault.check()
            require_peers(self, descriptor)

    def finished(self, caller: Stream) -> Event | None:
        stream = device_stream(caller)
        event = self.signals.mark_done(stream)
        stream.flush()
        return event


def make_transport(backend: Backend, arena: Arena, layout: ArenaLayout, fault: Fault, timeout_s: float) -> Transport:
    """The transport that fits ``backend``. Collective for the process-group backend."""
    if not backend.one_sided:
        from tpoverlap.comm.message_transport import MessageTransport

        return MessageTransport(backend, fault, timeout_s)
    driver = backend.driver()
    if driver is not None:
        return DeviceTransport(backend.device, fault, DeviceSignals(arena, layout, driver, timeout_s), driver)
    from tpoverlap.comm.host_signals import HostSignals

    assert isinstance(arena, CpuArena), f"the shared backend allocated {arena!r}"
    return OneSidedTransport(backend.device, fault, HostSignals(arena, layout, fault, timeout_s))
