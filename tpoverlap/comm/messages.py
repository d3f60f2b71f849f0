"""The transport for ranks that share no memory: point-to-point messages, with the same schedules.

=============  ==================================================  ====================================================
               Gloo (CPU)                                          NCCL (GPU)
=============  ==================================================  ====================================================
header         two words to and from every peer, on worker         the same, over Gloo too, on the calling thread: it
               threads, compared before any receive is posted      costs a host round trip an operation
data           one message a transfer, tag = (sequence, piece)     one batch a step: its sends and receives together
credit         a receive is posted only into a slot that has no    the same, in stream order
               reader left
=============  ==================================================  ====================================================

Headers come first, so ranks that disagree never exchange data of different sizes (which would hang or abort).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from tpoverlap.comm.exchange import Exchange, Gate
from tpoverlap.comm.mailbox import SEQUENCES_WITH_OWN_TAG, Mailbox
from tpoverlap.comm.schedule import Step, Transfer
from tpoverlap.comm.streams import Event, HostStream, Stream
from tpoverlap.memory.layout import MAX_PIECES


class GlooExchange(Exchange):
    """Messages between CPUs, on two worker threads: the comm stream sends, the receive stream receives."""

    mailbox: Mailbox
    receive_stream: HostStream

    def start(self) -> None:
        mailbox, receive = self.mailbox, self.receive_stream
        self._region.held.discard(self._epoch - self._region.depth)  # receives are posted in order: nothing to grant
        self._sending: list[tuple[Any, int, str]] = []
        self._receiving: dict[Transfer, Any] = {}
        what = f"{self.descriptor.label} (T={self.partition.total}, header)"
        self._comm.run(
            lambda: self._sending.extend(
                (work, peer, what)
                for work, peer in zip(mailbox.send_headers(self.descriptor), mailbox.peers, strict=True)
            )
        )
        receive.run(lambda: mailbox.compare_headers(self.descriptor))
        self._compared = receive.record()
        receive.run(self._post_receives)
        self._arrivals: dict[int, Event] = {}
        for step in self.steps:
            receive.run(partial(self._finish_receives, step))
            self._arrivals[step.number] = receive.record()

    def _post_receives(self) -> None:
        for step in self.steps:
            for transfer in step.receives:
                view = self.view(transfer.slot_element, (transfer.num_elements,))
                self._receiving[transfer] = self.mailbox.link.receive(view, transfer.source, self._tag(transfer))

    def _finish_receives(self, step: Step) -> None:
        for transfer in step.receives:
            self.mailbox.finish(self._receiving.pop(transfer), transfer.source, self._describe(transfer))

    def _tag(self, transfer: Transfer) -> int:
        return (self.descriptor.sequence % SEQUENCES_WITH_OWN_TAG) * MAX_PIECES + transfer.piece

    def _send(self, step: Step, source: torch.Tensor, base_row: int, gate: Gate | None) -> None:
        assert gate is None, "messages are not gated"
        for transfer in step.sends:
            if self._channel.before_copy is not None:
                self._channel.before_copy(self._comm, transfer)
            self._mark(self._comm, "send", transfer.step, transfer.destination)
            rows = source[transfer.row_start - base_row : transfer.row_stop - base_row].contiguous()
            work = self.mailbox.link.send(rows, transfer.destination, self._tag(transfer))
            self._sending.append((work, transfer.destination, self._describe(transfer)))
            self._mark(self._comm, "sent", transfer.step, transfer.destination)

    def _wait(self, step: Step, stream: Stream) -> None:
        self._mark(stream, "wait", step.number, step.peer)
        stream.wait(self._arrivals[step.number])
        self._mark(stream, "arrived", step.number, step.peer)

    def _finish(self) -> None:
        self._mark(self.caller, "wait", -1)
        self.caller.wait(self._compared)
        self._comm.run(self._finish_sends)
        self.caller.wait(self._comm.record())
        self._mark(self.caller, "arrived", -1)

    def _finish_sends(self) -> None:
        for work, peer, what in self._sending:
            self.mailbox.finish(work, peer, f"{what} to be taken")


class NcclExchange(Exchange):
    """Messages between GPUs on the comm stream. The header exchange blocks the host; see the module's table."""

    mailbox: Mailbox

    def start(self) -> None:
        mailbox = self.mailbox
        self._region.held.discard(self._epoch - self._region.depth)
        headers = mailbox.send_headers(self.descriptor)
        mailbox.compare_headers(self.descriptor)
        for work, peer in zip(headers, mailbox.peers, strict=True):
            mailbox.finish(work, peer, f"{self.descriptor.label} (T={self.partition.total}, header)")
        self._arrivals: dict[int, Event] = {}
        if self._previous_reader is not None:
            self._comm.wait(self._previous_reader)

    def _send(self, step: Step, source: torch.Tensor, base_row: int, gate: Gate | None) -> None:
        assert gate is None, "messages are not gated"
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
        self._arrivals[step.number] = self._comm.record()

    def _wait(self, step: Step, stream: Stream) -> None:
        self._mark(stream, "wait", step.number, step.peer)
        stream.wait(self._arrivals[step.number])
        self._mark(stream, "arrived", step.number, step.peer)

    def _finish(self) -> None:
        self.caller.wait(self._comm.record())
        self.finished = self.caller.record()
        self._region.last_reader[self._epoch % self._region.depth] = self.finished
