"""FP8 row-parallel linear layers. q(.) is a tensor in FP8; what is not marked is in the manager's dtype.

========  ====================================  ================================  =====================================
          computes                              shapes on rank r                  collective, and what hides it
========  ====================================  ================================  =====================================
fprop     y_shard = scatter(q(x) q(W)^T) + b    [T,K] -> [T,N] -> [T_r,N]         reduce-scatter of y (FP8 rows with
                                                                                  fp8_buf), behind its own GEMM
dgrad     dx = gather(q(dy)) q(W)               [T_r,N] -> [T,N] -> [T,K]         all-gather of q(dy), behind its own
                                                                                  GEMM
wgrad     dW = gather(q(dy))^T q(x)             [N,T16] x [T16,K] -> [N,K]        none: it reads what dgrad gathered
bias      db = sum of own rows of dy            [T_r,N] -> [N]                    none here: `sync_replicated_grads`
scales    of q(dy): `tpoverlap.overlap.fp8`     one float32 a rank (or a row)     before or beside dgrad's gather
========  ====================================  ================================  =====================================

Saved: q(x)^T [K, T16] in FP8, which wgrad reads, with its scale (row-wise: q(x) [T, K]), and q(W)^T of the forward's
version.
"""

from __future__ import annotations

from typing import Any

import torch

from tpoverlap.communicator import LayerCommunicators
from tpoverlap.gemm.fp8 import Fp8State, QuantizedTensor, ScaledPartialGemm, ScaledRowGemm
from tpoverlap.nn.autograd import differentiable_once
from tpoverlap.nn.fp8.wgrad import GatheredOperand, WgradOperand, fp8_weight_grad
from tpoverlap.nn.inputs import keepable
from tpoverlap.nn.layer_view import grads_of
from tpoverlap.overlap import gather_then_gemm, gemm_then_scatter
from tpoverlap.overlap.fp8 import QuantizedShard, gather_operation, scatter_operation
from tpoverlap.tokens import TokenPartition


class Fp8RowLinear(torch.autograd.Function):
    """See the table above."""

    @staticmethod
    def forward(
        ctx: Any,
        layer: LayerCommunicators,
        partition: TokenPartition,
        fp8: Fp8State,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        needs, training, features = ctx.needs_input_grad, fp8.training, x.shape[1]
        needs_x, needs_weight = needs[3:5]
        operation = layer.manager.operation(layer.fprop, partition, scatter=True, features=features, fp8=True)
        quantizer = fp8.quantizer("input")
        quantised_x = quantizer.local(x, record=training, transposes=needs_weight)
        quantised = fp8.quantized_weight(0, weight, transposes=needs_x)
        gemm = ScaledPartialGemm(terms=[(quantised_x, quantised.weight)], bias=bias, fast_accumulation=True)
        out = x.new_empty(partition.counts[layer.manager.rank], weight.shape[0])
        gemm_then_scatter(*scatter_operation(operation, gemm, quantizer.dtype), out)
        if True not in needs:  # no backward follows
            return out
        ctx.layer, ctx.partition, ctx.fp8, ctx.training, ctx.x_dtype = layer, partition, fp8, training, x.dtype
        ctx.parameters = (weight,) if grads_of(layer).needs_parameters else ()
        ctx.features = features  # T enters the choice of method by this shape
        kept = quantised_x.data if quantised_x.columns is None else quantised_x.columns
        saved = [kept, quantised_x.scale] if needs_weight else []
        if needs_x:
            transposed = quantised.transposed
            saved += (transposed.data, transposed.scale)
        ctx.save_for_backward(*saved)
        return out

    @staticmethod
    @differentiable_once  # the gradient of a gradient would need collectives of its own
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        layer, partition, fp8 = ctx.layer, ctx.partition, ctx.fp8
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[3:6]
        saved, dtype = ctx.saved_tensors, ctx.x_dtype
        x = QuantizedTensor(saved[0], saved[1], dtype) if needs_weight else None
        weights = [QuantizedTensor(saved[-2], saved[-1], dtype)] if needs_x else []
        y_grad_shard_t = grads[0].contiguous()
        outs = [y_grad_shard_t.new_empty(partition.total, weight.data.shape[0]) for weight in weights]
        policy = grads_of(layer)
        weight_grads: list[torch.Tensor | None] = [None] if needs_weight else policy.skip(1)
        if needs_x or needs_weight:
            quantizer = fp8.quantizer("grad")
            operation = layer.manager.operation(layer.dgrad, partition, scatter=False, features=ctx.features, fp8=True)
            operation = gather_operation(operation, quantizer)
            shard = QuantizedShard(operation, quantizer, y_grad_shard_t, record=ctx.training)

            def compute_weight_grad(gathered: torch.Tensor) -> None:
                assert x is not None, "asked for"
                if policy.delayed is not None:
                    gathered = keepable(layer.manager, gathered)
                dy = GatheredOperand(gathered, shard.dtype, shard.scale, dtype)
                rowwise = quantizer.is_rowwise
                operand = WgradOperand(x) if rowwise else WgradOperand(None, x)
                weight_grads[:] = policy.compute(
                    ctx.parameters, [True], [gathered], x.data, lambda _: fp8_weight_grad(dy, operand, rowwise)
                )

            gather_then_gemm(
                operation,
                shard.local.bytes,
                ScaledRowGemm(
                    weights=weights,  # none: the gather still feeds wgrad
                    biases=[None] * len(weights),
                    outs=outs,
                    x_scale=shard.scale,
                    x_format=shard.dtype,
                ),
                compute_weight_grad if needs_weight else None,
            )
            shard.finish()
        bias_grad = y_grad_shard_t.sum(0) if needs_bias else None
        return (
            None,
            None,
            None,
            outs[0] if outs else None,
            weight_grads[0],
            bias_grad,
        )
