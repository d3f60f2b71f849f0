"""Rank function of `test_layouts`: tensors that are not contiguous, in every place that takes one."""

from __future__ import annotations

import torch

import tpoverlap as tpo
from tests.manager.ranks import FEATURES, WIDTH, make_manager, seeded
from tpoverlap.tokens import TokenPartition


def strided(tensor: torch.Tensor, how: str) -> torch.Tensor:
    """The same numbers, laid out otherwise."""
    if how == "transposed":
        result = tensor.t().contiguous().t()
    elif how == "every other row":
        result = tensor.repeat_interleave(2, dim=0)[::2]
    else:  # columns of something wider
        result = torch.cat([tensor, tensor], 1)[:, : tensor.shape[1]]
    assert torch.equal(result, tensor)
    return result


def run(rank: int, size: int, backend: str, method: str) -> None:
    partition = TokenPartition.balanced(4 * size + 1, size)
    own, total = partition.rows(rank), partition.total
    config = {"qkv_fprop": {"method": method}, "proj_fprop": {"method": method}}
    with make_manager(backend=backend, ub_cfgs=config) as manager:
        manager.set_active_shape(partition)
        for how in ("transposed", "every other row", "columns"):
            x, weight = seeded(total, WIDTH, seed=1), seeded(FEATURES, WIDTH, seed=2)
            y_grads = [seeded(total, FEATURES, seed=30 + peer) for peer in range(size)]
            shard = strided(x[own], how).requires_grad_()
            laid_out = strided(weight, how).requires_grad_()
            y = tpo.all_gather_gemm(shard, laid_out, manager.layer("qkv"))
            torch.testing.assert_close(y, x @ weight.t())
            y.backward(strided(y_grads[rank], how))
            torch.testing.assert_close(shard.grad, (torch.stack(y_grads).sum(0) @ weight)[own])
            torch.testing.assert_close(laid_out.grad, y_grads[rank].t() @ x)

            xs = [seeded(total, FEATURES, seed=40 + peer) for peer in range(size)]
            weight = seeded(WIDTH, FEATURES, seed=3)
            whole, laid_out = strided(xs[rank], how).requires_grad_(), strided(weight, how).requires_grad_()
            y_shard = tpo.gemm_reduce_scatter(whole, laid_out, manager.layer("proj"))
            torch.testing.assert_close(y_shard, (torch.stack(xs).sum(0) @ weight.t())[own])
            y_shard.sum().backward()  # a gradient of stride 0
            torch.testing.assert_close(whole.grad, weight.sum(0).expand(total, FEATURES))
            torch.testing.assert_close(laid_out.grad, xs[rank].sum(0).expand(WIDTH, FEATURES))

            a, b = seeded(3, 5, seed=4), seeded(2, 5, seed=5)
            shard, left = strided(x[own], how).requires_grad_(), strided(a, how).requires_grad_()
            gathered, product = tpo.bulk_all_gather(shard, manager.get("qkv_dgrad"), gemm=(left, strided(b, how)))
            torch.testing.assert_close(gathered, x, rtol=0, atol=0)
            torch.testing.assert_close(product, a @ b.t())
            (gathered.sum() + product.sum()).backward()
            torch.testing.assert_close(shard.grad, torch.full_like(shard, size))
            torch.testing.assert_close(left.grad, b.sum(0).expand(3, 5))

            whole = strided(x, how).requires_grad_()
            scattered, _ = tpo.bulk_reduce_scatter(whole, manager.get("qkv_wgrad"), gemm=(a, b))
            torch.testing.assert_close(scattered, size * x[own])
            scattered.sum().backward()
            torch.testing.assert_close(whole.grad, torch.ones_like(whole))
