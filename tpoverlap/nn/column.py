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

A `LayerView` changes this: ``save_gathered`` saves gather(x) [T, K], and backward gathers nothing. A delayed wgrad
(``WeightGrads.delayed``) always goes with "dgrad RS", since there is no wgrad GEMM to put a scatter beside; it keeps dy
and gather(x), so that ``backward_dw`` communicates nothing. Frozen weights: nothing is gathered in backward at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tpoverlap.communicator import CommOverlap, LayerCommunicators
from tpoverlap.gemm import PartialGemm, RowGemm
from tpoverlap.nn.agreement import agreed_detail
from tpoverlap.nn.autograd import differentiable_once
from tpoverlap.nn.inputs import keepable
from tpoverlap.nn.layer_view import LayerView, grads_of
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
        weights: Sequence[torch.Tensor] = parameters[:num_weights]  # type: ignore[assignment]  # none of these is None
        biases = parameters[num_weights:]
        outs, matrices, features = [], [], 0
        for weight in weights:
            width = weight.shape[0]
            outs.append(x_shard_t.new_empty(partition.total, width))
            matrices.append(weight.t())
            features += width
        gathered: list[torch.Tensor] = []
        saves = saves_gathered(layer) and any(ctx.needs_input_grad[5 : 5 + num_weights])

        def keep(whole: torch.Tensor) -> None:
            gathered.append(whole.clone() if return_gathered else keepable(layer.manager, whole))

        operation = layer.manager.operation(
            layer.fprop, partition, scatter=False, features=features, detail=agreed_detail()
        )
        x_shard_t = x_shard_t.contiguous()  # saved like this, too: backward sends it again
        if operation.method == "sequential":
            # It claims no slot, so a peer that has left the collective may push its next operation over a view of one.
            x_shard_t = keepable(layer.manager, x_shard_t)
        gather_then_gemm(
            operation,
            x_shard_t,
            RowGemm(matrices, biases, outs),
            keep if return_gathered or saves else None,
        )
        if True not in ctx.needs_input_grad:  # no backward follows
            return (*outs, *gathered) if return_gathered else tuple(outs)
        ctx.layer, ctx.partition, ctx.num_weights, ctx.return_gathered = layer, partition, num_weights, return_gathered
        # The parameters themselves: what autograd unpacks under recomputation is not them, but has no main_grad.
        ctx.parameters = tuple(weights) if grads_of(layer).needs_parameters else ()
        ctx.save_for_backward(gathered[0] if saves else keepable(layer.manager, x_shard_t), *weights)
        return (*outs, *gathered) if return_gathered else tuple(outs)

    @staticmethod
    @differentiable_once  # the gradient of a gradient would need collectives of its own
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        layer: LayerCommunicators = ctx.layer
        x, *weights = ctx.saved_tensors
        output_grads = [grad.contiguous() for grad in grads[: ctx.num_weights]]
        addend = grads[ctx.num_weights] if ctx.return_gathered else None
        needs_x, needs_weights = ctx.needs_input_grad[3], ctx.needs_input_grad[5 : 5 + ctx.num_weights]
        needs_biases = ctx.needs_input_grad[5 + ctx.num_weights :]
        input_grad = PartialGemm(output_grads, weights, addend)
        backward = ColumnBackward(
            layer, ctx.partition, x, ctx.parameters, output_grads, input_grad, list(needs_weights)
        )
        x_grad = backward.run(needs_x)
        bias_grads = [dy.sum(0) if needed else None for dy, needed in zip(output_grads, needs_biases, strict=True)]
        return (None, None, None, x_grad, None, *backward.weight_grads, *bias_grads)


