"""What operations of one name need, kept: by the partition at hand, and by how many rows its ranks have.

Within a microbatch every layer asks with the same partition, and a look at which object it is is enough. The next
microbatch brings another object, often of the same T: packed to the capacity most of them are full.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tpoverlap.tokens import TokenPartition

if TYPE_CHECKING:
    from tpoverlap.overlap import OperationContext

OperationUse = tuple[int, bool, bool, int | None, int, bool]
"""What operations of a name differ in: ``id`` of the partition, scatter, beside, sharded features, detail, FP8."""
_MOST: Final = 512


class OperationCache:
    """The manager's memory of one communicator.

    Attributes:
        get: the context of a use, or None; for a use whose partition is the one that was kept, not an equal one.
    """

    def __init__(self) -> None:
        self._by_object: dict[OperationUse, OperationContext] = {}
        self._by_counts: dict[tuple[object, ...], OperationContext] = {}
        self._partitions: list[TokenPartition] = []  # held, so that no other one gets the same ``id``
        self.get = self._by_object.get

    def again(self, partition: TokenPartition, use: OperationUse) -> OperationContext | None:
        """The context of a use that differs in the partition's ``id`` only, found by `get` from now on; or None."""
        context = self._by_counts.get((partition.counts, *use[1:]))
        if context is not None:
            self._remember(partition, use, context)
        return context

    def keep(self, partition: TokenPartition, use: OperationUse, context: OperationContext) -> None:
        """Remember ``context``."""
        if len(self._by_counts) >= _MOST:
            self.clear()
        self._by_counts[(partition.counts, *use[1:])] = context
        self._remember(partition, use, context)

    def _remember(self, partition: TokenPartition, use: OperationUse, context: OperationContext) -> None:
        if len(self._by_object) >= _MOST:
            self._by_object.clear()
            self._partitions.clear()
        self._by_object[use] = context
        self._partitions.append(partition)

    def clear(self) -> None:
        """Forget everything."""
        self._by_object.clear()
        self._by_counts.clear()
        self._partitions.clear()
