"""Bytes between a parent and its ranks: plain pickle, with tensors copied to the CPU.

``multiprocessing`` would send a tensor as a file descriptor of shared memory, which dies with its sender and is not
allowed everywhere; a tensor that is a small view would take its whole storage along. Here a tensor travels by value.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch


class _ByValuePickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        # Exactly Tensor: Parameter and other subclasses keep what their own reduction keeps.
        if type(obj) is not torch.Tensor or obj.layout is not torch.strided:
            return NotImplemented
        copy = obj.detach().cpu()
        if copy.untyped_storage().nbytes() != copy.numel() * copy.element_size():
            copy = copy.clone()
        if obj.is_leaf:
            copy.requires_grad_(obj.requires_grad)
        return copy.__reduce_ex__(pickle.HIGHEST_PROTOCOL)


def dumps(value: object) -> bytes:
    """Pickle ``value``; tensors are detached, brought to the CPU and cut to the elements they show."""
    stream = io.BytesIO()
    _ByValuePickler(stream, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return stream.getvalue()


def loads(data: bytes) -> Any:
    """The value that ``dumps`` was given. Only for bytes of one's own children."""
    return pickle.loads(data)
