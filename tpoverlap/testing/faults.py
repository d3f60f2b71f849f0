"""Faults on purpose: late, failing or dying transfers and GEMMs, slow streams, and a trace to see what came when.

::

    with delay_transfers(mgr, 0.3, only_source=1), tracing(mgr) as trace:   # the same line on every rank
        y = all_gather_gemm(...)
    trace.marks()

Every function acts on this process alone; ``only_source`` and ``only_rank`` let all ranks of a test run the same lines.
A manager of R = 1 has nothing to disturb.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tpoverlap.comm import Channel, Trace, Transfer
from tpoverlap.comm.device_streams import DeviceStream
from tpoverlap.comm.streams import Stream, Work
from tpoverlap.manager import UserBufferManager
from tpoverlap.testing.simulated import SimulatedDriver

Seconds = float | Callable[[], float]
"""A duration, or a function that gives another one each time (a random delay)."""

_GPU_CYCLES_PER_S = 1.5e9
"""Lower than any present clock: a delay on the GPU may be shorter than asked for, by up to a third."""


def pause(stream: Stream, seconds: Seconds) -> None:
    """Hold up ``stream``, inside work of it: the calling thread on the CPU, the CUDA stream on a GPU."""
    duration_s = seconds() if callable(seconds) else seconds
    if not isinstance(stream, DeviceStream):
        time.sleep(duration_s)
    elif isinstance(stream.driver, SimulatedDriver):
        stream.driver.launch(stream.handle, lambda: time.sleep(duration_s))
    else:
        stream.driver.launch(stream.handle, lambda: torch.cuda._sleep(int(duration_s * _GPU_CYCLES_PER_S)))


def trace(mgr: UserBufferManager) -> Trace:
    """Record from now on what the manager's streams do; returns the record."""
    channel = _channel(mgr)
    recorded = Trace(channel.device)
    channel.record(recorded)
    return recorded


@contextmanager
def tracing(mgr: UserBufferManager) -> Iterator[Trace]:
    """`trace` for a block."""
    try:
        yield trace(mgr)
    finally:
        _channel(mgr).record(None)


# -- transfers ---------------------------------------------------------------------------------------------------


@contextmanager
def before_transfers(mgr: UserBufferManager, action: Callable[[Transfer], None], **which: Any) -> Iterator[None]:
    """Call ``action(transfer)`` right before this rank's transfers copy or send their rows, on the stream that does.

    Args:
        mgr: whose transfers; blocks nest, the innermost acts first.
        action: what to do; what it raises ends the operation.
        which: only_source: act on this rank alone (the source is always this rank); only_destination: on transfers to
            this rank; only_step: in this step of the schedule; None (the default): all. after: let that many matching
            ones pass first; times: act at most that often, None: always.
    """
    with _before_transfers(mgr, lambda stream, transfer: action(transfer), **which):
        yield


@contextmanager
def _before_transfers(
    mgr: UserBufferManager,
    action: Callable[[Stream, Transfer], None],
    *,
    only_source: int | None = None,
    only_destination: int | None = None,
    only_step: int | None = None,
    after: int = 0,
    times: int | None = None,
) -> Iterator[None]:
    channel = _channel(mgr)
    outer, seen = channel.before_copy, 0

    def hook(stream: Stream, transfer: Transfer) -> None:
        nonlocal seen
        wanted = (
            only_source in (None, transfer.source)
            and only_destination in (None, transfer.destination)
            and only_step in (None, transfer.step)
        )
        if wanted:
            seen += 1
            if seen > after and (times is None or seen <= after + times):
                action(stream, transfer)
        if outer is not None:
            outer(stream, transfer)

    channel.before_copy = hook
    try:
        yield
    finally:
        channel.before_copy = outer


@contextmanager
def delay_transfers(mgr: UserBufferManager, seconds: Seconds, **which: Any) -> Iterator[None]:
    """Each matching transfer waits before it copies; ``which``: see `before_transfers`."""
    with _before_transfers(mgr, lambda stream, transfer: pause(stream, seconds), **which):
        yield


@contextmanager
def raise_in_transfer(mgr: UserBufferManager, error: BaseException, *, after: int = 0, **which: Any) -> Iterator[None]:
    """The matching transfer number ``after`` (from 0) raises ``error`` instead of copying."""

    def fail(transfer: Transfer) -> None:
        raise error

    with before_transfers(mgr, fail, after=after, times=1, **which):
        yield


