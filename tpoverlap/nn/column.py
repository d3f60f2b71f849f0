"""Column-parallel linear layers: all-gather + GEMM forward, and both backward modes.

==========  ===============================  =============================  =====================================
            computes                         shapes on rank r               collective, and what hides it
==========  ===============================  =============================  =====================================
fprop       y_i = gather(x) W_i^T + b_i      [T_r,K] -> [T,K] -> [T,N_i]    all-gather of x, behind its own GEMM
dgrad bulk  dx = sum dy_i W_i                [T,N_i] -> [T,K]               all-gather of x *for wgrad*, beside it
wgrad bulk  dW_i = dy_i^T gather(x)          [N_i,T] x [T,K] -> [N_i,K]     reduce-scatter of dx, beside it
dgrad RS    dx_shard = scatter(sum dy_i W_i)  [T,N_i] -> [T_r,K]            reduce-scatter of dx, behind its own
                                                                            GEMM; all-gather of x beside both
wgrad RS    dW_i = dy_i^T gather(x)          [N_i,T] x [T,K] -> [N_i,K]     none left
==========  ===============================  =============================  =====================================

Saved: the shard x [T_r, K] (R times smaller than the gathered activation, which is gathered again in backward) and the
weights. Never a view of a shared buffer. The partition of the forward is kept and used in backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from tpoverlap.communicator import CommOverlap, LayerCommunicators
from tpoverlap.gemm import PartialGemm, RowGemm, weight_grad
from tpoverlap.nn.inputs import keepable
from tpoverlap.overlap import (
    OperationContext,
    gather_beside,
    gather_then_gemm,
    gemm_then_scatter,
    open_gather,
    scatter_beside,
)
from tpoverlap.tokens import TokenPartition


class ColumnLinear(torch.autograd.Function):
    """See the table above. Outputs: y_1 .. y_n and, with ``return_gathered``, the gathered x [T, K]."""

    @staticmethod
    def forward(
        ctx: Any,
        layer: LayerCommunicators,
        partition: TokenPartition,
        return_gathered: bool,
        x_shard_t: torch.Tensor,
        num_weights: int,
        *parameters: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        weights, biases = parameters[:num_weights], parameters[num_weights:]
        assert all(weight is not None for weight in weights), "weights are never None"
        outs = [x_shard_t.new_empty(partition.total, w.shape[0]) for w in weights if w is not None]
        gathered: list[torch.Tensor] = []
        features = sum(out.shape[1] for out in outs)
        operation = layer.manager.operation(layer.fprop, partition, scatter=False, features=features)
        x_shard_t = x_shard_t.contiguous()  # saved like this, too: backward sends it again
        if operation.method == "sequential":
            # It claims no slot, so a peer that has left the collective may push its next operation over a view of one.
            x_shard_t = keepable(layer.manager, x_shard_t)
        gather_then_gemm(
            operation,
            x_shard_t,
            RowGemm([w.t() for w in weights if w is not None], biases, outs),
            (lambda whole: gathered.append(whole.clone())) if return_gathered else None,
        )
        ctx.layer, ctx.partition, ctx.num_weights, ctx.return_gathered = layer, partition, num_weights, return_gathered
        ctx.save_for_backward(keepable(layer.manager, x_shard_t), *weights)
        return (*outs, *gathered)

    @staticmethod
    @once_differentiable  # the gradient of a gradient would need collectives of its own
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        layer: LayerCommunicators = ctx.layer
        x_shard_t, *weights = ctx.saved_tensors
        output_grads = [grad.contiguous() for grad in grads[: ctx.num_weights]]
        addend = grads[ctx.num_weights] if ctx.return_gathered else None
        needs_x, needs_weights = ctx.needs_input_grad[3], ctx.needs_input_grad[5 : 5 + ctx.num_weights]
        needs_biases = ctx.needs_input_grad[5 + ctx.num_weights :]
        backward = _Backward(layer, ctx.partition, x_shard_t, weights, output_grads, addend, list(needs_weights))
        x_grad = backward.run(needs_x)
        bias_grads = [dy.sum(0) if needed else None for dy, needed in zip(output_grads, needs_biases, strict=True)]
        return (None, None, None, x_grad, None, *backward.weight_grads, *bias_grads)


class _Backward:
    """One backward pass: which gather, which GEMM and which scatter run, and what runs beside what."""

    def __init__(
        self,
        layer: LayerCommunicators,
        partition: TokenPartition,
        x_shard_t: torch.Tensor,
        weights: list[torch.Tensor],
        output_grads: list[torch.Tensor],
        addend: torch.Tensor | None,
        needs_weights: list[bool],
    ) -> None:
        self.layer = layer
        self.partition = partition
        self.x_shard_t = x_shard_t
        self.output_grads = output_grads
        self.needs_weights = needs_weights
        self.input_grad = PartialGemm(output_grads, weights, addend)
        self.features = sum(grad.shape[1] for grad in output_grads)  # T enters the choice of method by this shape
        self.weight_grads: list[torch.Tensor | None] = [None] * len(weights)

    def run(self, needs_x: bool) -> torch.Tensor | None:
        """Fills ``weight_grads``; returns dx_shard [T_r, K] when the input needs it."""
        if not any(self.needs_weights):
            return self._input_only() if needs_x else None
        if not needs_x:
            self._gather(lambda: None, self._compute_weight_grads)
            return None
        return self._scatter_in_dgrad() if self.layer.scatters_in_dgrad else self._bulk()

    def _bulk(self) -> torch.Tensor:
        partial = self.input_grad.empty(self.partition.total, self.input_grad.width)
        gathered: list[torch.Tensor] = []
        # The gather's slot is read by wgrad, which runs beside the scatter: so the gather stays open until then.
        operation = self._operation(self.layer.dgrad, scatter=False, beside=True)
        with open_gather(operation, self.x_shard_t) as gather:
            gather.run_beside(lambda: self.input_grad.rows(0, self.partition.total, partial))
            gather.read(gathered.append)
            out = self.x_shard_t.new_empty(self.x_shard_t.shape)
            wgrad = self.layer.wgrad if self.layer.wgrad is not None else self.layer.dgrad
            scatter_beside(
                self._operation(wgrad, scatter=True, beside=True),
                partial,
                lambda: self._compute_weight_grads(gathered[0]),
                out,
            )
        return out

    def _scatter_in_dgrad(self) -> torch.Tensor:
        operation = self._operation(self.layer.dgrad, scatter=False, beside=True)
        with open_gather(operation, self.x_shard_t) as gather:
            out = self._input_only()
            gather.read(self._compute_weight_grads)
        return out

    def _input_only(self) -> torch.Tensor:
        """dx_shard by GEMM + reduce-scatter: there is no wgrad GEMM to put beside it."""
        out = self.x_shard_t.new_empty(self.x_shard_t.shape)
        operation = self._operation(self.layer.dgrad, scatter=True)
        gemm_then_scatter(operation, self.input_grad, out)
        return out

    def _gather(self, work: Any, read: Any) -> None:
        operation = self._operation(self.layer.dgrad, scatter=False, beside=True)
        gather_beside(operation, self.x_shard_t, work, read)

    def _compute_weight_grads(self, gathered: torch.Tensor) -> None:
        for index, needed in enumerate(self.needs_weights):
            if needed:
                self.weight_grads[index] = weight_grad(self.output_grads[index], gathered)

    def _operation(self, communicator: CommOverlap, *, scatter: bool, beside: bool = False) -> OperationContext:
        return self.layer.manager.operation(
            communicator, self.partition, scatter=scatter, beside=beside, features=self.features
        )
