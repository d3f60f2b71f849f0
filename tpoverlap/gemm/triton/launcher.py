"""Launching the kernels of one device: variants, tables of tile rows, descriptors. Knows tensors, words and streams'
order (everything goes to the current stream), and no transport.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from tpoverlap.errors import ConfigError
from tpoverlap.gemm.tasks import PartialGemm
from tpoverlap.gemm.triton.tile_plan import RowBlock, TilePlan
from tpoverlap.gemm.triton.tiles import INTERPRETED, TileShape, choose_tile

MAX_TERMS: Final = 3
_MAX_TABLES: Final = 256
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
    """What peers sent of own rows: at ``address`` one block [rows, N] a peer, in rank order, this ``rank`` left out."""

    address: int
    rank: int
    num_ranks: int


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
        self._loaded: set[tuple[Any, ...]] = set()
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
    ) -> None:
        """``out = gathered @ matrix (+ bias)``: own rows at once, then ``blocks`` in order, as their words arrive.

        Args:
            own: [T_r, K], rows of ``own_block``; read instead of these rows of ``gathered``.
            gathered: [T, K].
            matrix: [K, N], a view of which one stride is 1.
            out: [T, N], contiguous.
        """
        operands = _Operands([gathered], *_stored([matrix]))
        counts = tuple(block.stop - block.start for block in (own_block, *blocks))
        tile = self.tile_for(counts, out.shape[1], out.dtype)
        own_plan, plan = TilePlan.of((own_block,), tile.rows), TilePlan.of(blocks, tile.rows)

        def launch(own_plan: TilePlan, plan: TilePlan) -> None:
            self._launch(
                tile, own_plan, plan, operands, out, own=own, own_shift=own_block.start, bias=bias, gate=gate
            )

        self._load_first(("gather", tile, *_kinds([own, gathered, *operands.stored, out], bias)), launch)
        launch(own_plan, plan)

    def partial_rows(
        self, gemm: PartialGemm, blocks: tuple[RowBlock, ...], out: torch.Tensor, counters: torch.Tensor
    ) -> None:
        """``blocks`` of this rank's partial sum into ``out`` [T, N]; each tile bumps the ``counters`` of its words."""
        operands = _Operands(gemm.lefts, *_stored(gemm.matrices))
        tile = self.partial_tile(gemm, blocks)
        plan = TilePlan.of(blocks, tile.rows)

        def launch(own_plan: TilePlan, plan: TilePlan) -> None:
            self._launch(tile, own_plan, plan, operands, out, addend=gemm.addend, counters=counters)

        self._load_first(("partial", tile, *_kinds([*gemm.lefts, *operands.stored, out], gemm.addend)), launch)
        launch(_NO_ROWS, plan)

    def tiles_per_word(self, gemm: PartialGemm, blocks: tuple[RowBlock, ...]) -> dict[int, int]:
        """How often `partial_rows` bumps each word."""
        tile = self.partial_tile(gemm, blocks)
        return TilePlan.of(blocks, tile.rows).tiles_per_word(-(-gemm.width // tile.columns))

    def partial_tile(self, gemm: PartialGemm, blocks: tuple[RowBlock, ...]) -> TileShape:
        """The tile of `partial_rows`."""
        return self.tile_for(tuple(block.stop - block.start for block in blocks), gemm.width, gemm.dtype)

    def own_rows(
        self, gemm: PartialGemm, block: RowBlock, out: torch.Tensor, received: Received, gate: Gate | None = None
    ) -> None:
        """``out`` [T_r, N] = rows of ``block``, bias, and what was received, added in rank order and rounded once."""
        operands = _Operands(gemm.lefts, *_stored(gemm.matrices))
        rows = block.stop - block.start
        tile = self.tile_for((rows,), gemm.width, gemm.dtype, two_sums=received.num_ranks > 2)
        plan = TilePlan.of((block,), tile.rows)

        def launch(own_plan: TilePlan, plan: TilePlan) -> None:
            self._launch(
                tile,
                own_plan,
                plan,
                operands,
                out,
                out_shift=block.start,
                bias=gemm.bias,
                addend=gemm.addend,
                received=received,
                block_rows=rows,
            )

        kinds = _kinds([*gemm.lefts, *operands.stored, out], gemm.addend, gemm.bias)
        self._load_first(("own", tile, received.num_ranks, *kinds), launch)
        launch(_NO_ROWS, plan)

    def tile_for(
        self, block_rows: tuple[int, ...], columns: int, dtype: torch.dtype, *, two_sums: bool = False
    ) -> TileShape:
        """The tile for blocks of that many rows."""
        if self._tile is not None:
            return self._tile
        return choose_tile(block_rows, columns, dtype.itemsize, self.num_programs, two_sums=two_sums)

    # -- one launch --------------------------------------------------------------------------------------------------

    def _load_first(self, key: tuple[Any, ...], launch: Callable[[TilePlan, TilePlan], None]) -> None:
        # Compiling and loading happen at the first launch of a variant. Do both with nothing to compute, so that no
        # kernel ever waits for a peer that is still compiling, and no module is loaded beside a kernel that waits.
        if not self.interpreted and key not in self._loaded:
            launch(_NO_ROWS, _NO_ROWS)
            self._loaded.add(key)

    def _launch(
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
    ) -> None:
        from tpoverlap.gemm.triton.tile_gemm import tile_gemm

        width, num_terms = out.shape[1], len(operands.lefts)
        assert all(tensor.stride(1) == 1 or tensor.shape[1] == 1 for tensor in operands.lefts), "rows are contiguous"
        lefts = [own, *operands.lefts] if own is not None and own.shape[0] > 0 else list(operands.lefts)
        tma = self._use_tma and all(map(_describable, (*lefts, *operands.stored)))
        tma_store = tma and counters is None and _describable(out) and out.shape[0] > 0
        addressed = self.interpreted and gate is not None and not tma

        def left(tensor: torch.Tensor) -> Any:
            return _descriptor(tensor, (tile.rows, tile.depth)) if tma else tensor

        def right(tensor: torch.Tensor) -> Any:
            shape = (tile.columns, tile.depth) if operands.n_major else (tile.depth, tile.columns)
            return _descriptor(tensor, shape) if tma else tensor

        def padded(values: Sequence[Any]) -> list[Any]:
            return [*values, *[values[0]] * (MAX_TERMS - num_terms)]

        a = padded([left(tensor) for tensor in operands.lefts])
        if addressed:
            a = padded([operands.lefts[0].data_ptr()])
        b = padded([right(tensor) for tensor in operands.stored])
        rows = len(own_plan.rows) + len(plan.rows)
        tiles = rows * -(-width // tile.columns)
        has_own = own is not None
        tile_gemm[(max(1, min(self.num_programs, tiles)),)](
            self._table(own_plan, plan),
            len(own_plan.rows),
            rows,
            left(lefts[0]) if has_own else a[0],
            lefts[0].stride(0),
            *a,
            *b,
            *padded([tensor.shape[1] for tensor in operands.lefts]),
            *padded([tensor.stride(0) for tensor in operands.lefts]),
            *padded([tensor.stride(0) for tensor in operands.stored]),
            width,
            own_shift,
            0,
            out,
            _descriptor(out, (tile.rows, tile.columns)) if tma_store else out,
            out_shift,
            out if bias is None else bias,
            out if addend is None else addend,
            16 if addend is None else addend.stride(0),
            0 if received is None else received.address,
            block_rows,
            0 if gate is None else gate.address,
            0 if gate is None else _signed32(gate.epoch),
            self._limit,
            self._error.data_ptr(),
            self._none if counters is None else counters,
            ROWS=tile.rows,
            COLUMNS=tile.columns,
            DEPTH=tile.depth,
            GROUP=tile.group,
            NUM_TERMS=num_terms,
            TMA=tma,
            TMA_STORE=tma_store,
            N_MAJOR=operands.n_major,
            PRECISION=_precision(out.dtype),
            HAS_OWN=has_own,
            HAS_BIAS=bias is not None,
            HAS_ADDEND=addend is not None,
            GATED=gate is not None,
            SIGNALS=counters is not None,
            NUM_RANKS=1 if received is None else received.num_ranks,
            RANK=0 if received is None else received.rank,
            ADDRESSED=addressed,
            INTERPRETED=self.interpreted,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )

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


def _kinds(tensors: Sequence[torch.Tensor], *optional: torch.Tensor | None) -> tuple[Any, ...]:
    """What a variant depends on: dtype, and whether descriptors and vectors are possible."""
    kinds: list[Any] = [tensors[0].dtype]
    kinds += [(_describable(tensor), tensor.stride(0) % 16) for tensor in tensors]
    kinds += [None if tensor is None else tensor.data_ptr() % 16 for tensor in optional]
    return tuple(kinds)


def _describable(tensor: torch.Tensor) -> bool:
    """Whether a tensor-map descriptor can hold it: 16-byte aligned base and rows."""
    return (
        tensor.stride(1) == 1
        and tensor.data_ptr() % 16 == 0
        and tensor.stride(0) * tensor.element_size() % 16 == 0
        and tensor.numel() > 0
    )


def _descriptor(tensor: torch.Tensor, block_shape: tuple[int, int]) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), list(block_shape))


def _has_tma(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] >= 9


def _precision(dtype: torch.dtype) -> str:
    """As torch multiplies: float32 in full unless the user allowed TF32."""
    return "tf32" if dtype != torch.float32 or torch.backends.cuda.matmul.allow_tf32 else "ieee"


def _signed32(value: int) -> int:
    return ((value + 0x80000000) & 0xFFFFFFFF) - 0x80000000
