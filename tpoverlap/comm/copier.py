"""Who moves rows into a mapped peer: a copy engine, or (``use_ce: false``) something that the method brings."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Final, NamedTuple

import torch

from tpoverlap.comm.signals import Signals, SlotRef
from tpoverlap.comm.streams import Stream


class CopyJob(NamedTuple):
    """One transfer into a mapped peer.

    Attributes:
        target, source: [t, H] there and here, contiguous.
        destination: rank that ``target`` belongs to.
        ref: the slot.
        piece: whose arrival flag is set.
    """

    target: torch.Tensor
    source: torch.Tensor
    destination: int
    ref: SlotRef
    piece: int


class Copier(ABC):
    """Moves one transfer and marks its arrival."""

    @abstractmethod
    def push(self, signals: Signals, stream: Stream, job: CopyJob) -> None:
        """In ``stream``'s order: ``target`` = ``source``; then the arrival flag, with release order at system scope."""


class EngineCopier(Copier):
    """By copy engine (on the CPU: by the comm thread), and a stream memory operation for the flag."""

    def push(self, signals: Signals, stream: Stream, job: CopyJob) -> None:
        stream.copy(job.target, job.source)
        signals.set_arrival(stream, job.destination, job.ref, job.piece)


ENGINE: Final = EngineCopier()
"""It has no state, so all exchanges share it."""
