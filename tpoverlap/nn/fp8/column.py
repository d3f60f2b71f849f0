"""FP8 column-parallel linear layers. q(.) is a tensor in FP8; what is not marked is in the manager's dtype.

==========  =======================================  ================================  ================================
            computes                                 shapes on rank r                  collective, and what hides it
==========  =======================================  ================================  ================================
fprop       y_i = gather(q(x)) q(W_i)^T + b_i        [T_r,K] -> [T,K] -> [T,N_i]       all-gather of q(x), behind its
                                                                                       own GEMM
dgrad bulk  dx = sum q(dy_i) q(W_i)                  [T,N_i] -> [T,K]                  all-gather of q(x) *for wgrad*,
                                                                                       beside it
wgrad bulk  dW_i = q(dy_i)^T gather(q(x))            [N_i,T16] x [T16,K] -> [N_i,K]    reduce-scatter of dx, beside it
dgrad RS    dx_shard = scatter(sum q(dy_i) q(W_i))   [T,N_i] -> [T_r,K]                reduce-scatter of dx (FP8 rows
                                                                                       with fp8_buf), behind its GEMM
wgrad RS    dW_i = q(dy_i)^T gather(q(x))            [N_i,T16] x [T16,K] -> [N_i,K]    none left
scales      of q(x): see `tpoverlap.overlap.fp8`     one float32 a rank (or a row)     before or after fprop's;
                                                                                       none in backward
==========  =======================================  ================================  ================================

Saved: the bytes of the shard q(x) [T_r, K], as they are sent again, with the scale of the gathered tensor, and q(W_i)^T
of the forward's version. T16 is T rounded up to a multiple of 16 by zeros, in wgrad's operands only. Never a view of a
shared buffer.
`LayerView`'s options (``save_gathered``, ``main_grad``, delayed wgrad) mean what they mean in `tpoverlap.nn.column`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from tpoverlap.communicator import CommOverlap, LayerCommunicators
from tpoverlap.gemm import PartialGemm
from tpoverlap.gemm.fp8 import Fp8State, QuantizedTensor, ScaledPartialGemm, ScaledRowGemm
from tpoverlap.nn.agreement import agreed_detail
from tpoverlap.nn.autograd import differentiable_once
from tpoverlap.nn.column import ColumnBackward, saves_gathered
from tpoverlap.nn.fp8.wgrad import GatheredOperand, WgradOperand, fp8_weight_grad
from tpoverlap.nn.inputs import keepable
from tpoverlap.nn.layer_view import grads_of
from tpoverlap.overlap import gather_then_gemm, gemm_then_scatter
from tpoverlap.overlap.context import OperationContext
from tpoverlap.overlap.fp8 import QuantizedShard, gather_operation, scatter_operation
from tpoverlap.tokens import TokenPartition


class Fp8ColumnLinear(torch.autograd.Function):
    """See the table above. Outputs: y_1 .. y_n and, with ``return_gathered``, the gathered x [T, K], dequantised."""

    @staticmethod
    def forward(
        ctx: Any,
        layer: LayerCommunicators,
        partition: TokenPartition,
        return_gathered: bool,
        fp8: Fp8State,
        x_shard_t: torch.Tensor,
        num_weights: int,
        *parameters: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        weights: Sequence[torch.Tensor] = parameters[:num_weights]  # type: ignore[assignment]  # none of these is None
        biases, needs, training = parameters[num_weights:], ctx.needs_input_grad, fp8.training
        needs_x, needs_weights = needs[4], True in needs[6 : 6 + num_weights]
        outs, features = [], 0
        for weight in weights:
            width = weight.shape[0]
            outs.append(x_shard_t.new_empty(partition.total, width))
            features += width
        operation = layer.manager.operation(
            layer.fprop, partition, scatter=False, features=features, detail=agreed_detail(), fp8=True
        )
        quantizer = fp8.quantizer("input")
        operation = gather_operation(operation, quantizer)
        quantised = [fp8.quantized_weight(index, weight, transposes=needs_x) for index, weight in enumerate(weights)]
        shard = QuantizedShard(operation, quantizer, x_shard_t, record=training)
        sent = shard.local.bytes
        saves = saves_gathered(layer) and needs_weights
        gathered: list[torch.Tensor] = []
        kept: list[torch.Tensor] = []

        def read(whole: torch.Tensor) -> None:
            if return_gathered:
                gathered.append(shard.whole(whole).dequantize())
            if saves:
                kept.append(keepable(layer.manager, whole))

        gather_then_gemm(
            operation,
            sent,
            ScaledRowGemm(
                weights=[one.weight for one in quantised],
                biases=biases,
                outs=outs,
                x_scale=shard.scale,
                x_format=shard.dtype,
                fast_accumulation=True,
            ),
            read if return_gathered or saves else None,
        )
        shard.finish()
        if True not in needs:  # no backward follows
            return (*outs, *gathered)
        ctx.layer, ctx.partition, ctx.fp8, ctx.training = layer, partition, fp8, training
        ctx.num_weights, ctx.return_gathered, ctx.x_dtype = num_weights, return_gathered, x_shard_t.dtype
        ctx.x_format = shard.dtype
        ctx.parameters = tuple(weights) if grads_of(layer).needs_parameters else ()
        saved = [kept[0] if saves else sent, shard.scale] if needs_weights else []  # as bytes: they are sent again
        if needs_x:
            for one in quantised:
                transposed = one.transposed
                saved += (transposed.data, transposed.scale)
        ctx.save_for_backward(*saved)
        return (*outs, *gathered)

    @staticmethod
    @differentiable_once  # the gradient of a gradient would need collectives of its own
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        count, fp8, needs, saved = ctx.num_weights, ctx.fp8, ctx.needs_input_grad, ctx.saved_tensors
        needs_x, needs_weights, needs_biases = needs[4], list(needs[6 : 6 + count]), needs[6 + count :]
        x = SavedShard(saved[0], saved[1], ctx.x_format, ctx.x_dtype) if True in needs_weights else None
        output_grads = [grad.contiguous() for grad in grads[:count]]
        quantised: list[QuantizedTensor] = []
        if needs_x or x is not None:
            for index, dy in enumerate(output_grads):
                quantizer = fp8.quantizer("grad", index)
                quantised.append(quantizer.local(dy, record=ctx.training, transposes=needs_weights[index]))
        weights = [
            QuantizedTensor(saved[at], saved[at + 1], ctx.x_dtype) for at in range(0 if x is None else 2, len(saved), 2)
        ]
        addend = grads[count] if ctx.return_gathered else None
        terms = list(zip(quantised, weights, strict=True)) if needs_x else []
        gemm = ScaledPartialGemm(terms=terms, addend=addend)
        backward = _Backward(
            ctx.layer, ctx.partition, fp8, x, ctx.parameters, output_grads, quantised, gemm, needs_weights
        )
        x_grad = backward.run(needs_x)
        bias_grads = [dy.sum(0) if needed else None for dy, needed in zip(output_grads, needs_biases, strict=True)]
        return (None, None, None, None, x_grad, None, *backward.weight_grads, *bias_grads)


class SavedShard(NamedTuple):
    """q(x) as backward finds it."""

    bytes: torch.Tensor
    """uint8, the shard [T_r, K], or what was gathered [T, K]."""
    scale: torch.Tensor
    """Of the gathered tensor."""
    format: torch.dtype
    """Of the bytes."""
    dtype: torch.dtype
    """Of x."""


class _Backward(ColumnBackward):
    """`ColumnBackward` whose gathers move FP8 rows and whose GEMMs are scaled.

    Args:
        x: the saved shard (or gathered tensor) with the gathered tensor's scale; None when no weight trains.
        quantised: dy_i in FP8.
    """

    def __init__(
        self,
        layer: LayerCommunicators,
        partition: TokenPartition,
        fp8: Fp8State,
        x: SavedShard | None,
        parameters: Sequence[torch.Tensor],
        output_grads: Sequence[torch.Tensor],
        quantised: Sequence[QuantizedTensor],
        input_grad: PartialGemm,
        needs_weights: list[bool],
    ) -> None:
        saved = output_grads[0] if x is None else x.bytes  # without x nothing reads it
        super().__init__(layer, partition, saved, parameters, output_grads, input_grad, needs_weights)
        self.fp8, self.quantised_x, self.quantised = fp8, x, quantised

    def _operation(self, communicator: CommOverlap, *, scatter: bool, beside: bool = False) -> OperationContext:
        operation: OperationContext = self._manager.operation(
            communicator, self.partition, scatter=scatter, beside=beside, features=self.features, fp8=True
        )
        return operation if scatter else gather_operation(operation, self.fp8.quantizer("input"))

    def _input_only(self) -> torch.Tensor:
        out = self._empty_input_grad()
        operation = self._operation(self.layer.dgrad, scatter=True)
        gemm_then_scatter(*scatter_operation(operation, self.input_grad, self.fp8.quantizer("grad").dtype), out)
        return out

    def _compute_weight_grads(self, gathered: torch.Tensor) -> None:
        x = self.quantised_x
        assert x is not None, "a weight trains, so it was saved"
        if self.grads.delayed is not None:
            gathered = keepable(self._manager, gathered)
        whole = GatheredOperand(gathered, x.format, x.scale, x.dtype)
        output_grads, rowwise = [WgradOperand(dy) for dy in self.quantised], self.fp8.quantizer("input").is_rowwise
        self.weight_grads = self.grads.compute(
            self.parameters,
            self.needs_weights,
            self.output_grads,
            gathered,
            lambda index: fp8_weight_grad(output_grads[index], whole, rowwise),
        )
