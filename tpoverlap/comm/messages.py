"""The transport for ranks that share no memory: ``torch.distributed`` point-to-point, with the same schedules.

=============  ==================================================  ====================================================
               Gloo (CPU)                                          NCCL (GPU)
=============  ==================================================  ====================================================
header         two words to and from every peer, on worker         the same, over a Gloo side group, on the calling
               threads, compared before any receive is posted      thread: it costs a host round trip an operation
data           one message a transfer, tag = (sequence, piece)     one batch a step: its sends and receives together
credit         a receive is posted only into a slot that has no    the same, in stream order
               reader left
=============  ==================================================  ====================================================

Headers come first, so ranks that disagree never exchange data of different sizes (which would hang or abort).
"""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from tpoverlap.comm.descriptor import Descriptor
from tpoverlap.comm.diagnosis import Diagnosis
from tpoverlap.comm.exchange import Exchange
from tpoverlap.comm.schedule import Step, Transfer
from tpoverlap.comm.streams import Event, HostStream, Stream
from tpoverlap.errors import PeerTimeoutError
from tpoverlap.memory.layout import DESCRIPTOR_RING, MAX_PIECES

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_SIGN = 1 << 63
_HEADER_TAG = 1 << 20
_SEQUENCES_WITH_OWN_TAG = 8192


class Mailbox:
    """Sends, receives and compares headers; remembers the peers' for `Diagnosis`.

    Args:
        group: moves data. control_group: moves headers of CPU tensors (the same one on the CPU).
    """

    def __init__(self, group: ProcessGroup, control_group: ProcessGroup, timeout_s: float) -> None:
        self.group = group
        self.control_group = control_group
        self.timeout = timedelta(seconds=timeout_s)
        self.rank = group.rank()
        self.peers = [(self.rank + offset) % group.size() for offset in range(1, group.size())]
        self._words: dict[tuple[int, int], tuple[int, int]] = {}
        self.diagnosis = Diagnosis(self.rank, group.size(), timeout_s, self._peer_words)

    def _peer_words(self, peer: int, sequence: int) -> tuple[int, int]:
        return self._words.get((peer, sequence % DESCRIPTOR_RING), (0, 0))

    def send_headers(self, descriptor: Descriptor) -> list[Any]:
        """Start sending ``descriptor`` to every peer; wait for the returned works before leaving the operation."""
        words = torch.tensor([descriptor.record - _SIGN, descriptor.digest - _SIGN], dtype=torch.int64)
        return [
            dist.isend(words, group=self.control_group, group_dst=peer, tag=_header_tag(descriptor))
            for peer in self.peers
        ]

    def compare_headers(self, descriptor: Descriptor) -> None:
        """Receive every peer's header and compare.

        Raises:
            RankMismatchError: a header differs. PeerTimeoutError: one did not come.
        """
        incoming = [torch.empty(2, dtype=torch.int64) for _ in self.peers]
        works = [
            dist.irecv(words, group=self.control_group, group_src=peer, tag=_header_tag(descriptor))
            for words, peer in zip(incoming, self.peers, strict=True)
        ]
        for work, words, peer in zip(works, incoming, self.peers, strict=True):
            self.finish(work, peer, f"{descriptor.label} (T={descriptor.num_tokens}) to start it")
            record, digest = (int(word) + _SIGN for word in words.tolist())
            self._words[peer, descriptor.sequence % DESCRIPTOR_RING] = (record, digest)
        if self.diagnosis.differs(descriptor):
            raise self.diagnosis.mismatch(descriptor.sequence)

    def finish(self, work: Any, peer: int, what: str) -> None:
        """Wait for one message, bounded by the time-out."""
        try:
            work.wait(self.timeout)
        except RuntimeError as error:
            raise PeerTimeoutError(
                f"rank {self.rank} lost rank {peer} while it waited for {what}: {error}. "
                f"It died, closed the connection, or is slower than timeout_s={self.timeout.total_seconds():g}"
            ) from error


