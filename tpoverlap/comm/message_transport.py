"""`Transport` over messages: Gloo exchanges on the CPU, NCCL exchanges on the GPU, aborts through the store."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from tpoverlap.comm.descriptor import Descriptor
from tpoverlap.comm.exchange import Exchange
from tpoverlap.comm.fault import Fault
from tpoverlap.comm.messages import GlooExchange, Mailbox, NcclExchange
from tpoverlap.comm.region import Region
from tpoverlap.comm.schedule import Step
from tpoverlap.comm.streams import HostStream, Stream
from tpoverlap.comm.transport import Transport
from tpoverlap.memory.base import Backend, agree
from tpoverlap.tokens import TokenPartition

if TYPE_CHECKING:
    from tpoverlap.comm.channel import Channel


class MessageTransport(Transport):
    """Point-to-point messages. Construction is collective (it may make a side group for headers)."""

    def __init__(self, backend: Backend, fault: Fault, timeout_s: float) -> None:
        super().__init__(backend.device, fault)
        group = backend.group
        control = group
        self._side_group: Any = None
        if backend.device.type == "cuda":
            ranks = dist.get_process_group_ranks(group)
            self._side_group = control = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        self._mailbox = Mailbox(group, control, timeout_s)
        self.diagnosis = self._mailbox.diagnosis
        self._receive: HostStream | None = None
        if backend.device.type == "cpu":
            self._receive = HostStream("receive", fault)
        # Aborts cannot travel as messages (nobody would be receiving), so they go through the default store, under a
        # key that no other manager of this group has.
        self._store = dist.distributed_c10d._get_default_store()
        self._prefix = f"tpoverlap/{agree(group, secrets.token_hex(8))[0]}"
        self._aborts: dict[int, int] = {}

    def new_exchange(
        self,
        channel: Channel,
        region: Region,
        epoch: int,
        descriptor: Descriptor,
        steps: tuple[Step, ...],
        partition: TokenPartition,
        dtype: torch.dtype,
        caller: Stream,
    ) -> Exchange:
        kind = NcclExchange if self._receive is None else GlooExchange
        exchange = kind(channel, region, epoch, descriptor, steps, partition, dtype, caller)
        exchange.mailbox = self._mailbox
        if isinstance(exchange, GlooExchange):
            assert self._receive is not None, "a Gloo exchange needs its receive thread"
            exchange.receive_stream = self._receive
        return exchange

    def meet(self, descriptor: Descriptor, caller: Stream) -> None:
        mailbox = self._mailbox
        works = mailbox.send_headers(descriptor)
        if self._receive is None:
            mailbox.compare_headers(descriptor)
        else:  # on the receive thread, so that the watchdog can release the caller
            self._receive.run(lambda: mailbox.compare_headers(descriptor))
            caller.wait(self._receive.record())
        for work, peer in zip(works, mailbox.peers, strict=True):
            mailbox.finish(work, peer, f"{descriptor.label} (header)")

    def refresh(self) -> None:
        for peer in self._mailbox.peers:
            key = f"{self._prefix}/abort/{peer}"
            if peer not in self._aborts and self._store.check([key]):
                self._aborts[peer] = int(self._store.get(key))

    def abort_word(self, peer: int) -> int:
        return self._aborts.get(peer, 0)

    def announce_abort(self, word: int) -> None:
        self._store.set(f"{self._prefix}/abort/{self._mailbox.rank}", str(word))

    def release(self, pending: list[Descriptor]) -> None:
        """Nothing to write: callers wait on host events and look at the fault; worker threads end at the time-out."""

    def close(self) -> None:
        if self._receive is not None:
            self._receive.close()
        if self._side_group is not None and self.fault.error is None:
            dist.destroy_process_group(self._side_group)
            self._side_group = None

