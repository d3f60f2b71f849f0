"""What ``mgr.explain`` prints: one operation in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import torch

from tpoverlap.config import Note
from tpoverlap.config.honoured import FP8_SCATTERS
from tpoverlap.dispatch import Decision
from tpoverlap.gemm.cublaslt import lt_products
from tpoverlap.gemm.fp8 import SCALE_BYTES
from tpoverlap.overlap.fp8 import METHODS
from tpoverlap.overlap.kernel_trader import exchange_form
from tpoverlap.overlap.tapes import tape_maker
from tpoverlap.tokens import TokenPartition

if TYPE_CHECKING:
    from tpoverlap.communicator import CommOverlap

UNDER_RECIPE: Final = "under an FP8 recipe"
"""Begins the lines about layers with a recipe."""


def explanation(
    communicator: CommOverlap,
    partition: TokenPartition,
    decision: Decision,
    backend: str,
    notes: Sequence[Note],
    dtype: torch.dtype,
    remark: str = "",
    fp8: tuple[Decision, str] | None = None,
) -> str:
    """Method, source and reason; rows and bytes; backend and why; what the configuration's checker had to say.

    ``remark``: about the choice by T, empty where there is none. ``fp8``: where the manager has an FP8 mode, the same
    two for layers with a recipe: they move another number of bytes, maybe by another method.
    """
    tokens, width = partition.total, communicator.width
    size_bytes = tokens * width * dtype.itemsize
    form = _form(communicator, partition, decision)
    lines = [
        f"{communicator.name} at T={tokens}: {_method(decision)} ({communicator.config.direction})",
        f"  chosen by: {decision.source}: {decision.reason}",
        *([f"  by T: {remark}"] if remark else []),
        *([f"  form: {form}"] if form else []),
        *sums_by_torch(communicator, decision),
        *calls_by_python(communicator, decision),
        f"  rows a rank: {list(partition.counts)}; activation [{tokens}, {width}], {size_bytes} bytes",
        *(_under_recipe(communicator, *fp8, tokens, size_bytes, dtype) if fp8 else []),
        f"  backend: {backend}",
    ]
    return "\n".join(lines + [f"  {note.level}: {note}" for note in notes])


def _method(decision: Decision) -> str:
    splits = f" in {decision.config.num_splits}" if decision.method == "pipeline" and decision.config else ""
    return decision.method + splits


def _under_recipe(
    communicator: CommOverlap, decision: Decision, remark: str, tokens: int, size_bytes: int, dtype: torch.dtype
) -> list[str]:
    return [
        f"  {UNDER_RECIPE}: {_in_fp8(communicator, decision, tokens, size_bytes, dtype)}",
        f"    by {_method(decision)}, chosen by: {decision.source}: {decision.reason}",
        *([f"    by T: {remark}"] if remark else []),
    ]


def _form(communicator: CommOverlap, partition: TokenPartition, decision: Decision) -> str:
    """How sequential moves its rows through registered buffers; "" where it does not."""
    manager = communicator.manager
    channel = manager.channel
    if channel is None or decision.method != "sequential" or decision.source == "overflow":
        return ""
    if not communicator.registered or not channel.backend.one_sided:
        return ""
    sums = manager.dtype if communicator.is_reduce_scatter else None
    return exchange_form(channel, partition.counts, communicator.width * manager.dtype.itemsize, sums)


def sums_by_torch(communicator: CommOverlap, decision: Decision) -> list[str]:
    """A line if own rows of a ring are added to what arrived by torch; cublasLt reads that where it is."""
    device = communicator.manager.device
    if device.type != "cuda" or decision.method != "ring_exchange" or not communicator.config.is_reduce_scatter:
        return []
    if lt_products(device.index or 0) is not None:
        return []
    return ["  sums: by torch, with a copy more: there is no cublasLt, the log says why"]


def calls_by_python(communicator: CommOverlap, decision: Decision) -> list[str]:
    """A line if operations that C could start are started call by call from Python."""
    channel = communicator.manager.channel
    if channel is None or channel.device.type != "cuda" or decision.method == "pipeline":
        return []
    if tape_maker(channel) is not None:
        return []
    return ["  host: calls one by one from Python, which takes the processor longer: no C compiler, the log says why"]


def _in_fp8(communicator: CommOverlap, decision: Decision, tokens: int, size_bytes: int, dtype: torch.dtype) -> str:
    """What an FP8 layer's operation of this name moves: docs/design/0008-fp8.md."""
    method, config = decision.method, decision.config or communicator.config
    rows_bytes = tokens * communicator.width
    if method not in METHODS:
        return f"refused, {method} moves no FP8 rows; {', '.join(METHODS)} do"
    if not config.is_reduce_scatter:
        return f"{rows_bytes} bytes, one an element, and the scales: {SCALE_BYTES} bytes a tensor, or a row if row-wise"
    if communicator.config.fp8_buf and method in FP8_SCATTERS:
        return f"{rows_bytes + SCALE_BYTES * tokens} bytes, one an element and {SCALE_BYTES} a row for its scale"
    why = "fp8_buf is false" if not communicator.config.fp8_buf else f"{method} adds in it"
    return f"{size_bytes} bytes still, the sums move in {str(dtype).removeprefix('torch.')}: {why}"


def overflow_message(rank: int, communicator: CommOverlap, partition: TokenPartition) -> str:
    """The log line of a microbatch that does not fit, where ``on_overflow`` lets it run."""
    return (
        f"rank {rank}: T={partition.total} (rows a rank: {list(partition.counts)}) is above the capacity of "
        f"{communicator.max_tokens} tokens or {communicator.max_rows_per_rank} rows a rank: this microbatch runs "
        f"without overlap, first {communicator.name}"
    )
