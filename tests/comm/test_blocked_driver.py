"""The watchdog where no call of the driver returns; on a GPU, what makes it so."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from tests.comm import blocked_ranks
from tpoverlap.comm import watchdog
from tpoverlap.comm.diagnosis import Diagnosis
from tpoverlap.comm.fault import Fault
from tpoverlap.errors import PeerTimeoutError
from tpoverlap.memory.driver import DriverBlockedError
from tpoverlap.testing import run_ranks


def blocked(*arguments: object) -> None:
    raise DriverBlockedError("blocked")


def channel(**more: Any) -> Any:
    """One whose oldest operation is a second old; peer 1 lives and says nothing."""
    descriptor = SimpleNamespace(sequence=7, label="qkv_fprop all-gather", num_tokens=16, record=1 << 48, digest=2)
    made = SimpleNamespace(
        oldest_in_flight=lambda: SimpleNamespace(started_s=time.monotonic() - 1.0, descriptor=descriptor),
        refresh_peer_state=blocked,
        diagnosis=Diagnosis(0, 2, 0.5, lambda peer, sequence: (0, 0)),
        identities=[SimpleNamespace(is_dead=lambda: False, pid=1)] * 2,
        abort_word=lambda peer: 0,
        **{"rank": 0, "peers": [1], "timeout_s": 0.5, "bounds_waits": True},
    )
    made.__dict__.update(more)
    return made


def test_a_rank_that_cannot_look_still_has_a_time_out() -> None:
    error = watchdog._look(channel(), set())
    assert isinstance(error, PeerTimeoutError) and "qkv_fprop all-gather with T=16" in str(error)
    assert watchdog._look(channel(timeout_s=60.0), set()) is None, "not being able to look is no error by itself"


def test_a_process_that_nothing_can_release_ends(caplog: pytest.LogCaptureFixture) -> None:
    fault = Fault()
    fault.set(PeerTimeoutError("rank 1 is gone"))

    class Held:
        def __init__(self) -> None:
            self.__dict__.update(vars(channel(fault=fault, end=lambda error: None, release_waiters=blocked)))

    held, ended = Held(), []
    with (
        mock.patch.object(watchdog, "LAST_RESORT_S", 0.25),
        mock.patch.object(watchdog.os, "_exit", lambda status: (ended.append(status), stop.set())),
        mock.patch.object(watchdog.faulthandler, "dump_traceback", lambda file: None),
    ):
        stop, started = threading.Event(), time.monotonic()
        watchdog._watch(lambda: held, stop)  # type: ignore[arg-type]
    assert ended == [1] and time.monotonic() - started > 0.25
    assert "rank 1 is gone" in caplog.text, "why"


@pytest.mark.gpu
@pytest.mark.timeout(200)
@pytest.mark.parametrize("ending", ["dies", "stalls"])
@pytest.mark.parametrize("blocks", ["first use of a kernel", "memory is freed"])
def test_a_call_of_the_driver_that_waits_for_the_blocked_stream(blocks: str, ending: str) -> None:
    """Processes of their own: what is loaded stays loaded."""
    dead = (1,) if ending == "dies" else ()
    found = run_ranks(blocked_ranks.held_up, 2, blocks, ending, device="cuda", timeout_s=90, expect_dead=dead)[0]
    assert found is not None, "rank 0 lives"
    message, took_s = found
    assert message.startswith("PeerTimeoutError"), message
    assert took_s < 40, f"took {took_s:.1f} s"
