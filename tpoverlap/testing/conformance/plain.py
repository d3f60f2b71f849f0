"""The twins in plain torch: the whole group's arithmetic on one rank, without any communication.

Called in the tested dtype they round where the methods round: partial sums once to the communicated dtype, their sum
(float32, rank order) once. Called on tensors of the reference dtype they are the reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tpoverlap.tokens import TokenPartition


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """[T, K] x [N, K] -> [T, N]."""
    return torch.mm(x, weight.t()) if bias is None else torch.addmm(bias, x, weight.t())


def rank_sum(partials: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum of R equal shapes in rank order, in at least float32, rounded once. Differentiable."""
    wide = torch.promote_types(partials[0].dtype, torch.float32)
    total = partials[0].to(wide)
    for partial in partials[1:]:
        total = total + partial.to(wide)
    return total.to(partials[0].dtype)


def row_linear(
    xs: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor] | None,
    partition: TokenPartition,
    fused_bias: bool = False,
) -> torch.Tensor:
    """[T, N]: the sum over ranks q of xs[q] @ weights[q].T, plus the bias, once, in the owner's partial sum.

    Args:
        xs: [T, K] each.
        weights: [N, K] each.
        biases: [N] each: what each owner of rows adds (equal numbers; several tensors, so that each has a gradient).
        partition: whose rows are whose.
        fused_bias: added before the partial sum is rounded (ring_exchange), not after it (pipeline, sequential).
    """
    shards = []
    for owner in range(partition.tp_size):
        chunks = [x[partition.rows(owner)] for x in xs]
        partials = [linear(chunk, weight, None) for chunk, weight in zip(chunks, weights, strict=True)]
        if biases is not None:
            if fused_bias:
                partials[owner] = linear(chunks[owner], weights[owner], biases[owner])
            else:
                partials[owner] = partials[owner] + biases[owner]
        shards.append(rank_sum(partials))
    return torch.cat(shards)


def fuses_bias(method: str, tp_size: int) -> bool:
    """Whether ``method`` adds a row bias before it rounds."""
    return tp_size > 1 and method in ("ring_exchange", "auto")


class _FanOut(torch.autograd.Function):
    """R references to one tensor, whose gradients are summed as `rank_sum` does, not as autograd would."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
        return tuple(x.clone() for _ in range(count))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return rank_sum(grads), None


def fan_out(x: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
    """``x`` for each of ``count`` column-parallel shards; the backward is their input gradient's reduce-scatter."""
    copies: tuple[torch.Tensor, ...] = _FanOut.apply(x, count)  # type: ignore[no-untyped-call]
    return copies


def input_grad(output_grads: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Column-parallel dx [T, K]: the sum over ranks of dy [T, N] @ W [N, K]."""
    return rank_sum([torch.mm(dy, weight) for dy, weight in zip(output_grads, weights, strict=True)])


def weight_grad(output_grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Column- or row-parallel dW [N, K] = dy [T, N].T @ x [T, K]."""
    return torch.mm(output_grad.t(), x)


def wide(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The same numbers in the reference dtype, without history."""
    return value.detach().to(dtype)


def raised(values: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """`wide` of each."""
    return [wide(value, dtype) for value in values]
