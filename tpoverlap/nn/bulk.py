"""Whole collectives beside an independent GEMM, with autograd: each is the other's backward.

===================  ======================  =====================================
                     forward                 backward of the collective
===================  ======================  =====================================
bulk_all_gather      [T_r,H] -> [T,H]        reduce-scatter of the gradient
bulk_reduce_scatter  [T,H] -> [T_r,H]        all-gather of the gradient
===================  ======================  =====================================

The GEMM ``a @ b.T`` ([M,K] x [N,K] -> [M,N]) is differentiable too; its two gradient GEMMs run beside the collective.
Saved: a and b. Nothing is saved for the collectives.
"""

from __future__ import annotations

from typing import Any

import torch

from tpoverlap.communicator import CommOverlap
from tpoverlap.nn.autograd import differentiable_once
from tpoverlap.nn.inputs import keepable
from tpoverlap.overlap import gather_beside, scatter_beside
from tpoverlap.tokens import TokenPartition


class BulkAllGather(torch.autograd.Function):
    """(gathered [T, H], a @ b.T)."""

    @staticmethod
    def forward(
        ctx: Any,
        comm: CommOverlap,
        partition: TokenPartition,
        x_shard_t: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.comm, ctx.partition = comm, partition
        ctx.save_for_backward(keepable(comm.manager, a), keepable(comm.manager, b))
        return _gather(comm, partition, x_shard_t.contiguous(), lambda: torch.mm(a, b.t()))

    @staticmethod
    @differentiable_once  # the gradient of a gradient would need collectives of its own
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        a, b = ctx.saved_tensors
        x_grad, gemm_grads = _scatter(
            ctx.comm, ctx.partition, grads[0].contiguous(), lambda: _gemm_grads(ctx, grads[1], a, b)
        )
        return None, None, x_grad, *gemm_grads


class BulkReduceScatter(torch.autograd.Function):
    """(y_shard [T_r, H], a @ b.T)."""

    @staticmethod
    def forward(
        ctx: Any, comm: CommOverlap, partition: TokenPartition, y: torch.Tensor, a: torch.Tensor, b: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.comm, ctx.partition = comm, partition
        ctx.save_for_backward(keepable(comm.manager, a), keepable(comm.manager, b))
        return _scatter(comm, partition, y.contiguous(), lambda: torch.mm(a, b.t()))

    @staticmethod
    @differentiable_once  # the gradient of a gradient would need collectives of its own
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        a, b = ctx.saved_tensors
        y_grad, gemm_grads = _gather(
            ctx.comm, ctx.partition, grads[0].contiguous(), lambda: _gemm_grads(ctx, grads[1], a, b)
        )
        return None, None, y_grad, *gemm_grads


def _gather(comm: CommOverlap, partition: TokenPartition, x_shard_t: torch.Tensor, work: Any) -> tuple[Any, Any]:
    results: list[Any] = []
    gathered: list[torch.Tensor] = []
    operation = comm.manager.operation(comm, partition, scatter=False, beside=True)
    gather_beside(operation, x_shard_t, lambda: results.append(work()), lambda whole: gathered.append(whole.clone()))
    return gathered[0], results[0]


def _scatter(comm: CommOverlap, partition: TokenPartition, y: torch.Tensor, work: Any) -> tuple[Any, Any]:
    results: list[Any] = []
    out = y.new_empty(partition.counts[comm.manager.rank], y.shape[1])
    operation = comm.manager.operation(comm, partition, scatter=True, beside=True)
    scatter_beside(operation, y, lambda: results.append(work()), out)
    return out, results[0]


def _gemm_grads(
    ctx: Any, grad: torch.Tensor, a: torch.Tensor, b: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    return (
        grad.mm(b) if ctx.needs_input_grad[3] else None,
        grad.t().mm(a) if ctx.needs_input_grad[4] else None,
    )
