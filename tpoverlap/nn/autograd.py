"""What every autograd function of this package does around its own work, without the parts that it never needs.

A layer's forward and backward pass through six of them, and on small T the host is what takes the time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.autograd.function import once_differentiable
from torch.compiler import is_dynamo_compiling

Backward = Callable[..., Any]
Result = TypeVar("Result")
is_compiling = is_dynamo_compiling  # one call, where torch.compiler.is_compiling is two


def uncompiled(function: Callable[..., Result], *arguments: Any, **options: Any) -> Result:
    """Call ``function`` where `is_compiling`: it breaks ``torch.compile``'s graph, and nothing below is compiled.

    Slots, flags and counters are none of what a compiler may trace. ``torch.compiler.disable`` as a decorator would
    import the compiler along with this package, and cost every call.
    """
    result: Result = torch.compiler.disable(function)(*arguments, **options)
    return result


def apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """``function.apply(*arguments)``, for a function without ``setup_context``.

    Outside of functorch's transforms and of compilers, torch's own looks at each argument for a tensor that one of them
    has left behind; here none can be.
    """
    if is_compiling() or torch._C._are_functorch_transforms_active():
        return function.apply(*arguments)
    return super(torch.autograd.Function, function).apply(*arguments)  # type: ignore[misc]  # what that one calls


def differentiable_once(backward: Backward) -> Backward:
    """Torch's ``once_differentiable``, which has nothing to do unless a graph of the backward pass is wanted."""
    guarded = once_differentiable(backward)

    @functools.wraps(backward)
    def run(ctx: Any, *grads: torch.Tensor) -> Any:
        return guarded(ctx, *grads) if torch.is_grad_enabled() else backward(ctx, *grads)

    return run
