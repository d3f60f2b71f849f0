"""What the message transport needs besides the caller's group: Gloo connections of its own, and a board for aborts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_CONNECT_S = 120.0
_CANCEL_TAG = 1 << 30
"""No message has it."""


def default_store() -> Any:
    """The store that ``init_process_group`` made."""
    return dist.distributed_c10d._get_default_store()


class GlooLink:
    """Messages between CPU tensors over connections that belong to one manager. Construction is collective.

    Not over the caller's group: Gloo closes *every* connection of a group when one wait in it times out, tags could
    meet those of the caller's own messages, and only connections of one's own can be given up to wake a waiting
    thread. Not by ``new_group`` either: with ``use_local_synchronization`` it names a group after its ranks alone, so
    the next manager of these ranks could find the addresses of the last one in the store.

    Args:
        group: whose ranks are connected.
        prefix: of the keys in the store; the same on every rank, never used before.
    """

    def __init__(self, group: ProcessGroup, prefix: str) -> None:
        store = PrefixStore(f"{prefix}/gloo", default_store())
        self._peer = (group.rank() + 1) % group.size()
        self._context: Any = dist.ProcessGroupGloo(
            store, group.rank(), group.size(), timeout=timedelta(seconds=_CONNECT_S)
        )

    def send(self, tensor: torch.Tensor, destination: int, tag: int) -> Any:
        """Start sending; returns the work to wait for, which raises RuntimeError if the connection is broken."""
        return self._started(lambda: self._context.send([tensor], destination, tag))

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> Any:
        """Start receiving into ``tensor``; returns the work to wait for, as `send` does."""
        return self._started(lambda: self._context.recv([tensor], source, tag))

    @staticmethod
    def _started(start: Callable[[], Any]) -> Any:
        try:
            return start()
        except RuntimeError as error:  # the connection broke before: raise where somebody knows what it was for
            return _NeverStarted(error)

    def cancel(self) -> None:
        """Close the connections: every wait of this rank ends with an error now instead of at its time-out.

        A thread left waiting would not only delay `close`: one that is inside Gloo when the interpreter exits ends the
        process with "terminate called without an active exception". Gloo has no call for this, hence a wait that
        cannot but time out.
        """
        with suppress(RuntimeError):
            self.receive(torch.empty(1), self._peer, _CANCEL_TAG).wait(timedelta(milliseconds=1))

    def close(self) -> None:
        """Drop the connections. After the threads that use them have ended."""
        self._context = None


class _NeverStarted:
    """Stands for the work of a message that could not even be posted."""

    def __init__(self, error: RuntimeError) -> None:
        self._error = error

    def wait(self, timeout: timedelta) -> None:
        """Raise what posting raised."""
        raise self._error


class AbortBoard:
    """Which ranks gave up, and in which operation: kept in the store, since nobody would receive a message about it.

    Args:
        rank: this rank.
        prefix: as for `GlooLink`.
    """

    def __init__(self, rank: int, prefix: str) -> None:
        self._store = PrefixStore(f"{prefix}/abort", default_store())
        self._rank = rank
        self._seen: dict[int, tuple[int, int, int]] = {}

    def announce(self, word: int, record: int, digest: int) -> None:
        """Put this rank's abort word there, with the descriptor of the operation it names (0, 0: it never started)."""
        with suppress(RuntimeError):  # the rank that served the store is dead, and with it the board
            self._store.set(str(self._rank), f"{word} {record} {digest}")

    def look(self, peer: int) -> tuple[int, int, int]:
        """(abort word, record, digest) of ``peer``, all 0 while it is fine. Costs a round trip to the store."""
        with suppress(RuntimeError):  # as above: then the broken connections say what there is to say
            if peer not in self._seen and self._store.check([str(peer)]):
                word, record, digest = self._store.get(str(peer)).split()
                self._seen[peer] = int(word), int(record), int(digest)
        return self.last_seen(peer)

    def last_seen(self, peer: int) -> tuple[int, int, int]:
        """As `look`, without asking the store."""
        return self._seen.get(peer, (0, 0, 0))
