"""A layer with every TP collective taken out: what its GEMMs, norms, attention and activation take by themselves.

`without_collectives` puts a `ComputeOnlyGemm` in place of each GEMM of a layer. All the rest of the layer stays, and so
do the kernels and the shapes. What a collective would bring lies ready in `Resident`, so the numbers mean nothing.

========  =================================================  ==========================  =============================
          computes                                           shapes on rank r            in place of the collective
========  =================================================  ==========================  =============================
column    y = resident W^T                                   [T,K] -> [T,N_i]            resident x, not gather(x)
          dx_shard = own rows of dy W                        [T,N_i] -> [T,K] -> [T_r,K] a view, no sum over ranks
          dW = dy^T resident                                 [N_i,T] x [T,K]             resident x again
row       y_shard = own rows of x W^T                        [T,K] -> [T,N] -> [T_r,N]   a view, no sum over ranks
          dx = resident W; dW = resident^T x                 [T,N] -> [T,K]; [N,K]       resident dy, not gather(dy)
FP8       the same on FP8 operands; the rank's own shard     as above                    resident q(x), q(dy) with
          and the weights are still measured and quantised                               their scales
========  =================================================  ==========================  =============================
"""

from __future__ import annotations

from typing import Any

import torch

from tpoverlap.gemm import weight_grad
from tpoverlap.gemm.fp8 import Fp8State, QuantizedTensor, Quantizer, ScaledPartialGemm, ScaledRowGemm
from tpoverlap.nn.autograd import apply, differentiable_once
from tpoverlap.nn.fp8.wgrad import WgradOperand, fp8_weight_grad
from tpoverlap.nn.parallel_gemm import ParallelGemm
from tpoverlap.nn.parallel_layer import ParallelLayer
from tpoverlap.tokens import TokenPartition


class Resident:
    """What gathers would have brought: an activation and a gradient, [C, H] each, and both in FP8.

    Args:
        activation, gradient: random numbers of the size of the real ones.
    """

    def __init__(self, activation: torch.Tensor, gradient: torch.Tensor) -> None:
        self._plain = {"input": activation, "grad": gradient}
        self._quantised: dict[tuple[str, torch.dtype], QuantizedTensor] = {}

    def plain(self, role: str, num_tokens: int) -> torch.Tensor:
        """[T, H] for role "input" or "grad"."""
        return self._plain[role][:num_tokens]

    def quantised(self, quantizer: Quantizer, num_tokens: int) -> QuantizedTensor:
        """[T, H] in the format of ``quantizer``; quantised once, since a gather brings FP8 rows."""
        key = (quantizer.role, quantizer.dtype)
        if key not in self._quantised:
            self._quantised[key] = quantizer.local(self._plain[quantizer.role], record=False)
        whole = self._quantised[key]
        return QuantizedTensor(whole.data[:num_tokens], whole.scale, whole.dtype)


def without_collectives(layer: torch.nn.Module, resident: Resident) -> torch.nn.Module:
    """``layer`` itself, whose GEMMs communicate nothing from now on. Pass ``partition=`` to each of its forwards."""
    for module in layer.modules():
        if isinstance(module, ParallelLayer):
            module._gemms = tuple(ComputeOnlyGemm(gemm, resident) for gemm in module._gemms)
    return layer


