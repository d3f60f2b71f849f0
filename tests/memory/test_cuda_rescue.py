"""Device memory from another process: the process itself, over a driver whose memory is files."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tpoverlap.errors import BackendUnavailableError
from tpoverlap.memory import cuda_rescue
from tpoverlap.memory.cuda_rescue import RescueProcess, Share, export
from tpoverlap.memory.cuda_rescue_child import FABRIC, POSIX_FILE

UUID = "11" * 16
"""Of the second of two devices."""
COMPILER = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="the driver of this test is compiled")


@pytest.fixture
def fake_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert COMPILER is not None, "skipped"
    source = Path(__file__).with_name("fake_cuda.c")
    subprocess.run([COMPILER, "-shared", "-fPIC", "-o", tmp_path / "libcuda.so.1", source], check=True, timeout=60)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))


@pytest.fixture
def files() -> Iterator[list[int]]:
    made = [os.memfd_create(f"share {index}") for index in range(2)]
    for file in made:
        os.ftruncate(file, 4 << 20)
    yield made
    for file in made:
        os.close(file)


def shares(files: list[int]) -> list[Share]:
    """Of 3 MiB and of 100 bytes."""
    return [Share(0x7000_0000_0000, 3 << 20, POSIX_FILE, files[0]), Share(0x1000, 100, POSIX_FILE, files[1])]


@needs_compiler
@pytest.mark.usefixtures("fake_driver")
def test_reads_writes_and_fills(files: list[int]) -> None:
    os.pwrite(files[0], b"abc", (3 << 20) - 3)
    rescue = RescueProcess(UUID, shares(files))
    assert rescue.read(0x7000_0000_0000 + (3 << 20) - 3, 3) == b"abc"
    big = bytes(range(256)) * 1000
    rescue.write(0x7000_0000_0000 + 5, big)
    assert os.pread(files[0], len(big) + 1, 5) == big + b"\0"
    rescue.fill(0x1000 + 90, 0xFF, 10)
    assert os.pread(files[1], 11, 89) == b"\0" + b"\xff" * 10
    assert rescue.read(0x7000_0000_0000 + 5, len(big)) == big
    rescue.close()
    rescue.close()
    assert rescue._process.poll() is not None, "it ends"


@needs_compiler
@pytest.mark.usefixtures("fake_driver")
def test_an_interrupt_of_the_terminal_does_not_end_it(files: list[int]) -> None:
    rescue = RescueProcess(UUID, shares(files))
    os.kill(rescue._process.pid, signal.SIGINT)
    assert rescue.read(0x1000, 2) == b"\0\0"
    rescue.close()


@needs_compiler
@pytest.mark.usefixtures("fake_driver")
def test_another_gpu_is_an_error(files: list[int]) -> None:
    with pytest.raises(BackendUnavailableError, match="cuDeviceGet returned 101"):
        RescueProcess("33" * 16, shares(files))


def test_no_driver_is_an_error(files: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").write_text("no library")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    with pytest.raises(BackendUnavailableError, match="could not map device memory"):
        RescueProcess(UUID, shares(files))


def test_a_process_that_ends_hangs_or_cannot_start(files: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BackendUnavailableError, match="does not answer"):
        RescueProcess(UUID, shares(files), [sys.executable, "-c", "pass"])
    with pytest.raises(BackendUnavailableError, match="no process could be started"):
        RescueProcess(UUID, shares(files), ["/nowhere/python"])
    monkeypatch.setattr(cuda_rescue, "_ANSWER_S", 0.3)
    answers = "import sys, time; print('{\"error\": null}', flush=True); time.sleep(60)"
    rescue = RescueProcess(UUID, shares(files), [sys.executable, "-c", answers])
    with pytest.raises(BackendUnavailableError, match="does not answer"):
        rescue.read(0x1000, 1)
    with pytest.raises(BackendUnavailableError, match="does not answer"):
        rescue.write(0x1000, b"1")
    rescue.close()


class FakeLibrary:
    """Says whether memory can be had by a descriptor, as fabric memory, or not at all."""

    def __init__(self, kind: int) -> None:
        self.kind, self.released = kind, 0

    def cuMemRetainAllocationHandle(self, handle: Any, address: ctypes.c_void_p) -> int:
        return 0 if self.kind >= 0 else 1

    def cuMemExportToShareableHandle(self, into: Any, handle: Any, kind: int, flags: Any) -> int:
        if kind != self.kind:
            return 1
        if kind == FABRIC:
            into.raw = bytes(range(64))
        else:
            ctypes.cast(into, ctypes.POINTER(ctypes.c_int))[0] = 77
        return 0

    def cuMemRelease(self, handle: Any) -> int:
        self.released += 1
        return 0


@pytest.mark.parametrize(
    ("kind", "handle"), [(POSIX_FILE, 77), (FABRIC, bytes(range(64)).hex()), (0, None), (-1, None)]
)
def test_export(kind: int, handle: int | str | None) -> None:
    library = FakeLibrary(kind)
    share = export(library, 0x1000, 50)
    assert (None if share is None else share.handle) == handle
    assert library.released == (kind >= 0), "a handle that was retained is released"


def test_what_a_share_covers() -> None:
    share = Share(0x1000, 100, POSIX_FILE, -1)
    assert share.covers(0x1000 + 99, 1) and not share.covers(0x1000 + 99, 2) and not share.covers(0xFFF, 1)
