"""FP8 twins of the tasks in `tpoverlap.gemm.tasks`: same interface, so every method runs them as it runs the others."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tpoverlap.gemm.cublaslt import ALIGNMENT_BYTES
from tpoverlap.gemm.fp8.quantize import SCALE_BYTES, QuantizedTensor, pack_rows
from tpoverlap.gemm.fp8.scaled_mm import accumulates_fast, scaled_mm
from tpoverlap.gemm.tasks import PartialGemm, RowGemm, Scaling, Write
from tpoverlap.native import register


def _scaling(
    lefts: Sequence[torch.Tensor],
    rights: Sequence[torch.Tensor],
    formats: tuple[torch.dtype, ...],
    fast_accumulation: bool,
    dtype: torch.dtype,
) -> Scaling:
    """``formats``: of all left operands, then of all right ones; ``dtype``: of the result."""
    is_rowwise = any([scale.shape[0] != 1 for scale in rights])  # an activation of one row has one scale either way
    fast = accumulates_fast(dtype, is_rowwise=is_rowwise, wanted=fast_accumulation)
    return Scaling(lefts, rights, formats[0], is_rowwise, fast, (*formats, dtype, is_rowwise, fast))


@dataclass(slots=True, eq=False, kw_only=True)
class ScaledRowGemm(RowGemm):
    """Rows of FP8 bytes in, the same rows of every output out.

    Attributes:
        weights: [N_i, K] each.
        x_scale: float32 [1, 1], or [T, 1]: of the whole activation.
        x_format: the FP8 dtype of the bytes.
        fast_accumulation: see `scaled_mm`.
    """

    weights: Sequence[QuantizedTensor]
    x_scale: torch.Tensor
    x_format: torch.dtype
    fast_accumulation: bool = False
    matrices: Sequence[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.matrices = [weight.data.t() for weight in self.weights]

    @property
    def scalings(self) -> Sequence[Scaling]:
        """For kernels, one a matrix."""
        return [
            _scaling(
                [self.x_scale], [weight.scale], (self.x_format, weight.data.dtype), self.fast_accumulation, out.dtype
            )
            for weight, out in zip(self.weights, self.outs, strict=True)
        ]

    @property
    def num_operands(self) -> int:
        """Of `operands`."""
        return 1 + 4 * len(self.matrices)

    def operands(self) -> tuple[Hashable, list[int]] | None:
        """As `RowGemm.operands`: where the scale of the activation lies; then each matrix, output, bias (0: none) and
        scale. None for row-wise scales, too.
        """
        if self.x_scale.shape[0] != 1:
            return None
        kinds: list[Hashable] = [self.x_format, self.fast_accumulation]
        found, low = [self.x_scale.data_ptr()], 0
        for weight, matrix, bias, out in zip(self.weights, self.matrices, self.biases, self.outs, strict=True):
            scale = weight.scale
            if scale.shape[0] != 1:
                return None
            first, second, third = matrix.data_ptr(), out.data_ptr(), 0 if bias is None else bias.data_ptr()
            low |= first | second | third
            found += [first, second, third, scale.data_ptr()]
            kinds += [matrix.shape, matrix.dtype, out.dtype, bias is None]
        return None if low % ALIGNMENT_BYTES else (tuple(kinds), found)

    def record(self, write: Write, x: torch.Tensor, x_at: int, start: int, first: int) -> bool:
        """As `RowGemm.record`."""
        count = x.shape[0]
        if count == 0:
            return True
        x8, scale_at, place = x.view(self.x_format), register(first), first + 1
        for weight, matrix, bias, out in zip(self.weights, self.matrices, self.biases, self.outs, strict=True):
            offset = start * out.shape[1] * out.element_size()
            if (x_at | offset) % ALIGNMENT_BYTES:
                return False
            out_at = register(place + 1, offset)
            written = write(
                x8, matrix, out[start : start + count], None, bias, (register(place), x_at, out_at, out_at),
                register(place + 2), (self.x_scale, weight.scale), (scale_at, register(place + 3)),
                fast=accumulates_fast(out.dtype, is_rowwise=False, wanted=self.fast_accumulation),
            )  # fmt: skip
            if not written:
                return False
            place += 4
        return True

    def rows(self, x: torch.Tensor, start: int) -> None:
        """Compute the outputs of the chunk ``x`` (uint8 [t, K]), whose first row is row ``start`` of the activation."""
        stop = start + x.shape[0]
        scale = self.x_scale if self.x_scale.shape[0] == 1 else self.x_scale[start:stop]
        x8 = x.view(self.x_format)
        for weight, matrix, bias, out in zip(self.weights, self.matrices, self.biases, self.outs, strict=True):
            target = out if x.shape[0] == out.shape[0] else out[start:stop]
            fast = self.fast_accumulation
            scaled_mm(x8, matrix, scale, weight.scale, target, bias, fast_accumulation=fast)


@dataclass(slots=True, eq=False, kw_only=True)
class ScaledPartialGemm(PartialGemm):
    """This rank's partial sum of a [T, N] output from FP8 operands; the sum itself is in the original dtype.

    Attributes:
        terms: pairs of a left operand [T, K_i] and a weight [N, K_i].
        fast_accumulation: see `scaled_mm`.
    """

    terms: Sequence[tuple[QuantizedTensor, QuantizedTensor]]
    fast_accumulation: bool = False
    lefts: Sequence[torch.Tensor] = field(init=False)
    matrices: Sequence[torch.Tensor] = field(init=False)
    _scaling: Scaling | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.lefts = [left.data for left, _ in self.terms]
        self.matrices = [weight.data.t() for _, weight in self.terms]

    @property
    def scaling(self) -> Scaling | None:
        """For kernels; made when one asks."""
        if self._scaling is None and self.terms:
            scales = [left.scale for left, _ in self.terms], [weight.scale for _, weight in self.terms]
            formats = tuple([one.dtype for one in (*self.lefts, *self.matrices)])
            self._scaling = _scaling(*scales, formats, self.fast_accumulation, self.terms[0][0].dtype)
        return self._scaling

    @property
    def is_plain(self) -> bool:
        """False: its operands are not what `PartialGemm` multiplies."""
        return False

    @property
    def can_add(self) -> bool:
        """One term and nothing to add but the bias; and scales a tensor each, for no kernel adds under others."""
        if self.addend is not None or len(self.terms) != 1:
            return False
        left, weight = self.terms[0]
        return left.scale.shape[0] == weight.scale.shape[0] == 1

    @property
    def num_operands(self) -> int:
        """Of `operands`."""
        return 5

    def operands(self) -> tuple[Hashable, list[int]] | None:
        """As `PartialGemm.operands`; behind the bias lie both scales. None where it cannot add, too."""
        if not self.can_add:
            return None
        (left, weight), bias = self.terms[0], self.bias
        data, matrix = self.lefts[0], self.matrices[0]
        first, second, third = data.data_ptr(), matrix.data_ptr(), 0 if bias is None else bias.data_ptr()
        if (first | second | third) % ALIGNMENT_BYTES:
            return None
        kind = matrix.shape, matrix.dtype, data.dtype, data.stride(), bias is None, self.fast_accumulation
        return kind, [first, second, third, left.scale.data_ptr(), weight.scale.data_ptr()]

    def _record_more(self, first: int, out: torch.Tensor) -> dict[str, Any]:
        left, weight = self.terms[0]
        fast = accumulates_fast(out.dtype, is_rowwise=False, wanted=self.fast_accumulation)
        return {
            "scales": (left.scale, weight.scale), "scales_at": (register(first), register(first + 1)), "fast": fast
        }  # fmt: skip

    @property
    def dtype(self) -> torch.dtype:
        """Of the result."""
        return self.terms[0][0].dtype

    def empty(self, num_rows: int, width: int) -> torch.Tensor:
        """Room for a part of the result."""
        return self.lefts[0].new_empty(num_rows, width, dtype=self.dtype)

    def part(self, rows: slice) -> ScaledPartialGemm:
        """The same GEMM of some of the rows."""
        terms = [(left.rows(rows), weight) for left, weight in self.terms]
        addend = None if self.addend is None else self.addend[rows]
        return ScaledPartialGemm(terms=terms, addend=addend, bias=self.bias, fast_accumulation=self.fast_accumulation)

    def rows_added(self, start: int, stop: int, received: torch.Tensor, out: torch.Tensor) -> None:
        """As `PartialGemm.rows_added`."""
        left, weight = self.terms[0]
        data = left.data[start:stop]
        scales, fast = (left.scale, weight.scale), self.fast_accumulation
        scaled_mm(data, self.matrices[0], *scales, out, self.bias, addend=received, fast_accumulation=fast)

    def _compute(self, rows: slice, columns: slice, out: torch.Tensor, owned: bool) -> None:
        if out.shape[0] == 0:
            return
        bias = self.bias[columns] if owned and self.bias is not None else None
        for number, (left, weight) in enumerate(self.terms):
            matrix = self.matrices[number]
            whole = columns.start == 0 and columns.stop == matrix.shape[1]  # a view costs the host a microsecond or two
            scaled_mm(
                left.data[rows],
                matrix if whole else matrix[:, columns],
                left.scale if left.scale.shape[0] == 1 else left.scale[rows],
                weight.scale if weight.scale.shape[0] == 1 else weight.scale[columns],
                out,
                bias if number == 0 else None,
                addend=out if number else None,
                fast_accumulation=self.fast_accumulation,
            )
        if self.addend is not None:
            out.add_(self.addend[rows, columns])


@dataclass(slots=True, eq=False, kw_only=True)
class PackedPartialGemm(PartialGemm):
    """Another partial GEMM whose results leave as FP8 rows with their scales (``fp8_buf`` reduce-scatter).

    Rows and columns are those of ``gemm``; what comes out is `pack_rows` of them, 4 bytes wider and a quarter or half
    as large.
    """

    gemm: PartialGemm
    packed_format: torch.dtype
    lefts: Sequence[torch.Tensor] = field(init=False)
    matrices: Sequence[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.lefts = self.gemm.lefts
        self.matrices = self.gemm.matrices
        self.bias = self.gemm.bias

    @property
    def is_plain(self) -> bool:
        """False: packed rows cannot be added to."""
        return False

    def operands(self) -> None:
        """None: packing is a kernel's."""
        return None

    @property
    def can_add(self) -> bool:
        """False, likewise."""
        return False

    @property
    def dtype(self) -> torch.dtype:
        """Bytes."""
        return torch.uint8

    def empty(self, num_rows: int, width: int) -> torch.Tensor:
        """Room for ``width`` columns of the result, packed."""
        return self.lefts[0].new_empty(num_rows, width + SCALE_BYTES, dtype=torch.uint8)

    def rows(self, start: int, stop: int, out: torch.Tensor, *, owned: bool = False) -> None:
        """As `PartialGemm.rows`, into packed ``out`` [stop - start, N + 4]."""
        part = self.gemm.empty(stop - start, self.width)
        self.gemm.rows(start, stop, part, owned=owned)
        pack_rows(part, self.packed_format, out)

    def columns(self, start: int, stop: int, out: torch.Tensor, owned_rows: slice) -> None:
        """As `PartialGemm.columns`, into packed ``out`` [T, stop - start + 4]."""
        part = self.gemm.empty(self.num_rows, stop - start)
        self.gemm.columns(start, stop, part, owned_rows)
        pack_rows(part, self.packed_format, out)


def scaled_weight_grad(output_grad_t: QuantizedTensor, input_t: QuantizedTensor, out: torch.Tensor) -> None:
    """DW [N, K] = dy^T [N, T16] @ x^T [K, T16]^T from `QuantizedTensor.padded_transposed` operands."""
    scaled_mm(output_grad_t.data, input_t.data.t(), output_grad_t.scale, input_t.scale, out)
