"""The first error of a manager, seen by every thread and stream of it."""

from __future__ import annotations

import threading
from types import FrameType
from typing import NoReturn

from tpoverlap.errors import TpOverlapError


class Fault:
    """Holds the first error; every later wait and every later call raises it again.

    Set by whichever thread meets it (a comm thread, the caller, the watchdog); a manager with a fault can only be
    closed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.error: BaseException | None = None
        """The first error, or None. Read it; `set` and `let_go` alone write it."""
        self._failures: list[BaseException] = []

    def set(self, error: BaseException) -> bool:
        """Store ``error`` if it is the first one; True when it was."""
        with self._lock:
            if self.error is None:
                self.error = error
                return True
            return False

    def note(self, error: BaseException) -> None:
        """An operation ends with ``error``, which goes on to the caller: `let_go` looks at its frames, too."""
        self._failures.append(error)

    def let_go(self) -> None:
        """The manager has ended: errors keep their messages and places, but no memory of it.

        Frames in a traceback hold views of the arena, and the caller may keep the error. And what is stored here has
        to lose its traceback: it leads to the caller's activations, their graph, the layers in it and back to this
        object, which the garbage collector cannot see through.
        """
        errors, self._failures = [*self._failures, self.error], []
        for frame in _frames_of(errors):
            if frame.f_globals.get("__name__", "").partition(".")[0] == __package__.partition(".")[0]:
                try:
                    frame.clear()
                except RuntimeError:  # still running: an operation during which another thread ended the manager
                    continue
        if isinstance(self.error, TpOverlapError):
            self.error = _copy(self.error)  # the caller may hold the first one: that keeps its traceback

    def check(self) -> None:
        """Raise the stored error, if there is one."""
        if self.error is not None:
            self._raise(self.error)

    @staticmethod
    def _raise(error: BaseException) -> NoReturn:
        # A copy: raising one object from several threads mixes their tracebacks.
        if isinstance(error, TpOverlapError):
            raise _copy(error) from error
        raise error


def _copy(error: TpOverlapError) -> TpOverlapError:
    copy = type(error)(*error.args)
    copy.__dict__.update(error.__dict__)
    return copy


def _frames_of(errors: list[BaseException | None]) -> list[FrameType]:
    """Of the tracebacks of ``errors`` and of what they were raised from."""
    frames, seen = [], set()
    while errors:
        error = errors.pop()
        if error is None or id(error) in seen:
            continue
        seen.add(id(error))
        errors += (error.__cause__, error.__context__)
        trace = error.__traceback__
        while trace is not None:
            frames.append(trace.tb_frame)
            trace = trace.tb_next
    return frames
