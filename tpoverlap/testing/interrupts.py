"""Ctrl-C reaches every process of a terminal's foreground group; the one that started the ranks decides.

::

    parent | holds and blocks SIGINT | start | unblocks it, gets what came
    rank                             | blocked from its first instruction | imports torch | ignores and unblocks it

Without the mask a rank that is still importing when Ctrl-C comes writes a traceback between the words of the parent.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker

_SIGINT = {signal.SIGINT}


@contextmanager
def starting_a_rank() -> Iterator[None]:
    """Around ``process.start()``: SIGINT comes after the block, or a rank that got half of its arguments complains."""
    resource_tracker.ensure_running()  # its start would unblock SIGINT inside the block (Python 3.11)
    with _interrupts_held():
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGINT)  # the new process inherits this thread's mask
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def ignore_interrupts() -> None:
    """In a process that was started inside `starting_a_rank`: SIGINT, also one that came meanwhile, does nothing."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGINT)


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """SIGINT comes after the block, though other threads take it. Only the main thread may hold it, and only there does
    it interrupt anything.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)
        if came:
            signal.raise_signal(signal.SIGINT)
