"""What one operation computes and moves: the input of the cost model. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal

from tpoverlap.config.honoured import FP8_SCATTERS
from tpoverlap.pieces import FirstPiece, gather_piece_rows, scatter_cut
from tpoverlap.tokens import TokenPartition

Kind = Literal["gather", "scatter", "beside-gather", "beside-scatter"]
"""gather: all-gather, then its GEMM · scatter: GEMM, then reduce-scatter · beside-...: next to an independent GEMM."""


ROW_SCALE_BYTES: Final = 4
"""Behind each row of ``fp8_buf``: its scale."""


@dataclass(frozen=True)
class Problem:
    """One GEMM of one rank and the [T, H] activation that travels with it.

    Attributes:
        kind: how the two depend on each other.
        num_tokens: T of the whole group.
        width: H, columns of what is communicated.
        features: the GEMM's sharded side on this rank: its output for ``gather``, its input for ``scatter``.
        tp_size: R.
        itemsize_bytes: of one element, 2 for bfloat16; in FP8 of what layers hand in and get.
        fp8: the GEMM's operands are FP8, under per-tensor current scaling, and gathered rows travel like that.
        fp8_buf: so do a reduce-scatter's, each with its scale, under the methods that can.
    """

    kind: Kind
    num_tokens: int
    width: int
    features: int
    tp_size: int
    itemsize_bytes: int = 2
    fp8: bool = False
    fp8_buf: bool = False

    @property
    def is_scatter(self) -> bool:
        """Whether rows are summed on their owner."""
        return self.kind in ("scatter", "beside-scatter")

    @property
    def is_beside(self) -> bool:
        """Whether the GEMM does not depend on what travels."""
        return self.kind.startswith("beside")

    @property
    def gemm_shape(self) -> tuple[int, int, int]:
        """(rows, columns, inner) of the whole GEMM on this rank."""
        if self.kind == "gather":
            return self.num_tokens, self.features, self.width
        if self.kind == "beside-scatter":  # wgrad: the tokens are summed over
            return self.features, self.width, self.num_tokens
        return self.num_tokens, self.width, self.features

    @property
    def rows_per_rank(self) -> int:
        """Rows of the ranks that own most."""
        return -(-self.num_tokens // self.tp_size)

    @property
    def is_packed(self) -> bool:
        """Whether sums travel as FP8 rows with their scales."""
        return self.fp8 and self.fp8_buf and self.kind == "scatter"

    @property
    def operand_bytes(self) -> int:
        """Of one element of what the GEMM reads."""
        return 1 if self.fp8 else self.itemsize_bytes

    @property
    def moved_bytes(self) -> int:
        """Of one element of what travels."""
        return 1 if self.is_packed or (self.fp8 and not self.is_scatter) else self.itemsize_bytes

    @property
    def chunk_bytes(self) -> int:
        """Of the rows of one rank, as they travel."""
        return self.rows_per_rank * (self.width * self.moved_bytes + (ROW_SCALE_BYTES if self.is_packed else 0))

    @property
    def bytes_sent(self) -> int:
        """By one rank, to all others together; it receives as many."""
        return (self.tp_size - 1) * self.chunk_bytes

    def at(self, num_tokens: int) -> Problem:
        """The same with another T."""
        return replace(self, num_tokens=num_tokens)

    def by(self, method: str) -> Problem:
        """The same as ``method`` does it: not every one packs the rows of a reduce-scatter."""
        return replace(self, fp8_buf=False) if self.is_packed and method not in FP8_SCATTERS else self


def scatter_parts(problem: Problem, multiprocessors: int) -> list[int]:
    """Rows of each piece into which ring_exchange cuts the largest chunk of a reduce-scatter."""
    partition, rows = TokenPartition.balanced(problem.num_tokens, problem.tp_size), problem.rows_per_rank
    known, row_bytes = 0 if problem.fp8 else multiprocessors, problem.features * problem.operand_bytes
    cut = scatter_cut(partition, problem.width, problem.moved_bytes, row_bytes, known)
    if isinstance(cut, FirstPiece):
        return [cut.rows, rows - cut.rows]
    pieces = 1 if cut is None else -(-rows // cut)
    return [-(-rows // pieces)] * pieces


def pieces_of(problem: Problem) -> int:
    """Pieces into which ring_exchange cuts a chunk; 1 where it travels whole."""
    if problem.kind == "scatter":
        return len(scatter_parts(problem, 0))
    partition = TokenPartition.balanced(problem.num_tokens, problem.tp_size)
    rows = gather_piece_rows(partition, problem.width, problem.moved_bytes)
    return 1 if rows is None else -(-partition.max_count // rows)
