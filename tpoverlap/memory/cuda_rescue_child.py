"""A program of its own: maps another process's device memory, and reads and writes it as its standard input says.

Run by path, in an interpreter without site-packages (`tpoverlap.memory.cuda_rescue` says why and starts it): so this
file imports nothing but the standard library. First comes one line of JSON, then requests; answers go to the output.

=========  =============================================================  ===========================================
           request                                                        answer
=========  =============================================================  ===========================================
set-up     {"uuid": hex, "shares": [{"kind", "handle", "size_bytes"}]}    {"error": null, or a text}
read       header (kind 0, share, offset, size)                           status, size bytes
write      header (kind 1, share, offset, size), size bytes               status
fill       header (kind 2, share, offset, size), 1 byte                   status
=========  =============================================================  ===========================================

A status is one byte, 0 if it worked. The program ends when its input does.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import struct
import sys
from typing import Any, BinaryIO, Protocol

HEADER = struct.Struct("<BBQQ")
READ, WRITE, FILL = range(3)
POSIX_FILE, FABRIC = 1, 8
"""CUmemAllocationHandleType: how memory is handed from process to process."""
GRANULARITY_BYTES = 2 << 20
"""What mappings of device memory are multiples of."""
_READ_WRITE, _ON_DEVICE = 3, 1
_MOST_DEVICES = 64


class Memory(Protocol):
    """What `serve` works on; each raises OSError if it cannot."""

    def read(self, share: int, offset: int, size_bytes: int) -> bytes:
        """Bytes from ``offset`` on."""

    def write(self, share: int, offset: int, data: bytes) -> None:
        """``data`` to ``offset``."""

    def fill(self, share: int, offset: int, size_bytes: int, value: int) -> None:
        """Every byte becomes ``value``."""


class MappedMemory:
    """Shares of another process, in this one's primary context of the GPU with that UUID. Raises OSError."""

    def __init__(self, uuid: str, shares: list[dict[str, Any]]) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self._call("cuInit", ctypes.c_uint(0))
        device = self._device(bytes.fromhex(uuid))
        context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)
        self._addresses = [self._map(device, share) for share in shares]

    def read(self, share: int, offset: int, size_bytes: int) -> bytes:
        data = ctypes.create_string_buffer(size_bytes)
        address = ctypes.c_uint64(self._addresses[share] + offset)
        self._call("cuMemcpyDtoH_v2", data, address, ctypes.c_size_t(size_bytes))
        return data.raw

    def write(self, share: int, offset: int, data: bytes) -> None:
        address = ctypes.c_uint64(self._addresses[share] + offset)
        self._call("cuMemcpyHtoD_v2", address, ctypes.c_char_p(data), ctypes.c_size_t(len(data)))

    def fill(self, share: int, offset: int, size_bytes: int, value: int) -> None:
        address = ctypes.c_uint64(self._addresses[share] + offset)
        self._call("cuMemsetD8_v2", address, ctypes.c_ubyte(value), ctypes.c_size_t(size_bytes))
        self._call("cuCtxSynchronize")  # a memset may return before it is done

    def _device(self, uuid: bytes) -> ctypes.c_int:
        """By UUID: numbers follow an environment that may have changed since the other process looked at it."""
        for index in range(_MOST_DEVICES):
            device, found = ctypes.c_int(), ctypes.create_string_buffer(16)
            self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(index))
            self._call("cuDeviceGetUuid_v2", found, device)
            if found.raw == uuid:
                return device
        raise OSError(f"no GPU has the UUID {uuid.hex()}")

    def _map(self, device: ctypes.c_int, share: dict[str, Any]) -> int:
        kind, size = share["kind"], ctypes.c_size_t(share["size_bytes"])
        source: Any = ctypes.c_void_p(share["handle"]) if kind == POSIX_FILE else bytes.fromhex(share["handle"])
        handle, address = ctypes.c_uint64(), ctypes.c_uint64()
        self._call("cuMemImportFromShareableHandle", ctypes.byref(handle), source, ctypes.c_int(kind))
        zero = ctypes.c_uint64(0)
        self._call("cuMemAddressReserve", ctypes.byref(address), size, ctypes.c_size_t(0), zero, zero)
        self._call("cuMemMap", address, size, ctypes.c_size_t(0), handle, zero)
        access = (ctypes.c_int * 3)(_ON_DEVICE, device.value, _READ_WRITE)  # CUmemAccessDesc
        self._call("cuMemSetAccess", address, size, access, ctypes.c_size_t(1))
        return address.value

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._cuda, name)(*arguments)
        if status:
            raise OSError(f"{name} returned {status}")


def serve(memory: Memory, source: BinaryIO, sink: BinaryIO) -> None:
    """Answer requests until ``source`` ends."""
    while len(header := source.read(HEADER.size)) == HEADER.size:
        kind, share, offset, size_bytes = HEADER.unpack(header)
        data = source.read({READ: 0, WRITE: size_bytes, FILL: 1}[kind])
        try:
            answer = b""
            if kind == READ:
                answer = memory.read(share, offset, size_bytes)
            elif kind == WRITE:
                memory.write(share, offset, data)
            else:
                memory.fill(share, offset, size_bytes, data[0])
            sink.write(b"\0" + answer)
        except OSError as error:
            print(error, file=sys.stderr, flush=True)
            sink.write(b"\1")
        sink.flush()


def main() -> int:
    """Set up, say how that went, serve."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the other process decides when this one ends
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    setup, error, memory = json.loads(source.readline()), None, None
    try:
        memory = MappedMemory(setup["uuid"], setup["shares"])
    except (OSError, AttributeError) as problem:  # no such library, function or memory
        error = str(problem)
    sink.write(json.dumps({"error": error}).encode() + b"\n")
    sink.flush()
    if memory is None:
        return 1
    serve(memory, source, sink)
    return 0


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        status = main()
        sys.stdout.flush()
        os._exit(status)  # the driver's own clean-up may wait for whoever was to be rescued
