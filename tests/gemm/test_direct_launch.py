"""Launches of small kernels: what the driver gets, from a GPU that does nothing."""

from __future__ import annotations

import ctypes
import struct
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from tests.costs.null_kernels import STREAM, NullKernelDriver, parameter
from tpoverlap.gemm.triton.direct import DirectKernels
from tpoverlap.gemm.triton.kernel_driver import LaunchConfig

TYPES = {"x": "*bf16", "y": "*fp32", "rows": "i32", "factor": "fp32", "pitch": "i32", "UNIT": "constexpr"}
PTX = """.visible .entry small(
	.param .u64 .ptr .global .align 1 small_param_0,
	.param .u64 .ptr .global .align 1 small_param_1,
	.param .u32 small_param_2,
	.param .f32 small_param_3,
	.param .u32 small_param_4,
	.param .u64 .ptr .global .align 1 small_param_5,
	.param .u64 .ptr .global .align 1 small_param_6
)
{ ret; }"""


class Binary:
    """As Triton's; launches itself, which is noted."""

    def __init__(self, types: dict[str, str] = TYPES, ptx: str = PTX) -> None:
        self.function = 0xF00
        self.src, self.asm = SimpleNamespace(signature=types), {"ptx": ptx}
        self.metadata = SimpleNamespace(num_warps=4, shared=96, tensordesc_meta=None)
        self.launched: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *values: self.launched.append((grid, *values))


class Seen(NullKernelDriver):
    """Notes each launch: programs, threads, shared bytes, stream and the arguments."""

    def __init__(self, pause_s: float = 0.0) -> None:
        super().__init__()
        self.launches: list[tuple[Any, ...]] = []
        self._pause_s = pause_s

    def _start(self, config: int, function: int, parameters: int, extra: int) -> int:
        assert function == 0xF00
        time.sleep(self._pause_s)  # another thread may run, as in the driver's call
        at = LaunchConfig.from_address(config)
        arguments = [
            struct.unpack(f"<{code}", parameter(parameters, number, struct.calcsize(code)))[0]
            for number, code in enumerate("QQifi")
        ]
        scratch = [parameter(parameters, number, 8) for number in (5, 6)]
        assert scratch == [bytes(8)] * 2, "no scratch"
        assert (at.attributes, at.num_attributes, tuple(at.grid)[1:], tuple(at.block)[1:]) == (0, 0, (1, 1), (1, 1))
        self.launches.append((at.grid[0], at.block[0], at.shared_bytes, at.stream, *arguments))
        return super()._start(config, function, parameters, extra)


def launch(kernels: DirectKernels, binary: Binary, programs: int, values: list[float]) -> None:
    kernels.launch("key", programs, values, ("constant",), lambda: binary)


def test_each_launch_writes_all_arguments() -> None:
    driver, binary = Seen(), Binary()
    kernels = DirectKernels(driver)
    launch(kernels, binary, 1, [1, 2, 3, 4.0, 5])
    assert driver.launches == [], "the first one is Triton's"
    launch(kernels, binary, 7, [1 << 40, 16, -3, 0.5, 9])
    launch(kernels, binary, 1 << 20, [32, 1 << 63, 2**31 - 1, -0.25, 0])
    assert driver.launches == [
        (7, 128, 96, STREAM, 1 << 40, 16, -3, 0.5, 9),
        (1 << 20, 128, 96, STREAM, 32, 1 << 63, 2**31 - 1, -0.25, 0),
    ]
    assert binary.launched == []


def test_a_thread_without_context_launches_again() -> None:
    driver, binary = Seen(), Binary()
    kernels = DirectKernels(driver)
    launch(kernels, binary, 1, [1, 2, 3, 4.0, 5])
    driver.statuses.append(201)
    launch(kernels, binary, 5, [1, 2, 3, 4.0, 5])
    assert [one[0] for one in driver.launches] == [5, 5]


@pytest.mark.parametrize(
    "binary",
    [
        Binary(TYPES | {"pitch": "i64"}),  # the PTX has 32 bits
        Binary({"x": "tensordesc<bf16[8,8]>"}),
        Binary(ptx="nothing"),
    ],
    ids=["another size", "a tensor map", "no entry"],
)
def test_what_is_not_understood_goes_by_triton(binary: Binary, caplog: pytest.LogCaptureFixture) -> None:
    driver = Seen()
    kernels = DirectKernels(driver)
    for _ in range(3):
        launch(kernels, binary, 3, [1, 2, 3, 4.0, 5])
    assert driver.launches == []
    assert binary.launched == [((3, 1, 1), 1, 2, 3, 4.0, 5, "constant")] * 2
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "small kernels are launched by Triton, which takes longer"
    ]


def test_threads_do_not_write_each_others_arguments() -> None:
    driver, binary = Seen(pause_s=0.002), Binary()
    kernels = DirectKernels(driver)
    launch(kernels, binary, 1, [1, 2, 3, 4.0, 5])

    def many(number: int) -> None:
        for _ in range(20):
            launch(kernels, binary, number, [number, number, number, float(number), number])

    threads = [threading.Thread(target=many, args=(number,)) for number in (3, 11)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(driver.launches) == 40
    for programs, _, _, _, *arguments in driver.launches:
        assert arguments == [programs] * 5


def test_the_configuration_is_the_drivers() -> None:
    assert ctypes.sizeof(LaunchConfig) == 56
