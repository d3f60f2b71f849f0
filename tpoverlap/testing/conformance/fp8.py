"""FP8 in cases 1, 2, 4 and 10: operations and linear layers, forward and backward, and FP8 beside other layers.

Results are compared with the twin's FP8 arithmetic tightly, as everything is (`Comparison.close`), and with the numbers
before quantisation loosely: CONFORMANCE.md's rtol 0.125 and atol 0.0625 (of the largest value), twice that where an
E5M2 gradient, which has one mantissa bit less, takes part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from tpoverlap.comm.schedule import column_splits
from tpoverlap.gemm.fp8 import DelayedScaling, Float8CurrentScaling, Float8RowwiseScaling, Fp8State, Recipe
from tpoverlap.gemm.fp8.recipes import Role
from tpoverlap.manager import UserBufferManager
from tpoverlap.nn.functional import all_gather_gemm, gemm_reduce_scatter
from tpoverlap.testing.conformance import linear, plain
from tpoverlap.testing.conformance.comparison import Comparison
from tpoverlap.testing.conformance.plain_fp8 import PlainQuantizer, PlainTensor, packed_sum, product
from tpoverlap.testing.conformance.setting import Setting, said, strided
from tpoverlap.testing.numeric import assert_elementwise, relative_error
from tpoverlap.tokens import TokenPartition

RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        "current": Float8CurrentScaling(),
        "current-e4m3": Float8CurrentScaling("e4m3", use_power_2_scales=True),
        "delayed": DelayedScaling(amax_history_len=3),
        "rowwise": Float8RowwiseScaling(),
    }
)
MODES = ("none", "fp8")
COLUMN_MODES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        **linear.COLUMN_MODES,
        "dgrad_ring_fp8_buf": {"qkv_dgrad": {"method": "ring_exchange", "fp8_buf": True}},
        "dgrad_pipeline_fp8_buf": {"qkv_dgrad": {"method": "pipeline", "num_splits": 3, "fp8_buf": True}},
        linear.UNREGISTERED: {},
    }
)
ROW_MODES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        **linear.ROW_MODES,
        "ring_fp8_buf": {"proj_fprop": {"method": "ring_exchange", "fp8_buf": True}},
        "pipeline_fp8_buf": {"proj_fprop": {"method": "pipeline", "num_splits": 7, "fp8_buf": True}},
        linear.UNREGISTERED: {},
    }
)
_FUSED: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {"fused": {"method": "fused"}, "fused_copies": {"method": "fused", "use_ce": False, "num_sm": 4}}
)
KERNEL_COLUMN_MODES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {mode: {f"qkv_{phase}": options for phase in ("fprop", "dgrad")} for mode, options in _FUSED.items()}
)
KERNEL_ROW_MODES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {mode: {f"proj_{phase}": options for phase in ("fprop", "dgrad")} for mode, options in _FUSED.items()}
)
"""What runs as Triton kernels: on GPUs; tests/overlap has them in the interpreter."""
_COLUMN: Mapping[str, Mapping[str, Any]] = MappingProxyType({**COLUMN_MODES, **KERNEL_COLUMN_MODES})
_ROW: Mapping[str, Mapping[str, Any]] = MappingProxyType({**ROW_MODES, **KERNEL_ROW_MODES})


@dataclass(frozen=True)
class _Layer:
    """One linear layer of the whole group: all ranks' weights, what is quantised how, and this rank's parameters."""

    rank: int
    size: int
    setting: Setting
    recipe: Recipe
    num_weights: int
    column: bool

    def weights(self, q: int) -> list[torch.Tensor]:
        """[N_i, K] each, of rank ``q``."""
        inside, outside = self.setting.features, self.setting.hidden
        shapes = [(inside + 16 * i, outside) if self.column else (outside, inside) for i in range(self.num_weights)]
        return [self.setting.draw(self.rank, s, "weight", q, i, scale=s[1] ** -0.5) for i, s in enumerate(shapes)]

    def quantizers(self, role: Role, count: int, gathered: bool) -> list[PlainQuantizer]:
        """Of one tensor of every rank: histories are a rank's own unless the tensor travels."""
        return [PlainQuantizer(self.recipe, role, gathered) for _ in range(count)]


def _roundings(setting: Setting) -> int:
    """For `Comparison.close`: tensor cores add FP8 products with fewer digits than float32: near zero all are lost."""
    return 1 if setting.device == "cpu" else 2


