"""Who does a whole exchange of few rows in one kernel, instead of a copy engine and stream memory operations.

A method with nothing beside its transfers may bring one (`Exchange.trader`). The words are those of
`tpoverlap.comm.signals`, written and awaited in the same order, so ranks that do not agree on who moves their rows
still understand each other; the watchdog lets its waits go like those of a stream.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch

from tpoverlap.comm.descriptor import Descriptor
from tpoverlap.comm.outline import Outline
from tpoverlap.native import Recording

if TYPE_CHECKING:
    from tpoverlap.comm.device_signals import SlotAddresses
    from tpoverlap.comm.device_streams import MarkEvent


class Trader(ABC):
    """Each method launches on the stream with handle ``stream``, which holds nothing back, and waits for nothing.

    ``outline``, ``slot``, ``epoch`` and ``descriptor`` are the operation's.
    """

    @abstractmethod
    def gather(
        self, outline: Outline, slot: SlotAddresses, epoch: int, descriptor: Descriptor, stream: int, own: torch.Tensor
    ) -> None:
        """Publish; put ``own`` [T_r, H] (contiguous) into every rank's slot; go on once everybody's rows are here.

        Raises:
            CapacityError: the gathered rows do not fit the slot. Nothing was launched.
        """

    @abstractmethod
    def add(
        self,
        outline: Outline,
        slot: SlotAddresses,
        epoch: int,
        descriptor: Descriptor,
        stream: int,
        summands: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        end: MarkEvent | None,
    ) -> None:
        """Publish; send the peers' rows of ``summands`` [T, N]; ``out`` [T_r, N] = the sum of everybody's.

        In rank order, in float32, rounded once; ``bias`` [N] is added to own rows first and rounded with them.

        Args:
            end: also give the credits and write this event's word; None: the caller does.

        Raises:
            CapacityError: the blocks do not fit the slot. Nothing was launched.
        """

    def record_gather(
        self, recording: Recording, outline: Outline, slot: SlotAddresses, stream: int, own: torch.Tensor, own_at: int
    ) -> bool:
        """Write `gather` down for a tape that is given `WordSheet`'s registers, of rows like ``own`` at ``own_at``.

        Returns:
            False: only Python launches it.
        """
        return False

    def record_add(
        self,
        recording: Recording,
        outline: Outline,
        slot: SlotAddresses,
        stream: int,
        summands: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        places: tuple[int, int, int],
    ) -> bool:
        """Likewise `add`, with an end, of tensors like these.

        Args:
            places: where the summands, the result and the bias will lie: addresses or registers.

        Returns:
            False: only Python launches it.
        """
        return False
