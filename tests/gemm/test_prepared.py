"""A prepared launch passes what Triton's own way would; from launch to launch addresses and the epoch change, only."""

from __future__ import annotations

import gc
import importlib.util
import struct
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from tests.costs.null_kernels import MAP, STREAM, NullBinary, NullKernelDriver, no_compiler, parameter, ptx_of
from tpoverlap.errors import BackendUnavailableError
from tpoverlap.gemm.triton import TileShape, compiled
from tpoverlap.gemm.triton.compiled import SCATTER_GEMM, TILE_GEMM, CompiledKernels, Kernel
from tpoverlap.gemm.triton.parameters import LayoutError, ParameterLayout
from tpoverlap.gemm.triton.prepared import PackedLaunch, TritonLaunch
from tpoverlap.gemm.triton.tensor_maps import MapShape, TensorMaps

TILE = TileShape(16, 32, 32, 1, 4)
MOVING = {"own": 0, "source": 0, "out": 1}


def at(name: str) -> int:
    return TILE_GEMM.arguments.index(name)


def arguments_of(kernels: CompiledKernels, own: torch.Tensor, out: torch.Tensor) -> list[Any]:
    given: list[Any] = list(range(100, 100 + len(TILE_GEMM.arguments)))
    given[0] = torch.zeros(4, 4, dtype=torch.int32)
    given[at("own")] = kernels.descriptor(own, (16, 32))
    given[at("source")], given[at("out")] = own, out
    given[at("flags")] = 1 << 40
    return given


def place_of(name: str) -> int:
    """Of its first parameter: the one map before it takes five."""
    return at(name) + (4 if at(name) > at("own") else 0)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("kernel", [TILE_GEMM, SCATTER_GEMM], ids=lambda kernel: kernel.name)
def test_the_names_are_the_kernels(kernel: Kernel) -> None:
    names, ours = list(kernel.load().arg_names), kernel.arguments
    assert tuple(names[: len(ours)]) == ours
    assert all(name.isupper() for name in names[len(ours) :] if name not in ("K0", "N")), "then come the constants"


def test_only_addresses_and_the_epoch_change() -> None:
    driver = NullKernelDriver()
    launches: list[tuple[int, list[bytes]]] = []
    sizes = {"own": 128, **dict.fromkeys(("table", "source", "out", "flags", "limit", "error", "received"), 8)}
    names = list(TILE_GEMM.arguments)

    def seen(grid: int, parameters: int) -> None:
        launches.append((grid, [parameter(parameters, place_of(name), sizes.get(name, 4)) for name in names]))

    driver.seen = seen
    kernels = CompiledKernels(driver)
    own, other, out = (torch.zeros(64, 32, dtype=torch.float16) for _ in range(3))
    given = arguments_of(kernels, own, out)
    with no_compiler() as made:
        for _ in range(2):
            kernels.load(TILE_GEMM, "variant", lambda: tuple(given), (), TILE)
        assert len(made) == 1, "compiled and loaded once"
        prepared = kernels.prepare(TILE_GEMM, "variant", 7, tuple(given), (), TILE, MOVING)
    prepared.launch((own.data_ptr(), out.data_ptr()), (1 << 32) - 1)
    prepared.launch((other.data_ptr(), own.data_ptr()), (1 << 32) + 5)
    prepared.launch((own.data_ptr(), own.data_ptr()), 6)
    assert driver.encodes == 2, "the map of the first address is found again"
    assert [grid for grid, _ in launches] == [7, 7, 7]
    by_name = [dict(zip(names, values, strict=True)) for _, values in launches]
    epochs = [struct.unpack("<I", one["epoch"])[0] for one in by_name]
    assert epochs == [(1 << 32) - 1, 5, 6], "modulo 2**32"
    for one, first, second in zip(by_name, (own, other, own), (out, own, own), strict=True):
        assert MAP.unpack(one["own"]) == (first.data_ptr(), 64, 32, 64, 16, 32, 3, 6)
        assert struct.unpack("<QQ", one["source"] + one["out"]) == (first.data_ptr(), second.data_ptr())
        assert struct.unpack("<Q", one["table"])[0] == given[0].data_ptr()
        for name in set(names) - {"own", "source", "out", "table", "epoch"}:
            assert int.from_bytes(one[name], "little") == given[at(name)], name


def test_the_driver_is_told_grid_block_shared_memory_and_stream() -> None:
    kernels = CompiledKernels(NullKernelDriver())
    own = torch.zeros(64, 32, dtype=torch.float16)
    given = arguments_of(kernels, own, own)
    with no_compiler():
        kernels.load(TILE_GEMM, "variant", partial(tuple, given), (), TILE)
        prepared = kernels.prepare(TILE_GEMM, "variant", 7, tuple(given), (), TILE, MOVING)
    assert isinstance(prepared, PackedLaunch)
    words = struct.unpack("<7I4xQQI4x", bytes(prepared._config))  # CUlaunchConfig of cuda.h
    assert words == (7, 1, 1, 8 * 32, 1, 1, 1000, STREAM, 0, 0)


def test_a_map_is_followed_by_its_shape_and_strides() -> None:
    driver, found = NullKernelDriver(), []
    driver.seen = lambda grid, parameters: found.extend(
        int.from_bytes(parameter(parameters, at("own") + 1 + i, size), "little") for i, size in enumerate((4, 4, 8, 8))
    )
    kernels = CompiledKernels(driver)
    own = torch.zeros(64, 48, dtype=torch.float16)[:, :32]
    given = arguments_of(kernels, own, own)
    with no_compiler():
        kernels.load(TILE_GEMM, "variant", lambda: tuple(given), (), TILE)
        kernels.prepare(TILE_GEMM, "variant", 1, tuple(given), (), TILE, {}).launch((), 1)
    assert found == [64, 32, 48, 1]


