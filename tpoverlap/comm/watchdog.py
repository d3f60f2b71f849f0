"""One thread a manager that looks at operations which take long, and ends what cannot end by itself.

It compares what the ranks published, looks whether peers gave up or died, warns about a slow rank, and at the
time-out stores the error and releases every waiter. Operations that finish quickly never meet it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING

from tpoverlap.comm.diagnosis import AbortReason, blame
from tpoverlap.errors import PeerTimeoutError, RankMismatchError, TpOverlapError
from tpoverlap.memory.driver import DriverBlockedError

if TYPE_CHECKING:
    from tpoverlap.comm.channel import Channel
    from tpoverlap.comm.in_flight import Flight

logger = logging.getLogger("tpoverlap")

TICK_S = 0.1
LOOK_AFTER_S = 0.4
"""Younger operations are left alone: looking costs a copy from the device."""
WARN_AFTER_S = 10.0
LAST_RESORT_S = 30.0
"""Waiters that could not be released for so long never will be."""


class Watchdog:
    """Runs until `stop` or until its channel is gone (it holds it weakly, so it does not keep it alive)."""

    def __init__(self, channel: Channel) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=_watch, args=(weakref.ref(channel), self._stop), name="tpoverlap-watchdog", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """End the thread. Idempotent."""
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=5.0)


def _watch(channel_ref: weakref.ref[Channel], stop: threading.Event) -> None:
    warned: set[int] = set()
    blocked_since: float | None = None
    while not stop.wait(TICK_S):
        channel = channel_ref()
        if channel is None:
            return
        try:
            error = _look(channel, warned) if channel.fault.error is None else None
        except Exception as unexpected:  # the watchdog must not die silently: a dead one turns errors into hangs
            logger.exception("tpoverlap watchdog failed")
            error = TpOverlapError(f"the watchdog failed: {unexpected!r}")
        if error is not None:
            channel.end(error)
        if channel.fault.error is not None:
            channel.end(channel.fault.error)  # a comm thread may have met it, which tells nobody
            try:
                channel.release_waiters()
                blocked_since = None
            except DriverBlockedError as problem:
                blocked_since = blocked_since or time.monotonic()
                if time.monotonic() - blocked_since > LAST_RESORT_S:
                    _end_process(channel.fault.error, problem)
            if channel.oldest_in_flight() is None or not channel.bounds_waits:
                return
        del channel  # or the loop itself would keep it alive while it sleeps


def _end_process(error: BaseException, problem: BaseException) -> None:
    """Nothing in this process can let its waits go, and its other threads may be waiting for ever."""
    logger.critical("tpoverlap ends this process, which cannot be released from a wait (%s): %s", problem, error)
    faulthandler.dump_traceback(sys.stderr)
    sys.stderr.flush()
    os._exit(1)


def _look(channel: Channel, warned: set[int]) -> TpOverlapError | None:
    oldest = channel.oldest_in_flight()
    if oldest is None:
        return None
    age_s = time.monotonic() - oldest.started_s
    if age_s < LOOK_AFTER_S:
        return None
    with contextlib.suppress(DriverBlockedError):  # what was read last is true, if not all that there is
        channel.refresh_peer_state()
    diagnosis, descriptor = channel.diagnosis, oldest.descriptor
    if diagnosis.differs(descriptor):
        return diagnosis.mismatch(descriptor.sequence)
    what = f"{descriptor.label} (T={descriptor.num_tokens})"
    for peer in channel.peers:  # first: who gave up may have done so because of who died
        if channel.identities[peer].is_dead():
            pid = channel.identities[peer].pid
            return blame(
                peer, f"rank {peer} (pid {pid}) died while rank {channel.rank} was in {what}; its own log has the cause"
            )
    for peer in channel.peers:
        word = channel.abort_word(peer)
        if word:
            return diagnosis.gave_up(peer, word, what)
    return _judge_age(channel, oldest, age_s, warned)


def _judge_age(channel: Channel, oldest: Flight, age_s: float, warned: set[int]) -> TpOverlapError | None:
    descriptor = oldest.descriptor
    missing = channel.diagnosis.missing_peers(descriptor.sequence)
    ranks = ", ".join(map(str, missing))
    who = "every rank has started it"
    if missing:
        who = f"rank {ranks} has not started it" if len(missing) == 1 else f"ranks {ranks} have not started it"
    what = f"operation number {descriptor.sequence}, {descriptor.label} with T={descriptor.num_tokens}"
    if age_s > channel.timeout_s and channel.bounds_waits:
        suspect = missing[0] if missing else channel.peers[0]
        return channel.diagnosis.late(suspect, age_s, f"{what}; {who}")
    if age_s > WARN_AFTER_S and descriptor.sequence not in warned:
        warned.add(descriptor.sequence)
        logger.warning(
            "rank %d has been in %s for %.0f s; %s (error after timeout_s=%g)",
            channel.rank,
            what,
            age_s,
            who,
            channel.timeout_s,
        )
    return None


def abort_word(error: BaseException, sequence: int) -> int:
    """How an error in operation ``sequence`` is told to the peers."""
    if isinstance(error, RankMismatchError):
        return AbortReason.MISMATCH.word(sequence)
    return AbortReason.ERROR.word(sequence, error.peer if isinstance(error, PeerTimeoutError) else None)
