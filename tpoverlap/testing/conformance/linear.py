"""Case 4: `nn.Linear` forward and backward in every mode, several weights behind one gather, and case 13's sums.

Rank functions, as in `gemms`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from tpoverlap.nn.functional import all_gather_gemm
from tpoverlap.nn.linear import Linear
from tpoverlap.nn.replicated import sync_replicated_grads
from tpoverlap.testing.conformance import plain
from tpoverlap.testing.conformance.comparison import Comparison
from tpoverlap.testing.conformance.setting import Setting, said, strided
from tpoverlap.tokens import TokenPartition

COLUMN_MODES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "bulk": {},
        "aggregate": {"qkv_fprop": {"method": "ring_exchange", "aggregate": True}},
        "dgrad_ring": {"qkv_dgrad": {"method": "ring_exchange"}},
        "dgrad_pipeline": {"qkv_dgrad": {"method": "pipeline", "num_splits": 3}},
        "sequential": {f"qkv_{phase}": {"method": "sequential"} for phase in ("fprop", "dgrad", "wgrad")},
    }
)
ROW_MODES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "ring": {},
        "pipeline": {"proj_fprop": {"method": "pipeline", "num_splits": 4}},
        "dgrad_aggregate": {"proj_dgrad": {"method": "ring_exchange", "aggregate": True}},
        "sequential": {f"proj_{phase}": {"method": "sequential"} for phase in ("fprop", "dgrad")},
    }
)
UNREGISTERED = "unregistered"
"""A mode of both: a name that nobody registered, which runs without overlap."""

# (bias, weight trains, input trains): every combination in which anything trains, and the one in which nothing does.
_STATES = [(bias, weight, x) for bias in (True, False) for weight in (True, False) for x in (True, False)]


def check_linear(
    rank: int, size: int, setting: Setting, parallel_mode: str, mode: str, turns_a_partition: int = 2
) -> dict[str, Any]:
    """`Linear` in one mode; bias, frozen weight and frozen input in every combination as T changes.

    Gradients accumulate over all T in ``parameter.grad``-like sums, which are compared too (case 13).
    """
    comparison = Comparison()
    column = parallel_mode == "column"
    configs = {} if mode == UNREGISTERED else (COLUMN_MODES if column else ROW_MODES)[mode]
    partitions = setting.partitions(size) * turns_a_partition
    check = _check_column if column else _check_row
    with setting.open_manager(rank, ub_cfgs=configs) as manager:
        name = "nobody" if mode == UNREGISTERED else "qkv" if column else "proj"
        features = setting.features * size
        sizes = (setting.hidden, features) if column else (features, setting.hidden)
        layers = {bias: Linear(*sizes, bias, parallel_mode=parallel_mode, manager=manager, ub_name=name)
                  for bias in (True, False)}  # fmt: skip
        twins = _Weights(rank, size, setting, column)
        for layer in layers.values():
            with torch.no_grad():
                layer.weight.copy_(twins.weights[rank])
                if layer.bias is not None:
                    layer.bias.copy_(twins.biases[rank])
        for turn, partition in enumerate(partitions):
            bias, weight_trains, x_trains = _STATES[turn * 3 % len(_STATES)]
            layer = layers[bias].requires_grad_(weight_trains)
            if layer.bias is not None:
                layer.bias.requires_grad_(turn % 5 != 4)
            layer.zero_grad(set_to_none=True)
            comparison.where = (
                f"rank {rank}, {parallel_mode} {mode}, T={partition.total} {list(partition.counts)}, bias {bias}, "
                f"weight trains {weight_trains}, x trains {x_trains}"
            )
            check(comparison, layer, partition, turn, x_trains, twins)
            manager.check()
    return comparison.summary()


class _Weights:
    """The full layer, cut by rank; every rank holds all shards of it for its twin."""

    def __init__(self, rank: int, size: int, setting: Setting, column: bool) -> None:
        self.rank, self.size, self.setting, self.high = rank, size, setting, setting.reference_dtype
        shape = (setting.features, setting.hidden) if column else (setting.hidden, setting.features)
        scale = shape[1] ** -0.5
        self.weights = [setting.draw(rank, shape, "weight", q, scale=scale) for q in range(size)]
        # A row bias is replicated.
        self.biases = [setting.draw(rank, shape[:1], "bias", q if column else 0) for q in range(size)]


def _check_column(
    comparison: Comparison, layer: Linear, partition: TokenPartition, turn: int, x_trains: bool, twins: _Weights
) -> None:
    rank, setting, own = twins.rank, twins.setting, partition.rows(twins.rank)
    x = setting.draw(rank, (partition.total, setting.hidden), "x", turn)
    dys = [setting.draw(rank, (partition.total, setting.features), "dy", turn, q) for q in range(twins.size)]
    shard = (strided(x[own]) if turn % 3 == 1 else x[own].clone()).requires_grad_(x_trains)
    bias = None if layer.bias is None else layer.bias.detach()
    weights_high, dys_high = plain.raised(twins.weights, twins.high), plain.raised(dys, twins.high)
    x_high = plain.wide(x, twins.high)
    y = _forward(layer, shard, partition, turn)
    reference = plain.linear(x_high, weights_high[rank], None if bias is None else plain.wide(bias, twins.high))
    comparison.close("y", y, plain.linear(x, twins.weights[rank], bias), reference, roundings=1)
    if not _backward(comparison, y, dys[rank], layer, x_trains):
        return
    if x_trains:
        dx, dx_high = plain.input_grad(dys, twins.weights), plain.input_grad(dys_high, weights_high)
        comparison.close("dx", shard.grad, dx[own], dx_high[own])
    else:
        comparison.absent("x", shard.grad)
    if layer.weight.requires_grad:
        dw = plain.weight_grad(dys[rank], x)
        comparison.close("dW", layer.weight.grad, dw, plain.weight_grad(dys_high[rank], x_high), roundings=1)
    else:
        comparison.absent("the weight", layer.weight.grad)
    if layer.bias is not None and layer.bias.requires_grad:
        comparison.close("db", layer.bias.grad, dys[rank].sum(0), dys_high[rank].sum(0), roundings=1)


def _check_row(
    comparison: Comparison, layer: Linear, partition: TokenPartition, turn: int, x_trains: bool, twins: _Weights
) -> None:
    rank, setting, own = twins.rank, twins.setting, partition.rows(twins.rank)
    xs = [setting.draw(rank, (partition.total, setting.features), "x", turn, q) for q in range(twins.size)]
    dy = setting.draw(rank, (partition.total, setting.hidden), "dy", turn)
    x = (strided(xs[rank]) if turn % 3 == 1 else xs[rank].clone()).requires_grad_(x_trains)
    bias = None if layer.bias is None else layer.bias.detach()
    dy_high, weights_high = plain.wide(dy, twins.high), plain.raised(twins.weights, twins.high)
    y = _forward(layer, x, partition, turn)
    biases = None if bias is None else [bias] * twins.size
    method = layer.comm.fprop.config.method
    twin = plain.row_linear(xs, twins.weights, biases, partition, plain.fuses_bias(method, twins.size))
    reference = plain.row_linear(plain.raised(xs, twins.high), weights_high, _raised(biases, twins.high), partition)
    comparison.close("y_shard", y, twin[own], reference[own])
    if not _backward(comparison, y, dy[own], layer, x_trains):
        return
    if x_trains:
        dx, dx_high = torch.mm(dy, twins.weights[rank]), torch.mm(dy_high, weights_high[rank])
        comparison.close("dx", x.grad, dx, dx_high, roundings=1)
    else:
        comparison.absent("x", x.grad)
    if layer.weight.requires_grad:
        dw_high = plain.weight_grad(dy_high, plain.wide(xs[rank], twins.high))
        comparison.close("dW", layer.weight.grad, plain.weight_grad(dy, xs[rank]), dw_high, roundings=1)
    else:
        comparison.absent("the weight", layer.weight.grad)
    if layer.bias is not None and layer.bias.requires_grad:
        comparison.close("db of own rows", layer.bias.grad, dy[own].sum(0), dy_high[own].sum(0), roundings=1)
        assert sync_replicated_grads(layer, layer.manager.group) == 1, "the row bias is not marked as replicated"
        shards = [dy[partition.rows(q)].sum(0) for q in range(twins.size)]
        comparison.close("db, summed over ranks", layer.bias.grad, plain.rank_sum(shards), dy_high.sum(0))


def _raised(biases: list[torch.Tensor] | None, dtype: torch.dtype) -> list[torch.Tensor] | None:
    return None if biases is None else plain.raised(biases, dtype)


def _forward(layer: Linear, x: torch.Tensor, partition: TokenPartition, turn: int) -> torch.Tensor:
    with said(layer.manager, partition, turn) as explicit:
        y: torch.Tensor = layer(x, explicit)
    layer.manager.set_active_shape(partition.total % layer.manager.capacity_shape[0] + 1)  # backward must not read it
    return y


def _backward(comparison: Comparison, y: torch.Tensor, dy: torch.Tensor, layer: Linear, x_trains: bool) -> bool:
    """False when nothing trains: then there is no history either."""
    trains = x_trains or any(parameter.requires_grad for parameter in layer.parameters())
    comparison.true(f"requires_grad of the output is {y.requires_grad}, expected {trains}", y.requires_grad == trains)
    if trains:
        y.backward(strided(dy) if dy.shape[0] % 2 else dy)
    return trains


def check_shared_gather(rank: int, size: int, setting: Setting, mode: str) -> dict[str, Any]:
    """Two weights (of which one is frozen in turn) and the gathered x itself, all with gradients, from one gather."""
    comparison, high = Comparison(), setting.reference_dtype
    widths, scale = (setting.features, setting.features + 5), setting.hidden**-0.5
    weights = [
        [setting.draw(rank, (width, setting.hidden), "weight", i, q, scale=scale) for q in range(size)]
        for i, width in enumerate(widths)
    ]
    bias = setting.draw(rank, (widths[0],), "bias", rank)
    with setting.open_manager(rank, ub_cfgs=COLUMN_MODES[mode]) as manager:
        layer = manager.layer("qkv")
        for turn, partition in enumerate(setting.partitions(size)):
            comparison.where = f"rank {rank}, two weights, {mode}, T={partition.total} {list(partition.counts)}"
            own = partition.rows(rank)
            x = setting.draw(rank, (partition.total, setting.hidden), "x", turn)
            dys = [
                [setting.draw(rank, (partition.total, width), "dy", i, turn, q) for q in range(size)]
                for i, width in enumerate(widths)
            ]
            extras = [setting.draw(rank, (partition.total, setting.hidden), "extra", turn, q) for q in range(size)]
            shard = x[own].clone().requires_grad_()
            trained = [w[rank].clone().requires_grad_(turn % 3 != i) for i, w in enumerate(weights)]
            one_bias = bias.clone().requires_grad_()
            calls = manager.stats().get("qkv_fprop", {}).get("calls", 0)
            with said(manager, partition, turn) as explicit:
                outputs = all_gather_gemm(
                    shard, trained, layer, [one_bias, None], return_gathered=True, partition=explicit
                )
            comparison.true("one gather", manager.stats()["qkv_fprop"]["calls"] == calls + 1)
            torch.autograd.backward(outputs, [dys[0][rank], dys[1][rank], extras[rank]])
            x_high, bias_high = plain.wide(x, high), plain.wide(bias, high)
            for i, y in enumerate(outputs[:2]):
                biases = (bias, bias_high) if i == 0 else (None, None)
                reference = plain.linear(x_high, plain.wide(weights[i][rank], high), biases[1])
                comparison.close(f"y{i}", y, plain.linear(x, weights[i][rank], biases[0]), reference, roundings=1)
                if trained[i].requires_grad:
                    twin = plain.weight_grad(dys[i][rank], x)
                    reference = plain.weight_grad(plain.wide(dys[i][rank], high), x_high)
                    comparison.close(f"dW{i}", trained[i].grad, twin, reference, roundings=1)
                else:
                    comparison.absent(f"weight {i}", trained[i].grad)
            comparison.same("gathered x", outputs[2], x)
            db = plain.wide(dys[0][rank], high).sum(0)
            comparison.close("db", one_bias.grad, dys[0][rank].sum(0), db, roundings=1)
            terms = [(dys[0][q], weights[0][q], dys[1][q], weights[1][q], extras[q]) for q in range(size)]
            dx, dx_high = (
                plain.rank_sum([torch.mm(a, b).addmm(c, d).add(e) for a, b, c, d, e in values])
                for values in (terms, [tuple(plain.wide(v, high) for v in term) for term in terms])
            )
            comparison.close("dx", shard.grad, dx[own], dx_high[own])
        manager.check()
    return comparison.summary()
