"""Streams and events, with one interface for the GPU and for the CPU, so that schedules are written once.

===================  ================================  ==============================================
                     GPU                               CPU
===================  ================================  ==============================================
caller's stream      ``torch.cuda.current_stream()``   `CallerStream`: the calling thread itself
comm stream          a high-priority CUDA stream       `HostStream`: a worker thread with a queue
``run(work)``        enqueue what ``work`` launches    run ``work`` now, or queue it to the thread
``record`` / wait    CUDA events                       `HostEvent`
===================  ================================  ==============================================

On the CPU overlap is therefore real concurrency: the thread copies and signals while the caller multiplies, and a
missing wait shows as wrong numbers in a test, as it would on the GPU.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch

from tpoverlap.comm.epochs import reached
from tpoverlap.comm.fault import Fault

Work = Callable[[], object]
_FAULT_CHECK_S = 0.05
_POLL_S = 1e-4


class Event(ABC):
    """A point in a stream's order of work."""

    @abstractmethod
    def done(self) -> bool:
        """Whether the work before it has finished. Never blocks."""


class Stream(ABC):
    """Work in order. Different streams run concurrently unless one waits for another's event."""

    label: str

    @abstractmethod
    def run(self, work: Work) -> None:
        """Do ``work`` after everything queued before."""

    @abstractmethod
    def enqueue(self, work: Work) -> None:
        """As `run`, for work that names its stream in every call (copies and signals): cheaper on the GPU, where
        making a stream current costs more host time than a copy does.
        """

    @abstractmethod
    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy contiguous bytes. Call it inside `run` or `enqueue`; on the GPU it runs on a copy engine."""

    def current(self) -> AbstractContextManager[object]:
        """For a block inside `enqueue` that launches kernels: they go to this stream."""
        return nullcontext()

    @abstractmethod
    def wait_counter(self, counters: torch.Tensor, index: int, target: int) -> None:
        """Wait until ``counters[index]`` (int32, this device, local) has reached ``target`` (mod 2**32, cyclically).
        Call it inside `run` or `enqueue`; on the GPU it is a stream memory operation.
        """

    @abstractmethod
    def record(self) -> Event:
        """An event after everything queued so far."""

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Whatever is queued from here on starts after ``event``."""

    @abstractmethod
    def close(self) -> None:
        """Finish and release. Idempotent."""


class HostEvent(Event):
    """Set by a host stream; waited for by any thread."""

    def __init__(self, *, is_set: bool = False) -> None:
        self._flag = threading.Event()
        if is_set:
            self._flag.set()

    def done(self) -> bool:
        return self._flag.is_set()

    def set(self) -> None:
        """Mark as reached."""
        self._flag.set()

    def block(self, fault: Fault) -> None:
        """Block the calling thread until it is set, or raise the fault that another thread has met meanwhile."""
        while not self._flag.wait(_FAULT_CHECK_S):
            fault.check()
        fault.check()


_REACHED = HostEvent(is_set=True)


class CallerStream(Stream):
    """The calling thread as a stream: work runs at once, so every event of it has been reached."""

    def __init__(self, fault: Fault) -> None:
        self.label = "caller"
        self._fault = fault

    def run(self, work: Work) -> None:
        work()

    def enqueue(self, work: Work) -> None:
        work()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def wait_counter(self, counters: torch.Tensor, index: int, target: int) -> None:
        _poll_counter(counters, index, target, self._fault)

    def record(self) -> Event:
        return _REACHED

    def wait(self, event: Event) -> None:
        assert isinstance(event, HostEvent), f"a host stream cannot wait for {event!r}"
        event.block(self._fault)

    def close(self) -> None:
        pass


class HostStream(Stream):
    """A worker thread that does its work in order.

    After a fault the remaining work is skipped but events are still set: nobody waits for a thread that gave up.
    """

    def __init__(self, label: str, fault: Fault) -> None:
        self.label = label
        self._fault = fault
        self._queue: queue.SimpleQueue[Work | HostEvent | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = threading.Thread(
            target=_drain, args=(self._queue, fault), name=f"tpoverlap-{label}", daemon=True
        )
        self._thread.start()
        weakref.finalize(self, self._queue.put, None)  # a stream that is dropped without close ends its thread too

    def run(self, work: Work) -> None:
        assert self._thread is not None, f"stream {self.label} used after close"
        # Thread-local too, and without it the worker may not write what the caller allocated in inference mode.
        self._queue.put(partial(_run_in_inference_mode, work) if torch.is_inference_mode_enabled() else work)

    def enqueue(self, work: Work) -> None:
        self.run(work)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def wait_counter(self, counters: torch.Tensor, index: int, target: int) -> None:
        _poll_counter(counters, index, target, self._fault)

    def record(self) -> Event:
        event = HostEvent()
        self._queue.put(event)
        return event

    def wait(self, event: Event) -> None:
        assert isinstance(event, HostEvent), f"a host stream cannot wait for {event!r}"
        if not event.done():
            self._queue.put(lambda: event.block(self._fault))

    def close(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            if thread is not threading.current_thread():
                thread.join(timeout=10.0)


def _run_in_inference_mode(work: Work) -> None:
    with torch.inference_mode():
        work()


def _poll_counter(counters: torch.Tensor, index: int, target: int, fault: Fault) -> None:
    while not reached(int(counters[index]), target):
        fault.check()
        time.sleep(_POLL_S)


def _drain(work_queue: queue.SimpleQueue[Work | HostEvent | None], fault: Fault) -> None:
    torch.set_grad_enabled(False)  # thread-local: the caller's no_grad inside an autograd function does not reach here
    while (item := work_queue.get()) is not None:
        if isinstance(item, HostEvent):
            item.set()
        elif fault.error is None:
            try:
                item()
            except BaseException as error:
                fault.set(error)
        del item  # the queue's item may hold tensors; do not keep them until the next one comes
