"""Device memory reached from another process, for when every call of the driver in this one is blocked.

A first use of a kernel loads it, and freeing device memory unmaps it. Both wait until the GPU has no work of this
process left, and keep every other call of the driver waiting meanwhile, of all threads and of all contexts. Where that
work is a stream's wait for a peer that has died, this is for ever: nothing in this process can write the word that is
waited for. Another process can. So each arena is exported when it is made, and the watchdog starts a process that maps
it when it needs one.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, Final

from tpoverlap.errors import BackendUnavailableError
from tpoverlap.memory import cuda_rescue_child as child

_START_S: Final = 30.0
"""A new process, a new context and the mappings take one or two seconds on an idle machine."""
_ANSWER_S: Final = 10.0
_FABRIC_BYTES: Final = 64


@dataclass(frozen=True)
class Share:
    """Device memory that other processes can map.

    Attributes:
        address: in this process. size_bytes: of what is used of it.
        kind: `POSIX_FILE` or `FABRIC`. handle: a file descriptor, or 64 bytes in hexadecimal.
    """

    address: int
    size_bytes: int
    kind: int
    handle: int | str

    def covers(self, address: int, size_bytes: int) -> bool:
        """Whether that is a part of it."""
        return self.address <= address and address + size_bytes <= self.address + self.size_bytes

    def close(self) -> None:
        """The file descriptor."""
        if isinstance(self.handle, int):
            with contextlib.suppress(OSError):
                os.close(self.handle)


def export(cuda: Any, address: int, size_bytes: int) -> Share | None:
    """A `Share` of memory at ``address``, which has one of its own; None: its owner did not make it for that.

    Args:
        cuda: the driver's library.
    """
    handle = ctypes.c_uint64()
    if cuda.cuMemRetainAllocationHandle(ctypes.byref(handle), ctypes.c_void_p(address)):
        return None
    try:
        number = ctypes.c_int(-1)
        if not cuda.cuMemExportToShareableHandle(ctypes.byref(number), handle, child.POSIX_FILE, ctypes.c_uint64(0)):
            return Share(address, size_bytes, child.POSIX_FILE, number.value)
        fabric = ctypes.create_string_buffer(_FABRIC_BYTES)
        if not cuda.cuMemExportToShareableHandle(fabric, handle, child.FABRIC, ctypes.c_uint64(0)):
            return Share(address, size_bytes, child.FABRIC, fabric.raw.hex())
        return None
    finally:
        cuda.cuMemRelease(handle)


class RescueProcess:
    """A process with these shares mapped. One request at a time.

    Args:
        uuid: of the GPU, 32 hexadecimal digits. shares: of its memory.
        command: instead of the one that starts `cuda_rescue_child` (tests).

    Raises:
        BackendUnavailableError: it cannot be started, or cannot map them. So do its methods if it does not answer.
    """

    def __init__(self, uuid: str, shares: Sequence[Share], command: Sequence[str] | None = None) -> None:
        self._shares, self._lock = list(shares), Lock()
        # Without site-packages: nothing there is needed, and what there is may take seconds to import.
        command = command or [sys.executable, "-I", "-S", child.__file__]
        files = [share.handle for share in shares if isinstance(share.handle, int)]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=files, start_new_session=True
            )
        except (OSError, ValueError) as error:
            raise BackendUnavailableError(f"no process could be started to reach device memory: {error}") from error
        rows = [
            {"kind": share.kind, "handle": share.handle, "size_bytes": _rounded(share.size_bytes)} for share in shares
        ]
        try:
            self._send(json.dumps({"uuid": uuid, "shares": rows}).encode() + b"\n")
            answer = json.loads(self._line(time.monotonic() + _START_S))
            if answer["error"] is not None:
                raise BackendUnavailableError(f"another process could not map device memory: {answer['error']}")
        except BaseException:
            self.close()
            raise

    def read(self, address: int, size_bytes: int) -> bytes:
        """Device bytes."""
        return self._ask(child.READ, address, size_bytes, b"", size_bytes)

    def write(self, address: int, data: bytes) -> None:
        """``data`` to device bytes."""
        self._ask(child.WRITE, address, len(data), data, 0)

    def fill(self, address: int, value: int, size_bytes: int) -> None:
        """Every byte becomes ``value``."""
        self._ask(child.FILL, address, size_bytes, bytes([value]), 0)

    def close(self) -> None:
        """End it. Idempotent."""
        process = self._process
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        process.kill()  # what it had to do is done: every request was answered
        process.wait()

    def _ask(self, kind: int, address: int, size_bytes: int, data: bytes, answer_bytes: int) -> bytes:
        places = [
            (index, address - share.address)
            for index, share in enumerate(self._shares)
            if share.covers(address, size_bytes)
        ]
        assert places, "the caller looked for a share"
        with self._lock:
            self._send(child.HEADER.pack(kind, *places[0], size_bytes) + data)
            answer = self._receive(1 + answer_bytes, time.monotonic() + _ANSWER_S, ends_early=True)
        if answer[0]:
            raise BackendUnavailableError("the process that reaches device memory from outside could not do that")
        return answer[1:]

    def _send(self, data: bytes) -> None:
        assert self._process.stdin is not None, "a pipe"
        try:
            self._process.stdin.write(data)
            self._process.stdin.flush()
        except (OSError, ValueError) as error:
            raise self._gone() from error

    def _line(self, deadline: float) -> bytes:
        line = b""
        while not line.endswith(b"\n"):
            line += self._receive(1, deadline)
        return line

    def _receive(self, size_bytes: int, deadline: float, *, ends_early: bool = False) -> bytes:
        """``ends_early``: a first byte that is not 0 is all there is."""
        assert self._process.stdout is not None, "a pipe"
        descriptor, data = self._process.stdout.fileno(), b""
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            while len(data) < size_bytes and not (ends_early and data and data[0]):
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise self._gone()
                more = os.read(descriptor, size_bytes - len(data))
                if not more:
                    raise self._gone()
                data += more
        return data

    def _gone(self) -> BackendUnavailableError:
        self._process.kill()  # whoever asks next must not wait for it as well
        return BackendUnavailableError(
            f"the process that reaches device memory from outside does not answer (its exit status: "
            f"{self._process.poll()})"
        )


def _rounded(size_bytes: int) -> int:
    return -(-size_bytes // child.GRANULARITY_BYTES) * child.GRANULARITY_BYTES
