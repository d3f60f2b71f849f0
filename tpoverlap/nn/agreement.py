"""Inputs that have to be equal on all ranks: their hash becomes part of what ranks compare, where the host knows them.

Tokens, targets and ``cu_seqlens`` are the whole group's, given to each rank by its own data loader. On the host a hash
costs microseconds; on a GPU it would cost a wait, so there nothing is compared by value.
"""

from __future__ import annotations

import zlib
from contextvars import ContextVar
from typing import TYPE_CHECKING, NoReturn

import torch

from tpoverlap.comm import Outline
from tpoverlap.errors import ActiveShapeError, RankMismatchError
from tpoverlap.tokens import TokenPartition

if TYPE_CHECKING:
    from tpoverlap.manager import UserBufferManager

_detail: ContextVar[int] = ContextVar("tpoverlap_agreement", default=0)


class agreeing_on:  # a context manager; not a generator, which would cost a layer several times as much
    """Layers' forward operations in this block are for ranks that give the same ``detail``. Local to the thread."""

    __slots__ = ("_token", "_value")

    def __init__(self, detail: int) -> None:
        self._value = detail

    def __enter__(self) -> None:
        self._token = _detail.set(self._value)

    def __exit__(self, *error: object) -> None:
        _detail.reset(self._token)


def agreed_detail() -> int:
    """The `agreeing_on` of now; 0 outside."""
    return _detail.get()


def values_hash(manager: UserBufferManager, what: str, values: torch.Tensor, more: int) -> int:
    """Hash of the numbers of an integer tensor on the host, whatever their dtype, and of ``more``; else ``more``.

    For the operation that peers may `refuse` under the name ``what``.
    """
    if manager.channel is None or values.device.type != "cpu":
        return more
    manager.channel.diagnosis.know(_refusal_label(what))
    return zlib.crc32(values.detach().to(torch.int64).contiguous().numpy().tobytes(), more & 0xFFFFFFFF)


def refuse(manager: UserBufferManager, what: str, values: torch.Tensor, problem: str) -> NoReturn:
    """Raise ActiveShapeError(problem) about an input of the whole group, and let the other ranks know.

    They are about to wait for this rank. If they were given the same input they are here, too, and the manager stays
    usable; else everybody finds that the ranks disagree, and this rank's operation says why.

    Args:
        what: names the operation, such as "cross entropy".
        values: the input, on the host; [T].
    """
    channel = manager.channel
    if channel is not None:
        partition = TokenPartition.balanced(max(1, values.shape[0]), manager.tp_size)
        try:
            detail = values_hash(manager, what, values, 0)
            with channel.announced(Outline(_refusal_label(what), partition, manager.dtype, detail)):
                pass
        except RankMismatchError as error:
            raise ActiveShapeError(f"{problem}; the other ranks were given something else: {error}") from error
    raise ActiveShapeError(problem)


def _refusal_label(what: str) -> str:
    return f"{what}: refused, a value is outside the vocabulary,"
