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

Saved: the shard q(x) [T_r, K] in FP8 with the scale of the gathered tensor, and q(W_i)^T of the forward's version. T16
is T rounded up to a multiple of 16 by zeros, in wgrad's operands only. Never a view of a shared buffer.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from tpoverlap.communicator import LayerCommunicators
from tpoverlap.gemm.fp8 import Fp8State, QuantizedTensor, ScaledPartialGemm, ScaledRowGemm
from tpoverlap.nn.fp8.wgrad import WgradOperand, fp8_weight_grad
from tpoverlap.overlap import gather_beside, gather_then_gemm, gemm_then_scatter, open_gather, scatter_beside
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
        weights, biases = [w for w in parameters[:num_weights] if w is not None], parameters[num_weights:]
        needs_x, needs_weights = ctx.needs_input_grad[4], any(ctx.needs_input_grad[6 : 6 + num_weights])
        operation = layer.manager.operation(layer.fprop, partition, scatter=False)
        operation = gather_operation(operation, fp8.input.dtype)
        quantised = [fp8.quantized_weight(index, weight) for index, weight in enumerate(weights)]
        shard = QuantizedShard(operation, fp8.input, x_shard_t, record=fp8.training)
        gathered: list[torch.Tensor] = []
        outs = [x_shard_t.new_empty(partition.total, weight.shape[0]) for weight in weights]
        gather_then_gemm(
            operation,
            shard.local.bytes,
            ScaledRowGemm(
                weights=[one.weight for one in quantised],
                biases=biases,
                outs=outs,
                x_scale=shard.scale,
                x_format=shard.dtype,
                fast_accumulation=True,
            ),
            (lambda whole: gathered.append(shard.whole(whole).dequantize())) if return_gathered else None,
        )
        shard.finish()
        ctx.layer, ctx.partition, ctx.fp8, ctx.training = layer, partition, fp8, fp8.training
        ctx.num_weights, ctx.return_gathered, ctx.x_dtype = num_weights, return_gathered, x_shard_t.dtype
        transposed = [one.transposed for one in quantised] if needs_x else []
        saved = [shard.local.data, shard.scale] if needs_weights else []
        ctx.save_for_backward(*saved, *[part for one in transposed for part in (one.data, one.scale)])
        return (*outs, *gathered)

    @staticmethod
    @once_differentiable  # the gradient of a gradient would need collectives of its own
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        count, fp8 = ctx.num_weights, ctx.fp8
        needs_x, needs_weights = ctx.needs_input_grad[4], list(ctx.needs_input_grad[6 : 6 + count])
        needs_biases = ctx.needs_input_grad[6 + count :]
        saved = list(ctx.saved_tensors)
        x = QuantizedTensor(saved.pop(0), saved.pop(0), ctx.x_dtype) if any(needs_weights) else None
        output_grads = [grad.contiguous() for grad in grads[:count]]
        quantised = [
            fp8.quantizer("grad", index).local(dy, record=ctx.training) if needs_x or needed else None
            for index, (dy, needed) in enumerate(zip(output_grads, needs_weights, strict=True))
        ]
        gemm = None
        if needs_x:
            weights = [QuantizedTensor(*pair, ctx.x_dtype) for pair in zip(saved[::2], saved[1::2], strict=True)]
            addend = grads[count] if ctx.return_gathered else None
            terms = [(dy, weight) for dy, weight in zip(quantised, weights, strict=True) if dy is not None]
            gemm = ScaledPartialGemm(terms=terms, addend=addend)
        backward = _Backward(ctx.layer, ctx.partition, fp8, x, gemm, quantised, needs_weights)
        x_grad = backward.run()
        bias_grads = [dy.sum(0) if needed else None for dy, needed in zip(output_grads, needs_biases, strict=True)]
        return (None, None, None, None, x_grad, None, *backward.weight_grads, *bias_grads)


class _Backward:
    """One backward pass: which gather, which GEMM and which scatter run, and what runs beside what.

    Args:
        x: the saved shard with the gathered tensor's scale; None when no weight needs a gradient.
        input_grad: the task of dgrad; None when the input needs no gradient.
        output_grads: dy_i in FP8, None where nobody reads it.
    """

    def __init__(
        self,
        layer: LayerCommunicators,
        partition: TokenPartition,
        fp8: Fp8State,
        x: QuantizedTensor | None,
        input_grad: ScaledPartialGemm | None,
        output_grads: list[QuantizedTensor | None],
        needs_weights: list[bool],
    ) -> None:
        self.layer, self.partition, self.fp8, self.x = layer, partition, fp8, x
        self.input_grad, self.output_grads, self.needs_weights = input_grad, output_grads, needs_weights
        self.weight_grads: list[torch.Tensor | None] = [None] * len(needs_weights)

    def run(self) -> torch.Tensor | None:
        """Fills ``weight_grads``; returns dx_shard [T_r, K] when the input needs it."""
        if self.x is None:
            return None if self.input_grad is None else self._input_only(self.input_grad)
        if self.input_grad is None:
            gather_beside(self._gather_operation(), self.x.bytes, lambda: None, self._compute_weight_grads)
            return None
        if self.layer.scatters_in_dgrad:
            with self._gather(self.x) as gather:
                out = self._input_only(self.input_grad)
                gather.read(self._compute_weight_grads)
            return out
        return self._bulk(self.x, self.input_grad)

    def _bulk(self, x: QuantizedTensor, input_grad: ScaledPartialGemm) -> torch.Tensor:
        partial = input_grad.empty(self.partition.total, input_grad.width)
        gathered: list[torch.Tensor] = []
        # The gather's slot is read by wgrad, which runs beside the scatter: so the gather stays open until then.
        with self._gather(x) as gather:
            gather.run_beside(lambda: input_grad.rows(0, self.partition.total, partial))
            gather.read(gathered.append)
            out = self._empty_shard(input_grad)
            wgrad = self.layer.wgrad if self.layer.wgrad is not None else self.layer.dgrad
            operation = self.layer.manager.operation(wgrad, self.partition, scatter=True, beside=True)
            scatter_beside(operation, partial, lambda: self._compute_weight_grads(gathered[0]), out)
        return out

    def _input_only(self, input_grad: ScaledPartialGemm) -> torch.Tensor:
        """dx_shard by GEMM + reduce-scatter."""
        out = self._empty_shard(input_grad)
        operation = self.layer.manager.operation(self.layer.dgrad, self.partition, scatter=True)
        gemm_then_scatter(*scatter_operation(operation, input_grad, self.fp8.quantizer("grad").dtype), out)
        return out

    def _empty_shard(self, input_grad: ScaledPartialGemm) -> torch.Tensor:
        return input_grad.empty(self.partition.counts[self.layer.manager.rank], input_grad.width)

    def _gather_operation(self) -> OperationContext:
        operation = self.layer.manager.operation(self.layer.dgrad, self.partition, scatter=False, beside=True)
        return gather_operation(operation, self.fp8.input.dtype)

    def _gather(self, x: QuantizedTensor) -> AbstractContextManager[Any]:
        return open_gather(self._gather_operation(), x.bytes)

    def _compute_weight_grads(self, gathered: torch.Tensor) -> None:
        assert self.x is not None, "gathered it"
        whole = WgradOperand(QuantizedTensor(gathered.view(self.x.data.dtype), self.x.scale, self.x.dtype))
        for index, (dy, needed) in enumerate(zip(self.output_grads, self.needs_weights, strict=True)):
            if needed and dy is not None:
                self.weight_grads[index] = fp8_weight_grad(WgradOperand(dy), whole, self.fp8.input.is_rowwise)