@contextmanager
def die_in_transfer(mgr: UserBufferManager, *, how: str = "exit", after: int = 0, **which: Any) -> Iterator[None]:
    """The process ends in the matching transfer number ``after`` (from 0); ``how``: see `die`."""
    with before_transfers(mgr, lambda transfer: die(how), after=after, times=1, **which):
        yield


@contextmanager
def stall_in_transfer(mgr: UserBufferManager, seconds: Seconds, *, after: int = 0, **which: Any) -> Iterator[None]:
    """Only the matching transfer number ``after`` (from 0) waits: a rank that hangs for a while."""
    with delay_transfers(mgr, seconds, after=after, times=1, **which):
        yield


# -- GEMMs and streams -------------------------------------------------------------------------------------------


@contextmanager
def before_gemms(
    mgr: UserBufferManager, action: Callable[[Stream], None], *, only_rank: int | None = None, after: int = 0
) -> Iterator[None]:
    """Call ``action(stream)`` on the GEMM's stream, inside the operation, before each GEMM but the first ``after``.

    Covers every method that opens an exchange, so all but ``sequential``.
    """
    channel, seen = _channel(mgr), 0
    outer = channel.before_gemm

    def hook(stream: Stream) -> None:
        nonlocal seen
        seen += 1
        if seen > after:
            action(stream)
        if outer is not None:
            outer(stream)

    if only_rank in (None, channel.rank):
        channel.before_gemm = hook
    try:
        yield
    finally:
        channel.before_gemm = outer


@contextmanager
def delay_gemms(mgr: UserBufferManager, seconds: Seconds, *, only_rank: int | None = None) -> Iterator[None]:
    """Each GEMM takes that much longer."""
    with before_gemms(mgr, lambda stream: pause(stream, seconds), only_rank=only_rank):
        yield


@contextmanager
def delay_stream(
    mgr: UserBufferManager, label: str, seconds: Seconds, *, only_rank: int | None = None
) -> Iterator[None]:
    """Every piece of work of one stream starts late.

    Args:
        mgr: whose stream.
        label: "comm", on a device "words", "compute0", ..., "caller" or (Gloo's receiving thread) "receive"; see
            `stream_labels`.
        seconds: how late.
        only_rank: act on this rank alone; None: on every rank.
    """
    channel = _channel(mgr)
    stream = _streams(channel)[label]
    if isinstance(stream, DeviceStream):
        with _disturbed(stream, seconds, active=only_rank in (None, channel.rank)):
            yield
        return
    original = type(stream).run

    def run(work: Work) -> None:
        def late() -> None:
            pause(stream, seconds)
            work()

        original(stream, late)

    if only_rank in (None, channel.rank):
        stream.run = stream.enqueue = run  # type: ignore[method-assign]
    try:
        yield
    finally:
        for name in ("run", "enqueue"):
            stream.__dict__.pop(name, None)


@contextmanager
def _disturbed(stream: DeviceStream, seconds: Seconds, *, active: bool) -> Iterator[None]:
    """Before each batch of memory operations, each copy and each launch of the driver's stream."""
    if active:
        stream.disturb = lambda: pause(stream, seconds)
    try:
        yield
    finally:
        stream.disturb = None


def stream_labels(mgr: UserBufferManager) -> tuple[str, ...]:
    """The streams that `delay_stream` can hold up."""
    return tuple(_streams(_channel(mgr)))


def _streams(channel: Channel) -> dict[str, Stream]:
    streams = [channel.comm_stream, channel.word_stream, *channel.compute_streams]
    if channel.device.type == "cpu":
        # On a GPU the caller's stream is a new wrapper each time: hold it up with `pause` instead.
        streams.append(channel.caller_stream())
    receive = getattr(channel.transport, "_receive", None)
    if receive is not None:
        streams.append(receive)
    return {stream.label: stream for stream in streams}


# -- ends --------------------------------------------------------------------------------------------------------


def die(how: str = "exit") -> None:
    """End this process at once, without cleaning up: "exit" (``os._exit(3)``) or "kill" (SIGKILL)."""
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60.0)  # the signal may take a moment; nothing may happen after it
    elif how != "exit":
        raise ValueError(f"how must be 'exit' or 'kill', got {how!r}")
    os._exit(3)


def _channel(mgr: UserBufferManager) -> Channel:
    if mgr.channel is None:
        raise ValueError("this manager has R = 1 and nothing to disturb")
    return mgr.channel