class ComputeOnlyGemm(ParallelGemm):
    """One GEMM of a layer, in place of ``gemm``: without bias, and per-tensor scales in FP8, as the suite has them."""

    def __init__(self, gemm: ParallelGemm, resident: Resident) -> None:
        super().__init__(gemm.manager, gemm.ub_name, row=gemm.row, fp8=gemm._fp8)
        self._resident = resident

    def column(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        partition: TokenPartition | None,
        *,
        return_gathered: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Y [T, N] of the resident activation; x [T_r, K] is quantised in FP8 and gets a gradient."""
        assert partition is not None and bias is None and not return_gathered, "not in this suite"
        return self._apply(_Fp8Column, _Column, "input", partition, x, weight), None

    def row_parallel(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, partition: TokenPartition | None
    ) -> torch.Tensor:
        """Own rows [T_r, N] of this rank's partial sum; backward takes the resident gradient."""
        assert partition is not None and bias is None, "not in this suite"
        return self._apply(_Fp8Row, _Row, "grad", partition, x, weight)

    def _apply(
        self,
        in_fp8: type[torch.autograd.Function],
        plain: type[torch.autograd.Function],
        role: str,
        partition: TokenPartition,
        x: torch.Tensor,
        weight: torch.Tensor,
    ) -> torch.Tensor:
        rows, fp8 = partition.rows(self.manager.rank), self._fp8_state()
        y: torch.Tensor
        if fp8 is None:
            y = apply(plain, rows, self._resident.plain(role, partition.total), x, weight)
        else:
            whole = self._resident.quantised(fp8.quantizer(role), partition.total)
            y = apply(in_fp8, rows, whole, fp8, x, weight)
        return y


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: slice, whole: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.rows, ctx.whole = rows, whole
        ctx.save_for_backward(weight)
        return torch.mm(whole, weight.t())

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        (weight,), dy = ctx.saved_tensors, grads[0].contiguous()
        dx = torch.mm(dy, weight)
        return None, None, dx[ctx.rows], weight_grad(dy, ctx.whole)


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: slice, whole: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.whole = whole
        ctx.save_for_backward(x, weight)
        return torch.mm(x, weight.t())[rows]

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        return None, None, torch.mm(ctx.whole, weight), weight_grad(ctx.whole, x)


class _Fp8Column(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: slice, whole: QuantizedTensor, fp8: Fp8State, x: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        quantised = fp8.quantized_weight(0, weight, transposes=True)
        fp8.input.local(x.detach(), record=False)  # what this rank would have sent
        out = _scaled_rows(whole, quantised.weight, x, fast_accumulation=True)
        transposed = quantised.transposed
        ctx.rows, ctx.whole, ctx.fp8 = rows, whole, fp8
        ctx.save_for_backward(transposed.data, transposed.scale)
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        dy, whole = grads[0].contiguous(), ctx.whole
        data, scale = ctx.saved_tensors
        weight = QuantizedTensor(data, scale, whole.dtype)
        quantised = ctx.fp8.quantizer("grad").local(dy, record=False, transposes=True)
        gemm = ScaledPartialGemm(terms=[(quantised, weight)])
        dx = gemm.empty(dy.shape[0], gemm.width)
        gemm.rows(0, dy.shape[0], dx)
        weight_gradient = fp8_weight_grad(WgradOperand(quantised), WgradOperand(whole), False)
        return None, None, None, dx[ctx.rows], weight_gradient


class _Fp8Row(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: slice, whole: QuantizedTensor, fp8: Fp8State, x: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        quantised_x = fp8.input.local(x.detach(), record=False, transposes=True)
        quantised = fp8.quantized_weight(0, weight, transposes=True)
        gemm = ScaledPartialGemm(terms=[(quantised_x, quantised.weight)], fast_accumulation=True)
        out = gemm.empty(x.shape[0], gemm.width)
        gemm.rows(0, x.shape[0], out)
        transposed = quantised.transposed
        ctx.whole, ctx.fp8 = whole, fp8
        x_t = quantised_x.padded_transposed()
        ctx.save_for_backward(x_t.data, x_t.scale, transposed.data, transposed.scale)
        return out[rows]

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        dy_shard, whole = grads[0].contiguous(), ctx.whole
        data, scale, weight_data, weight_scale = ctx.saved_tensors
        x, weight = QuantizedTensor(data, scale, whole.dtype), QuantizedTensor(weight_data, weight_scale, whole.dtype)
        ctx.fp8.quantizer("grad").local(dy_shard, record=False)  # what this rank would have sent
        dx = _scaled_rows(whole, weight, dy_shard, fast_accumulation=False)
        return None, None, None, dx, fp8_weight_grad(WgradOperand(whole), WgradOperand(None, x), False)


def _scaled_rows(
    whole: QuantizedTensor, weight: QuantizedTensor, like: torch.Tensor, *, fast_accumulation: bool
) -> torch.Tensor:
    out = like.new_empty(whole.data.shape[0], weight.data.shape[0])
    gemm = ScaledRowGemm(
        weights=[weight],
        biases=[None],
        outs=[out],
        x_scale=whole.scale,
        x_format=whole.data.dtype,
        fast_accumulation=fast_accumulation,
    )
    gemm.rows(whole.bytes, 0)
    return out
