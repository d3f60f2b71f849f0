"""Checks of one operation: all-gather + GEMM, GEMM + reduce-scatter, and the bulk twins.

Rank functions: ``check(rank, size, setting, ...)`` runs every T in one manager on the default group, compares on each
rank, raises AssertionError, and returns `Comparison.summary`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tpoverlap.manager import UserBufferManager
from tpoverlap.nn.functional import all_gather_gemm, bulk_all_gather, bulk_reduce_scatter, gemm_reduce_scatter
from tpoverlap.testing.conformance import plain
from tpoverlap.testing.conformance.comparison import Comparison
from tpoverlap.testing.conformance.setting import Setting, said, strided
from tpoverlap.tokens import TokenPartition

Options = Mapping[str, Any]


def check_all_gather_gemm(
    rank: int,
    size: int,
    setting: Setting,
    method: str,
    options: Options | None = None,
    partitions: Sequence[TokenPartition] | None = None,
) -> dict[str, Any]:
    """Case 1, forward: y and the gathered x, with and without bias, contiguous and not; repeated bit by bit."""
    comparison, high = Comparison(), setting.reference_dtype
    weight = setting.draw(rank, (setting.features, setting.hidden), "weight", rank, scale=setting.hidden**-0.5)
    bias = setting.draw(rank, (setting.features,), "bias", rank)
    with setting.open_manager(rank, ub_cfgs={"qkv_fprop": {"method": method, **(options or {})}}) as manager:
        layer = manager.layer("qkv")
        turns = partitions or setting.partitions(size)
        for turn, partition in enumerate(turns):
            comparison.where = _where(rank, method, options, partition)
            x = setting.draw(rank, (partition.total, setting.hidden), "x", turn)
            shard = x[partition.rows(rank)]
            shard = strided(shard) if turn % 3 == 1 else shard
            one_bias = bias if turn % 2 else None
            with said(manager, partition, turn) as explicit:
                y, gathered = all_gather_gemm(shard, weight, layer, one_bias, return_gathered=True, partition=explicit)
                again = all_gather_gemm(shard, weight, layer, one_bias, partition=explicit)
            reference = plain.linear(
                plain.wide(x, high), plain.wide(weight, high), None if one_bias is None else plain.wide(one_bias, high)
            )
            comparison.close("y", y, plain.linear(x, weight, one_bias), reference, roundings=1)
            comparison.same("gathered x", gathered, x)
            assert isinstance(again, torch.Tensor)
            comparison.same("y of the same call again", again, y)
        _ran_as(comparison, manager, "qkv_fprop", method, 2 * len(turns))
        manager.check()
    return comparison.summary()


def check_gemm_reduce_scatter(
    rank: int,
    size: int,
    setting: Setting,
    method: str,
    options: Options | None = None,
    partitions: Sequence[TokenPartition] | None = None,
) -> dict[str, Any]:
    """Case 2, forward: own rows of the summed output, with and without bias, contiguous and not; repeated."""
    comparison, high = Comparison(), setting.reference_dtype
    scale = setting.features**-0.5
    weights = [setting.draw(rank, (setting.hidden, setting.features), "weight", q, scale=scale) for q in range(size)]
    bias = setting.draw(rank, (setting.hidden,), "bias")
    with setting.open_manager(rank, ub_cfgs={"proj_fprop": {"method": method, **(options or {})}}) as manager:
        layer = manager.layer("proj")
        turns = partitions or setting.partitions(size)
        for turn, partition in enumerate(turns):
            comparison.where = _where(rank, method, options, partition)
            xs = [setting.draw(rank, (partition.total, setting.features), "x", turn, q) for q in range(size)]
            one_bias = bias if turn % 2 else None
            x = strided(xs[rank]) if turn % 3 == 1 else xs[rank]
            with said(manager, partition, turn) as explicit:
                y_shard = gemm_reduce_scatter(x, weights[rank], layer, one_bias, partition=explicit)
                again = gemm_reduce_scatter(x, weights[rank], layer, one_bias, partition=explicit)
            own = partition.rows(rank)
            biases = None if one_bias is None else [one_bias] * size
            twin = plain.row_linear(xs, weights, biases, partition, plain.fuses_bias(method, size))
            high_biases = None if biases is None else plain.raised(biases, high)
            reference = plain.row_linear(plain.raised(xs, high), plain.raised(weights, high), high_biases, partition)
            comparison.close("y_shard", y_shard, twin[own], reference[own])
            comparison.same("y_shard of the same call again", again, y_shard)
        _ran_as(comparison, manager, "proj_fprop", method, 2 * len(turns))
        manager.check()
    return comparison.summary()


def check_bulk(
    rank: int,
    size: int,
    setting: Setting,
    method: str,
    partitions: Sequence[TokenPartition] | None = None,
) -> dict[str, Any]:
    """Case 3: bulk all-gather and bulk reduce-scatter beside an independent GEMM, forward and all gradients."""
    comparison, high = Comparison(), setting.reference_dtype
    configs = {"qkv_dgrad": {"method": method}, "qkv_wgrad": {"method": method}}
    operand = setting.draw(rank, (7, setting.features), "a", rank)
    other = setting.draw(rank, (setting.features + 3, setting.features), "b", rank, scale=setting.features**-0.5)
    product_grad = setting.draw(rank, (7, setting.features + 3), "d product", rank)
    with setting.open_manager(rank, ub_cfgs=configs) as manager:
        turns = partitions or setting.partitions(size)
        for turn, partition in enumerate(turns):
            comparison.where, own = _where(rank, f"{method} beside a GEMM", None, partition), partition.rows(rank)
            shape = (partition.total, setting.hidden)
            # What every rank holds in full: the gradient of the gathered tensor, and the summands to be scattered.
            fulls = [setting.draw(rank, shape, "full", turn, q) for q in range(size)]
            rows = setting.draw(rank, shape, "rows", turn)
            summed = plain.rank_sum(fulls)[own], plain.rank_sum([plain.wide(full, high) for full in fulls])[own]
            for scatters in (False, True):
                label = "reduce-scatter" if scatters else "all-gather"
                a, b = operand.clone().requires_grad_(), other.clone().requires_grad_()
                given = (fulls[rank] if scatters else rows[own]).clone()
                given = (strided(given) if turn % 3 == 1 else given).requires_grad_()
                comm = manager.get("qkv_wgrad" if scatters else "qkv_dgrad")
                with said(manager, partition, turn) as explicit:
                    function = bulk_reduce_scatter if scatters else bulk_all_gather
                    result, product = function(given, comm, (a, b), partition=explicit)
                manager.set_active_shape(partition.total % setting.capacity + 1)  # backward keeps its own
                torch.autograd.backward([result, product], [rows[own] if scatters else fulls[rank], product_grad])
                assert given.grad is not None, f"{comparison.where}: {label}: no gradient"
                reduced, moved = (result, given.grad) if scatters else (given.grad, result)
                comparison.close(f"{label}: summed rows", reduced, *summed)
                comparison.same(f"{label}: gathered rows", moved, rows)
                wide = [plain.wide(value, high) for value in (operand, other, product_grad)]
                for what, actual, one, two in (
                    ("a @ b.T", product, (operand, other.t()), (wide[0], wide[1].t())),
                    ("d a", a.grad, (product_grad, other), (wide[2], wide[1])),
                    ("d b", b.grad, (product_grad.t(), operand), (wide[2].t(), wide[0])),
                ):
                    comparison.close(f"{label}: {what}", actual, torch.mm(*one), torch.mm(*two), roundings=1)
        _ran_as(comparison, manager, "qkv_dgrad", method, 2 * len(turns))
        manager.check()
    return comparison.summary()


def _where(rank: int, method: str, options: Options | None, partition: TokenPartition) -> str:
    return f"rank {rank}, {method} {dict(options or {})}, T={partition.total} {list(partition.counts)}"


def _ran_as(comparison: Comparison, manager: UserBufferManager, name: str, method: str, calls: int) -> None:
    """Nothing was downgraded silently: the method that was asked for is the one that ran, every time."""
    ran = "sequential" if manager.tp_size == 1 else "ring_exchange" if method == "auto" else method
    counted = manager.stats()[name].get(f"method_{ran}")
    comparison.true(f"{name} ran {manager.stats()[name]}, expected {calls} x {ran}", counted == calls)
    expected = 0 if manager.tp_size == 1 else 1
    allocations = manager.memory_report()["allocations"]
    comparison.true(f"{allocations} allocations, expected {expected}", allocations == expected)
