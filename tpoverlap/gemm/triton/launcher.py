"""Launching the kernels of one device: variants, tables of tile rows, descriptors. Knows tensors, words and streams'
order (everything goes to the current stream), and no transport.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

from tpoverlap.errors import ConfigError
from tpoverlap.gemm.tasks import PartialGemm
from tpoverlap.gemm.triton.compiled import CompiledKernels, InterpretedKernels, Prepared, describable
from tpoverlap.gemm.triton.tile_plan import RowBlock, TilePlan
from tpoverlap.gemm.triton.tiles import INTERPRETED, TileShape, choose_tile

MAX_TERMS: Final = 3
Launch = Callable[[], None]
"""A prepared launch: goes to the current stream, which must be the one it was prepared on."""
_MAX_TABLES: Final = 256
_MAX_PREPARED: Final = 1024
_INTERPRETED_PROGRAMS: Final = 3
_POLLS_PER_S: Final = 2_000
"""Roughly what the interpreter manages; its bound only has to exist."""


@dataclass(frozen=True)
class Gate:
    """Words that gated tiles wait for: int32 at ``address``, indexed by the plan's words, to reach ``epoch``."""

    address: int
    epoch: int


@dataclass(frozen=True)
class Received:
    """What peers sent of own rows: at ``address`` one block [rows, N] a peer, in rank order, this ``rank`` left out.

    ``gate``: words of the blocks, ``words_per_rank`` a source rank, which the tiles wait for before they add; None: all
    is there.
    """

    address: int
    rank: int
    num_ranks: int
    gate: Gate | None = None
    words_per_rank: int = 0


@dataclass(frozen=True)
class _Operands:
    """The terms of one launch: lefts [rows, K_i] and how their matrices are stored."""

    lefts: Sequence[torch.Tensor]
    stored: Sequence[torch.Tensor]
    n_major: bool


