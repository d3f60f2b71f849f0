"""How many programs a launch takes and which tile, on a GPU that does nothing (`tests.costs.null_kernels`)."""

from __future__ import annotations

import pytest
import torch

from tests.costs.null_kernels import NullKernelDriver, no_compiler
from tpoverlap.gemm import PartialGemm
from tpoverlap.gemm.fp8 import QuantizedTensor, ScaledPartialGemm
from tpoverlap.gemm.triton import TilePlan, choose_tile
from tpoverlap.gemm.triton.gates import Slot
from tpoverlap.gemm.triton.launcher import GemmLauncher
from tpoverlap.gemm.triton.tiles import TileShape, fits_one_wave
from tpoverlap.overlap.fused_blocks import gather_rows, scatter_rows

ALL, FREE = 132, 16
DEPTH = 16
"""K: no tile depends on it."""


@pytest.mark.parametrize("num_tokens", [16, 128, 256, 512, 1024, 2048])
@pytest.mark.parametrize("lends", [False, True])
@pytest.mark.parametrize("kind", ["gather", "scatter"])
def test_programs_that_wait_leave_room(kind: str, lends: bool, num_tokens: int) -> None:
    """4096 columns are 128 tiles for every power of two here: one wave only if ``FREE`` multiprocessors are lent."""
    driver, grids = NullKernelDriver(ALL), []
    driver.seen = lambda grid, parameters: grids.append(grid)
    launcher = GemmLauncher(torch.device("cpu"), 1.0, FREE, driver=driver, lends=lends)
    half, dtype = num_tokens // 2, torch.float16
    peers, words = torch.zeros(2, 2, dtype=torch.int64), torch.zeros(512, dtype=torch.int32)
    x, weight = torch.empty(num_tokens, DEPTH, dtype=dtype), torch.empty(4096, DEPTH, dtype=dtype)
    out = torch.empty(num_tokens, 4096, dtype=dtype)
    slot = Slot(x.data_ptr(), words.data_ptr(), 0, 2, 64, peers)
    with no_compiler():
        if kind == "gather":
            rows = gather_rows((half, half), DEPTH, 0, 128)
            launcher.gathered_rows(rows, x[:half], slot, lambda *_: x, weight.t(), None, out, 1, pushes=True)()
            waiting_blocks, free_blocks = rows.others, (rows.own,)
        else:
            rows = scatter_rows((half, half), 4096, 0, 128)
            launcher.scatter_rows(rows, PartialGemm([x], [weight.t()]), out[:half], slot, 1)()
            waiting_blocks, free_blocks = (rows.own,), rows.others
    tile = launcher._builder.tile_for((half, half), 4096, dtype, two_sums=kind == "scatter", waiting_rows=(half,))
    columns = -(-4096 // tile.columns)
    waiting, free = (len(TilePlan.of(blocks, tile.rows).rows) * columns for blocks in (waiting_blocks, free_blocks))
    (grid,) = grids
    assert grid <= ALL
    if not lends:
        assert grid <= ALL - FREE
    elif waiting + free <= ALL:
        assert grid >= waiting + free, "each tile has a program of its own"
        assert waiting <= ALL - FREE
    else:
        assert grid <= ALL - FREE


def test_lent_programs_make_one_wave_of_two() -> None:
    small = {"itemsize_bytes": 2, "num_programs": ALL - FREE}
    for rows, alone, lent in ((64, (64, 128), (64, 64)), (256, None, (128, 128)), (512, (128, 128), (128, 256))):
        without = choose_tile((rows, rows), 4096, **small)
        assert alone is None or (without.rows, without.columns) == alone
        tile = choose_tile((rows, rows), 4096, **small, lent=FREE, waiting_rows=(rows,))
        assert (tile.rows, tile.columns) == lent


def test_who_waits_never_borrows() -> None:
    assert fits_one_wave(116, 116, 116, 16) and fits_one_wave(132, 116, 116, 16)
    assert not fits_one_wave(132, 117, 116, 16), "then a library's kernel might find no room"
    assert not fits_one_wave(133, 64, 116, 16), "a program with a second tile may wait in it"
    assert not fits_one_wave(117, 1, 116, 0)


@pytest.mark.parametrize("num_terms", [1, 2])
@pytest.mark.parametrize("fast", [True, False])
def test_fp8_products_with_a_second_sum_take_smaller_tiles(fast: bool, num_terms: int) -> None:
    """256 columns leave no registers for it. A launch and the counters' targets agree on the tile."""
    launcher = GemmLauncher(torch.device("cpu"), 1.0, driver=NullKernelDriver(ALL))
    one = QuantizedTensor(torch.empty(8192, 256, dtype=torch.float8_e4m3fn), torch.ones(1, 1), torch.bfloat16)
    gemm = ScaledPartialGemm(terms=[(one, one)] * num_terms, fast_accumulation=fast)
    rows = scatter_rows((4096, 4096), 8192, 0, 128)
    tile = launcher._builder.partial_tile(rows, gemm)
    assert (tile.columns == 256) == (fast and num_terms == 1)
    assert tile.depth >= 128, "as many bytes as 64 columns of 16 bits"
    wanted = TilePlan.of(rows.others, tile.rows).tiles_per_word(8192 // tile.columns)
    assert launcher.tiles_per_word(rows, gemm) == wanted


def test_a_given_tile_is_used() -> None:
    tile = TileShape(64, 32, 128, 4, 4)
    driver, grids = NullKernelDriver(ALL), []
    driver.seen = lambda grid, parameters: grids.append(grid)
    launcher = GemmLauncher(torch.device("cpu"), 1.0, 0, tile, driver=driver)
    x, weight = torch.empty(64, DEPTH, dtype=torch.float16), torch.empty(128, DEPTH, dtype=torch.float16)
    out, slot = torch.empty(64, 128, dtype=torch.float16), Slot(x.data_ptr(), 1 << 40)
    rows = gather_rows((32, 32), DEPTH, 0, 128)
    with no_compiler():
        launcher.gathered_rows(rows, x[:32], slot, lambda *_: x, weight.t(), None, out, 1)()
    assert grids == [2 * 4]
