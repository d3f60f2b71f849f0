"""Which way the watchdog takes to device memory, with a driver whose calls can be held up."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tpoverlap.errors import BackendUnavailableError
from tpoverlap.memory.cuda_rescue import Share
from tpoverlap.memory.driver import DriverBlockedError

MINE, PEERS = 0x1000, 0x9000


class FakeDriver(types.ModuleType):
    """Notes its calls. ``free`` not set: no call returns. ``runs``: what is enqueued on a stream is done at once."""

    def __init__(self) -> None:
        super().__init__("driver")
        self.calls: list[tuple[Any, ...]] = []
        self.free, self.runs = threading.Event(), True
        self.free.set()
        self.CUresult = types.SimpleNamespace(CUDA_SUCCESS=0)
        self.CUstream = int

    def __getattr__(self, name: str) -> Callable[..., tuple[int, object]]:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*arguments: object) -> tuple[int, object]:
            self.free.wait(20.0)
            self.calls.append((name, *arguments))
            return 0, "context"

        return call

    def names(self) -> list[str]:
        return [name for name, *_ in self.calls]


class FakeRescue:
    """Instead of a process."""

    made: list[FakeRescue]
    works = True

    def __init__(self, uuid: str, shares: list[Share]) -> None:
        if not self.works:
            raise BackendUnavailableError("no process could be started")
        self.uuid, self.calls, self.closed = uuid, [], False
        FakeRescue.made.append(self)

    def read(self, address: int, size_bytes: int) -> bytes:
        return bytes(range(size_bytes))

    def write(self, address: int, data: bytes) -> None:
        self.calls.append((address, data))

    def fill(self, address: int, value: int, size_bytes: int) -> None:
        self.calls.append((address, value, size_bytes))

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    fake = FakeDriver()
    bindings: Any = types.ModuleType("cuda.bindings")
    bindings.driver = fake
    monkeypatch.setitem(sys.modules, "cuda", types.ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    stream = types.SimpleNamespace(cuda_stream=7, query=lambda: fake.runs)
    monkeypatch.setattr(torch.cuda, "Stream", lambda **options: stream)
    properties = types.SimpleNamespace(uuid="GPU-1111-22")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    yield fake
    fake.free.set()


@pytest.fixture
def side(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.delitem(sys.modules, "tpoverlap.memory.cuda_side_channel", raising=False)
    module: Any = importlib.import_module("tpoverlap.memory.cuda_side_channel")
    monkeypatch.setattr(module, "_BLOCKED_S", 0.2)
    monkeypatch.setattr(module, "_PROMPTLY_S", 0.05)
    monkeypatch.setattr(module, "RescueProcess", FakeRescue)
    monkeypatch.setattr(module, "export", lambda cuda, address, size_bytes: Share(address, size_bytes, 1, -1))
    FakeRescue.made, FakeRescue.works = [], True
    made = module.SideChannel(torch.device("cuda:0"))
    made.export(None, MINE, 0x100)
    yield made
    made.close()
    del sys.modules["tpoverlap.memory.cuda_side_channel"]  # it holds the fake


def test_a_stream_of_its_own(side: Any, driver: FakeDriver) -> None:
    side.write(MINE, torch.zeros(4, dtype=torch.uint8))
    side.fill(PEERS, 0xFF, 16)
    assert driver.names() == ["cuMemcpyHtoDAsync", "cuMemsetD8Async"] and not FakeRescue.made


def test_a_second_context_where_the_queue_is_shared(side: Any, driver: FakeDriver) -> None:
    driver.runs = False
    side.fill(MINE, 0xFF, 16)
    side.fill(PEERS, 0xFF, 16)
    assert driver.names() == [
        "cuMemsetD8Async", "cuCtxCreate", "cuCtxPopCurrent",
        "cuCtxPushCurrent", "cuMemsetD8", "cuCtxPopCurrent",
        "cuCtxPushCurrent", "cuMemsetD8", "cuCtxPopCurrent",
    ]  # fmt: skip
    assert not FakeRescue.made


@pytest.mark.parametrize("context", [False, True])
def test_another_process_where_the_driver_is_blocked(side: Any, driver: FakeDriver, context: bool) -> None:
    if context:
        driver.runs = False
        side.fill(MINE, 0, 1)
    driver.free.clear()
    into = torch.zeros(3, dtype=torch.uint8)
    side.read(MINE, into)
    assert into.tolist() == [0, 1, 2], "the first call finds out, and goes another way"
    side.write(MINE + 1, torch.tensor([5, 6], dtype=torch.uint8))
    side.fill(MINE + 2, 0xFF, 16)
    (rescue,) = FakeRescue.made
    assert rescue.uuid == "111122" and rescue.calls == [(MINE + 1, b"\5\6"), (MINE + 2, 0xFF, 16)]
    driver.free.set()
    side._caller.call(lambda: None, 5.0)
    assert not any("HtoD" in name for name in driver.names()), "what was done from outside is not done again"


def test_what_goes_to_a_peer_waits_for_the_driver(side: Any, driver: FakeDriver) -> None:
    """And what was told to this rank from outside is not done again."""
    driver.free.clear()
    side.fill(MINE, 0xFF, 16)
    for value in (1, 2):
        with pytest.raises(DriverBlockedError, match="first use of a kernel"):
            side.fill(PEERS, value, 4)
    driver.free.set()
    side.fill(MINE, 3, 4) if not side._caller.busy else side._caller.call(lambda: None, 5.0)
    values = [call[2] for call in driver.calls if call[0] == "cuMemsetD8Async"]
    assert values[:3] == [0xFF, 1, 2], "in order, once it is free"
    side.fill(MINE, 4, 4)
    assert driver.calls[-1][:3] == ("cuMemsetD8Async", MINE, 4), "by the first way again"


def test_no_other_process_to_be_had(side: Any, driver: FakeDriver) -> None:
    FakeRescue.works = False
    driver.free.clear()
    for _ in range(2):
        with pytest.raises(DriverBlockedError, match="no process could be started"):
            side.fill(MINE, 0xFF, 16)


def test_nothing_is_called_after_close(side: Any, driver: FakeDriver) -> None:
    """The memory may be somebody else's by then."""
    driver.free.clear()
    side.fill(MINE, 0xFF, 16)
    with pytest.raises(DriverBlockedError):
        side.fill(PEERS, 1, 4)
    side.close()
    driver.free.set()
    side._caller._thread.join(5.0)
    assert [call[2] for call in driver.calls] == [0xFF], "it was in that call"
    assert FakeRescue.made[0].closed


def test_forks_do_not_keep_the_memory(side: Any) -> None:
    """A descriptor in a data loader's worker would."""
    read, write = os.pipe()
    side._shares[:] = [Share(MINE, 0x100, 1, write)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns: there are threads
        child = os.fork()
    if child == 0:
        closed = not side._shares
        with contextlib.suppress(OSError):
            os.fstat(write)
            closed = False
        os._exit(0 if closed else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    os.fstat(write)  # still open here
    side.close()
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(write)
    os.close(read)
