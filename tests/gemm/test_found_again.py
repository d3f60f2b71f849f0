"""A launch that is found again is the one that would be prepared anew, whatever changed in between."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from tests.costs.null_kernels import NullKernelDriver, no_compiler
from tpoverlap.gemm import PartialGemm
from tpoverlap.gemm.fp8 import QuantizedTensor, ScaledPartialGemm, ScaledRowGemm
from tpoverlap.gemm.triton import compiled
from tpoverlap.gemm.triton.gates import Slot
from tpoverlap.gemm.triton.launcher import GemmLauncher, Launch
from tpoverlap.gemm.triton.prepared import PackedLaunch
from tpoverlap.memory.layout import MAX_PIECES
from tpoverlap.overlap.fused_blocks import gather_rows, scatter_rows

OF_THE_LAUNCHER = {"table", "pushes", "done", "ticket", "places", "parts", "error"}
"""Its own memory, elsewhere in each launcher."""
UNREAD = {"counters", "peers", "bias", "addend", "source", "own"}
"""Not compared where they were not given: placeholders."""


class Seen(PackedLaunch):
    """Remembers what its parameters are called."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.layout, self.moving = given[2], given[6]
        self.grid = given[4]

    def values(self) -> dict[str, Any]:
        """Parameters by name, as bytes, and the grid."""
        found: dict[str, Any] = {"grid": self.grid, "maps": [], "function": self._function}
        ends = sorted([offset for offset, _ in self.layout.places.values()] + [self.layout.size_bytes])
        for name, (offset, code) in self.layout.places.items():
            if name in OF_THE_LAUNCHER or (name in UNREAD and name not in self.moving):
                continue
            found[name] = bytes(self._block[offset : ends[ends.index(offset) + 1]])
            if not code:
                found["maps"].append(name)
        return found


