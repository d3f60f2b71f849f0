"""Host streams: order, events, and what becomes of work and of waiters after an error."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from tpoverlap.comm.fault import Fault
from tpoverlap.comm.streams import CallerStream, HostStream
from tpoverlap.comm.trace import Trace
from tpoverlap.errors import PeerTimeoutError, TpOverlapError


@pytest.fixture
def fault() -> Fault:
    return Fault()


@pytest.fixture
def stream(fault: Fault) -> Iterator[HostStream]:
    stream = HostStream("test", fault)
    yield stream
    stream.close()


def _until(condition: Callable[[], bool], within_s: float = 5.0) -> bool:
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def _threads(label: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == f"tpoverlap-{label}"]


def test_work_runs_in_order_on_one_other_thread(stream: HostStream, fault: Fault) -> None:
    done: list[tuple[int, int]] = []
    for number in range(100):
        stream.run(lambda n=number: done.append((n, threading.get_ident())))
    stream.record().block(fault)  # type: ignore[attr-defined]
    assert [number for number, _ in done] == list(range(100))
    assert {thread for _, thread in done} != {threading.get_ident()} and len({thread for _, thread in done}) == 1


def test_an_event_is_done_after_the_work_before_it_and_not_earlier(stream: HostStream, fault: Fault) -> None:
    gate = threading.Event()
    stream.run(gate.wait)
    event = stream.record()
    assert not event.done()
    time.sleep(0.05)
    assert not event.done()
    gate.set()
    event.block(fault)  # type: ignore[attr-defined]
    assert event.done()


def test_streams_run_at_the_same_time_and_wait_for_each_other(stream: HostStream, fault: Fault) -> None:
    other, order, gate = HostStream("other", fault), [], threading.Event()
    stream.run(lambda: (gate.wait(5.0), order.append("first")))
    event = stream.record()
    other.run(lambda: order.append("beside"))
    other.wait(event)
    other.run(lambda: order.append("second"))
    end = other.record()
    assert _until(lambda: order == ["beside"]), "it does not wait for the first stream's work"
    gate.set()
    end.block(fault)  # type: ignore[attr-defined]
    assert order == ["beside", "first", "second"]
    other.close()


def test_the_caller_stream_is_the_calling_thread(fault: Fault) -> None:
    caller, seen = CallerStream(fault), []
    caller.run(lambda: seen.append(threading.get_ident()))
    caller.enqueue(lambda: seen.append(threading.get_ident()))
    assert seen == [threading.get_ident()] * 2
    assert caller.record().done()


def test_an_error_is_stored_and_raised_where_somebody_waits(stream: HostStream, fault: Fault) -> None:
    def fail() -> None:
        raise PeerTimeoutError("rank 1 is late")

    skipped: list[str] = []
    stream.run(fail)
    stream.run(lambda: skipped.append("ran"))
    event = stream.record()
    with pytest.raises(PeerTimeoutError, match="rank 1 is late"):
        CallerStream(fault).wait(event)
    assert _until(event.done), "nobody waits for ever for a stream that gave up"
    assert skipped == [], "work after an error would read what is not there"
    assert isinstance(fault.error, PeerTimeoutError)
    stream.run(lambda: skipped.append("ran"))
    assert _until(stream.record().done) and skipped == []


def test_a_waiter_is_released_by_another_threads_error(stream: HostStream, fault: Fault) -> None:
    gate = threading.Event()
    stream.run(lambda: gate.wait(20.0))
    event = stream.record()
    threading.Timer(0.1, fault.set, (PeerTimeoutError("the watchdog says no"),)).start()
    start = time.monotonic()
    with pytest.raises(PeerTimeoutError, match="the watchdog"):
        CallerStream(fault).wait(event)
    assert time.monotonic() - start < 5.0
    gate.set()


def test_a_stream_that_waits_for_another_is_released_too(stream: HostStream, fault: Fault) -> None:
    other, gate = HostStream("other", fault), threading.Event()
    stream.run(lambda: gate.wait(20.0))
    other.wait(stream.record())
    end = other.record()
    fault.set(TpOverlapError("over"))
    assert _until(end.done)
    gate.set()
    other.close()


def test_the_first_error_stays_and_is_raised_as_a_copy() -> None:
    fault = Fault()
    fault.check()
    first = PeerTimeoutError("first")
    assert fault.set(first) and not fault.set(ValueError("second"))
    assert fault.error is first
    for _ in range(2):
        with pytest.raises(PeerTimeoutError, match="first") as caught:
            fault.check()
        assert caught.value is not first and caught.value.__cause__ is first


def test_close_ends_the_thread_after_what_is_queued(fault: Fault) -> None:
    stream, done = HostStream("closing", fault), []
    stream.run(lambda: time.sleep(0.05))
    stream.run(lambda: done.append(True))
    stream.close()
    assert done == [True] and _until(lambda: not _threads("closing"))
    stream.close()
    with pytest.raises(AssertionError, match="after close"):
        stream.run(lambda: None)


def test_a_stream_that_is_dropped_ends_its_thread(fault: Fault) -> None:
    HostStream("dropped", fault)
    gc.collect()
    assert _until(lambda: not _threads("dropped"))


def test_no_tensor_is_kept_after_its_work(stream: HostStream, fault: Fault) -> None:
    """A stream that waits for more must not hold on to the last activation."""
    import weakref

    tensor = torch.zeros(4)
    gone = weakref.ref(tensor)
    stream.run(lambda t=tensor: t.add_(1))
    stream.record().block(fault)  # type: ignore[attr-defined]
    del tensor
    gc.collect()
    assert gone() is None


def test_gradients_are_off_on_the_worker(stream: HostStream, fault: Fault) -> None:
    seen: list[bool] = []
    stream.run(lambda: seen.append(torch.is_grad_enabled()))
    stream.record().block(fault)  # type: ignore[attr-defined]
    assert seen == [False] and torch.is_grad_enabled()


def test_trace_keeps_time_and_order(stream: HostStream, fault: Fault) -> None:
    trace = Trace(torch.device("cpu"))
    for step in range(3):
        stream.run(lambda s=step: (trace.mark(stream, "sent", s), time.sleep(0.01)))
    stream.record().block(fault)  # type: ignore[attr-defined]
    marks = trace.marks()
    assert [(m.stream, m.what, m.step) for m in marks] == [("test", "sent", step) for step in range(3)]
    times_us = [mark.time_us for mark in marks]
    assert times_us == sorted(times_us) and times_us[0] >= 0
    assert times_us[2] - times_us[0] >= 20_000, "microseconds"
