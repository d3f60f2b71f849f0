"""Rank functions of `test_buffers`: activations that live in registered memory."""

from __future__ import annotations

from collections.abc import Callable

import torch

import tpoverlap as tpo
from tests.manager.ranks import CAPACITY, FEATURES, WIDTH, make_manager, seeded
from tpoverlap.tokens import TokenPartition


def overwrite(manager: tpo.UserBufferManager) -> None:
    """Use every slot again, at full capacity, with other numbers."""
    partition = TokenPartition.balanced(CAPACITY, manager.tp_size)
    for turn in range(3):
        shard = seeded(CAPACITY, WIDTH, seed=900 + turn)[partition.rows(manager.rank)]
        tpo.all_gather_gemm(shard, seeded(FEATURES, WIDTH, seed=1), manager.layer("fc1"), partition=partition)


def gather_from_the_buffer(rank: int, size: int, method: str) -> None:
    """x lies in the slot (``get_buffer(local_chunk=True)``): right y, and right gradients after overwriting."""
    with make_manager(ub_cfgs={"qkv_fprop": {"method": method}}) as manager:
        partition = TokenPartition.balanced(2 * size + 1, size)
        manager.set_active_shape(partition)
        whole = seeded(partition.total, WIDTH, seed=3)
        comm = manager.get("qkv_fprop")
        comm.copy_into_buffer(whole[partition.rows(rank)], local_chunk=True)
        x = comm.get_buffer(local_chunk=True)
        weight = seeded(FEATURES, WIDTH, seed=10 + rank).requires_grad_()
        y = tpo.all_gather_gemm(x, weight, manager.layer("qkv"))
        torch.testing.assert_close(y, whole @ weight.t())
        dy = seeded(partition.total, FEATURES, seed=20 + rank)
        overwrite(manager)
        y.backward(dy)
        torch.testing.assert_close(weight.grad, dy.t() @ whole)


def view_of_gathered(rank: int, size: int) -> None:
    """A view taken before an all-gather holds the gathered rows after it, and is right until the next-but-one."""
    with make_manager() as manager:
        partition = TokenPartition.balanced(2 * size + 1, size)
        manager.set_active_shape(partition)
        comm = manager.get("qkv_fprop")
        view = comm.get_buffer()
        whole, weight = seeded(partition.total, WIDTH, seed=4), seeded(FEATURES, WIDTH, seed=5)
        tpo.all_gather_gemm(whole[partition.rows(rank)], weight, manager.layer("qkv"))
        torch.testing.assert_close(view, whole, rtol=0, atol=0)
        assert view.data_ptr() != comm.get_buffer().data_ptr(), "the next operation has the other slot"
        manager.set_active_shape(CAPACITY)
        tpo.all_gather_gemm(
            seeded(CAPACITY, WIDTH, seed=6)[TokenPartition.balanced(CAPACITY, size).rows(rank)],
            weight,
            manager.layer("qkv"),
        )
        torch.testing.assert_close(view, whole, rtol=0, atol=0)


def other_inputs_from_the_buffer(rank: int, size: int) -> None:
    """The gathered view as input of a GEMM + reduce-scatter and of a GEMM beside: backward after overwriting."""
    with make_manager() as manager:
        partition = TokenPartition.balanced(2 * size + 1, size)
        manager.set_active_shape(partition)
        whole = seeded(partition.total, WIDTH, seed=7)
        for use in (_scatter, _beside_gather, _beside_scatter):
            view = manager.get("qkv_fprop").get_buffer()
            tpo.all_gather_gemm(whole[partition.rows(rank)], seeded(FEATURES, WIDTH, seed=1), manager.layer("qkv"))
            weight = seeded(WIDTH, WIDTH, seed=30).requires_grad_()
            loss, expected = use(manager, partition, view, weight, whole)
            overwrite(manager)
            loss.backward()
            torch.testing.assert_close(weight.grad, expected)


Use = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def _scatter(
    manager: tpo.UserBufferManager,
    partition: TokenPartition,
    x: torch.Tensor,
    weight: torch.Tensor,
    whole: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    y = tpo.gemm_reduce_scatter(x, weight, manager.layer("proj"))
    return y.sum(), whole.sum(0).expand(WIDTH, WIDTH)


def _beside_gather(
    manager: tpo.UserBufferManager,
    partition: TokenPartition,
    x: torch.Tensor,
    weight: torch.Tensor,
    whole: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    shard = whole[partition.rows(manager.rank)]
    _, product = tpo.bulk_all_gather(shard, manager.get("qkv_dgrad"), gemm=(x, weight))
    return product.sum(), whole.sum(0).expand(WIDTH, WIDTH)


def _beside_scatter(
    manager: tpo.UserBufferManager,
    partition: TokenPartition,
    x: torch.Tensor,
    weight: torch.Tensor,
    whole: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    _, product = tpo.bulk_reduce_scatter(whole, manager.get("qkv_wgrad"), gemm=(x, weight))
    return product.sum(), whole.sum(0).expand(WIDTH, WIDTH)


def staging_outlives_its_first_caller(rank: int, size: int, backend: str) -> None:
    """The reduce-scatter's staging buffer after a first use under inference mode, in autograd, and for FP8 rows."""
    with make_manager(backend=backend, quantization_modes=["none", "fp8"]) as manager:
        manager.set_active_shape(2 * size + 1)
        partition, comm, layer = manager.partition, manager.get("proj_fprop"), manager.layer("proj")
        assert partition is not None
        with torch.inference_mode():
            comm.get_buffer()
        for seed in (3, 4):  # twice: a graph that stayed on the buffer would be run backward again
            x = seeded(partition.total, WIDTH, seed=seed).requires_grad_()
            weight = seeded(WIDTH, WIDTH, seed=5)
            buffer = comm.get_buffer()
            buffer.copy_(2 * x)
            tpo.gemm_reduce_scatter(buffer, weight, layer).sum().backward()
            torch.testing.assert_close(x.grad, 2 * weight.sum(0).expand(partition.total, -1))
            assert not comm.get_buffer().requires_grad, "autograd must not stay on the buffer"
        quantised = manager.get("proj_fprop", quantised=True)
        assert quantised.get_buffer().dtype == torch.uint8 and comm.get_buffer().dtype == manager.dtype