class Problem:
    """Draws operands from a small pool, so that launches recur in part and in whole."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.memory = torch.zeros(1 << 18, dtype=torch.float16)
        words = torch.zeros(4, 256, dtype=torch.int32)
        peers = [torch.zeros(2, 2, dtype=torch.int64) for _ in range(4)]
        self.slots = [
            Slot(self.tensor(64, 32).data_ptr() + 4096 * i, words[i].data_ptr(), 0, 2, MAX_PIECES, peers[i])
            for i in range(2)
        ]
        self.keep = words
        self.scales = torch.ones(200, 1)

    def tensor(
        self, rows: int, columns: int, *, row_elements: int = 0, dtype: torch.dtype = torch.float16
    ) -> torch.Tensor:
        """Somewhere in the memory: aligned as a rule."""
        start = self.random.choice((0, 8192, 16384, 24576)) + (4 if self.random.random() < 0.02 else 0)
        return self.memory.view(dtype).as_strided((rows, columns), (row_elements or columns, 1), start)

    def quantised(self, rows: int, columns: int, dtype: torch.dtype, rowwise: bool) -> QuantizedTensor:
        """Its scale is aligned or not, as slices of scales are."""
        data = self.tensor(rows, columns, dtype=dtype)
        start = self.random.choice((0, 1, 4))
        return QuantizedTensor(data, self.scales[start : start + (rows if rowwise else 1)], torch.float16)

    def matrix(self, depth: int, width: int) -> torch.Tensor:
        """[K, N], stored either way."""
        if self.random.random() < 0.5:
            return self.tensor(width, depth, row_elements=self.random.choice((depth, depth + 8))).t()
        return self.tensor(depth, width)

    def draw(self) -> Callable[[GemmLauncher], Launch]:
        """One launch, to be made by any launcher."""
        choose, epoch = self.random.choice, self.random.randrange(1, 9)
        counts, depth, width = choose(((32, 32), (0, 40))), 32, choose((64, 128))
        total, slot = sum(counts), choose(self.slots)
        kind = choose(("gather", "partial", "own", "scatter"))
        is_fp8, rowwise, fast = choose((False, False, False, True)), choose((False, True)), choose((False, True))
        x_format = choose((torch.float8_e4m3fn, torch.float8_e5m2))
        if kind == "gather" and is_fp8:
            rows, out = gather_rows(counts, depth, 0, 128), self.tensor(total, width)
            bias = choose((None, self.tensor(1, width).view(-1)))
            x = self.quantised(total, depth, x_format, rowwise)
            task = ScaledRowGemm(
                weights=[self.quantised(width, depth, torch.float8_e4m3fn, rowwise)], biases=[bias], outs=[out],
                x_scale=x.scale, x_format=x_format, fast_accumulation=fast,
            )  # fmt: skip
            assert task.scalings is not None
            (scaling,), own = task.scalings, self.tensor(counts[0], depth, dtype=torch.uint8)
            whole = self.memory.view(torch.uint8).as_strided((total, depth), (depth, 1))
            return lambda launcher: launcher.gathered_rows(
                rows, own, slot, lambda *_: whole, task.matrices[0], bias, out, epoch,
                pushes=bool(rows.pushes) and epoch % 2 == 0, scaling=scaling,
            )  # fmt: skip
        if kind == "gather":
            rows = gather_rows(counts, depth, 0, 128)
            bias = choose((None, self.tensor(1, width).view(-1)))
            own, whole = self.tensor(counts[0], depth), self.memory.as_strided((total, depth), (depth, 1))
            given = (
                rows,
                own,
                slot,
                lambda *_: whole,
                self.matrix(depth, width),
                bias,
                self.tensor(total, width),
                epoch,
            )
            return lambda launcher: launcher.gathered_rows(*given, pushes=bool(rows.pushes) and epoch % 2 == 0)
        rows, terms = scatter_rows(counts, width, 0, 128), choose((1, 2))
        lefts = [self.tensor(total, depth, row_elements=choose((depth, depth + 16))) for _ in range(terms)]
        matrices = [self.tensor(depth, width) for _ in range(terms)]
        addend = choose((None, self.tensor(total, width)))
        gemm = PartialGemm(lefts, matrices, addend, choose((None, self.tensor(1, width).view(-1))))
        if is_fp8:
            pairs = [
                (self.quantised(total, depth, x_format, rowwise),
                 self.quantised(width, depth, torch.float8_e4m3fn, rowwise)) for _ in range(terms)
            ]  # fmt: skip
            gemm = ScaledPartialGemm(terms=pairs, addend=addend, bias=gemm.bias, fast_accumulation=fast)
        own = self.tensor(max(counts[0], 1), width)[: counts[0]]
        if kind == "partial":
            staging, counters = self.tensor(total, width), choose(self.keep)
            return lambda launcher: launcher.partial_rows(rows, gemm, staging, counters)
        if kind == "own" and counts[0]:
            return lambda launcher: launcher.own_rows(rows, gemm, own, slot, epoch)
        return lambda launcher: launcher.scatter_rows(rows, gemm, own, slot, epoch)


def launched(launch: Launch) -> Mapping[str, Any]:
    prepared = launch.prepared
    assert isinstance(prepared, Seen)
    launch()
    return prepared.values()


@pytest.mark.parametrize("has_tma", [True, False])
def test_found_again_is_prepared_anew(monkeypatch: pytest.MonkeyPatch, has_tma: bool) -> None:
    monkeypatch.setattr(compiled, "PackedLaunch", Seen)
    problem, driver = Problem(5), NullKernelDriver(has_tma=has_tma)
    kept = GemmLauncher(torch.device("cpu"), 10.0, 16, driver=driver, lends=True)
    with no_compiler():
        for turn in range(2000):
            draw = problem.draw()
            fresh = GemmLauncher(torch.device("cpu"), 10.0, 16, driver=NullKernelDriver(has_tma=has_tma), lends=True)
            assert launched(draw(kept)) == launched(draw(fresh)), turn
    assert len(kept._prepared) < 1000, "half of them and more were found again"


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tpoverlap.gemm.triton.launcher._MAX_PREPARED", 5)
    problem = Problem(6)
    launcher = GemmLauncher(torch.device("cpu"), 10.0, 16, driver=NullKernelDriver())
    with no_compiler():
        for _ in range(30):
            problem.draw()(launcher)()
            assert len(launcher._prepared) <= 5
