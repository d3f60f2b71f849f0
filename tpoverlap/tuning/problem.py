"""What one operation computes and moves: the input of the cost model. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from tpoverlap.pieces import gather_piece_rows, scatter_piece_rows
from tpoverlap.tokens import TokenPartition

Kind = Literal["gather", "scatter", "beside-gather", "beside-scatter"]
"""gather: all-gather, then its GEMM · scatter: GEMM, then reduce-scatter · beside-...: next to an independent GEMM."""


@dataclass(frozen=True)
class Problem:
    """One GEMM of one rank and the [T, H] activation that travels with it.

    Attributes:
        kind: how the two depend on each other.
        num_tokens: T of the whole group.
        width: H, columns of what is communicated.
        features: the GEMM's sharded side on this rank: its output for ``gather``, its input for ``scatter``.
        tp_size: R.
        itemsize_bytes: of one element, 2 for bfloat16.
    """

    kind: Kind
    num_tokens: int
    width: int
    features: int
    tp_size: int
    itemsize_bytes: int = 2

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
    def chunk_bytes(self) -> int:
        """Of the rows of one rank."""
        return self.rows_per_rank * self.width * self.itemsize_bytes

    @property
    def bytes_sent(self) -> int:
        """By one rank, to all others together; it receives as many."""
        return (self.tp_size - 1) * self.chunk_bytes

    def at(self, num_tokens: int) -> Problem:
        """The same with another T."""
        return replace(self, num_tokens=num_tokens)


def pieces_of(problem: Problem) -> int:
    """Pieces into which ring_exchange cuts a chunk; 1 where it travels whole."""
    partition = TokenPartition.balanced(problem.num_tokens, problem.tp_size)
    rule = scatter_piece_rows if problem.kind == "scatter" else gather_piece_rows
    rows = rule(partition, problem.width, problem.itemsize_bytes)
    return 1 if rows is None else -(-partition.max_count // rows)
