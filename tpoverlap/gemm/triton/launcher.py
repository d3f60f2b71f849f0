"""Launching the kernels of one device: variants, tables of tile rows, descriptors. Knows tensors, words and streams'
order (everything goes to the current stream), and no transport.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch

from tpoverlap.gemm.tasks import PartialGemm
from tpoverlap.gemm.triton.compiled import (
    SCATTER_GEMM,
    TILE_GEMM,
    CompiledKernels,
    InterpretedKernels,
    Kernel,
    Prepared,
    describable,
)
from tpoverlap.gemm.triton.gates import Gate, Received
from tpoverlap.gemm.triton.operands import Operands, has_tma, kind, places, precision
from tpoverlap.gemm.triton.push_plan import PushPlan, PushTo, RemoteBlock
from tpoverlap.gemm.triton.tables import DeviceTables
from tpoverlap.gemm.triton.tile_plan import RowBlock, TilePlan
from tpoverlap.gemm.triton.tiles import INTERPRETED, TileShape, choose_tile

Launch = Callable[[], None]
"""A prepared launch: goes to the current stream, which must be the one it was prepared on."""
_MAX_PREPARED: Final = 1024
_INTERPRETED_PROGRAMS: Final = 3
_POLLS_PER_S: Final = 2_000
"""Roughly what the interpreter manages; its bound only has to exist."""
_LEAST_PUSHERS: Final = 24
"""Programs that push, at least: one alone fills a small part of a link."""


class GemmLauncher:
    """Launches `tile_gemm` and `scatter_gemm`. One a manager; the caller has checked `require_kernels`.

    Args:
        device: of all tensors.
        limit_s: bound of a kernel's waits.
        reserve_programs: multiprocessors that are left free.
        tile: instead of `choose_tile`'s (tests).
        use_tma: False: pointers even where descriptors would do (tests).
    """

    def __init__(
        self,
        device: torch.device,
        limit_s: float,
        reserve_programs: int = 0,
        tile: TileShape | None = None,
        use_tma: bool | None = None,
    ) -> None:
        self.device = device
        self.interpreted = device.type == "cpu"
        self._limit = int(limit_s * (_POLLS_PER_S if self.interpreted else 1e9))
        self._tile = INTERPRETED if self.interpreted and tile is None else tile
        self._use_tma = use_tma if use_tma is not None else not self.interpreted and has_tma(device)
        self._tables = DeviceTables(device)
        self._prepared: OrderedDict[tuple[Any, ...], Prepared] = OrderedDict()
        self._kernels: CompiledKernels = InterpretedKernels() if self.interpreted else CompiledKernels()
        if self.interpreted:
            self.num_programs = _INTERPRETED_PROGRAMS
        else:
            self.num_programs = torch.cuda.get_device_properties(device).multi_processor_count
        self.num_programs = max(1, self.num_programs - reserve_programs)
        # Pinned: the kernel stores into it, the host looks at it without a copy or a synchronisation.
        self._error = torch.zeros(1, dtype=torch.int32, pin_memory=not self.interpreted)
        self._none = torch.zeros(4, dtype=torch.int32, device=device)

    @property
    def gave_up(self) -> bool:
        """Whether a kernel's wait exceeded its bound; its output is NaN then."""
        return bool(self._error[0])

    # -- what the methods launch -----------------------------------------------------------------------------------
    # A launch is prepared (which compiles and loads its binary) before the operation waits for anybody, then launched.

    def gathered_rows(
        self,
        own: torch.Tensor,
        own_block: RowBlock,
        gathered: torch.Tensor,
        blocks: tuple[RowBlock, ...],
        matrix: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        gate: Gate,
        push_to: PushTo | None = None,
    ) -> Launch:
        """``out = gathered @ matrix (+ bias)``: own rows at once, then ``blocks`` in order, as their words arrive.

        Args:
            own: [T_r, K], rows of ``own_block``; read instead of these rows of ``gathered``.
            gathered: [T, K].
            matrix: [K, N], a view of which one stride is 1.
            out: [T, N], contiguous.
            push_to: some programs also copy ``own`` to the peers, before they wait for anything.
        """

        def prepare() -> Prepared:
            operands = Operands.of([gathered], [matrix])
            counts = tuple(block.stop - block.start for block in (own_block, *blocks))
            tile = self.tile_for(counts, out.shape[1], out.dtype)
            plans = TilePlan.of((own_block,), tile.rows), TilePlan.of(blocks, tile.rows)
            return self._prepare(
                tile,
                *plans,
                operands,
                out,
                own=own,
                own_shift=own_block.start,
                bias=bias,
                gate=gate,
                push_to=push_to,
            )

        pushed = None if push_to is None else (id(push_to.pushes), push_to.peers.data_ptr())
        key = (own_block, blocks, gate.address, pushed, *places(own, gathered, matrix, bias, out))
        return partial(self._prepared_for(key, prepare).launch, gate.epoch, None)

    def partial_rows(
        self, gemm: PartialGemm, blocks: tuple[RowBlock, ...], out: torch.Tensor, counters: torch.Tensor
    ) -> Launch:
        """``blocks`` of this rank's partial sum into ``out`` [T, N]; each tile bumps the ``counters`` of its words."""

        def prepare() -> Prepared:
            operands = Operands.of(gemm.lefts, gemm.matrices)
            tile = self.partial_tile(gemm, blocks)
            plan = TilePlan.of(blocks, tile.rows)
            return self._prepare(tile, _NO_ROWS, plan, operands, out, addend=gemm.addend, counters=counters)

        key = ("partial", blocks, *places(*gemm.lefts, *gemm.matrices, gemm.addend, out))
        return partial(self._prepared_for(key, prepare).launch, 0, counters)

    def tiles_per_word(self, gemm: PartialGemm, blocks: tuple[RowBlock, ...]) -> dict[int, int]:
        """How often `partial_rows` bumps each word."""
        tile = self.partial_tile(gemm, blocks)
        return TilePlan.of(blocks, tile.rows).tiles_per_word(-(-gemm.width // tile.columns))

    def partial_tile(self, gemm: PartialGemm, blocks: tuple[RowBlock, ...]) -> TileShape:
        """The tile of `partial_rows`."""
        return self.tile_for(tuple(block.stop - block.start for block in blocks), gemm.width, gemm.dtype)

    def own_rows(self, gemm: PartialGemm, block: RowBlock, out: torch.Tensor, received: Received) -> Launch:
        """``out`` [T_r, N] = rows of ``block``, bias, and what was received, added in rank order and rounded once.

        Words of ``block``, if it has some, are those of its pieces in every source's part of ``received.gate``.
        """

        def prepare() -> Prepared:
            operands = Operands.of(gemm.lefts, gemm.matrices)
            rows = block.stop - block.start
            tile = self.tile_for((rows,), gemm.width, gemm.dtype, two_sums=received.num_ranks > 2)
            return self._prepare(
                tile,
                _NO_ROWS,
                TilePlan.of((block,), tile.rows),
                operands,
                out,
                out_shift=block.start,
                bias=gemm.bias,
                addend=gemm.addend,
                received=received,
                block_rows=rows,
            )

        gate_address = None if received.gate is None else received.gate.address
        key = (
            block,
            received.address,
            gate_address,
            *places(*gemm.lefts, *gemm.matrices, gemm.addend, gemm.bias, out),
        )
        epoch = 0 if received.gate is None else received.gate.epoch
        return partial(self._prepared_for(key, prepare).launch, epoch, None)

    def tile_for(
        self, block_rows: tuple[int, ...], columns: int, dtype: torch.dtype, *, two_sums: bool = False
    ) -> TileShape:
        """The tile for blocks of that many rows."""
        if self._tile is not None:
            return self._tile
        return choose_tile(block_rows, columns, dtype.itemsize, self.num_programs, two_sums=two_sums)

    # -- one launch --------------------------------------------------------------------------------------------------

    def _prepared_for(self, key: tuple[Any, ...], prepare: Callable[[], Prepared]) -> Prepared:
        # Buffers and tensors come back at the same addresses step after step: then only the epoch is new.
        if self.interpreted:
            return prepare()
        key = (*key, torch.cuda.current_stream(self.device).cuda_stream, torch.backends.cuda.matmul.allow_tf32)
        found = self._prepared.get(key)
        if found is None:
            found = self._prepared[key] = prepare()
            if len(self._prepared) > _MAX_PREPARED:
                self._prepared.popitem(last=False)
        else:
            self._prepared.move_to_end(key)
        return found

    def _prepare(
        self,
        tile: TileShape,
        own_plan: TilePlan,
        plan: TilePlan,
        operands: Operands,
        out: torch.Tensor,
        *,
        own: torch.Tensor | None = None,
        own_shift: int = 0,
        out_shift: int = 0,
        bias: torch.Tensor | None = None,
        addend: torch.Tensor | None = None,
        gate: Gate | None = None,
        counters: torch.Tensor | None = None,
        received: Received | None = None,
        block_rows: int = 0,
        push_to: PushTo | None = None,
    ) -> Prepared:
        width, lefts = out.shape[1], operands.lefts
        first = own if own is not None and own.shape[0] > 0 else lefts[0]
        tma = self._use_tma and describable(first) and operands.describable()
        tma_store = tma and describable(out)
        waits_for = gate if received is None else received.gate
        addressed = self.interpreted and gate is not None and not tma
        given = operands.given(self._kernels, tile, tma=tma, addressed=addressed)
        own_rows = first
        if own is None:
            own_rows = given[0]
        elif tma:
            own_rows = self._kernels.descriptor(first, (tile.rows, tile.depth))
        tiles = (len(own_plan.rows) + len(plan.rows)) * -(-width // tile.columns)
        push_plan, pushers = self._push_plan(push_to, tiles, first.shape[1] * first.element_size())
        programs = max(1, min(self.num_programs, tiles + pushers))
        if self.interpreted and push_to is not None:
            programs = 1  # they run one after the other: the first would wait for rows that the second has yet to push
        out_descriptor = self._kernels.descriptor(out, (tile.rows, tile.columns // tile.parts)) if tma_store else out
        constants = (
            tile.rows,
            tile.columns,
            tile.depth,
            tile.group,
            len(lefts),
            tma,
            tma_store,
            operands.n_major,
            precision(out.dtype),
            own is not None,
            bias is not None,
            addend is not None,
            gate is not None,
            counters is not None,
            1 if received is None else received.num_ranks,
            0 if received is None else received.rank,
            received is not None and received.gate is not None,
            addressed,
            tile.parts,
            push_to is not None,
            self.interpreted,
        )
        peers = self._none if push_to is None else push_to.peers
        done = self._none if push_to is None else self._zeros(1 + max(push.word for push in push_to.pushes))

        def arguments(own_plan: TilePlan, plan: TilePlan, push_plan: PushPlan, pushers: int) -> tuple[Any, ...]:
            return (
                self._table(own_plan, plan),
                len(own_plan.rows),
                len(own_plan.rows) + len(plan.rows),
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
                0 if received is None else received.address,
                block_rows,
                0 if received is None else received.words_per_rank,
                0 if waits_for is None else waits_for.address,
                0,  # the epoch: `Prepared.launch` puts it here
                self._limit,
                self._error.data_ptr(),
                self._none if counters is None else counters,  # and counters here
                first,
                self._tables.get((push_plan,), push_plan.rows) if push_plan.rows else self._none,
                len(push_plan.rows),
                pushers,
                peers,
                done,
            )

        tensors = (first, *lefts, *operands.stored, out, *(extra for extra in (bias, addend) if extra is not None))
        return self._loaded(
            TILE_GEMM,
            tile,
            (constants, *map(kind, tensors)),
            lambda: arguments(_NO_ROWS, _NO_ROWS, _NO_PUSHES, 1),
            arguments(own_plan, plan, push_plan, min(pushers, programs)),
            programs,
            (push_to, done),
        )

    def scatter_rows(
        self,
        gemm: PartialGemm,
        remote: tuple[RemoteBlock, ...],
        own_block: RowBlock,
        out: torch.Tensor,
        received: Received,
        peers: torch.Tensor,
    ) -> Launch:
        """The whole reduce-scatter in one launch.

        Args:
            remote: rows of other ranks, which are stored into their slots; words count up from
                ``peer * received.words_per_rank``.
            own_block: this rank's rows, with the words of `own_rows`.
            out: [T_r, N], contiguous.
            received: with a gate.
            peers: see `PushTo`.
        """
        gate = received.gate
        assert gate is not None, "a tile waits for what the peers send while it runs"

        def prepare() -> Prepared:
            return self._prepare_scatter(gemm, remote, own_block, out, received, gate, peers)

        key = (
            "scatter",
            id(remote),
            own_block,
            gate.address,
            peers.data_ptr(),
            *places(*gemm.lefts, *gemm.matrices, gemm.addend, gemm.bias, out),
        )
        return partial(self._prepared_for(key, prepare).launch, gate.epoch, None)

    def _prepare_scatter(
        self,
        gemm: PartialGemm,
        remote: tuple[RemoteBlock, ...],
        own_block: RowBlock,
        out: torch.Tensor,
        received: Received,
        gate: Gate,
        peers: torch.Tensor,
    ) -> Prepared:
        width, rows = gemm.width, own_block.stop - own_block.start
        if self.interpreted and rows == 0:
            out = out.new_empty(1, width)  # it cannot show a kernel an empty tensor, not even one that is not touched
        blocks = tuple(entry.block for entry in remote)
        counts = tuple(block.stop - block.start for block in (*blocks, own_block))
        tile = self.tile_for(counts, width, gemm.dtype, two_sums=True)
        plan, own_plan = TilePlan.of(blocks, tile.rows), TilePlan.of((own_block,), tile.rows)
        operands = Operands.of(gemm.lefts, gemm.matrices)
        tma = self._use_tma and operands.describable()
        tma_store = tma and describable(out)
        column_tiles = -(-width // tile.columns)
        tiles_per_word = plan.tiles_per_word(column_tiles)
        num_words = received.num_ranks * received.words_per_rank
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
            operands.n_major,
            precision(gemm.dtype),
            gemm.bias is not None,
            gemm.addend is not None,
            received.num_ranks,
            received.rank,
            self.interpreted,
        )

        def arguments(plan: TilePlan, own_plan: TilePlan) -> tuple[Any, ...]:
            return (
                self._table(plan, own_plan),
                len(plan.rows),
                len(plan.rows) + len(own_plan.rows),
                placed,
                parts,
                peers,
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
                received.address,
                rows,
                received.words_per_rank,
                gate.address,
                0,  # the epoch: `Prepared.launch` puts it here
                self._limit,
                self._error.data_ptr(),
            )

        extras = (extra for extra in (gemm.bias, gemm.addend) if extra is not None)
        tensors = (*gemm.lefts, *operands.stored, out, *extras)
        tiles = (len(plan.rows) + len(own_plan.rows)) * column_tiles
        return self._loaded(
            SCATTER_GEMM,
            tile,
            (constants, *map(kind, tensors)),
            lambda: arguments(_NO_ROWS, _NO_ROWS),
            arguments(plan, own_plan),
            1 if self.interpreted else max(1, min(self.num_programs, tiles)),
            (remote, peers, placed, parts, done, ticket),
        )

    def _loaded(
        self,
        kernel: Kernel,
        tile: TileShape,
        constants_and_kinds: tuple[Any, ...],
        no_work: Callable[[], tuple[Any, ...]],
        arguments: tuple[Any, ...],
        programs: int,
        keeps: tuple[Any, ...],
    ) -> Prepared:
        """A launch whose binary is compiled and loaded.

        Both happen at the first launch of a variant. That is done with nothing to compute, so that no kernel waits for
        a peer that is still compiling, and no module is loaded beside a kernel that waits.
        """
        constants, kinds = constants_and_kinds[0], constants_and_kinds[1:]
        variant = (constants, tile.num_stages, tile.num_warps, *kinds)
        self._kernels.load(kernel, variant, no_work, constants, tile)
        return self._kernels.prepare(kernel, variant, programs, arguments, constants, tile, keeps)

    def _push_plan(self, push_to: PushTo | None, tiles: int, row_bytes: int) -> tuple[PushPlan, int]:
        """What programs copy, and how many of them: those that the last wave of tiles leaves idle, but not too few."""
        if push_to is None:
            return _NO_PUSHES, 1
        if self.interpreted:  # small rows, still cut into parts
            plan = PushPlan.of(push_to.pushes, row_bytes, 3 * len(push_to.pushes), 1)
            return plan, len(plan.rows)
        idle = -(-tiles // self.num_programs) * self.num_programs - tiles
        plan = PushPlan.of(push_to.pushes, row_bytes, min(self.num_programs, max(idle, _LEAST_PUSHERS)))
        return plan, len(plan.rows)

    def _zeros(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int32, device=self.device)

    def _table(self, first: TilePlan, second: TilePlan) -> torch.Tensor:
        return self._tables.get((first, second), [*first.rows, *second.rows] or [(0, 0, 0, 0)])


_NO_ROWS: Final = TilePlan(())
_NO_PUSHES: Final = PushPlan(())
