"""Row-parallel linear layers: GEMM + reduce-scatter forward.

========  ==============================  ===============================  =======================================
          computes                        shapes on rank r                 collective, and what hides it
========  ==============================  ===============================  =======================================
fprop     y_shard = scatter(x W^T) + b    [T,K] -> [T,N] -> [T_r,N]        reduce-scatter of y, behind its own GEMM
dgrad     dx = gather(dy) W               [T_r,N] -> [T,N] -> [T,K]        all-gather of dy, behind its own GEMM
wgrad     dW = gather(dy)^T x             [N,T] x [T,K] -> [N,K]           none: it reads what dgrad gathered
bias      db = sum of own rows of dy      [T_r,N] -> [N]                   none here: `sync_replicated_grads`
========  ==============================  ===============================  =======================================

Saved: x [T, K] (this rank's own activation) and the weight. wgrad reads the gathered dy from the slot before its credit
is given, so dy is neither gathered twice nor copied; only a delayed wgrad (`WeightGrads`) keeps a copy of it.
"""

from __future__ import annotations

from typing import Any

import torch

from tpoverlap.communicator import LayerCommunicators
from tpoverlap.gemm import PartialGemm, RowGemm
from tpoverlap.nn.autograd import differentiable_once
from tpoverlap.nn.inputs import keepable
from tpoverlap.nn.layer_view import grads_of
from tpoverlap.overlap import gather_then_gemm, gemm_then_scatter
from tpoverlap.tokens import TokenPartition


class RowLinear(torch.autograd.Function):
    """See the table above."""

    @staticmethod
    def forward(
        ctx: Any,
        layer: LayerCommunicators,
        partition: TokenPartition,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        x = x.contiguous()
        rank = layer.manager.rank
        out = x.new_empty(partition.counts[rank], weight.shape[0])
        operation = layer.manager.operation(layer.fprop, partition, scatter=True, features=x.shape[1])
        gemm_then_scatter(operation, PartialGemm([x], [weight.t()], bias=bias), out)
        if True not in ctx.needs_input_grad:  # no backward follows
            return out
        ctx.layer, ctx.partition = layer, partition
        ctx.parameters = (weight,) if grads_of(layer).needs_parameters else ()
        ctx.save_for_backward(keepable(layer.manager, x), weight)
        return out

    @staticmethod
    @differentiable_once  # the gradient of a gradient would need collectives of its own
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        layer: LayerCommunicators = ctx.layer
        x, weight = ctx.saved_tensors
        y_grad_shard_t = grads[0].contiguous()
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[2:5]
        policy = grads_of(layer)
        weight_grads: list[torch.Tensor | None] = [None]

        def compute_weight_grad(gathered: torch.Tensor) -> None:
            dy = gathered if policy.delayed is None else keepable(layer.manager, gathered)
            weight_grads[:] = policy.compute(ctx.parameters, [True], [dy], x)

        x_grad = None
        if not needs_weight:
            weight_grads = policy.skip(1)
        if needs_x or needs_weight:
            if needs_x:
                x_grad = x.new_empty(x.shape)
                gemm = RowGemm([weight], [None], [x_grad])
            else:
                gemm = RowGemm([], [], [])  # the gather still feeds wgrad
            gather_then_gemm(
                layer.manager.operation(layer.dgrad, ctx.partition, scatter=False, features=x.shape[1]),
                y_grad_shard_t,
                gemm,
                compute_weight_grad if needs_weight else None,
            )
        bias_grad = y_grad_shard_t.sum(0) if needs_bias else None
        return None, None, x_grad, weight_grads[0], bias_grad