def check_column(
    rank: int, size: int, setting: Setting, recipe_name: str, mode: str, num_weights: int = 1
) -> dict[str, Any]:
    """Cases 1 and 4: y, the gathered x, dx and dW of FP8 column layers, at every T."""
    comparison, recipe = Comparison(), RECIPES[recipe_name]
    layer = _Layer(rank, size, setting, recipe, num_weights, True)
    weights = [layer.weights(q) for q in range(size)]
    own_weights = [w.clone().requires_grad_() for w in weights[rank]]
    bias = setting.draw(rank, (setting.features,), "bias", rank).requires_grad_()
    quantize_x = PlainQuantizer(recipe, "input", gathered=True)
    quantize_dys = [layer.quantizers("grad", num_weights, False) for _ in range(size)]
    weights8 = [[PlainQuantizer(recipe, "weight", False)(w) for w in ws] for ws in weights]
    weights8_t = [[_transposed(recipe, w) for w in ws] for ws in weights]
    with _open(setting, rank, _COLUMN[mode]) as manager:
        comm = manager.layer("nobody" if mode == linear.UNREGISTERED else "qkv")
        state = Fp8State(recipe, num_weights, manager.device)
        for turn, partition in enumerate(setting.partitions(size)):
            own = partition.rows(rank)
            comparison.where = _where(rank, f"{recipe_name} column {mode}", partition)
            x = setting.draw(rank, (partition.total, setting.hidden), "x", turn, scale=2.0 ** (turn % 5 - 2))
            dys = [
                [setting.draw(rank, (partition.total, w.shape[0]), "dy", turn, q, i, scale=2.0 ** (q - turn % 4))
                 for i, w in enumerate(ws)] for q, ws in enumerate(weights)
            ]  # fmt: skip
            shard = (strided(x[own]) if turn % 3 == 1 else x[own].clone()).requires_grad_()
            biases = [bias if turn % 2 else None] + [None] * (num_weights - 1)
            with said(manager, partition, turn) as explicit:
                *ys, gathered = all_gather_gemm(shard, own_weights, comm, biases, explicit, True, fp8=state)
            x8 = quantize_x(x)
            comparison.close("gathered x", gathered, x8.wide().to(x.dtype), x8.wide(), roundings=1)
            for i, y in enumerate(ys):
                shift = None if biases[i] is None else bias.detach()
                twin, reference = (product(x8, weights8[rank][i], p) for p in ("twin", "reference"))
                original = plain.linear(
                    x.double(), weights[rank][i].double(), None if shift is None else shift.double()
                )
                if shift is not None:
                    twin, reference = (twin.float() + shift.float()).to(twin.dtype), reference + shift.double()
                comparison.close(f"y_{i}", y, twin, reference, roundings=_roundings(setting))
                if recipe_name != "delayed":  # there a scale may be stale
                    _near_original(comparison, f"y_{i}", y, original)
            manager.set_active_shape(partition.total % setting.capacity + 1)  # backward keeps its own
            torch.autograd.backward(ys, dys[rank])
            dys8 = [[quantize(dy) for quantize, dy in zip(quantize_dys[q], dys[q], strict=True)] for q in range(size)]
            _compare_input_grad(comparison, layer, mode, shard.grad, dys8, weights8_t, partition)
            if biases[0] is not None:
                wide_db = dys[rank][0].double().sum(0)
                comparison.close("db", bias.grad, dys[rank][0].sum(0), wide_db)
                bias.grad = None
            for i, weight in enumerate(own_weights):
                expected = _weight_grads(recipe, dys8[rank][i], x8, dys[rank][i])
                comparison.close(f"dW_{i}", weight.grad, *expected, roundings=_roundings(setting))
                weight.grad = None
        _ran(comparison, manager, mode, "qkv_fprop")
        manager.check()
    return comparison.summary()


