"""GEMMs cut up by whoever schedules them: the task knows the operands, the method decides which part is next.

On the GPU these are calls of cublasLt on the current stream (`tpoverlap.gemm.cublaslt`), on the CPU, and where cublasLt
has nothing, torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tpoverlap.gemm.cublaslt import ALIGNMENT_BYTES, lt_products
from tpoverlap.native import register

Write = Callable[..., bool]
"""`LtProducts.record` for one tape and stream."""


@dataclass(frozen=True, slots=True, eq=False)
class Scaling:
    """What turns products of FP8 operands into numbers, term by term: ``(a_i @ b_i) * lefts[i] * rights[i]``.

    Attributes:
        lefts: float32, [1, 1] each, or [T, 1]: one a row of the activation.
        rights: float32, [1, 1] each, or [N, 1]: one a column of the product.
        left_format: the FP8 dtype of the activations, whose bytes may come as uint8.
        is_rowwise: of all of them.
        fast: tensor cores may keep sums in less than float32 (see `tpoverlap.gemm.fp8.scaled_mm`).
        kind: hashable: all that a kernel depends on, the formats of all operands and the result's dtype among it.
    """

    lefts: Sequence[torch.Tensor]
    rights: Sequence[torch.Tensor]
    left_format: torch.dtype
    is_rowwise: bool
    fast: bool
    kind: tuple[object, ...]

    @property
    def sums_twice(self) -> bool:
        """Whether a kernel holds two sums at a time: of a few steps, or of a term, beside the whole."""
        return not self.fast or len(self.lefts) > 1


@dataclass(slots=True, eq=False)
class RowGemm:
    """Rows in, the same rows of every output out: what an all-gather feeds chunk by chunk.

    ``outs[i][start:start+t] = x @ matrices[i] (+ biases[i])`` for a chunk x of t rows.

    Attributes:
        matrices: [K, N_i] each; views such as ``weight.t()`` are fine.
        biases: [N_i] or None each, contiguous.
        outs: [T, N_i] each, contiguous.
    """

    matrices: Sequence[torch.Tensor]
    biases: Sequence[torch.Tensor | None]
    outs: Sequence[torch.Tensor]

    @property
    def scalings(self) -> Sequence[Scaling | None]:
        """Of FP8 operands, one a matrix; of others None each."""
        return (None,) * len(self.outs)

    @property
    def num_features(self) -> int:
        """Of all outputs together."""
        return sum(out.shape[1] for out in self.outs)

    def rows(self, x: torch.Tensor, start: int) -> None:
        """Compute the outputs of the chunk ``x`` [t, K], whose first row is row ``start`` of the activation."""
        count = x.shape[0]
        if count == 0:
            return
        for matrix, bias, out in zip(self.matrices, self.biases, self.outs, strict=True):
            target = out if count == out.shape[0] else out[start : start + count]  # a view costs as much as a check
            _multiply(x, matrix, target, bias)

    @property
    def num_operands(self) -> int:
        """Of `operands`."""
        return 3 * len(self.matrices)

    def operands(self) -> tuple[Hashable, list[int]] | None:
        """For a tape: what it depends on but for T; and its registers: where each matrix, its output and its bias (0:
        none) lie. None: not as cublasLt needs them.
        """
        kinds, found, low = [], [], 0
        for matrix, bias, out in zip(self.matrices, self.biases, self.outs, strict=True):
            first, second, third = matrix.data_ptr(), out.data_ptr(), 0 if bias is None else bias.data_ptr()
            low |= first | second | third
            found += [first, second, third]
            kinds += [matrix.shape, matrix.stride(), bias is None]
        return None if low % ALIGNMENT_BYTES else (tuple(kinds), found)

    def record(self, write: Write, x: torch.Tensor, x_at: int, start: int, first: int) -> bool:
        """Write `rows` down.

        Args:
            x: a chunk like those that the tape will multiply. x_at: where it will lie, an address or a register.
            start: its first row.
            first: the register that the first of `operands` will be in.

        Returns:
            False: cublasLt does not do this.
        """
        count = x.shape[0]
        if count == 0:
            return True
        for matrix, bias, out in zip(self.matrices, self.biases, self.outs, strict=True):
            offset = start * out.shape[1] * out.element_size()
            if (x_at | offset) % ALIGNMENT_BYTES:
                return False
            out_at = register(first + 1, offset)
            operands = (register(first), x_at, out_at, out_at)
            if not write(x, matrix, out[start : start + count], None, bias, operands, register(first + 2)):
                return False
            first += 3
        return True


@dataclass(slots=True, eq=False)
class PartialGemm:
    """This rank's partial sum of a [T, N] output, any rows or columns of it: what a reduce-scatter drains.

    ``partial = sum_i lefts[i] @ matrices[i] (+ addend)``. Several terms are the input gradients of several weights
    that shared one gather.

    Attributes:
        lefts: [T, K_i] each.
        matrices: [K_i, N] each; views are fine.
        addend: [T, N] or None, part of this rank's partial sum.
        bias: [N] or None, contiguous; the rank that owns a row adds it, once.
    """

    lefts: Sequence[torch.Tensor]
    matrices: Sequence[torch.Tensor]
    addend: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    @property
    def scaling(self) -> Scaling | None:
        """Of FP8 operands; None: of others."""
        return None

    @property
    def width(self) -> int:
        """N."""
        return self.matrices[0].shape[1]

    @property
    def operand_row_bytes(self) -> int:
        """Of a row of all left operands together."""
        total = 0
        for left in self.lefts:
            total += left.shape[1] * left.element_size()
        return total

    @property
    def is_plain(self) -> bool:
        """One term and nothing to add but the bias."""
        return self.addend is None and len(self.lefts) == 1

    @property
    def can_add(self) -> bool:
        """Whether `rows_added` is for this one."""
        return self.is_plain

    @property
    def num_rows(self) -> int:
        """T."""
        return self.lefts[0].shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """Of the operands and of the result."""
        return self.lefts[0].dtype

    def empty(self, num_rows: int, width: int) -> torch.Tensor:
        """Room for a part of the result."""
        return self.lefts[0].new_empty(num_rows, width)

    def part(self, rows: slice) -> PartialGemm:
        """The same GEMM of some of the rows."""
        addend = None if self.addend is None else self.addend[rows]
        return PartialGemm([left[rows] for left in self.lefts], self.matrices, addend, self.bias)

    def rows(self, start: int, stop: int, out: torch.Tensor, *, owned: bool = False) -> None:
        """Rows [start, stop) into ``out`` [stop - start, N]; ``owned`` adds the bias."""
        if self.is_plain and start < stop:
            left = self.lefts[0]
            if stop - start != left.shape[0]:
                left = left[start:stop]
            _multiply(left, self.matrices[0], out, self.bias if owned else None)
            return
        self._compute(slice(start, stop), slice(0, self.width), out, owned)

    def rows_added(self, start: int, stop: int, received: torch.Tensor, out: torch.Tensor) -> None:
        """``out`` [stop - start, N] = rows [start, stop), with the bias, + ``received``, which another rank rounded
        once. The own sum stays in float32 inside the GEMM and is rounded with the total. Only where `can_add`.
        """
        left, matrix = self.lefts[0][start:stop], self.matrices[0]
        products = lt_products(left.get_device()) if left.is_cuda else None
        if products is not None and products.multiply(left, matrix, out, received, self.bias):
            return
        if self.bias is None:
            torch.addmm(received, left, matrix, out=out)
        else:
            torch.add(received, self.bias, out=out)
            out.addmm_(left, matrix)

    @property
    def num_operands(self) -> int:
        """Of `operands`."""
        return 3

    def operands(self) -> tuple[Hashable, list[int]] | None:
        """For a tape: what it depends on but for T; and its registers: where the left operand, the matrix and the bias
        (0: none) lie. None: it is not one product, or they do not lie as cublasLt needs them.
        """
        if self.addend is not None or len(self.lefts) != 1:
            return None
        left, matrix, bias = self.lefts[0], self.matrices[0], self.bias
        first, second, third = left.data_ptr(), matrix.data_ptr(), 0 if bias is None else bias.data_ptr()
        if (first | second | third) % ALIGNMENT_BYTES:
            return None
        return (matrix.shape, matrix.stride(), left.stride(), bias is None), [first, second, third]

    def record(
        self,
        write: Write,
        rows: tuple[int, int],
        out: torch.Tensor,
        out_at: int,
        first: int,
        received: torch.Tensor | None = None,
        *,
        owned: bool = False,
    ) -> bool:
        """Write `rows` down, or `rows_added` on top of ``received``, which lies there each time.

        Args:
            rows: first, and the one after the last.
            out: like the result, which will lie at ``out_at``, an address or a register.
            first: the register that the first of `operands` will be in.
            owned: add the bias.

        Returns:
            False: cublasLt does not do this.
        """
        left = self.lefts[0]
        offset = rows[0] * left.stride(0) * left.element_size()
        added = out_at if received is None else received.data_ptr()
        if (offset | out_at | added) % ALIGNMENT_BYTES:
            return False
        bias = self.bias if owned else None
        operands = (register(first + 1), register(first, offset), added, out_at)
        more = self._record_more(first + 3, out)
        part = left[rows[0] : rows[1]]
        return write(part, self.matrices[0], out, received, bias, operands, register(first + 2), **more)

    def _record_more(self, first: int, out: torch.Tensor) -> dict[str, Any]:
        """What `LtProducts.record` is told beside that; ``first``: the register behind the bias'."""
        return {}

    def columns(self, start: int, stop: int, out: torch.Tensor, owned_rows: slice) -> None:
        """Columns [start, stop) of all rows into ``out`` [T, stop - start]; the bias goes to ``owned_rows``."""
        self._compute(slice(0, self.num_rows), slice(start, stop), out, False)
        if self.bias is not None:
            out[owned_rows].add_(self.bias[start:stop])

    def _compute(self, rows: slice, columns: slice, out: torch.Tensor, owned: bool) -> None:
        if out.shape[0] == 0:
            return
        bias = self.bias[columns] if owned and self.bias is not None else None
        terms = list(zip(self.lefts, self.matrices, strict=True))
        left, matrix = terms[0]
        if bias is None:
            torch.mm(left[rows], matrix[:, columns], out=out)
        else:
            torch.addmm(bias, left[rows], matrix[:, columns], out=out)
        for left, matrix in terms[1:]:
            out.addmm_(left[rows], matrix[:, columns])
        if self.addend is not None:
            out.add_(self.addend[rows, columns])


def _multiply(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> None:
    """``out`` = left @ right (+ bias): by cublasLt where a tape would have it so, so that both give the same bits."""
    products = lt_products(left.get_device()) if left.is_cuda else None
    if products is not None and products.multiply(left, right, out, None, bias):
        return
    if bias is None:
        torch.mm(left, right, out=out)
    else:
        torch.addmm(bias, left, right, out=out)


def weight_grad(output_grad: torch.Tensor, gathered_input: torch.Tensor) -> torch.Tensor:
    """DW [N, K] = dy [T, N]^T @ x [T, K]."""
    return torch.mm(output_grad.t(), gathered_input)
