"""What every autograd function of this package does around its own work, without the parts that it never needs.

A layer's forward and backward pass through six of them, and on small T the host is what takes the time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

Backward = Callable[..., Any]


def apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """``function.apply(*arguments)``, for a function without ``setup_context``.

    Outside of functorch's transforms and of compilers, torch's own looks at each argument for a tensor that one of them
    has left behind; here none can be.
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return function.apply(*arguments)
    return super(torch.autograd.Function, function).apply(*arguments)  # type: ignore[misc]  # what that one calls


def differentiable_once(backward: Backward) -> Backward:
    """Torch's ``once_differentiable``, which has nothing to do unless a graph of the backward pass is wanted."""
    guarded = once_differentiable(backward)

    @functools.wraps(backward)
    def run(ctx: Any, *grads: torch.Tensor) -> Any:
        return guarded(ctx, *grads) if torch.is_grad_enabled() else backward(ctx, *grads)

    return run
