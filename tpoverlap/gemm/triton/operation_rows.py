"""Whose rows one operation computes and sends, as data: the part of a launch that the partition decides."""

from __future__ import annotations

from dataclasses import dataclass

from tpoverlap.gemm.triton.push_plan import Push, RemoteBlock
from tpoverlap.gemm.triton.tile_plan import RowBlock


@dataclass(frozen=True, eq=False)
class OperationRows:
    """Made once a partition and compared by identity, so that finding a launch again hashes no rows.

    Attributes:
        own: this rank's rows. With pieces: the words of each peer's part of them.
        others: rows of the peers, in the order of their computation, with their words.
        pushes: what a gather's kernel itself sends of its own rows.
        remote: of a scatter in one launch: ``others`` with their place in the peers' slots.
    """

    own: RowBlock
    others: tuple[RowBlock, ...] = ()
    pushes: tuple[Push, ...] = ()
    remote: tuple[RemoteBlock, ...] = ()
