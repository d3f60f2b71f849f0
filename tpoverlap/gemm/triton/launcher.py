"""Launching the kernels of one device. Knows tensors, words and streams' order (everything goes to the current stream),
and no transport.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import reduce
from operator import attrgetter, or_
from typing import Any, Final

import torch

from tpoverlap.gemm.tasks import PartialGemm, Scaling
from tpoverlap.gemm.triton.building import LaunchBuilder
from tpoverlap.gemm.triton.gates import Slot
from tpoverlap.gemm.triton.kernel_driver import CudaKernelDriver, KernelDriver
from tpoverlap.gemm.triton.operation_rows import OperationRows
from tpoverlap.gemm.triton.prepared import Prepared
from tpoverlap.gemm.triton.tile_plan import TilePlan
from tpoverlap.gemm.triton.tiles import TileShape


class Launch:
    """A prepared launch of an epoch and of tensors that lie somewhere: call it, or `place` it for a tape.

    It goes to the current stream, which must be the one it was prepared on.
    """

    __slots__ = ("addresses", "epoch", "prepared")

    def __init__(self, prepared: Prepared, addresses: tuple[int, ...], epoch: int) -> None:
        self.prepared, self.addresses, self.epoch = prepared, addresses, epoch

    def __call__(self) -> None:
        self.prepared.launch(self.addresses, self.epoch)

    def place(self) -> None:
        """See `Prepared.place`."""
        self.prepared.place(self.addresses)


View = Callable[[int, tuple[int, ...]], torch.Tensor]
"""(first element, shape) of the slot, as a tensor."""
_MAX_PREPARED: Final = 1024
_ALIGNMENT: Final = 15
_address, _strides, _shape = torch.Tensor.data_ptr, torch.Tensor.stride, attrgetter("shape")


class GemmLauncher:
    """Launches `tile_gemm` and `scatter_gemm`. One a manager; the caller has checked `require_kernels`.

    A launch is prepared (which compiles and loads its binary) before the operation waits for anybody, then launched. It
    is found again by all that is static: rows, slot, strides, what is there. Addresses may differ each time.

    Args:
        device: of all tensors.
        limit_s: bound of a kernel's waits.
        reserve_programs: multiprocessors that are left free.
        tile: instead of `choose_tile`'s (tests).
        use_tma: False: pointers even where descriptors would do (tests).
        driver: instead of the device's (tests).
        lends: programs that wait for nobody may use the multiprocessors that are left free, see `fits_one_wave`.

    Attributes:
        error: one word, not 0 once `gave_up`; asked in every operation.
    """

    def __init__(
        self,
        device: torch.device,
        limit_s: float,
        reserve_programs: int = 0,
        tile: TileShape | None = None,
        use_tma: bool | None = None,
        driver: KernelDriver | None = None,
        lends: bool = False,
    ) -> None:
        if driver is None and device.type == "cuda":
            driver = CudaKernelDriver(device)
        self._builder = LaunchBuilder(device, limit_s, reserve_programs, tile, use_tma, driver, lends)
        self.interpreted = driver is None
        self._current_stream = _no_stream if driver is None else driver.current_stream
        self._prepared: OrderedDict[tuple[Any, ...], Prepared] = OrderedDict()
        self._tiles_per_word: dict[tuple[Any, ...], dict[int, int]] = {}
        self.error = self._builder.error

    @property
    def gave_up(self) -> bool:
        """Whether a kernel's wait exceeded its bound; its output is NaN then."""
        return bool(self.error[0])

    def gathered_rows(
        self,
        rows: OperationRows,
        own: torch.Tensor,
        slot: Slot,
        view: View,
        matrix: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        epoch: int,
        *,
        pushes: bool = False,
        number: int = 0,
        scaling: Scaling | None = None,
    ) -> Launch:
        """``out = gathered @ matrix (+ bias)``: own rows at once, then the others in order, as their words arrive.

        Args:
            rows: own and others.
            own: [T_r, K], contiguous; read instead of these rows of the slot.
            slot: where the others' rows arrive, [T, K], and their words.
            view: of the slot.
            matrix: [K, N], a view of which one stride is 1.
            out: [T, N], contiguous.
            epoch: what the words will be.
            pushes: some programs also copy ``own`` to the peers, before they wait for anything.
            number: of the launch in its operation. Two of one number may share what is prepared, and the addresses in
                it: a tape, which starts one after the other, wants one each.
            scaling: of FP8 operands; ``own`` and ``view`` then give their bytes.
        """
        addresses: tuple[int, ...] = (
            own.data_ptr(), matrix.data_ptr(), out.data_ptr(), 0 if bias is None else bias.data_ptr(),
        )  # fmt: skip
        key: tuple[Any, ...] = (
            rows, slot, pushes, number, matrix.shape, matrix.stride(), own.dtype, bias is None, self._current_stream(),
            reduce(or_, addresses) & _ALIGNMENT and _misses(addresses),
            own.dtype is torch.float32 and torch.backends.cuda.matmul.allow_tf32,
        )  # fmt: skip
        if scaling is not None:
            key += (scaling.kind,)
            addresses += (scaling.lefts[0].data_ptr(), scaling.rights[0].data_ptr())
        found = self._prepared.get(key)
        if found is None:
            gathered = view(0, (out.shape[0], matrix.shape[0]))
            prepared = self._builder.gathered(rows, own, slot, gathered, matrix, bias, out, pushes, scaling)
            found = self._keep(key, prepared)
        else:
            self._prepared.move_to_end(key)
        return Launch(found, addresses, epoch)

    def partial_rows(self, rows: OperationRows, gemm: PartialGemm, out: torch.Tensor, counters: torch.Tensor) -> Launch:
        """The others' rows of this rank's partial sum into ``out`` [T, N]; each tile bumps the ``counters`` of its
        words.
        """
        key, addresses = self._of_partial("partial", rows, None, gemm, out, counters)
        found = self._prepared.get(key)
        if found is None:
            found = self._keep(key, self._builder.partial(rows, gemm, out, counters))
        else:
            self._prepared.move_to_end(key)
        return Launch(found, addresses, 0)

    def tiles_per_word(self, rows: OperationRows, gemm: PartialGemm) -> dict[int, int]:
        """How often `partial_rows` bumps each word."""
        matrix = gemm.matrices[0]
        key = (rows, matrix.shape[1], matrix.dtype, None if gemm.scaling is None else gemm.scaling.kind)
        found = self._tiles_per_word.get(key)
        if found is None:
            tile = self._builder.partial_tile(rows, gemm)
            plan = TilePlan.of(rows.others, tile.rows)
            if len(self._tiles_per_word) >= _MAX_PREPARED:
                self._tiles_per_word.clear()
            found = self._tiles_per_word[key] = plan.tiles_per_word(-(-gemm.width // tile.columns))
        return found

    def own_rows(self, rows: OperationRows, gemm: PartialGemm, out: torch.Tensor, slot: Slot, epoch: int) -> Launch:
        """``out`` [T_r, N] = own rows, bias, and what the peers sent, added in rank order and rounded once.

        Words of ``rows.own``, if it has some, are those of its pieces in every source's part of ``slot.words``.
        """
        key, addresses = self._of_partial("own", rows, slot, gemm, out, gemm.bias)
        found = self._prepared.get(key)
        if found is None:
            found = self._keep(key, self._builder.own(rows, gemm, out, slot))
        else:
            self._prepared.move_to_end(key)
        return Launch(found, addresses, epoch)

    def scatter_rows(self, rows: OperationRows, gemm: PartialGemm, out: torch.Tensor, slot: Slot, epoch: int) -> Launch:
        """The whole reduce-scatter in one launch.

        Args:
            rows: remote: rows of other ranks, which are stored into their slots, with words that count up from
                ``peer * slot.words_per_rank``; own: this rank's rows, with the words of `own_rows`.
            out: [T_r, N], contiguous.
            slot: with words and peers.
            epoch: what the words will be.
        """
        key, addresses = self._of_partial("scatter", rows, slot, gemm, out, gemm.bias)
        found = self._prepared.get(key)
        if found is None:
            found = self._keep(key, self._builder.scatter(rows, gemm, out, slot))
        else:
            self._prepared.move_to_end(key)
        return Launch(found, addresses, epoch)

    # -- finding a launch again --------------------------------------------------------------------------------------

    def _of_partial(
        self,
        what: str,
        rows: OperationRows,
        slot: Slot | None,
        gemm: PartialGemm,
        out: torch.Tensor,
        last: torch.Tensor | None,
    ) -> tuple[tuple[Any, ...], tuple[int, ...]]:
        """(key, addresses) of a launch that computes rows of ``gemm``; ``last``: bias or counters."""
        lefts, matrices, addend = gemm.lefts, gemm.matrices, gemm.addend
        operands = (*lefts, *matrices)
        addresses = (
            *map(_address, operands), out.data_ptr(), 0 if addend is None else addend.data_ptr(),
            0 if last is None else last.data_ptr(),
        )  # fmt: skip
        dtype = out.dtype
        key = (
            what, rows, slot, *map(_shape, matrices), *map(_strides, operands), dtype,
            None if addend is None else addend.stride(), last is None, self._current_stream(),
            reduce(or_, addresses) & _ALIGNMENT and _misses(addresses),
            dtype is torch.float32 and torch.backends.cuda.matmul.allow_tf32,
        )  # fmt: skip
        scaling = gemm.scaling
        if scaling is not None:
            key += (scaling.kind,)
            addresses += (*map(_address, scaling.lefts), *map(_address, scaling.rights))
        return key, addresses

    def _keep(self, key: tuple[Any, ...], prepared: Prepared) -> Prepared:
        if not self.interpreted:
            self._prepared[key] = prepared
            if len(self._prepared) > _MAX_PREPARED:
                self._prepared.popitem(last=False)
        return prepared


def _misses(addresses: tuple[int, ...]) -> tuple[int, ...]:
    """By how much each address misses a multiple of 16, which a binary depends on. Asked only where one does."""
    return tuple(map(_ALIGNMENT.__and__, addresses))


def _no_stream() -> int:
    return 0