def check_row(rank: int, size: int, setting: Setting, recipe_name: str, mode: str) -> dict[str, Any]:
    """Cases 2 and 4: y, dx and dW of FP8 row layers, with and without ``fp8_buf``, at every T."""
    comparison, recipe = Comparison(), RECIPES[recipe_name]
    layer = _Layer(rank, size, setting, recipe, 1, False)
    weights = [layer.weights(q)[0] for q in range(size)]
    own_weight = weights[rank].clone().requires_grad_()
    bias = setting.draw(rank, (setting.hidden,), "bias").requires_grad_()
    quantize_xs = layer.quantizers("input", size, False)
    quantize_dy = PlainQuantizer(recipe, "grad", gathered=True)
    weights8 = [PlainQuantizer(recipe, "weight", False)(w) for w in weights]
    weight8_t = _transposed(recipe, weights[rank])
    options = _ROW[mode].get("proj_fprop", {})
    with _open(setting, rank, _ROW[mode]) as manager:
        comm = manager.layer("nobody" if mode == linear.UNREGISTERED else "proj", row=True)
        state = Fp8State(recipe, 1, manager.device)
        for turn, partition in enumerate(setting.partitions(size)):
            own = partition.rows(rank)
            comparison.where = _where(rank, f"{recipe_name} row {mode}", partition)
            xs = [
                setting.draw(rank, (partition.total, setting.features), "x", turn, q, scale=2.0 ** (q - turn % 3))
                for q in range(size)
            ]
            dy = setting.draw(rank, (partition.total, setting.hidden), "dy", turn, scale=2.0 ** (turn % 5 - 2))
            x = (strided(xs[rank]) if turn % 3 == 1 else xs[rank].clone()).requires_grad_()
            one_bias = bias if turn % 2 else None
            with said(manager, partition, turn) as explicit:
                y = gemm_reduce_scatter(x, own_weight, comm, one_bias, explicit, fp8=state)
            xs8 = [quantize(one) for quantize, one in zip(quantize_xs, xs, strict=True)]
            partials = [product(x8, w8, "twin") for x8, w8 in zip(xs8, weights8, strict=True)]
            reference = torch.stack([product(a, b, "reference") for a, b in zip(xs8, weights8, strict=True)]).sum(0)
            shift = None if one_bias is None else bias.detach()
            twin = _row_twin(partials, shift, partition, options, manager, recipe, mode)
            reference = reference if shift is None else reference + shift.double()
            comparison.close("y_shard", y, twin[own], reference[own])
            manager.set_active_shape(partition.total % setting.capacity + 1)
            y.backward(dy[own])
            dy8 = quantize_dy(dy)
            comparison.close("dx", x.grad, product(dy8, weight8_t, "twin"), product(dy8, weight8_t, "reference"))
            expected = _weight_grads(recipe, dy8, xs8[rank], None)
            comparison.close("dW", own_weight.grad, *expected, roundings=_roundings(setting))
            own_weight.grad = None
            if one_bias is not None:
                comparison.close("db of own rows", bias.grad, dy[own].sum(0), dy[own].double().sum(0))
                bias.grad = None
        _ran(comparison, manager, mode, "proj_fprop")
        manager.check()
    return comparison.summary()


def check_mixed(rank: int, size: int, setting: Setting) -> dict[str, Any]:
    """Case 10: FP8 and other layers in turn, on the same names and regions; each has its own reference, every step."""
    comparison, recipe = Comparison(), Float8CurrentScaling()
    layer = _Layer(rank, size, setting, recipe, 1, True)
    weight = layer.weights(rank)[0]
    weight8 = PlainQuantizer(recipe, "weight", False)(weight)
    with _open(setting, rank, {"qkv_dgrad": {"method": "ring_exchange"}}) as manager:
        comm = manager.layer("qkv")
        states = [Fp8State(recipe, device=manager.device), None, Fp8State(recipe, device=manager.device), None, None]
        for turn, partition in enumerate(setting.partitions(size)):
            comparison.where = _where(rank, "mixed modes", partition)
            x = setting.draw(rank, (partition.total, setting.hidden), "x", turn)
            dy = [setting.draw(rank, (partition.total, weight.shape[0]), "dy", turn, q) for q in range(size)]
            shards, weights, ys = [], [], []
            for state in states:
                shards.append(x[partition.rows(rank)].clone().requires_grad_())
                weights.append(weight.clone().requires_grad_())
                y = all_gather_gemm(shards[-1], weights[-1], comm, partition=partition, fp8=state)
                assert isinstance(y, torch.Tensor)
                ys.append(y)
            for index in torch.randperm(len(ys), generator=torch.Generator().manual_seed(turn)).tolist():
                ys[index].backward(dy[rank])
            x8, dy8 = PlainQuantizer(recipe, "input", True)(x), PlainQuantizer(recipe, "grad", False)(dy[rank])
            for state, y, one in zip(states, ys, weights, strict=True):
                if state is None:
                    comparison.close(
                        "y", y, plain.linear(x, weight, None), x.double() @ weight.double().t(), roundings=1
                    )
                    wide = dy[rank].double().t() @ x.double()
                    comparison.close("dW", one.grad, plain.weight_grad(dy[rank], x), wide, roundings=1)
                else:
                    twin, reference = product(x8, weight8, "twin"), product(x8, weight8, "reference")
                    comparison.close("FP8 y", y, twin, reference, roundings=_roundings(setting))
                    comparison.close(
                        "FP8 dW", one.grad, *_weight_grads(recipe, dy8, x8, None), roundings=_roundings(setting)
                    )
            for kind in ([0, 2], [1, 3, 4]):
                for index in kind[1:]:
                    comparison.same("dx of equal layers", shards[index].grad, shards[kind[0]].grad)  # type: ignore[arg-type]
        manager.check()
    return comparison.summary()


