"""Cross-entropy of logits that are cut along the vocabulary; the logits are never gathered.

===============  =========================================  ===========================  ===============================
                 computes                                   shapes on rank r             collective
===============  =========================================  ===========================  ===============================
maximum          m = max over V                             [T,V_r] -> [T]               all-gather of [1,T] a rank
sums             s = sum over V of exp(l - m), l[target]    [T,V_r] -> [2,T]             all-gather of [2,T] a rank
loss             log s + m - l[target]                      [T]                          none
backward         dl = (exp(l - m) / s - onehot) dloss       [T] -> [T,V_r]               none
===============  =========================================  ===========================  ===============================

What travels is 3 T float32 numbers a rank. Sums are in rank order, so every rank has the same bits. Saved: the logits,
and log s + m [T] in float32; the softmax is computed again, block of rows by block of rows, so that no float32 tensor
of the size of the logits exists.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from tpoverlap.errors import ActiveShapeError, ConfigError
from tpoverlap.nn.agreement import refuse, values_hash
from tpoverlap.nn.autograd import is_compiling, uncompiled
from tpoverlap.nn.vocab import vocabulary_rows
from tpoverlap.nn.vocab_statistics import gather_statistics

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tpoverlap.manager import UserBufferManager

_BLOCK_ELEMENTS = 1 << 24
"""Of the float32 scratch: 64 MiB."""
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
REDUCTIONS = ("none", "sum", "mean")


def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    vocab_size: int,
    manager: UserBufferManager,
    *,
    ignore_index: int = -100,
    reduction: str = "none",
) -> torch.Tensor:
    """Cross-entropy (nats, float32) of `VocabParallelHead`'s logits. Every rank gets the loss of all T rows.

    So the loss is not to be summed over ranks, and needs no division by R: ``loss.backward()`` on every rank gives each
    its part of the gradient.

    Args:
        logits: [T, V_r], this rank's part of the vocabulary.
        targets: [T] entries of the full vocabulary, the same on every rank.
        vocab_size: V.
        manager: of the head.
        ignore_index: rows with this target have loss 0 and no gradient.
        reduction: "none" [T], "sum", or "mean" over the rows that are not ignored.

    Raises:
        ActiveShapeError: shapes do not fit each other, targets are no integers, or one is outside the vocabulary. (On a
            GPU nobody waits to look at targets: such a row's loss is NaN.)
        RankMismatchError: ranks differ in T, in the vocabulary, or (on the CPU) in their targets; also where one rank
            refuses its targets and others do not.
        ConfigError: an unknown ``reduction``.
    """
    if is_compiling():
        options = {"ignore_index": ignore_index, "reduction": reduction}
        return uncompiled(vocab_parallel_cross_entropy, logits, targets, vocab_size, manager, **options)
    if reduction not in REDUCTIONS:
        raise ConfigError(f"reduction={reduction!r} is not known; use one of {', '.join(REDUCTIONS)}")
    manager.require_open()
    vocabulary = vocabulary_rows(vocab_size, manager)
    width = vocabulary.stop - vocabulary.start
    _require_kinds(logits, targets)
    if logits.dim() != 2 or targets.shape != logits.shape[:1] or logits.shape[1] != width or logits.shape[0] == 0:
        raise ActiveShapeError(
            f"logits are {list(logits.shape)}, targets {list(targets.shape)}; rank {manager.rank} of "
            f"{manager.tp_size} needs [T, {width}] of the vocabulary's {vocab_size}, and [T] with T of at least 1"
        )
    if targets.device.type == "cpu":
        wrong = targets[(targets != ignore_index) & ((targets < 0) | (targets >= vocab_size))]
        if wrong.numel():
            problem = f"target {int(wrong[0])} is not among the vocabulary's {vocab_size} entries"
            refuse(manager, "cross entropy", targets, f"rank {manager.rank}: {problem}")
    losses: torch.Tensor = _CrossEntropy.apply(manager, logits, targets, vocabulary, ignore_index, vocab_size)  # type: ignore[no-untyped-call]
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total / (targets != ignore_index).sum()


def _require_kinds(logits: torch.Tensor, targets: torch.Tensor) -> None:
    """A fraction would be cut to the entry below it, without a word."""
    kinds = [getattr(one, "dtype", type(one).__name__) for one in (logits, targets)]
    tensors = isinstance(logits, torch.Tensor) and isinstance(targets, torch.Tensor)
    if tensors and logits.is_floating_point() and targets.dtype in _INTEGERS:
        return
    raise ActiveShapeError(
        f"logits are {kinds[0]}, targets {kinds[1]}; give logits as a floating-point tensor and targets as a tensor of "
        "integers: entries of the vocabulary"
    )


class _CrossEntropy(torch.autograd.Function):
    """See the table above."""

    @staticmethod
    def forward(
        ctx: Any,
        manager: UserBufferManager,
        logits: torch.Tensor,
        targets: torch.Tensor,
        vocabulary: slice,
        ignore_index: int,
        vocab_size: int,
    ) -> torch.Tensor:
        own_maximum = logits.max(dim=1).values.float()
        detail = values_hash(manager, "cross entropy", targets, vocab_size)
        maximum = gather_statistics(manager, "maximum", own_maximum[None], detail).amax(0)[0]
        ignored = targets == ignore_index
        illegal = ~ignored & ((targets < 0) | (targets >= vocab_size))
        columns = targets.long() - vocabulary.start
        elsewhere = ignored | (columns < 0) | (columns >= logits.shape[1])
        columns = columns.masked_fill(elsewhere, 0)
        own = logits.new_empty(2, logits.shape[0], dtype=torch.float32)
        for rows in _blocks(logits):
            own[0, rows] = torch.sub(logits[rows].float(), maximum[rows, None]).exp_().sum(1)
        own[1] = logits.gather(1, columns[:, None])[:, 0].float().masked_fill_(elsewhere, 0)
        sums = torch.zeros_like(own)
        for part in gather_statistics(manager, "sums", own, detail).unbind(0):
            sums += part  # in rank order
        log_sum = (sums[0].log() + maximum).masked_fill_(illegal, torch.nan)  # its gradient is NaN, too
        ctx.save_for_backward(logits, log_sum, columns, elsewhere, ignored)
        return (log_sum - sums[1]).masked_fill(ignored, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        logits, log_sum, columns, elsewhere, ignored = ctx.saved_tensors
        scale = grads[0].float().masked_fill(ignored, 0)
        logits_grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
        for rows in _blocks(logits):
            softmax = torch.sub(logits[rows].float(), log_sum[rows, None]).exp_()
            at_target = torch.where(elsewhere[rows], 0.0, -1.0)
            softmax.scatter_add_(1, columns[rows, None], at_target[:, None])
            logits_grad[rows] = softmax.mul_(scale[rows, None])
        return None, logits_grad, None, None, None, None


def _blocks(logits: torch.Tensor) -> Iterator[slice]:
    step = max(1, _BLOCK_ELEMENTS // logits.shape[1])
    for start in range(0, logits.shape[0], step):
        yield slice(start, min(start + step, logits.shape[0]))
