"""The first error of a manager, seen by every thread and stream of it."""

from __future__ import annotations

import threading
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
        """The first error, or None. Read it; `set` alone writes it."""

    def set(self, error: BaseException) -> bool:
        """Store ``error`` if it is the first one; True when it was."""
        with self._lock:
            if self.error is None:
                self.error = error
                return True
            return False

    def check(self) -> None:
        """Raise the stored error, if there is one."""
        if self.error is not None:
            self._raise(self.error)

    @staticmethod
    def _raise(error: BaseException) -> NoReturn:
        # A copy: raising one object from several threads mixes their tracebacks.
        if isinstance(error, TpOverlapError):
            copy = type(error)(*error.args)
            copy.__dict__.update(error.__dict__)
            raise copy from error
        raise error