class GemmLauncher:
    """Launches `tile_gemm`. One a manager; the caller has checked `require_kernels`.

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
        self._use_tma = use_tma if use_tma is not None else not self.interpreted and _has_tma(device)
        self._tables: OrderedDict[tuple[int, int, int], tuple[TilePlan, TilePlan, torch.Tensor]] = OrderedDict()
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
    ) -> Launch:
        """``out = gathered @ matrix (+ bias)``: own rows at once, then ``blocks`` in order, as their words arrive.

        Args:
            own: [T_r, K], rows of ``own_block``; read instead of these rows of ``gathered``.
            gathered: [T, K].
            matrix: [K, N], a view of which one stride is 1.
            out: [T, N], contiguous.
        """

        def prepare() -> Prepared:
            operands = _Operands([gathered], *_stored([matrix]))
            counts = tuple(block.stop - block.start for block in (own_block, *blocks))
            tile = self.tile_for(counts, out.shape[1], out.dtype)
            plans = TilePlan.of((own_block,), tile.rows), TilePlan.of(blocks, tile.rows)
            return self._prepare(tile, *plans, operands, out, own=own, own_shift=own_block.start, bias=bias, gate=gate)

        key = (own_block, blocks, gate.address, *_places(own, gathered, matrix, bias, out))
        return partial(self._prepared_for(key, prepare).launch, gate.epoch, None)

    def partial_rows(
        self, gemm: PartialGemm, blocks: tuple[RowBlock, ...], out: torch.Tensor, counters: torch.Tensor
    ) -> Launch:
        """``blocks`` of this rank's partial sum into ``out`` [T, N]; each tile bumps the ``counters`` of its words."""

        def prepare() -> Prepared:
            operands = _Operands(gemm.lefts, *_stored(gemm.matrices))
            tile = self.partial_tile(gemm, blocks)
            plan = TilePlan.of(blocks, tile.rows)
            return self._prepare(tile, _NO_ROWS, plan, operands, out, addend=gemm.addend, counters=counters)

        key = ("partial", blocks, *_places(*gemm.lefts, *gemm.matrices, gemm.addend, out))
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
            operands = _Operands(gemm.lefts, *_stored(gemm.matrices))
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
            *_places(*gemm.lefts, *gemm.matrices, gemm.addend, gemm.bias, out),
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
        operands: _Operands,
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
    ) -> Prepared:
        width, lefts, stored = out.shape[1], operands.lefts, operands.stored
        assert all(left.stride(1) == 1 or left.shape[1] == 1 for left in lefts), "rows are contiguous"
        first = own if own is not None and own.shape[0] > 0 else lefts[0]
        tma = self._use_tma and describable(first) and all(map(describable, lefts)) and all(map(describable, stored))
        tma_store = tma and describable(out)
        waits_for = gate if received is None else received.gate
        addressed = self.interpreted and gate is not None and not tma
        unused = (0,) * (MAX_TERMS - len(lefts))
        a: list[Any] = list(lefts)
        if tma:
            left_shape = (tile.rows, tile.depth)
            right_shape = (tile.columns, tile.depth) if operands.n_major else (tile.depth, tile.columns)
            a = [self._kernels.descriptor(left, left_shape) for left in lefts]
            b = [self._kernels.descriptor(right, right_shape) for right in stored]
            own_rows = a[0] if own is None else self._kernels.descriptor(first, left_shape)
        else:
            a = [lefts[0].data_ptr()] if addressed else list(lefts)
            b = list(stored)
            own_rows = a[0] if own is None else first
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
            _precision(out.dtype),
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
            self.interpreted,
        )

        def arguments(own_plan: TilePlan, plan: TilePlan) -> tuple[Any, ...]:
            return (
                self._table(own_plan, plan),
                len(own_plan.rows),
                len(own_plan.rows) + len(plan.rows),
                own_rows,
                first.stride(0),
                *a,
                *unused,
                *b,
                *unused,
                *[left.shape[1] for left in lefts],
                *unused,
                *[left.stride(0) for left in lefts],
                *unused,
                *[right.stride(0) for right in stored],
                *unused,
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
            )

        tensors = (first, *lefts, *stored, out, *(extra for extra in (bias, addend) if extra is not None))
        variant = (constants, tile.num_stages, tile.num_warps, out.dtype, *map(_kind, tensors))
        # Compiling and loading happen at the first launch of a variant. Do both with nothing to compute, so that no
        # kernel waits for a peer that is still compiling, and no module is loaded beside a kernel that waits.
        self._kernels.load(variant, lambda: arguments(_NO_ROWS, _NO_ROWS), constants, tile)
        tiles = (len(own_plan.rows) + len(plan.rows)) * -(-width // tile.columns)
        programs = max(1, min(self.num_programs, tiles))
        return self._kernels.prepare(variant, programs, arguments(own_plan, plan), constants, tile)

    def _table(self, own_plan: TilePlan, plan: TilePlan) -> torch.Tensor:
        # A new T costs one small copy that does not wait; later operations with the same rows find the table here.
        stream = 0 if self.interpreted else torch.cuda.current_stream(self.device).cuda_stream
        # By identity (plans are cached, and the entry keeps them alive): hashing hundreds of rows would cost more.
        key = (id(own_plan), id(plan), stream)
        if key in self._tables:
            self._tables.move_to_end(key)
            return self._tables[key][2]
        rows = [*own_plan.rows, *plan.rows] or [(0, 0, 0, 0)]
        host = torch.tensor(rows, dtype=torch.int32, pin_memory=not self.interpreted)
        table = host.to(self.device, non_blocking=True)
        self._tables[key] = own_plan, plan, table
        if len(self._tables) > _MAX_TABLES:
            self._tables.popitem(last=False)
        return table


_NO_ROWS: Final = TilePlan(())


def _stored(matrices: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], bool]:
    """[K, N] views as they lie in memory, rows of unit stride, and whether these rows run along K ([N, K])."""
    if len(matrices) > MAX_TERMS:
        raise ConfigError(
            f"method 'fused' adds up to {MAX_TERMS} products in one kernel, here are {len(matrices)} weights that "
            "share one gather; use method 'ring_exchange' for this name"
        )
    n_major = matrices[0].stride(0) == 1 and matrices[0].stride(1) >= matrices[0].shape[0]
    stored = [matrix.t() for matrix in matrices] if n_major else list(matrices)
    for matrix, tensor in zip(matrices, stored, strict=True):
        if tensor.stride(1) != 1:
            raise ConfigError(
                f"method 'fused' needs weights with unit stride along one axis, and all of one gather along the same; "
                f"got shape {list(matrix.shape)} with strides {list(matrix.stride())}: make them contiguous"
            )
    return stored, n_major


def _kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What a binary depends on: alignment, and sizes that the compiler may specialise on (none changes with T)."""
    return tensor.data_ptr() % 16 == 0, tensor.shape[-1], tensor.stride(0)


def _has_tma(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] >= 9


def _precision(dtype: torch.dtype) -> str:
    """As torch multiplies: float32 in full unless the user allowed TF32."""
    return "tf32" if dtype != torch.float32 or torch.backends.cuda.matmul.allow_tf32 else "ieee"


def _places(*tensors: torch.Tensor | None) -> list[Any]:
    """Where tensors lie and how, without keeping them alive."""
    return [None if t is None else (t.data_ptr(), t.dtype, t.shape, t.stride()) for t in tensors]
