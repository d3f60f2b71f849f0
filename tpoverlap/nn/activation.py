"""Activations between fc1 and fc2. Gated ones take [T, 2F], the gate's F features first, and give [T, F].

==========================  ==============================  ==========================================================
``activation``              of h [T, F] or [g, u] [T, 2F]   note
==========================  ==============================  ==========================================================
gelu, relu, silu, srelu     act(h)                          gelu is the tanh approximation, as in Transformer Engine
qgelu                       h sigmoid(1.702 h)
geglu, reglu, swiglu        act(g) u                        act is gelu, relu, silu; one kernel each way on CUDA
==========================  ==============================  ==========================================================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F

from tpoverlap.errors import ConfigError
from tpoverlap.nn.autograd import apply, differentiable_once
from tpoverlap.nn.elementwise import gated_backward, gated_forward

Pointwise = Callable[[torch.Tensor], torch.Tensor]

PLAIN_ACTIVATIONS: Mapping[str, Pointwise] = MappingProxyType(
    {
        "gelu": partial(F.gelu, approximate="tanh"),
        "relu": F.relu,
        "silu": F.silu,
        "srelu": lambda h: F.relu(h).square(),
        "qgelu": lambda h: h * torch.sigmoid(1.702 * h),
    }
)
_GATE_OF: Mapping[str, str] = MappingProxyType({"geglu": "gelu", "reglu": "relu", "swiglu": "silu"})


def require_activation(name: str) -> None:
    """Raise ConfigError, listing the names, for one that is not known."""
    if name not in PLAIN_ACTIVATIONS and name not in _GATE_OF:
        raise ConfigError(f"activation={name!r} is not known; use one of {', '.join((*PLAIN_ACTIVATIONS, *_GATE_OF))}")


def is_gated(name: str) -> bool:
    """Whether fc1 has a gate and an up part."""
    return name in _GATE_OF


def activate(name: str, h: torch.Tensor) -> torch.Tensor:
    """Apply activation ``name`` to fc1's output."""
    if name not in _GATE_OF:
        return PLAIN_ACTIVATIONS[name](h)
    if not (h.requires_grad and torch.is_grad_enabled()):
        return gated_forward(h, _GATE_OF[name])
    result: torch.Tensor = apply(_Gated, h, _GATE_OF[name])
    return result


class _Gated(torch.autograd.Function):
    """act(g) * u for [g, u] side by side. Saved: h [T, 2F] alone; see `tpoverlap.nn.elementwise.gated`."""

    @staticmethod
    def forward(ctx: Any, h: torch.Tensor, gate: str) -> torch.Tensor:
        ctx.gate = gate
        ctx.save_for_backward(h)
        return gated_forward(h, gate)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (h,) = ctx.saved_tensors
        return gated_backward(grads[0], h, ctx.gate), None