class GlooExchange(Exchange):
    """Messages between CPUs, on two worker threads: the comm stream sends, the receive stream receives."""

    mailbox: Mailbox
    receive_stream: HostStream

    def start(self) -> None:
        mailbox, receive = self.mailbox, self.receive_stream
        self._region.held.discard(self._epoch - self._region.depth)  # receives are posted in order: nothing to grant
        self._sending: list[tuple[Any, int, str]] = []
        self._receiving: dict[Transfer, Any] = {}
        what = f"{self._descriptor.label} (header)"
        self._comm.run(
            lambda: self._sending.extend(
                (work, peer, what)
                for work, peer in zip(mailbox.send_headers(self._descriptor), mailbox.peers, strict=True)
            )
        )
        receive.run(lambda: mailbox.compare_headers(self._descriptor))
        self._compared = receive.record()
        receive.run(self._post_receives)
        self._arrivals: dict[int, Event] = {}
        for step in self.steps:
            receive.run(partial(self._finish_receives, step))
            self._arrivals[step.index] = receive.record()

    def _post_receives(self) -> None:
        for step in self.steps:
            for transfer in step.receives:
                view = self.view(transfer.slot_element, (transfer.num_elements,))
                self._receiving[transfer] = dist.irecv(
                    view, group=self.mailbox.group, group_src=transfer.source, tag=self._tag(transfer)
                )

    def _finish_receives(self, step: Step) -> None:
        for transfer in step.receives:
            self.mailbox.finish(self._receiving.pop(transfer), transfer.source, self._describe(transfer))

    def _tag(self, transfer: Transfer) -> int:
        return (self._descriptor.sequence % _SEQUENCES_WITH_OWN_TAG) * MAX_PIECES + transfer.piece

    def _send(self, step: Step, source: torch.Tensor, base_row: int) -> None:
        for transfer in step.sends:
            if self._channel.before_copy is not None:
                self._channel.before_copy(transfer)
            rows = source[transfer.row_start - base_row : transfer.row_stop - base_row].contiguous()
            work = dist.isend(
                rows, group=self.mailbox.group, group_dst=transfer.destination, tag=self._tag(transfer)
            )
            self._sending.append((work, transfer.destination, self._describe(transfer)))
            self._mark(self._comm, "sent", transfer.step)

    def _wait(self, step: Step, stream: Stream) -> None:
        stream.wait(self._arrivals[step.index])
        self._mark(stream, "arrived", step.index)

    def _finish(self) -> None:
        self.caller.wait(self._compared)
        self._comm.run(self._finish_sends)
        self.caller.wait(self._comm.record())

    def _finish_sends(self) -> None:
        for work, peer, what in self._sending:
            self.mailbox.finish(work, peer, f"{what} to be taken")


class NcclExchange(Exchange):
    """Messages between GPUs on the comm stream. The header exchange blocks the host; see the module's table."""

    mailbox: Mailbox

    def start(self) -> None:
        mailbox = self.mailbox
        self._region.held.discard(self._epoch - self._region.depth)
        headers = mailbox.send_headers(self._descriptor)
        mailbox.compare_headers(self._descriptor)
        for work, peer in zip(headers, mailbox.peers, strict=True):
            mailbox.finish(work, peer, f"{self._descriptor.label} (header)")
        self._arrivals: dict[int, Event] = {}
        reader = self._region.last_reader.get(self._epoch % self._region.depth)
        if reader is not None:
            self._comm.wait(reader)

    def _send(self, step: Step, source: torch.Tensor, base_row: int) -> None:
        self._comm.run(lambda: self._send_and_receive(step, source, base_row))

    def _send_and_receive(self, step: Step, source: torch.Tensor, base_row: int) -> None:
        # NCCL orders its own stream after the current one, so the comm stream must be current here.
        operations = [
            dist.P2POp(
                dist.isend,
                source[transfer.row_start - base_row : transfer.row_stop - base_row].contiguous(),
                group=self.mailbox.group,
                group_peer=transfer.destination,
            )
            for transfer in step.sends
        ]
        operations += [
            dist.P2POp(
                dist.irecv,
                self.view(transfer.slot_element, (transfer.num_elements,)),
                group=self.mailbox.group,
                group_peer=transfer.source,
            )
            for transfer in step.receives
        ]
        if operations:
            for work in dist.batch_isend_irecv(operations):
                work.wait()  # orders the comm stream after NCCL's; does not block the host
        self._arrivals[step.index] = self._comm.record()

    def _wait(self, step: Step, stream: Stream) -> None:
        stream.wait(self._arrivals[step.index])
        self._mark(stream, "arrived", step.index)

    def _finish(self) -> None:
        self.caller.wait(self._comm.record())
        self._region.last_reader[self._epoch % self._region.depth] = self.caller.record()


def _header_tag(descriptor: Descriptor) -> int:
    return _HEADER_TAG + descriptor.sequence % _SEQUENCES_WITH_OWN_TAG
