"""act(g) * u for h = [g, u] side by side, and its gradient: one pass each.

========  ======================================  ============================  ======================
          computes                                shapes                        reads, writes
========  ======================================  ============================  ======================
forward   y = act(g) u                            [T,2F] -> [T,F]               h; y
backward  dg = dy u act'(g), du = dy act(g)       [T,F], [T,2F] -> [T,2F]       dy, h; dh
========  ======================================  ============================  ======================

act is "silu", "gelu" (the tanh approximation) or "relu". The kernels compute in float32 and round once; the twins round
after each torch operation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Final

import torch
import torch.nn.functional as F

from tpoverlap.nn.elementwise.launch import DirectKernel, runs_kernels, vector_unit

_BLOCK: Final = 1024
_NUM_WARPS: Final = 4

GATES: Final[Mapping[str, Callable[[torch.Tensor], torch.Tensor]]] = MappingProxyType(
    {"silu": F.silu, "gelu": partial(F.gelu, approximate="tanh"), "relu": F.relu}
)


def _silu_gradient(dy: torch.Tensor, g: torch.Tensor, out: torch.Tensor) -> None:
    torch.ops.aten.silu_backward.grad_input(dy, g, grad_input=out)


def _gelu_gradient(dy: torch.Tensor, g: torch.Tensor, out: torch.Tensor) -> None:
    torch.ops.aten.gelu_backward.grad_input(dy, g, approximate="tanh", grad_input=out)


def _relu_gradient(dy: torch.Tensor, g: torch.Tensor, out: torch.Tensor) -> None:
    torch.ops.aten.threshold_backward.grad_input(dy, g, 0, grad_input=out)


_WRITE_GRADIENT = MappingProxyType({"silu": _silu_gradient, "gelu": _gelu_gradient, "relu": _relu_gradient})


def gated_forward(h: torch.Tensor, gate: str) -> torch.Tensor:
    """[T, 2F], the gate's F features first, -> [T, F], contiguous. Rows of ``h`` may be strided."""
    if runs_kernels(h) and h.dim() == 2 and h.stride(1) == 1:
        return gated_forward_kernel(h, gate)
    return gated_forward_twin(h, gate)


def gated_backward(dy: torch.Tensor, h: torch.Tensor, gate: str) -> torch.Tensor:
    """Dh [T, 2F], contiguous, of dy [T, F] (h's dtype) and the forward's h."""
    if runs_kernels(h) and h.dim() == 2 and h.stride(1) == 1 and dy.dtype == h.dtype:
        return gated_backward_kernel(dy if dy.stride(1) == 1 else dy.contiguous(), h, gate)
    return gated_backward_twin(dy, h, gate)


def gated_forward_twin(h: torch.Tensor, gate: str) -> torch.Tensor:
    """`gated_forward` in plain torch, on any device and in any dtype."""
    g, u = h.chunk(2, dim=-1)
    return GATES[gate](g) * u


def gated_backward_twin(dy: torch.Tensor, h: torch.Tensor, gate: str) -> torch.Tensor:
    """`gated_backward` in plain torch. Both halves are written in place: autograd's own would pad each with zeros and
    add the two.
    """
    g, u = h.chunk(2, dim=-1)
    dh = torch.empty_like(h, memory_format=torch.contiguous_format)
    dg, du = dh.chunk(2, dim=-1)
    torch.mul(dy, GATES[gate](g), out=du)
    _WRITE_GRADIENT[gate](dy * u, g, dg)
    return dh


def gated_forward_kernel(h: torch.Tensor, gate: str) -> torch.Tensor:
    """`gated_forward` by the Triton kernel (on the CPU: in its interpreter)."""
    rows, width = h.shape[0], h.shape[1] // 2
    y = h.new_empty(rows, width)
    row_stride = h.stride(0)
    unit = vector_unit(width, row_stride)
    blocks = -(-width // _BLOCK)
    _kernels()[0].launch(rows * blocks, (h, y), (width // unit, blocks, row_stride // unit), (gate, unit, _BLOCK))
    return y


def gated_backward_kernel(dy: torch.Tensor, h: torch.Tensor, gate: str) -> torch.Tensor:
    """`gated_backward` by the Triton kernel (on the CPU: in its interpreter)."""
    rows, width = dy.shape
    dh = torch.empty_like(h, memory_format=torch.contiguous_format)
    row_stride, dy_stride = h.stride(0), dy.stride(0)
    unit = vector_unit(width, row_stride, dy_stride)
    blocks = -(-width // _BLOCK)
    _kernels()[1].launch(
        rows * blocks,
        (h, dy, dh),
        (width // unit, blocks, row_stride // unit, dy_stride // unit),
        (gate, unit, _BLOCK),
    )
    return dh


@lru_cache(maxsize=1)
def _kernels() -> tuple[DirectKernel, DirectKernel]:
    from tpoverlap.nn.elementwise import gated_kernels

    return DirectKernel(gated_kernels.gated_forward, _NUM_WARPS), DirectKernel(gated_kernels.gated_backward, _NUM_WARPS)
