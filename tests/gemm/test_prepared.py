"""The short way to launch passes what Triton's own way would, except for the epoch and the counters."""

from __future__ import annotations

import gc
import importlib.util
import weakref
from typing import Any

import pytest
import torch

from tpoverlap.gemm.triton import TileShape, compiled
from tpoverlap.gemm.triton.compiled import SCATTER_GEMM, TILE_GEMM, CompiledKernels, Kernel

TILE = TileShape(16, 32, 32, 1, 4)


class FakeBinary:
    """Records what it is launched with."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda *arguments: self.launches.append((grid, *arguments))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("kernel", [TILE_GEMM, SCATTER_GEMM], ids=lambda kernel: kernel.name)
def test_the_names_are_the_kernels(kernel: Kernel) -> None:
    names, ours = list(kernel.load().arg_names), kernel.arguments
    assert tuple(names[: len(ours)]) == ours
    assert all(name.isupper() for name in names[len(ours) :] if name not in ("K0", "N")), "then come the constants"


def test_only_the_epoch_and_the_counters_change(monkeypatch: pytest.MonkeyPatch) -> None:
    binary, slow = FakeBinary(), []
    epoch, counters_at = TILE_GEMM.epoch, TILE_GEMM.counters
    assert counters_at is not None
    monkeypatch.setattr(
        compiled, "launch_slowly", lambda kernel, programs, given, constants, tile: slow.append(given) or binary
    )
    kernels = CompiledKernels()
    activation, table, counters = torch.zeros(64, 32), torch.zeros(4, 4), torch.zeros(8, dtype=torch.int32)
    arguments: list[Any] = list(range(len(TILE_GEMM.arguments)))
    arguments[0] = table
    arguments[3] = kernels.descriptor(activation, (16, 32))
    arguments[23] = activation
    constants = ("constant",) * 3
    for _ in range(2):
        kernels.load(TILE_GEMM, "variant", lambda: tuple(arguments), constants, TILE)
    assert len(slow) == 1, "compiled and loaded once"
    prepared = kernels.prepare(TILE_GEMM, "variant", 7, tuple(arguments), constants, TILE)
    prepared.launch((1 << 32) - 1, counters)
    prepared.launch(1 << 32, None)
    first, second = binary.launches
    assert first[0] == (7, 1, 1) and first[1] is table and first[-3:] == constants
    assert first[1 + epoch] == -1 and second[1 + epoch] == 0
    assert first[1 + counters_at] == second[1 + counters_at] == counters.data_ptr()
    assert first[1 + 23] == activation.data_ptr(), "an address, not the tensor"
    shown = first[1 + 3]
    assert (shown.base.data_ptr(), shown.shape, shown.strides) == (activation.data_ptr(), [64, 32], [32, 1])
    untouched = [i for i in range(len(arguments)) if i not in (0, 3, 23, epoch, counters_at)]
    assert [first[1 + i] for i in untouched] == [arguments[i] for i in untouched]


def test_it_keeps_no_activation_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "launch_slowly", lambda *given: FakeBinary())
    kernels = CompiledKernels()
    activation = torch.zeros(64, 32)
    gone = weakref.ref(activation)
    arguments: list[Any] = [torch.zeros(4, 4), *range(1, len(TILE_GEMM.arguments))]
    arguments[5] = kernels.descriptor(activation, (16, 32))
    arguments[23] = activation
    kernels.load(TILE_GEMM, "variant", lambda: (), (), TILE)
    kept = kernels.prepare(TILE_GEMM, "variant", 1, tuple(arguments), (), TILE)
    del activation, arguments
    gc.collect()
    assert gone() is None
    assert kept is not None
