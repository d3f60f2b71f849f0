"""TokenPartition: which rank owns which rows of the [T, H] activation. Pure arithmetic, no torch."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import SupportsIndex, cast

from tpoverlap.errors import ActiveShapeError


@dataclass(frozen=True)
class TokenPartition:
    """Rows of a [T, H] activation, cut along T into one contiguous shard a rank.

    ============================== =====================================================================
    ``TokenPartition.even(T, R)``      every rank owns T / R rows; T must be divisible by R
    ``TokenPartition.balanced(T, R)``  the first T mod R ranks own one row more; a rank may own none
    ``TokenPartition.from_counts(c)``  rank r owns ``c[r]`` rows, any non-negative numbers
    ============================== =====================================================================

    Immutable and hashable; equal partitions compare equal whatever constructor made them. Anything with ``__index__``
    (a NumPy integer, say) passes as a number and is kept as ``int``; a bool does not, since it is a mask by mistake.

    Raises:
        ActiveShapeError: a count is not a non-negative integer, no row at all, or T not divisible under ``even``.
    """

    counts: tuple[int, ...]
    total: int = field(init=False, compare=False, repr=False)
    """T: rows of all ranks together."""
    offsets: tuple[int, ...] = field(init=False, compare=False, repr=False)
    """First row of each rank in the [T, H] activation; R entries, each equal to the sum of the counts before it."""
    max_count: int = field(init=False, compare=False, repr=False)
    """The most rows that one rank owns."""
    hash64: int = field(init=False, compare=False, repr=False)
    """64-bit digest of the counts, the same in every process: integers hash alike whatever PYTHONHASHSEED is."""

    def __post_init__(self) -> None:
        if not self.counts:
            raise ActiveShapeError("a partition needs at least one rank, got no counts")
        counts = tuple(as_int(count) for count in self.counts)
        for rank, count in enumerate(counts):
            if count is None or count < 0:
                raise ActiveShapeError(
                    f"counts must be non-negative integers, got {self.counts[rank]!r} for rank {rank} "
                    f"in {list(self.counts)}"
                )
        if not any(counts):
            raise ActiveShapeError(f"a partition needs at least one row, got counts {list(self.counts)}")
        counts = cast("tuple[int, ...]", counts)
        facts = self.__dict__  # as every operation needs them; the class is frozen for everybody else
        facts["counts"] = counts
        facts["total"] = sum(counts)
        facts["offsets"] = (0, *accumulate(counts[:-1]))
        facts["max_count"] = max(counts)
        facts["hash64"] = hash(counts) & 0xFFFFFFFFFFFFFFFF

    @classmethod
    def even(cls, num_tokens: SupportsIndex, tp_size: SupportsIndex) -> TokenPartition:
        """T / R rows a rank. Raises ActiveShapeError when R does not divide T."""
        num_tokens, tp_size = _positive("T", num_tokens), _positive("tp_size", tp_size)
        if num_tokens % tp_size:
            raise ActiveShapeError(
                f"T={num_tokens} is not divisible by tp_size={tp_size} under an even partition; "
                f"use TokenPartition.balanced({num_tokens}, {tp_size})"
            )
        return cls((num_tokens // tp_size,) * tp_size)

    @classmethod
    def balanced(cls, num_tokens: SupportsIndex, tp_size: SupportsIndex) -> TokenPartition:
        """The first T mod R ranks own ceil(T / R) rows, the others floor(T / R)."""
        num_tokens, tp_size = _positive("T", num_tokens), _positive("tp_size", tp_size)
        base, extra = divmod(num_tokens, tp_size)
        return cls((base + 1,) * extra + (base,) * (tp_size - extra))

    @classmethod
    def from_counts(cls, counts: Iterable[SupportsIndex], total: int | None = None) -> TokenPartition:
        """Rank r owns ``counts[r]`` rows; ``total``, when given, must be their sum."""
        partition = cls(tuple(cast("Iterable[int]", counts)))
        if total is not None and total != partition.total:
            raise ActiveShapeError(
                f"counts {list(partition.counts)} sum to {partition.total}, not to T={total}; correct one of the two"
            )
        return partition

    @property
    def tp_size(self) -> int:
        """R: number of ranks."""
        return len(self.counts)

    def rows(self, rank: int) -> slice:
        """The rows of ``rank`` (in the TP group) as a slice into the [T, H] activation; empty when it owns none."""
        if not 0 <= rank < len(self.counts):
            raise ActiveShapeError(
                f"rank {rank} is not in a group of {len(self.counts)}: rows() takes the rank in the TP group (mgr.rank)"
            )
        start = self.offsets[rank]
        return slice(start, start + self.counts[rank])

    def owner(self, row: int) -> int:
        """The rank that owns ``row``."""
        if not 0 <= row < self.total:
            raise ActiveShapeError(f"row {row} is outside 0..{self.total - 1}")
        for rank, (start, count) in enumerate(zip(self.offsets, self.counts, strict=True)):
            if start <= row < start + count:
                return rank
        raise AssertionError(f"no rank of {self} owns row {row}")


def as_int(value: object) -> int | None:
    """``value`` as an int; None when it is no integer, or a bool."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def _positive(name: str, value: object) -> int:
    number = as_int(value)
    if number is None or number < 1:
        raise ActiveShapeError(f"{name} must be a positive integer, got {value!r}")
    return number