def test_it_keeps_no_activation_alive() -> None:
    kernels = CompiledKernels(NullKernelDriver())
    activation = torch.zeros(64, 32, dtype=torch.float16)
    gone = weakref.ref(activation)
    given = arguments_of(kernels, activation, activation)
    with no_compiler() as made:
        kernels.load(TILE_GEMM, "variant", partial(tuple, given), (), TILE)
        kept = kernels.prepare(TILE_GEMM, "variant", 1, tuple(given), (), TILE, MOVING)
        made.clear()
    del activation, given
    gc.collect()
    assert gone() is None
    assert kept is not None


def test_a_thread_without_a_context_tries_again() -> None:
    driver = NullKernelDriver()
    kernels = CompiledKernels(driver)
    own = torch.zeros(64, 32, dtype=torch.float16)
    given = arguments_of(kernels, own, own)
    with no_compiler():
        kernels.load(TILE_GEMM, "variant", lambda: tuple(given), (), TILE)
        prepared = kernels.prepare(TILE_GEMM, "variant", 1, tuple(given), (), TILE, MOVING)
    driver.statuses = [201]
    prepared.launch((own.data_ptr(), own.data_ptr()), 1)
    assert driver.starts == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda binary: binary.asm.update(ptx=ptx_of("x", ["i32"])),
        lambda binary: setattr(binary.metadata, "global_scratch_size", 64),
        lambda binary: setattr(binary.metadata, "tensordesc_meta", None),
        lambda binary: binary.src.signature.update(table=("*i32", "i32")),
        lambda binary: binary.src.signature.update(table_2=binary.src.signature.pop("num_rows")),
    ],
    ids=["other parameters", "scratch memory", "no description of maps", "a tuple", "another name"],
)
def test_what_is_not_known_is_launched_by_triton(
    change: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    launches: list[Any] = []

    class ByTriton(NullBinary):
        def __getitem__(self, grid: tuple[int, int, int]) -> Any:
            return lambda *arguments: launches.append((grid, *arguments))

    def slowly(kernel: Kernel, programs: int, arguments: Any, *rest: Any) -> ByTriton:
        binary = ByTriton(kernel, arguments)
        change(binary)
        return binary

    monkeypatch.setattr(compiled, "launch_slowly", slowly)
    kernels = CompiledKernels(NullKernelDriver())
    own, other = (torch.zeros(64, 32, dtype=torch.float16) for _ in range(2))
    given = arguments_of(kernels, own, own)
    kernels.load(TILE_GEMM, "variant", lambda: tuple(given), (), TILE)
    assert "launched by Triton" in caplog.text
    prepared = kernels.prepare(TILE_GEMM, "variant", 7, tuple(given), ("constant",), TILE, MOVING)
    assert isinstance(prepared, TritonLaunch)
    prepared.launch((other.data_ptr(), own.data_ptr()), (1 << 32) - 1)
    (launch,) = launches
    assert launch[0] == (7, 1, 1) and launch[-1] == "constant"
    assert launch[1 + at("epoch")] == -1, "Triton passes a signed word"
    shown = launch[1 + at("own")]
    assert (shown.base.data_ptr(), shown.shape, shown.strides) == (other.data_ptr(), [64, 32], [32, 1])
    assert launch[1 + at("source")] == other.data_ptr() and launch[1 + at("out")] == own.data_ptr()
    assert launch[1 + at("flags")] == 1 << 40


def test_a_layout_is_aligned_as_the_driver_wants() -> None:
    types = {"a": "i32", "m": "tensordesc<bf16[8,8]>", "p": "*bf16", "C": "constexpr", "n": "i64"}
    ptx = ptx_of("k", [kind for kind in types.values() if kind != "constexpr"])
    layout = ParameterLayout.of(types, ptx)
    assert layout.places == {"a": (0, "i"), "m": (64, ""), "p": (216, "Q"), "n": (224, "q")}
    assert layout.offsets == (0, 64, 192, 196, 200, 208, 216, 224, 232, 240) and layout.size_bytes == 248
    with pytest.raises(LayoutError, match="no entry"):
        ParameterLayout.of(types, "")


def test_maps_are_bounded_and_the_oldest_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tpoverlap.gemm.triton.tensor_maps._MAX_MAPS", 2)
    driver = NullKernelDriver()
    maps, shape = TensorMaps(driver), MapShape(64, 32, 64, (16, 32), 3, 6, 2)
    for address in (16, 32, 16, 48, 16):
        assert MAP.unpack(maps.get(address, shape))[0] == address
    assert driver.encodes == 3, "16 was used last, so 32 went"
    maps.get(16, shape._replace(rows=65))
    assert driver.encodes == 4, "another shape is another map"


def test_without_the_driver_library_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from tpoverlap.gemm.triton import kernel_driver

    def missing(name: str) -> None:
        raise OSError(name)

    kernel_driver._library.cache_clear()
    monkeypatch.setattr(kernel_driver.ctypes, "CDLL", missing)
    with pytest.raises(BackendUnavailableError, match=r"libcuda\.so\.1"):
        kernel_driver._library()
