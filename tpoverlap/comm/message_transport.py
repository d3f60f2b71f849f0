"""`Transport` over messages: Gloo exchanges on the CPU, NCCL exchanges on the GPU, aborts through the store."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from tpoverlap.comm.descriptor import Descriptor
from tpoverlap.comm.exchange import Claim, Exchange
from tpoverlap.comm.fault import Fault
from tpoverlap.comm.gloo_link import AbortBoard, GlooLink
from tpoverlap.comm.mailbox import Mailbox
from tpoverlap.comm.messages import GlooExchange, NcclExchange
from tpoverlap.comm.streams import HostStream, Stream
from tpoverlap.comm.transport import Transport, require_peers
from tpoverlap.memory.base import Backend, agree

if TYPE_CHECKING:
    from tpoverlap.comm.channel import Channel


class MessageTransport(Transport):
    """Point-to-point messages. Construction is collective (it connects the ranks)."""

    def __init__(self, backend: Backend, fault: Fault, timeout_s: float) -> None:
        super().__init__(backend.device, fault, backend.driver())
        group = backend.group
        prefix = f"tpoverlap/{agree(group, secrets.token_hex(8))[0]}"  # of this manager alone
        self._link = GlooLink(group, prefix)
        self._board = AbortBoard(backend.rank, prefix)
        self._mailbox = Mailbox(group, self._link, self._board, timeout_s)
        self.diagnosis = self._mailbox.diagnosis
        self._receive: HostStream | None = None
        if backend.device.type == "cpu":
            self._receive = HostStream("receive", fault)

    def new_exchange(self, channel: Channel, claim: Claim) -> Exchange:
        kind = NcclExchange if self._receive is None else GlooExchange
        exchange = kind(channel, claim)
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
            mailbox.finish(work, peer, f"{descriptor.label} (T={descriptor.num_tokens}, header)")
        require_peers(self, descriptor)

    def refresh(self) -> None:
        for peer in self._mailbox.peers:
            self._board.look(peer)

    def abort_word(self, peer: int) -> int:
        return self._board.last_seen(peer)[0]

    def announce_abort(self, word: int) -> None:
        self._mailbox.announce_abort(word)

    def release(self, pending: list[Descriptor]) -> None:
        """On the CPU callers wait on host events and look at the fault; else they wait for headers themselves."""
        if self._receive is None:
            self.cancel()

    def cancel(self) -> None:
        self._link.cancel()

    def close(self) -> None:
        if self._receive is not None:
            self._receive.close()
        self._link.close()
        super().close()
