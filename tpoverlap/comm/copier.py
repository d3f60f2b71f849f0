"""Who moves rows into a mapped peer: a copy engine, or (``use_ce: false``) something that the method brings."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Final

import torch

from tpoverlap.comm.signals import Signals, SlotRef
from tpoverlap.comm.streams import Stream


class Copier(ABC):
    """Moves one transfer and marks its arrival."""

    @abstractmethod
    def push(
        self,
        signals: Signals,
        stream: Stream,
        target: torch.Tensor,
        source: torch.Tensor,
        destination: int,
        ref: SlotRef,
        piece: int,
    ) -> None:
        """In ``stream``'s order: ``target`` [t, H] = ``source``; then the arrival flag of ``piece`` in the slot of
        rank ``destination``, with release order at system scope.
        """


class EngineCopier(Copier):
    """By copy engine (on the CPU: by the comm thread), and a stream memory operation for the flag."""

    def push(
        self,
        signals: Signals,
        stream: Stream,
        target: torch.Tensor,
        source: torch.Tensor,
        destination: int,
        ref: SlotRef,
        piece: int,
    ) -> None:
        stream.copy(target, source)
        signals.set_arrival(stream, destination, ref, piece)


ENGINE: Final = EngineCopier()
"""It has no state, so all exchanges share it."""
