"""What an operation is, apart from when it runs: made once for a shape, used by every operation that repeats it."""

from __future__ import annotations

from typing import Literal

import torch

from tpoverlap.comm.descriptor import MASK16, MASK64, Descriptor, text_hash
from tpoverlap.comm.schedule import Step
from tpoverlap.tokens import TokenPartition

Order = Literal["beside", "behind", "at_once", "traded"]
"""How transfers and GEMMs lie, so that a device needs no more calls of its driver than that takes. beside: transfers
from the start. behind: a GEMM comes before the first of them, and the descriptor travels with that. at_once: nothing
runs beside them (`Exchange.trade`, or a kernel that moves the rows itself), so there is no comm stream. traded: the
same, and the descriptor comes with the transfers, so that one kernel can do all of it (`tpoverlap.comm.trader`).
"""


class Outline:
    """All ranks must have the same one, but for ``steps``, which are each rank's own.

    Args:
        label: GEMM name, direction, method and the options that change the slot's layout.
        partition: rows of each rank.
        dtype: of the communicated rows.
        detail: hash of what else the ranks must agree on.
        region: "ag", "rs" or a later region; "": the operation claims no slot.
        steps: this rank's schedule.
        order: see `Order`.
    """

    __slots__ = ("_parts", "_record", "dtype", "label", "order", "partition", "region", "steps")

    def __init__(
        self,
        label: str,
        partition: TokenPartition,
        dtype: torch.dtype,
        detail: int = 0,
        *,
        region: str = "",
        steps: tuple[Step, ...] = (),
        order: Order = "beside",
    ) -> None:
        self.label, self.partition, self.dtype = label, partition, dtype
        self.region, self.steps, self.order = region, steps, order
        self._parts = partition.hash64, text_hash(str(dtype)), text_hash(label), detail
        self._record = Descriptor(0, label, partition.total, 0).record

    def descriptor(self, sequence: int, region: int, epoch: int) -> Descriptor:
        """Of one operation: its number among this rank's, and its use of the region with that index.

        The digest is 64 bits of everything that ranks compare.
        """
        made = Descriptor.__new__(Descriptor)  # without the call of a function that works out the record again
        made.sequence, made.label, made.num_tokens = sequence, self.label, self.partition.total
        made.digest = hash((*self._parts, region, epoch)) & MASK64  # `digest64`, without the call
        made.record = (sequence & MASK16) << 48 | self._record
        return made
