"""FP8 without sequence parallelism: activations are whole on every rank, GEMMs run in FP8 and meet an all-reduce.

================  =================================  ==========================  =====================================
                  computes                           shapes on rank r            collective, and what hides it
================  =================================  ==========================  =====================================
column fprop      y = q(x) q(W)^T + b                [T,K] -> [T,N]              none
column dgrad      dx = all-reduce(q(dy) q(W))        [T,N] -> [T,K]              reduce-scatter behind its own GEMM,
                                                                                 all-gather beside wgrad
column wgrad      dW = q(dy)^T q(x)                  [N,T16] x [T16,K] -> [N,K]  none
row fprop         y = all-reduce(q(x) q(W)^T) + b    [T,K] -> [T,N]              as in `tpoverlap.nn.all_reduce`
row dgrad, wgrad  dx = q(dy) q(W), dW = q(dy)^T q(x)  [T,N] -> [T,K], [N,K]      none
================  =================================  ==========================  =====================================

No scale is exchanged: what is replicated (a column's x, a row's dy) has the same bits on every rank, since all-reduces
here give them, and so the same magnitude; what is not (a column's dy, a row's x) is multiplied by this rank alone. The
all-reduce moves sums in the manager's dtype; with ``fp8_buf`` its reduce-scatter moves FP8 rows.

Saved: q(x) [T, K] in FP8 with its scale, and q(W)^T of the forward's version.
"""

from __future__ import annotations

from typing import Any

import torch

from tpoverlap.gemm.fp8 import Fp8State, QuantizedTensor, ScaledPartialGemm
from tpoverlap.gemm.fp8.scaled_mm import scaled_mm
from tpoverlap.nn.all_reduce import gemm_all_reduce
from tpoverlap.nn.autograd import differentiable_once
from tpoverlap.nn.fp8.wgrad import WgradOperand, fp8_weight_grad
from tpoverlap.nn.layer_view import LayerView


class Fp8ColumnWhole(torch.autograd.Function):
    """See the table above, rows "column"."""

    @staticmethod
    def forward(
        ctx: Any,
        layer: LayerView,
        fp8: Fp8State,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        return_x: bool,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        x8, weight8 = _quantised(ctx, layer, fp8, x, weight)
        ctx.return_x = return_x
        y = _multiplied(x8, weight8, bias, fast_accumulation=True)
        return (y, x.view_as(x)) if return_x else y

    @staticmethod
    @differentiable_once  # the gradient of a gradient would need collectives of its own
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        layer, dy = ctx.layer, grads[0].contiguous()
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[2:5]
        x8, weight8_t = _saved(ctx)
        dy8 = _quantised_grad(ctx, dy)
        weight_grads: list[torch.Tensor | None] = [None] if needs_weight else layer.weight_grads.skip(1)

        def work() -> None:
            weight_grads[:] = _weight_grad(ctx, dy, dy8, x8)

        x_grad = None
        if needs_x:
            assert dy8 is not None and weight8_t is not None, "needed"
            x_grad = dy.new_empty(dy.shape[0], weight8_t.data.shape[0])
            gemm = ScaledPartialGemm(terms=[(dy8, weight8_t)], addend=grads[1] if ctx.return_x else None)
            gemm_all_reduce(layer.dgrad, gemm, x_grad, work if needs_weight else None, fp8_format=dy8.data.dtype)
        elif needs_weight:
            work()
        return None, None, x_grad, weight_grads[0], dy.sum(0) if needs_bias else None, None


class Fp8RowWhole(torch.autograd.Function):
    """See the table above, rows "row"."""

    @staticmethod
    def forward(
        ctx: Any, layer: LayerView, fp8: Fp8State, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        x8, weight8 = _quantised(ctx, layer, fp8, x, weight)
        out = x.new_empty(x.shape[0], weight.shape[0])
        gemm = ScaledPartialGemm(terms=[(x8, weight8)], bias=bias, fast_accumulation=True)
        gemm_all_reduce(layer.fprop, gemm, out, None, fp8_format=x8.data.dtype)
        return out

    @staticmethod
    @differentiable_once  # as above
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        layer, dy = ctx.layer, grads[0].contiguous()
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[2:5]
        x8, weight8_t = _saved(ctx)
        dy8 = _quantised_grad(ctx, dy)
        weight_grads = _weight_grad(ctx, dy, dy8, x8) if needs_weight else layer.weight_grads.skip(1)
        x_grad = None
        if needs_x:
            assert dy8 is not None and weight8_t is not None, "needed"
            x_grad = _multiplied(dy8, weight8_t, None, fast_accumulation=False)
        return None, None, x_grad, weight_grads[0], dy.sum(0) if needs_bias else None


def _quantised(
    ctx: Any, layer: LayerView, fp8: Fp8State, x: torch.Tensor, weight: torch.Tensor
) -> tuple[QuantizedTensor, QuantizedTensor]:
    """(q(x), q(W)) of a forward; keeps what its backward needs."""
    needs_x, needs_weight = ctx.needs_input_grad[2:4]
    x8 = fp8.quantizer("input").local(x.contiguous(), record=fp8.training)
    quantised = fp8.quantized_weight(0, weight)
    ctx.layer, ctx.fp8, ctx.training, ctx.x_dtype = layer, fp8, fp8.training, x.dtype
    ctx.parameters = (weight,) if layer.weight_grads.needs_parameters else ()
    saved = [x8.data, x8.scale] if needs_weight else []
    if needs_x:
        transposed = quantised.transposed
        saved += (transposed.data, transposed.scale)
    ctx.save_for_backward(*saved)
    return x8, quantised.weight


def _saved(ctx: Any) -> tuple[QuantizedTensor | None, QuantizedTensor | None]:
    """(q(x), q(W)^T) of the forward, where backward needs them."""
    saved = list(ctx.saved_tensors)
    needs_x, needs_weight = ctx.needs_input_grad[2:4]
    x8 = QuantizedTensor(saved.pop(0), saved.pop(0), ctx.x_dtype) if needs_weight else None
    return x8, QuantizedTensor(saved[0], saved[1], ctx.x_dtype) if needs_x else None


def _quantised_grad(ctx: Any, dy: torch.Tensor) -> QuantizedTensor | None:
    if not any(ctx.needs_input_grad[2:4]):
        return None
    quantised: QuantizedTensor = ctx.fp8.quantizer("grad").local(dy, record=ctx.training)
    return quantised


def _weight_grad(
    ctx: Any, dy: torch.Tensor, dy8: QuantizedTensor | None, x8: QuantizedTensor | None
) -> list[torch.Tensor | None]:
    assert dy8 is not None and x8 is not None, "a weight trains"
    left, right, rowwise = WgradOperand(dy8), WgradOperand(x8), ctx.fp8.quantizer("input").is_rowwise
    grads: list[torch.Tensor | None] = ctx.layer.weight_grads.compute(
        ctx.parameters, [True], [dy], x8.data, lambda _: fp8_weight_grad(left, right, rowwise)
    )
    return grads


def _multiplied(
    left: QuantizedTensor, right: QuantizedTensor, bias: torch.Tensor | None, *, fast_accumulation: bool
) -> torch.Tensor:
    out = left.data.new_empty(left.data.shape[0], right.data.shape[0], dtype=left.dtype)
    scaled_mm(left.data, right.data.t(), left.scale, right.scale, out, bias, fast_accumulation=fast_accumulation)
    return out
