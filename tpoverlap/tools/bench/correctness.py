"""Before anything is timed: the result against a wide reference, with the bound that the tests use too."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from tpoverlap.testing.numeric import FLOAT32_FLOOR, relative_error
from tpoverlap.tools.bench.fp8_rows import Fp8Row
from tpoverlap.tools.bench.rows import GemmRow
from tpoverlap.tools.bench.session import Session

TWIN_FACTOR = 1.25
"""CONFORMANCE.md: a method may be that much farther from the reference than the non-overlapped twin."""


class Reference:
    """All T rows of a row's output, wide, and a twin of the same dtype that went through plain collectives.

    The twin is not our `sequential`: it shares no code with what is judged. float32 is judged against float64. An FP8
    row is judged by the numbers that its FP8 operands stand for.
    """

    def __init__(
        self, session: Session, row: GemmRow, x: torch.Tensor, weight: torch.Tensor, fp8: Fp8Row | None = None
    ) -> None:
        wide = torch.float64 if x.dtype == torch.float32 else torch.float32
        self.num_tokens = row.num_tokens
        if fp8 is None:
            self.rows = torch.mm(x.to(wide), weight.to(wide).t())
            self._twin = torch.mm(x, weight.t())
        else:
            self.rows, self._twin = fp8.wide(wide), fp8.multiplied()
        if row.direction == "rs":
            summands = self._twin.to(wide)  # each rounded once, as it travels; the sum is rounded once more
            dist.all_reduce(self.rows, group=session.group)
            dist.all_reduce(summands, group=session.group)
            self._twin = summands.to(x.dtype)
        self._twin_errors: dict[tuple[int, int], float] = {}

    def compare(self, output: torch.Tensor, first_row: int, factor: float = TWIN_FACTOR) -> tuple[float, str | None]:
        """(relative error, problem or None) of ``output``, whose first row is row ``first_row`` of the whole.

        Rows behind T are padding and not looked at.
        """
        count = max(0, min(output.shape[0], self.num_tokens - first_row))
        expected = self.rows[first_row : first_row + count]
        if output.shape[1] != expected.shape[1]:
            return math.nan, f"{output.shape[1]} columns instead of {expected.shape[1]}"
        error = relative_error(output[:count], expected)
        bound = factor * self._twin_error(first_row, count) + FLOAT32_FLOOR
        if error <= bound:  # false for NaN
            return error, None
        return error, f"wrong numbers: relative error {error:.3e}, allowed {bound:.3e}; not timed"

    def _twin_error(self, first_row: int, count: int) -> float:
        key = (first_row, count)
        if key not in self._twin_errors:
            rows = slice(first_row, first_row + count)
            self._twin_errors[key] = relative_error(self._twin[rows], self.rows[rows])
        return self._twin_errors[key]
