"""Tensor parallelism without sequence parallelism: activations are whole on every rank, and GEMMs meet an all-reduce.

================  ==============================  ==========================  ========================================
                  computes                        shapes on rank r            collective, and what hides it
================  ==============================  ==========================  ========================================
column fprop      y_i = x W_i^T + b_i             [T,K] -> [T,N_i]            none
column dgrad      dx = all-reduce(dy_i W_i)       [T,N_i] -> [T,K]            reduce-scatter behind its own GEMM,
                                                                              all-gather beside wgrad
column wgrad      dW_i = dy_i^T x                 [N_i,T] x [T,K] -> [N_i,K]  none
row fprop         y = all-reduce(x W^T) + b       [T,K] -> [T,N]              as below
row dgrad, wgrad  dx = dy W, dW = dy^T x          [T,N] -> [T,K], [N,K]       none
================  ==============================  ==========================  ========================================

An all-reduce is a reduce-scatter and an all-gather, by this library's methods, over a balanced partition of the T rows
that only this file sees. Where nothing else is there to hide the all-gather, the rows are cut in two pieces::

    caller | GEMM + RS piece 0 | GEMM + RS piece 1 | copy piece 0 | copy piece 1
    comm           | RS 0      | AG 0     | RS 1          | AG 1

so that only the second piece's all-gather is in the open. Every rank adds in rank order and rounds once, as elsewhere:
all ranks get the same bits. Saved: x and the weights.

With ``return_x`` a column also returns x, where sequence parallelism returns the gathered x. It means the same: every
rank's gradient of it is this rank's part, and joins dy_i W_i before the all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tpoverlap.communicator import CommOverlap
from tpoverlap.gemm import PartialGemm
from tpoverlap.nn.agreement import agreed_detail
from tpoverlap.nn.autograd import differentiable_once
from tpoverlap.nn.inputs import keepable
from tpoverlap.nn.layer_view import LayerView
from tpoverlap.overlap import gemm_then_scatter, open_gather
from tpoverlap.overlap.fp8 import scatter_operation
from tpoverlap.tokens import TokenPartition

_MIN_PIECE_ROWS = 128  # a tile of rows: smaller pieces cost a GEMM more than the gather they hide


def gemm_all_reduce(
    comm: CommOverlap,
    gemm: PartialGemm,
    out: torch.Tensor,
    work: Callable[[], object] | None,
    fp8_format: torch.dtype | None = None,
) -> None:
    """``out`` [T, N] = sum over ranks of ``gemm``.

    Args:
        comm: whose name, options and regions to use, in both directions.
        gemm: this rank's partial sum; its bias is added once.
        out: [T, N], contiguous.
        work: an independent GEMM that runs beside the (then only) all-gather.
        fp8_format: of an FP8 GEMM: what its reduce-scatter moves with ``fp8_buf``.
    """
    pieces = _pieces(gemm.num_rows, 1 if work is not None else 2)
    shard = _scatter(comm, gemm, pieces[0], fp8_format)
    for index, rows in enumerate(pieces):
        operation = comm.manager.operation(comm, _partition(comm, rows), scatter=False, beside=True)
        with open_gather(operation, shard) as gather:
            if index + 1 < len(pieces):
                shard = _scatter(comm, gemm, pieces[index + 1], fp8_format)
            elif work is not None:
                gather.run_beside(work)
            gather.read(partial(_copy, out[rows]))


def _scatter(comm: CommOverlap, gemm: PartialGemm, rows: slice, fp8_format: torch.dtype | None) -> torch.Tensor:
    piece = gemm.part(rows)
    partition = _partition(comm, rows)
    shard = gemm.empty(partition.counts[comm.manager.rank], gemm.width)
    operation = comm.manager.operation(comm, partition, scatter=True, detail=agreed_detail())
    if fp8_format is not None:
        operation, piece = scatter_operation(operation, piece, fp8_format)
    gemm_then_scatter(operation, piece, shard)
    return shard


def _copy(out: torch.Tensor, summed: torch.Tensor) -> None:
    out.copy_(summed)


def _pieces(num_rows: int, most: int) -> list[slice]:
    count = max(1, min(most, num_rows // _MIN_PIECE_ROWS))
    return [TokenPartition.balanced(num_rows, count).rows(index) for index in range(count)]


def _partition(comm: CommOverlap, rows: slice) -> TokenPartition:
    return TokenPartition.balanced(rows.stop - rows.start, comm.manager.tp_size)


class ColumnWhole(torch.autograd.Function):
    """See the table above, rows "column"."""

    @staticmethod
    def forward(
        ctx: Any, layer: LayerView, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, return_x: bool
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        ctx.layer, ctx.return_x = layer, return_x
        ctx.parameters = (weight,) if layer.weight_grads.needs_parameters else ()
        ctx.save_for_backward(keepable(layer.manager, x), weight)
        y = torch.mm(x, weight.t()) if bias is None else torch.addmm(bias, x, weight.t())
        return (y, x.view_as(x)) if return_x else y

    @staticmethod
    @differentiable_once  # the gradient of a gradient would need collectives of its own
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        layer: LayerView = ctx.layer
        x, weight = ctx.saved_tensors
        dy = grads[0].contiguous()
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[1:4]
        weight_grads: list[torch.Tensor | None] = layer.weight_grads.skip(1) if not needs_weight else [None]

        def work() -> None:
            weight_grads[:] = layer.weight_grads.compute(ctx.parameters, [True], [dy], x)

        x_grad = None
        if needs_x:
            x_grad = x.new_empty(x.shape)
            gemm = PartialGemm([dy], [weight], grads[1] if ctx.return_x else None)
            gemm_all_reduce(layer.dgrad, gemm, x_grad, work if needs_weight else None)
        elif needs_weight:
            work()
        return None, x_grad, weight_grads[0], dy.sum(0) if needs_bias else None, None


class RowWhole(torch.autograd.Function):
    """See the table above, rows "row"."""

    @staticmethod
    def forward(
        ctx: Any, layer: LayerView, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        x = x.contiguous()
        out = x.new_empty(x.shape[0], weight.shape[0])
        gemm_all_reduce(layer.fprop, PartialGemm([x], [weight.t()], bias=bias), out, None)
        ctx.layer = layer
        ctx.parameters = (weight,) if layer.weight_grads.needs_parameters else ()
        ctx.save_for_backward(keepable(layer.manager, x), weight)
        return out

    @staticmethod
    @differentiable_once  # as above
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        layer: LayerView = ctx.layer
        x, weight = ctx.saved_tensors
        dy = grads[0].contiguous()
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[1:4]
        policy = layer.weight_grads
        weight_grads = policy.compute(ctx.parameters, [True], [dy], x) if needs_weight else policy.skip(1)
        return None, dy.mm(weight) if needs_x else None, weight_grads[0], dy.sum(0) if needs_bias else None
