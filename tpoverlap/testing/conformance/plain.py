"""The twins in plain torch: the whole group's arithmetic on one rank, without any communication.

Called in the tested dtype they round where the methods round: partial sums once to the communicated dtype, their sum
(float32, rank order) once. Called on tensors of the reference dtype they are the reference.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


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
    xs: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], bias: torch.Tensor | None, own: int = 0
) -> torch.Tensor:
    """Sum over ranks q of xs[q] @ weights[q].T, plus the bias once (in the partial sum of rank ``own``).

    Args:
        xs: [T, K] each. weights: [N, K] each.
    """
    partials = [linear(x, weight, None) for x, weight in zip(xs, weights, strict=True)]
    if bias is not None:
        partials[own] = partials[own] + bias
    return rank_sum(partials)


def input_grad(output_grads: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Column-parallel dx [T, K]: the sum over ranks of dy [T, N] @ W [N, K]."""
    return rank_sum([torch.mm(dy, weight) for dy, weight in zip(output_grads, weights, strict=True)])


def weight_grad(output_grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """dW [N, K] = dy [T, N].T @ x [T, K]."""
    return torch.mm(output_grad.t(), x)


def wide(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The same numbers in the reference dtype, without history."""
    return value.detach().to(dtype)
