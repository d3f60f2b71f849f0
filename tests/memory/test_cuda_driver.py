"""`CudaDriver` without a GPU: what it makes of a thread's current device."""

from __future__ import annotations

import ctypes
from typing import Any
from unittest import mock

import pytest
import torch

from tpoverlap.errors import BackendUnavailableError
from tpoverlap.memory import cuda_driver
from tpoverlap.memory.cuda_driver import CudaDriver

OWN, OTHER = 0x1000, 0x2000


def stream(handle: int, current: int, context: int) -> int:
    """What a driver of cuda:1 says of the caller's stream."""
    driver: Any = object.__new__(CudaDriver)
    driver._device, driver._index, driver._context = torch.device("cuda:1"), 1, OWN

    def get_context(address: int) -> int:
        ctypes.c_void_p.from_address(address).value = context
        return 0

    driver._get_context, driver._current_stream = get_context, lambda index: handle
    with (
        mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: False),
        mock.patch.object(cuda_driver, "_current_device", lambda: current),
    ):
        found: int = driver.caller_stream()
    return found


@pytest.mark.parametrize(
    ("handle", "current", "context"), [(0, 1, OWN), (0, 0, OWN), (0, 0, 0), (7, 0, OTHER)], ids=str
)
def test_streams_that_are_this_devices(handle: int, current: int, context: int) -> None:
    """Also in a thread that has made no CUDA call; a stream that is not the default one says whose it is."""
    assert stream(handle, current, context) == handle


def test_the_default_stream_of_another_device() -> None:
    """Words and events on stream 0 would be that device's, and nothing here would wait."""
    with pytest.raises(BackendUnavailableError, match=r"set_device\(1\)"):
        stream(0, 0, OTHER)
