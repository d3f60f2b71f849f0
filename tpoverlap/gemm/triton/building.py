"""Preparing launches: the tile, the programs, tables and all arguments of `tile_gemm` and `scatter_gemm`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from tpoverlap.gemm.tasks import PartialGemm, Scaling
from tpoverlap.gemm.triton.compiled import (
    SCATTER_GEMM,
    TILE_GEMM,
    CompiledKernels,
    InterpretedKernels,
    Kernel,
    describable,
)
from tpoverlap.gemm.triton.gates import Slot
from tpoverlap.gemm.triton.kernel_driver import KernelDriver
from tpoverlap.gemm.triton.operands import Operands, kind
from tpoverlap.gemm.triton.operation_rows import OperationRows
from tpoverlap.gemm.triton.prepared import Prepared
from tpoverlap.gemm.triton.push_plan import Push, PushPlan
from tpoverlap.gemm.triton.tables import DeviceTables
from tpoverlap.gemm.triton.tile_plan import TilePlan
from tpoverlap.gemm.triton.tiles import INTERPRETED, TileShape, choose_tile, fits_one_wave
from tpoverlap.gemm.triton.wait_bound import WaitBound

_INTERPRETED_PROGRAMS: Final = 3
_LEAST_PUSHERS: Final = 24
"""Programs that push, at least: one alone fills a small part of a link."""


class LaunchBuilder:
    """See `GemmLauncher`, whose arguments these are."""

    def __init__(
        self,
        device: torch.device,
        limit_s: float,
        reserve_programs: int,
        tile: TileShape | None,
        use_tma: bool | None,
        driver: KernelDriver | None,
        lends: bool,
    ) -> None:
        self.device = device
        self.interpreted = driver is None
        self._bound = WaitBound(device, limit_s, interpreted=driver is None)
        self._tile = INTERPRETED if driver is None and tile is None else tile
        self._use_tma = use_tma if use_tma is not None else driver is not None and driver.has_tma
        self._tables = DeviceTables(device, driver)
        self._kernels = InterpretedKernels(None) if driver is None else CompiledKernels(driver)
        multiprocessors = _INTERPRETED_PROGRAMS if driver is None else driver.multiprocessors
        self.num_programs = max(1, multiprocessors - reserve_programs)
        self._lent = multiprocessors - self.num_programs if lends else 0
        self.error = self._bound.error
        self._none = torch.zeros(4, dtype=torch.int32, device=device)

    def tile_for(
        self,
        block_rows: tuple[int, ...],
        columns: int,
        dtype: torch.dtype,
        *,
        two_sums: bool = False,
        waiting_rows: tuple[int, ...] = (),
    ) -> TileShape:
        """The tile for blocks of that many rows, of which ``waiting_rows`` wait for peers."""
        if self._tile is not None:
            return self._tile
        return choose_tile(
            block_rows,
            columns,
            dtype.itemsize,
            self.num_programs,
            two_sums=two_sums,
            lent=self._lent,
            waiting_rows=waiting_rows,
        )

    def partial_tile(self, rows: OperationRows, gemm: PartialGemm) -> TileShape:
        """The tile of `partial`."""
        counts = tuple(block.stop - block.start for block in rows.others)
        twice = gemm.scaling is not None and gemm.scaling.sums_twice
        return self.tile_for(counts, gemm.width, gemm.matrices[0].dtype, two_sums=twice)

    # -- what is launched --------------------------------------------------------------------------------------------

    def gathered(
        self,
        rows: OperationRows,
        own: torch.Tensor,
        slot: Slot,
        gathered: torch.Tensor,
        matrix: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        pushes: bool,
        scaling: Scaling | None,
    ) -> Prepared:
        """See `GemmLauncher.gathered_rows`. Moving: own, matrix, out, bias, scales."""
        if scaling is not None:
            own, gathered = own.view(scaling.left_format), gathered.view(scaling.left_format)
        operands = Operands.of([gathered], [matrix], scaling)
        waiting = tuple(block.stop - block.start for block in rows.others)
        counts = (rows.own.stop - rows.own.start, *waiting)
        tile = self.tile_for(counts, out.shape[1], matrix.dtype, two_sums=operands.sums_twice, waiting_rows=waiting)
        plans = TilePlan.of((rows.own,), tile.rows), TilePlan.of(rows.others, tile.rows)
        moving = {"b0": 1, "out": 2, "out_descriptor": 2, "bias": 3}
        if scaling is not None:
            moving |= {"a0_scale": 4, "b0_scale": 5}
        if own.shape[0]:
            moving |= {"own": 0, "source": 0}
        return self._tile_gemm(
            tile, *plans, operands, out, moving, own=own, own_shift=rows.own.start, bias=bias, slot=slot, gated=True,
            pushes=rows.pushes if pushes else (),
        )  # fmt: skip

    def partial(self, rows: OperationRows, gemm: PartialGemm, out: torch.Tensor, counters: torch.Tensor) -> Prepared:
        """See `GemmLauncher.partial_rows`. Moving: lefts, matrices, out, addend, counters, scales."""
        operands = Operands.of(gemm.lefts, gemm.matrices, gemm.scaling)
        tile = self.partial_tile(rows, gemm)
        plan = TilePlan.of(rows.others, tile.rows)
        moving = _moving(gemm, "counters")
        return self._tile_gemm(tile, _NO_ROWS, plan, operands, out, moving, addend=gemm.addend, counters=counters)

    def own(self, rows: OperationRows, gemm: PartialGemm, out: torch.Tensor, slot: Slot) -> Prepared:
        """See `GemmLauncher.own_rows`. Moving: lefts, matrices, out, addend, bias, scales."""
        operands = Operands.of(gemm.lefts, gemm.matrices, gemm.scaling)
        own = rows.own
        count = own.stop - own.start
        two_sums = slot.num_ranks > 2 or operands.sums_twice
        tile = self.tile_for((count,), gemm.width, gemm.matrices[0].dtype, two_sums=two_sums)
        return self._tile_gemm(
            tile, _NO_ROWS, TilePlan.of((own,), tile.rows), operands, out, _moving(gemm, "bias"), out_shift=own.start,
            bias=gemm.bias, addend=gemm.addend, slot=slot, block_rows=count, received=True,
        )  # fmt: skip

    # -- all arguments -----------------------------------------------------------------------------------------------

    def _tile_gemm(
        self,
        tile: TileShape,
        own_plan: TilePlan,
        plan: TilePlan,
        operands: Operands,
        out: torch.Tensor,
        moving: Mapping[str, int],
        *,
        own: torch.Tensor | None = None,
        own_shift: int = 0,
        out_shift: int = 0,
        bias: torch.Tensor | None = None,
        addend: torch.Tensor | None = None,
        slot: Slot | None = None,
        gated: bool = False,
        received: bool = False,
        block_rows: int = 0,
        counters: torch.Tensor | None = None,
        pushes: tuple[Push, ...] = (),
    ) -> Prepared:
        width, lefts = out.shape[1], operands.lefts
        first = own if own is not None and own.shape[0] > 0 else lefts[0]
        tma = self._use_tma and describable(first) and operands.describable()
        tma_store = tma and describable(out)
        addressed = self.interpreted and gated and not tma
        given = operands.given(self._kernels, tile, tma=tma, addressed=addressed)
        own_rows = first
        if own is None:
            own_rows = given[0]
        elif tma:
            own_rows = self._kernels.descriptor(first, (tile.rows, tile.depth))
        column_tiles = -(-width // tile.columns)
        tiles = (len(own_plan.rows) + len(plan.rows)) * column_tiles
        most = self._most_programs(tiles, len(plan.rows) * column_tiles)
        push_plan, pushers = self._push_plan(pushes, tiles, most, first.shape[1] * first.element_size())
        programs = max(1, min(most, tiles + pushers))
        if self.interpreted and pushes:
            programs = 1  # they run one after the other: the first would wait for rows that the second has yet to push
        out_descriptor = self._kernels.descriptor(out, (tile.rows, tile.columns // tile.parts)) if tma_store else out
        waits = slot is not None and slot.words != 0
        constants = (
            tile.rows,
            tile.columns,
            tile.depth,
            tile.group,
            len(lefts),
            tma,
            tma_store,
            *operands.constants(out.dtype),
            own is not None,
            bias is not None,
            addend is not None,
            gated,
            counters is not None,
            slot.num_ranks if received and slot is not None else 1,
            slot.rank if received and slot is not None else 0,
            received and waits,
            addressed,
            tile.parts,
            bool(pushes),
            self.interpreted,
        )
        peers = self._none
        if pushes:
            assert slot is not None and slot.peers is not None, "where to push"
            peers = slot.peers
        done = self._zeros(1 + max(push.word for push in pushes)) if pushes else self._none
        pushed = self._tables.get((push_plan,), push_plan.rows) if push_plan.rows else self._none

        def arguments(table: torch.Tensor, own_count: int, count: int, num_pushes: int, pushers: int) -> Any:
            return (
                table,
                own_count,
                count,
                own_rows,
                first.stride(0),
                *given,
                width,
                own_shift,
                0,
                out,
                out_descriptor,
                out_shift,
                out if bias is None else bias,
                out if addend is None else addend,
                16 if addend is None else addend.stride(0),
                slot.data if received and slot is not None else 0,
                block_rows,
                slot.words_per_rank if received and slot is not None else 0,
                slot.words if waits and slot is not None else 0,
                0,  # the epoch: `Prepared.launch` puts it here
                self._bound.limit,
                self._bound.address,
                self._none if counters is None else counters,
                first,
                pushed,
                num_pushes,
                pushers,
                peers,
                done,
            )

        tensors = (first, *lefts, *operands.stored, out, *(extra for extra in (bias, addend) if extra is not None))
        table = self._table(own_plan, plan)
        counts = len(own_plan.rows), len(own_plan.rows) + len(plan.rows)
        return self._loaded(
            TILE_GEMM,
            tile,
            (constants, *map(kind, tensors)),
            lambda: arguments(self._table(_NO_ROWS, _NO_ROWS), 0, 0, 0, 1),
            arguments(table, *counts, len(push_plan.rows), min(pushers, programs)),
            programs,
            moving,
            (table, slot, pushed, done),
        )

    def scatter(self, rows: OperationRows, gemm: PartialGemm, out: torch.Tensor, slot: Slot) -> Prepared:
        """See `GemmLauncher.scatter_rows`. Moving: lefts, matrices, out, addend, bias, scales."""
        remote, own_block = rows.remote, rows.own
        width, count = gemm.width, own_block.stop - own_block.start
        assert slot.peers is not None, "where to store the peers' rows"
        assert slot.words, "a tile waits for what the peers send while it runs"
        if self.interpreted and count == 0:
            out = out.new_empty(1, width)  # it cannot show a kernel an empty tensor, not even one that is not touched
        blocks = tuple(entry.block for entry in remote)
        counts = tuple(block.stop - block.start for block in (*blocks, own_block))
        tile = self.tile_for(counts, width, gemm.matrices[0].dtype, two_sums=True, waiting_rows=(count,))
        plan, own_plan = TilePlan.of(blocks, tile.rows), TilePlan.of((own_block,), tile.rows)
        operands = Operands.of(gemm.lefts, gemm.matrices, gemm.scaling)
        tma = self._use_tma and operands.describable()
        tma_store = tma and describable(out)
        column_tiles = -(-width // tile.columns)
        tiles_per_word = plan.tiles_per_word(column_tiles)
        num_words = slot.num_ranks * slot.words_per_rank
        parts = self._tables.get((remote, plan, tile), [tiles_per_word.get(word, 0) for word in range(num_words)])
        slot_rows = [
            (entry.peer, entry.slot_row + start - entry.block.start)
            for entry in remote
            for start in range(entry.block.start, entry.block.stop, tile.rows)
        ]
        assert len(slot_rows) == len(plan.rows), "one entry a tile row"
        placed = self._tables.get((remote, plan, tile, "places"), slot_rows or [(0, 0)])
        done, ticket = self._zeros(num_words), self._zeros(1)
        given = operands.given(self._kernels, tile, tma=tma, addressed=False)
        constants = (
            tile.rows,
            tile.columns,
            tile.depth,
            tile.group,
            len(gemm.lefts),
            tma,
            tma_store,
            *operands.constants(gemm.dtype),
            gemm.bias is not None,
            gemm.addend is not None,
            slot.num_ranks,
            slot.rank,
            self.interpreted,
        )

        def arguments(table: torch.Tensor, remote_rows: int, num_rows: int) -> tuple[Any, ...]:
            return (
                table,
                remote_rows,
                num_rows,
                placed,
                parts,
                slot.peers,
                done,
                ticket,
                *given,
                width,
                out,
                self._kernels.descriptor(out, (tile.rows, tile.columns)) if tma_store else out,
                own_block.start,
                out if gemm.bias is None else gemm.bias,
                out if gemm.addend is None else gemm.addend,
                16 if gemm.addend is None else gemm.addend.stride(0),
                slot.data,
                count,
                slot.words_per_rank,
                slot.words,
                0,  # the epoch: `Prepared.launch` puts it here
                self._bound.limit,
                self._bound.address,
            )

        extras = (extra for extra in (gemm.bias, gemm.addend) if extra is not None)
        tensors = (*gemm.lefts, *operands.stored, out, *extras)
        tiles = (len(plan.rows) + len(own_plan.rows)) * column_tiles
        most = self._most_programs(tiles, len(own_plan.rows) * column_tiles)
        table = self._table(plan, own_plan)
        return self._loaded(
            SCATTER_GEMM,
            tile,
            (constants, *map(kind, tensors)),
            lambda: arguments(self._table(_NO_ROWS, _NO_ROWS), 0, 0),
            arguments(table, len(plan.rows), len(plan.rows) + len(own_plan.rows)),
            1 if self.interpreted else max(1, min(most, tiles)),
            _moving(gemm, "bias"),
            (table, slot, placed, parts, done, ticket),
        )

    def _loaded(
        self,
        kernel: Kernel,
        tile: TileShape,
        constants_and_kinds: tuple[Any, ...],
        no_work: Callable[[], tuple[Any, ...]],
        arguments: tuple[Any, ...],
        programs: int,
        moving: Mapping[str, int],
        keeps: tuple[Any, ...],
    ) -> Prepared:
        """A launch whose binary is compiled and loaded.

        Both happen at the first launch of a variant. That is done with nothing to compute, so that no kernel waits for
        a peer that is still compiling, and no module is loaded beside a kernel that waits.
        """
        constants, kinds = constants_and_kinds[0], constants_and_kinds[1:]
        variant = (constants, tile.num_stages, tile.num_warps, *kinds)
        self._kernels.load(kernel, variant, no_work, constants, tile)
        return self._kernels.prepare(kernel, variant, programs, arguments, constants, tile, moving, keeps)

    def _most_programs(self, tiles: int, waiting: int) -> int:
        lent = self._lent if fits_one_wave(tiles, waiting, self.num_programs, self._lent) else 0
        return self.num_programs + lent

    def _push_plan(self, pushes: tuple[Push, ...], tiles: int, most: int, row_bytes: int) -> tuple[PushPlan, int]:
        """What programs copy, and how many of them: those that the last wave of tiles leaves idle, but not too few."""
        if not pushes:
            return _NO_PUSHES, 0
        if self.interpreted:  # small rows, still cut into parts
            plan = PushPlan.of(pushes, row_bytes, 3 * len(pushes), 1)
            return plan, len(plan.rows)
        idle = -(-tiles // most) * most - tiles
        plan = PushPlan.of(pushes, row_bytes, min(most, max(idle, _LEAST_PUSHERS)))
        return plan, len(plan.rows)

    def _zeros(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int32, device=self.device)

    def _table(self, first: TilePlan, second: TilePlan) -> torch.Tensor:
        return self._tables.get((first, second), [*first.rows, *second.rows] or [(0, 0, 0, 0)])


def _moving(gemm: PartialGemm, last: str) -> dict[str, int]:
    """Places of lefts, matrices, out, addend, ``last`` and the scales."""
    terms = len(gemm.lefts)
    places = {f"a{i}": i for i in range(terms)} | {f"b{i}": terms + i for i in range(terms)}
    places |= {"out": 2 * terms, "out_descriptor": 2 * terms}
    if gemm.addend is not None:
        places["addend"] = 2 * terms + 1
    if last != "bias" or gemm.bias is not None:
        places[last] = 2 * terms + 2
    if gemm.scaling is not None:
        first = 2 * terms + 3
        places |= {f"a{i}_scale": first + i for i in range(terms)}
        places |= {f"b{i}_scale": first + terms + i for i in range(terms)}
    return places


_NO_ROWS: Final = TilePlan(())
_NO_PUSHES: Final = PushPlan(())
