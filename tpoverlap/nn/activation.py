"""Activations between fc1 and fc2. Gated ones take [T, 2F], the gate's F features first, and give [T, F].

==========================  ==============================  ==========================================================
``activation``              of h [T, F] or [g, u] [T, 2F]   note
==========================  ==============================  ==========================================================
gelu, relu, silu, srelu     act(h)                          gelu is the tanh approximation, as in Transformer Engine
qgelu                       h sigmoid(1.702 h)
geglu, reglu, swiglu        act(g) u                        act is gelu, relu, silu
==========================  ==============================  ==========================================================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from tpoverlap.errors import ConfigError

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


def _silu_gradient(dy: torch.Tensor, g: torch.Tensor, out: torch.Tensor) -> None:
    torch.ops.aten.silu_backward.grad_input(dy, g, grad_input=out)


def _gelu_gradient(dy: torch.Tensor, g: torch.Tensor, out: torch.Tensor) -> None:
    torch.ops.aten.gelu_backward.grad_input(dy, g, approximate="tanh", grad_input=out)


def _relu_gradient(dy: torch.Tensor, g: torch.Tensor, out: torch.Tensor) -> None:
    torch.ops.aten.threshold_backward.grad_input(dy, g, 0, grad_input=out)


_WRITE_GRADIENT = MappingProxyType({"silu": _silu_gradient, "gelu": _gelu_gradient, "relu": _relu_gradient})


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
    result: torch.Tensor = _Gated.apply(h, _GATE_OF[name])  # type: ignore[no-untyped-call]
    return result


class _Gated(torch.autograd.Function):
    """act(g) * u for [g, u] side by side. Saved: h alone. backward writes both halves of dh [T, 2F] in place, where
    autograd's own would pad each half with zeros and add the two.
    """

    @staticmethod
    def forward(ctx: Any, h: torch.Tensor, gate: str) -> torch.Tensor:
        g, u = h.chunk(2, dim=-1)
        ctx.gate = gate
        ctx.save_for_backward(h)
        return PLAIN_ACTIVATIONS[gate](g) * u

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (h,), dy = ctx.saved_tensors, grads[0]
        g, u = h.chunk(2, dim=-1)
        dh = torch.empty_like(h, memory_format=torch.contiguous_format)
        dg, du = dh.chunk(2, dim=-1)
        torch.mul(dy, PLAIN_ACTIVATIONS[ctx.gate](g), out=du)
        _WRITE_GRADIENT[ctx.gate](dy * u, g, dg)
        return dh, None