class ColumnBackward:
    """One backward pass: which gather, which GEMM and which scatter run, and what runs beside what.

    ``x`` is the shard [T_r, K], or the gathered [T, K] if the layer saves that and a weight trains.
    """

    def __init__(
        self,
        layer: LayerCommunicators,
        partition: TokenPartition,
        x: torch.Tensor,
        parameters: Sequence[torch.Tensor],
        output_grads: Sequence[torch.Tensor],
        input_grad: PartialGemm,
        needs_weights: list[bool],
    ) -> None:
        self.layer = layer
        self._manager: Any = layer.manager
        self.partition = partition
        self.x = x
        self.parameters = parameters
        self.output_grads = output_grads
        self.needs_weights = needs_weights
        self.grads = grads_of(layer)
        self.input_grad = input_grad
        self.features = sum([grad.shape[1] for grad in output_grads])  # T enters the choice of method by this shape
        self.weight_grads: list[torch.Tensor | None] = [None] * len(needs_weights)

    def run(self, needs_x: bool) -> torch.Tensor | None:
        """Fills ``weight_grads``; returns dx_shard [T_r, K] when the input needs it."""
        if not any(self.needs_weights):
            self.weight_grads = self.grads.skip(len(self.needs_weights))
            return self._input_only() if needs_x else None
        in_dgrad = self.layer.scatters_in_dgrad or self.grads.delayed is not None
        if saves_gathered(self.layer):
            if needs_x and not in_dgrad:
                partial = self.input_grad.empty(self.partition.total, self.input_grad.width)
                self.input_grad.rows(0, self.partition.total, partial)
                return self._scatter_beside_wgrad(partial, self.x)
            x_grad = self._input_only() if needs_x else None
            self._compute_weight_grads(self.x)
            return x_grad
        if not needs_x:
            self._gather(lambda: None, self._compute_weight_grads)
            return None
        return self._scatter_in_dgrad() if in_dgrad else self._bulk()

    def _bulk(self) -> torch.Tensor:
        partial = self.input_grad.empty(self.partition.total, self.input_grad.width)
        gathered: list[torch.Tensor] = []
        # The gather's slot is read by wgrad, which runs beside the scatter: so the gather stays open until then.
        operation = self._operation(self.layer.dgrad, scatter=False, beside=True)
        with open_gather(operation, self.x) as gather:
            gather.run_beside(lambda: self.input_grad.rows(0, self.partition.total, partial))
            gather.read(gathered.append)
            return self._scatter_beside_wgrad(partial, gathered[0])

    def _scatter_beside_wgrad(self, partial: torch.Tensor, gathered: torch.Tensor) -> torch.Tensor:
        out = self._empty_input_grad()
        wgrad = self.layer.wgrad if self.layer.wgrad is not None else self.layer.dgrad
        scatter_beside(
            self._operation(wgrad, scatter=True, beside=True),
            partial,
            lambda: self._compute_weight_grads(gathered),
            out,
        )
        return out

    def _scatter_in_dgrad(self) -> torch.Tensor:
        operation = self._operation(self.layer.dgrad, scatter=False, beside=True)
        with open_gather(operation, self.x) as gather:
            out = self._input_only()
            gather.read(self._compute_weight_grads)
        return out

    def _input_only(self) -> torch.Tensor:
        """dx_shard by GEMM + reduce-scatter: there is no wgrad GEMM to put beside it."""
        out = self._empty_input_grad()
        operation = self._operation(self.layer.dgrad, scatter=True)
        gemm_then_scatter(operation, self.input_grad, out)
        return out

    def _empty_input_grad(self) -> torch.Tensor:
        return self.input_grad.empty(self.partition.counts[self._manager.rank], self.input_grad.width)

    def _gather(self, work: Any, read: Any) -> None:
        operation = self._operation(self.layer.dgrad, scatter=False, beside=True)
        gather_beside(operation, self.x, work, read)

    def _compute_weight_grads(self, gathered: torch.Tensor) -> None:
        x = keepable(self._manager, gathered) if self.grads.delayed is not None else gathered
        self.weight_grads = self.grads.compute(self.parameters, self.needs_weights, self.output_grads, x)

    def _operation(self, communicator: CommOverlap, *, scatter: bool, beside: bool = False) -> OperationContext:
        operation: OperationContext = self._manager.operation(
            communicator, self.partition, scatter=scatter, beside=beside, features=self.features
        )
        return operation


def saves_gathered(layer: LayerCommunicators) -> bool:
    """Whether backward finds the gathered input saved."""
    return isinstance(layer, LayerView) and layer.save_gathered