def _open(setting: Setting, rank: int, configs: Mapping[str, Any]) -> UserBufferManager:
    return setting.open_manager(rank, ub_cfgs=configs, quantization_modes=MODES)


def _where(rank: int, what: str, partition: TokenPartition) -> str:
    return f"rank {rank}, FP8 {what}, T={partition.total} {list(partition.counts)}"


def _transposed(recipe: Recipe, weight: torch.Tensor) -> PlainTensor:
    """A weight as dgrad reads it, [K, N]: row-wise scales are computed anew, along the other axis."""
    if isinstance(recipe, Float8RowwiseScaling):
        return PlainQuantizer(recipe, "weight", False)(weight.t())
    return PlainQuantizer(recipe, "weight", False)(weight).t()


def _weight_grads(
    recipe: Recipe, dy8: PlainTensor, x8: PlainTensor, dy: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(twin, reference) of dW."""
    if not isinstance(recipe, Float8RowwiseScaling):
        return product(dy8.t(), x8.t(), "twin"), product(dy8.t(), x8.t(), "reference")
    wide = [one.wide().to(one.dtype) for one in (dy8, x8)]  # row-wise: in the original dtype
    return wide[0].t() @ wide[1], wide[0].double().t() @ wide[1].double()


def _compare_input_grad(
    comparison: Comparison,
    layer: _Layer,
    mode: str,
    actual: torch.Tensor | None,
    dys8: list[list[PlainTensor]],
    weights8_t: list[list[PlainTensor]],
    partition: TokenPartition,
) -> None:
    own, recipe = partition.rows(layer.rank), layer.recipe
    partials = []
    for dy8s, w8s in zip(dys8, weights8_t, strict=True):
        terms = [product(dy, w, "twin") for dy, w in zip(dy8s, w8s, strict=True)]
        partial = terms[0]
        for term in terms[1:]:
            partial = partial + term
        partials.append(partial)
    pairs = [pair for dy8s, w8s in zip(dys8, weights8_t, strict=True) for pair in zip(dy8s, w8s, strict=True)]
    reference = torch.stack([product(*pair, "reference") for pair in pairs]).sum(0)
    options = _COLUMN[mode].get("qkv_dgrad", {})
    twin = plain.rank_sum(partials)
    if options.get("fp8_buf") and layer.size > 1:
        twin = packed_sum(partials, recipe, "grad", _splits(options, layer.setting.hidden))
    comparison.close("dx", actual, twin[own], reference[own])


def _row_twin(
    partials: list[torch.Tensor],
    bias: torch.Tensor | None,
    partition: TokenPartition,
    options: Mapping[str, Any],
    manager: UserBufferManager,
    recipe: Recipe,
    mode: str,
) -> torch.Tensor:
    packs = bool(options.get("fp8_buf")) and manager.tp_size > 1
    if bias is not None:
        for owner in range(partition.tp_size):
            rows = partition.rows(owner)
            partials[owner] = partials[owner].clone()
            partials[owner][rows] += bias
    if packs:
        return packed_sum(partials, recipe, "input", _splits(options, partials[0].shape[1]))
    return plain.rank_sum(partials)


def _splits(options: Mapping[str, Any], width: int) -> list[slice]:
    count = options.get("num_splits", 1) if options.get("method") == "pipeline" else 1
    return [slice(start, stop) for start, stop in column_splits(width, count, 16)]


def _near_original(comparison: Comparison, what: str, actual: torch.Tensor, original: torch.Tensor) -> None:
    label = f"{comparison.where}: {what} against the numbers before quantisation"
    assert_elementwise(actual, original, rtol=0.125, atol_scale=0.0625, what=label)
    error = relative_error(actual, original)
    comparison.true(f"{label}: relative error {error:.3f}", error < 0.0625)


def _ran(comparison: Comparison, manager: UserBufferManager, mode: str, name: str) -> None:
    """Nothing was downgraded: the configured method ran."""
    if manager.tp_size == 1 or mode == linear.UNREGISTERED:
        return
    methods = {key for key, count in manager.stats()[name].items() if key.startswith("method_") and count}
    expected = manager.get(name).config.method
    expected = "ring_exchange" if expected == "auto" else expected
    comparison.true(f"{name} ran {methods}, configured is {expected}", methods == {f"method_{expected}"})
