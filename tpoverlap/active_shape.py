"""The active shape: what the manager, a scope or a communicator says T is, and how an operation resolves it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, cast

from tpoverlap.errors import ActiveShapeError, CapacityError
from tpoverlap.tokens import TokenPartition, as_int

ShapeLike = int | Sequence[int] | TokenPartition


class ActiveShape:
    """One manager's active shape. Setting it stores a partition: no allocation, no synchronisation.

    A scope (``with manager.microbatch(...)``) is local to the thread or task that entered it; `set` is for all.
    """

    def __init__(self, tp_size: int, width: int) -> None:
        self.tp_size = tp_size
        self.width = width
        self.version = 0
        self.refused: Callable[[BaseException], None] = lambda error: None
        """Told what `parse_fitting` raises: peers may be about to wait for this rank."""
        self._base: TokenPartition | None = None
        self._scopes: ContextVar[tuple[TokenPartition | None, ...]] = ContextVar("tpoverlap_active_shape", default=())

    @property
    def partition(self) -> TokenPartition | None:
        """The innermost scope's partition, else the one that was set; None: infer T from the input."""
        scopes = self._scopes.get()
        return scopes[-1] if scopes else self._base

    def set(self, partition: TokenPartition | None) -> None:
        """Set the shape outside scopes."""
        self._base = partition
        self.version += 1

    @contextmanager
    def scope(self, partition: TokenPartition | None) -> Iterator[None]:
        """``partition`` (None: infer) until the block ends."""
        token = self._scopes.set((*self._scopes.get(), partition))
        self.version += 1
        try:
            yield
        finally:
            self._scopes.reset(token)
            self.version += 1

    def parse_fitting(
        self, shape: ShapeLike | None, partition: TokenPartition | None, limits: tuple[int, int] | None
    ) -> TokenPartition:
        """`parse` for the manager; ``limits``: (most tokens, most rows of a rank), or None.

        Raises:
            As `parse`. CapacityError: above the limits.
        """
        try:
            parsed = self.parse(shape, partition)
            if limits is not None:
                require_capacity(parsed, *limits, "active shape")
        except ActiveShapeError as error:
            self.refused(error)
            raise
        return parsed

    def parse(
        self, shape: ShapeLike | None, partition: TokenPartition | None, width: int | None = None
    ) -> TokenPartition:
        """A partition from T, (T, H), a TokenPartition, or ``partition=``; ``balanced`` when only T is given.

        ``width`` is the H to expect; None: the manager's.

        Raises:
            ActiveShapeError: not 2-D, not positive integers, H differs, counts that do not sum to T, or a wrong R.
        """
        if isinstance(shape, TokenPartition):
            if partition is not None and partition != shape:
                raise ActiveShapeError(
                    f"two different partitions were given: {shape.counts} and {partition.counts}; pass one"
                )
            shape, partition = None, shape
        num_tokens = None if shape is None else self._num_tokens(shape, self.width if width is None else width)
        if partition is None:
            if num_tokens is None:
                raise ActiveShapeError("give T, (T, H) or a TokenPartition")
            return TokenPartition.balanced(num_tokens, self.tp_size)
        if not isinstance(partition, TokenPartition):
            raise ActiveShapeError(
                f"partition must be a TokenPartition, got {type(partition).__name__} {partition!r}; "
                "TokenPartition.from_counts makes one from the rows of each rank"
            )
        self.require_size(partition)
        if num_tokens is not None and num_tokens != partition.total:
            raise ActiveShapeError(
                f"shape says T={num_tokens} but the counts {list(partition.counts)} sum to {partition.total}"
            )
        return partition

    def require_size(self, partition: TokenPartition) -> None:
        """Raise unless the partition is for this many ranks."""
        if partition.tp_size != self.tp_size:
            raise ActiveShapeError(
                f"the partition has {partition.tp_size} counts {list(partition.counts)}, the group has "
                f"{self.tp_size} ranks; give one count a rank"
            )

    def _num_tokens(self, shape: Any, width: int) -> int:
        num_tokens = as_int(shape)
        if num_tokens is None:
            dims = _dims(shape)
            if len(dims) != 2:
                raise ActiveShapeError(f"the active shape must be (T, H), got {shape!r}")
            if dims[1] != width:
                raise ActiveShapeError(
                    f"the active shape {dims} changes the hidden size: H={width} was registered; "
                    "register another width with mgr.register(name, width=...)"
                )
            num_tokens = dims[0]
        if num_tokens < 1:
            raise ActiveShapeError(
                f"T must be at least 1, got {num_tokens} in {shape!r}; skip a microbatch that has no token on any rank"
            )
        return num_tokens


def _dims(shape: Any) -> tuple[int, ...]:
    try:
        dims = tuple(as_int(length) for length in shape)
    except TypeError:  # neither a number nor a sequence
        dims = (None,)
    if None in dims:
        raise ActiveShapeError(f"the active shape must be integers (T, H) or T, got {shape!r}")
    return cast("tuple[int, ...]", dims)


def require_capacity(partition: TokenPartition, max_tokens: int, max_rows_per_rank: int, name: str) -> None:
    """Raise CapacityError when ``partition`` does not fit what ``name`` was registered with."""
    if partition.total > max_tokens:
        raise CapacityError(
            f"{name}: T={partition.total} exceeds the capacity of {max_tokens} tokens; register a larger "
            "capacity_shape, split the microbatch, or use on_overflow='sequential'"
        )
    if partition.max_count > max_rows_per_rank:
        raise CapacityError(
            f"{name}: a rank has {partition.max_count} rows in {list(partition.counts)}, but max_rows_per_rank is "
            f"{max_rows_per_rank}; pass max_rows_per_rank={partition.max_count} to the manager, or balance the rows"
        )
