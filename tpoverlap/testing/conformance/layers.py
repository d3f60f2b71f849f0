"""Cases 5, 6 and 13: layers forward and backward in every mode, against `plain_layers`, as T changes.

Rank functions, as in `gemms`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from tpoverlap.manager import UserBufferManager
from tpoverlap.nn.layer_norm_linear import LayerNormLinear
from tpoverlap.nn.layer_norm_mlp import LayerNormMLP
from tpoverlap.nn.multihead_attention import MultiheadAttention
from tpoverlap.nn.recompute import checkpoint_context_fn
from tpoverlap.nn.replicated import sync_replicated_grads
from tpoverlap.nn.sequences import PackedSequences
from tpoverlap.nn.transformer_layer import TransformerLayer
from tpoverlap.testing.conformance import plain, plain_layers
from tpoverlap.testing.conformance.comparison import Comparison
from tpoverlap.testing.conformance.microbatches import microbatch_partitions, one_forward_one_backward
from tpoverlap.testing.conformance.plain_layers import Group
from tpoverlap.testing.conformance.setting import Setting, said
from tpoverlap.tokens import TokenPartition

MODES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "bulk": {},
        "rs_dgrad": {"ub_overlap_rs_dgrad": True},
        "save_gathered": {"save_gathered": True},
        "save_gathered_rs_dgrad": {"save_gathered": True, "ub_overlap_rs_dgrad": True},
        "delayed": {"delay_wgrad_compute": True},
        "main_grad": {"fuse_wgrad_accumulation": True},
        "delayed_main_grad": {"delay_wgrad_compute": True, "fuse_wgrad_accumulation": True},
        "whole": {"sequence_parallel": False},
        "whole_delayed_main_grad": {
            "sequence_parallel": False,
            "delay_wgrad_compute": True,
            "fuse_wgrad_accumulation": True,
        },
        "flags_off": {
            f"ub_{flag}": False for flag in ("overlap_ag", "overlap_rs", "overlap_rs_dgrad", "bulk_dgrad", "bulk_wgrad")
        },
    }
)
KINDS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "linear-layernorm": {"normalization": "LayerNorm"},
        "linear-rmsnorm": {"normalization": "RMSNorm", "bias": False},
        "mlp-gelu": {"activation": "gelu"},
        "mlp-swiglu": {"activation": "swiglu", "normalization": "RMSNorm", "bias": False},
        "attention": {},
        "attention-normed": {"input_layernorm": True, "rotary_base": 100.0},
        "transformer-gqa": {
            "activation": "swiglu",
            "normalization": "RMSNorm",
            "bias": False,
            "rotary_base": 100.0,
        },
    }
)


UNREGISTERED: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "linear": {"ub_name": "nobody"},
        "mlp": {"ub_names": ("nobody1", "nobody2")},
        "attention": {"ub_names": ("nobody1", "nobody2")},
        "transformer": {"ub_names": ("nobody1", "nobody2", "nobody3", "nobody4")},
    }
)
HEADS_A_GROUP, HEAD_DIM = 2, 8
"""Two query heads share a key and value head; every rank has one such group."""


def make_layer(kind: str, manager: UserBufferManager, setting: Setting, **options: Any) -> torch.nn.Module:
    """The layer of a kind, at the sizes of ``setting``."""
    options = {**KINDS[kind], **options}
    if kind.startswith("linear"):
        named = {"ub_name": "qkv", **options}
        return LayerNormLinear(setting.hidden, setting.features * manager.tp_size, manager=manager, **named)
    features, size = setting.features * manager.tp_size, manager.tp_size
    if kind.startswith("mlp"):
        return LayerNormMLP(setting.hidden, features, manager=manager, **options)
    heads: dict[str, Any] = {"num_gqa_groups": size, "kv_channels": HEAD_DIM}
    if kind.startswith("attention"):
        return MultiheadAttention(setting.hidden, HEADS_A_GROUP * size, manager=manager, **heads, **options)
    return TransformerLayer(setting.hidden, features, HEADS_A_GROUP * size, manager=manager, **heads, **options)


class Model:
    """A layer's parameters on all ranks, as leaves of ``dtype``, and its arithmetic in plain torch."""

    def __init__(
        self,
        kind: str,
        layer: torch.nn.Module,
        rank: int,
        size: int,
        setting: Setting,
        dtype: torch.dtype,
        index: int = 0,
    ) -> None:
        self.kind, self.rank, self.size, self.dtype = kind, rank, size, dtype
        self.replicated = {name for name, _ in layer.named_parameters() if is_replicated(name)}
        self.parameters = {
            name: [
                _drawn(rank, setting, f"{index}.{name}", tuple(parameter.shape), 0 if name in self.replicated else q)
                .to(dtype)
                .requires_grad_()
                for q in range(size)
            ]
            for name, parameter in layer.named_parameters()
        }

    def forward(self, x: torch.Tensor, group: Group) -> list[torch.Tensor]:
        """What each rank's layer gives for all rows, [T, N] each."""
        if self.kind.startswith("linear"):
            return plain_layers.layer_norm_linear(group, self.parameters, x)
        options = KINDS[self.kind]
        if self.kind.startswith("mlp"):
            y = plain_layers.layer_norm_mlp(group, self.parameters, x, options["activation"])
            return [y] * self.size
        sequences = PackedSequences(sequence_offsets(x.shape[0]), x.shape[0], x.device)
        heads = plain_layers.Heads(HEADS_A_GROUP, 1, HEAD_DIM, sequences, options.get("rotary_base"))
        if self.kind.startswith("attention"):
            y = plain_layers.attention(heads, group, self.parameters, x)
        else:
            y = plain_layers.transformer(heads, group, self.parameters, x, options["activation"])
        return [y] * self.size

    def train(self, x: torch.Tensor, dys: list[torch.Tensor], group: Group) -> tuple[torch.Tensor, torch.Tensor]:
        """Forward and backward: (this rank's y, dx); gradients add up in the parameters."""
        leaf = plain.wide(x, self.dtype).clone().requires_grad_()
        ys = self.forward(leaf, group)
        if self.kind.startswith("linear"):
            torch.autograd.backward(ys, [dy.to(self.dtype) for dy in dys])
        else:
            ys[0].backward(dys[0].to(self.dtype))
        assert leaf.grad is not None, "x trains"
        return ys[self.rank].detach(), leaf.grad

    def grad_of(self, name: str, *, summed: bool) -> torch.Tensor:
        """This rank's gradient; of a replicated parameter the sum over ranks."""
        shards = self.parameters[name]
        grads = [torch.zeros_like(shard) if shard.grad is None else shard.grad for shard in shards]
        if name in self.replicated:
            return plain.rank_sum(grads) if summed else grads[0]
        return grads[self.rank]

    def zero(self) -> None:
        """Forget the gradients."""
        for shards in self.parameters.values():
            for shard in shards:
                shard.grad = None


def sequence_offsets(num_tokens: int) -> list[int]:
    """Sequences of 1, 2, 4, .. tokens and the rest: offsets that no rank boundary respects."""
    offsets = [0]
    while offsets[-1] < num_tokens:
        offsets.append(min(num_tokens, offsets[-1] + 2 ** (len(offsets) - 1)))
    return offsets


def is_replicated(name: str) -> bool:
    """Norm parameters and row biases."""
    return name.endswith(("layer_norm_weight", "layer_norm_bias", "fc2_bias", "proj.bias"))


def _drawn(rank: int, setting: Setting, name: str, shape: tuple[int, ...], key: int) -> torch.Tensor:
    scale = shape[-1] ** -0.5 if len(shape) == 2 else 0.3
    drawn = setting.draw(rank, shape, name, key, scale=scale)
    return drawn + 1 if name.endswith("layer_norm_weight") else drawn


def load(layer: torch.nn.Module, model: Model) -> None:
    """This rank's shards of the twin's parameters."""
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.copy_(model.parameters[name][model.rank])


def check_layer(
    rank: int, size: int, setting: Setting, kind: str, mode: str, unregistered: bool = False
) -> dict[str, Any]:
    """One layer in one mode. Two microbatches at every T, whose gradients add up; then once more without autograd."""
    comparison, options = Comparison(), MODES[mode]
    whole = options.get("sequence_parallel") is False
    if unregistered:
        options = {**options, **UNREGISTERED[kind.split("-")[0]]}
    with setting.open_manager(rank) as manager:
        layer = make_layer(kind, manager, setting, **options)
        twin, reference = (
            Model(kind, layer, rank, size, setting, dtype) for dtype in (setting.dtype, setting.reference_dtype)
        )
        load(layer, twin)
        for turn, partition in enumerate((*microbatch_partitions(setting, size), TokenPartition.balanced(1, size))):
            comparison.where = f"rank {rank}, {kind} {mode}, T={partition.total} {list(partition.counts)}"
            group = Group(partition, whole, fused_bias=size > 1 and not (mode == "flags_off" or unregistered))
            _clear(layer, twin, reference)
            for microbatch in range(2):
                _one_microbatch(comparison, layer, twin, reference, setting, group, 2 * turn + microbatch)
            _compare_gradients(
                comparison, layer, twin, reference, group, accumulates="fuse_wgrad_accumulation" in options
            )
            manager.check()
    return comparison.summary()


def check_layers_1f1b(
    rank: int, size: int, setting: Setting, kind: str, mode: str, num_warmup: int, recomputed: bool
) -> dict[str, Any]:
    """Two stacked layers that share buffers, four microbatches of different T in flight, gradients added up.

    T is set before each forward and nowhere else, so every backward (and recomputation) runs under a later T.
    """
    comparison, options = Comparison(), MODES[mode]
    partitions = microbatch_partitions(setting, size)
    with setting.open_manager(rank) as manager:
        layers = [make_layer(kind, manager, setting, **options) for _ in range(2)]
        twins, references = (
            [Model(kind, layer, rank, size, setting, dtype, index) for index, layer in enumerate(layers)]
            for dtype in (setting.dtype, setting.reference_dtype)
        )
        for layer, twin in zip(layers, twins, strict=True):
            load(layer, twin)
            _clear(layer)
        inputs, outputs = {}, {}
        for phase, index in one_forward_one_backward(len(partitions), num_warmup):
            partition = partitions[index]
            own = partition.rows(rank)
            comparison.where = f"rank {rank}, {kind} {mode}, {phase}{index} of {num_warmup} warm-up, {recomputed}"
            x = setting.draw(rank, (partition.total, setting.hidden), "x", index)
            dy = setting.draw(rank, (partition.total, setting.hidden), "dy", index)
            if phase == "F":
                manager.set_active_shape(partition)
                y = inputs[index] = x[own].clone().requires_grad_()
                for layer in layers:
                    packed = _packed(kind, partition.total, x.device, index)
                    y = _forward(layer, y, packed, recomputed=recomputed)
                outputs[index] = y
                continue
            outputs[index].backward(dy[own])
            (y, dx), (y_high, dx_high) = (
                _train(models, x, dy, Group(partition, fused_bias=size > 1)) for models in (twins, references)
            )
            comparison.close("y", outputs.pop(index), y[own], y_high[own])
            comparison.close("dx", inputs.pop(index).grad, dx[own], dx_high[own])
        for layer, twin, reference in zip(layers, twins, references, strict=True):
            for _ in partitions if options.get("delay_wgrad_compute") else ():
                layer.backward_dw()  # type: ignore[operator]  # a method of every layer here
            accumulates = "fuse_wgrad_accumulation" in options
            _compare_gradients(comparison, layer, twin, reference, Group(partitions[0]), accumulates=accumulates)
        manager.check()
    return comparison.summary()


def _forward(layer: torch.nn.Module, x: torch.Tensor, packed: tuple[Any, ...], *, recomputed: bool) -> Any:
    if not recomputed:
        return layer(x, *packed)
    return checkpoint(layer, x, *packed, use_reentrant=False, context_fn=checkpoint_context_fn)


def _train(models: list[Model], x: torch.Tensor, dy: torch.Tensor, group: Group) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = plain.wide(x, models[0].dtype).clone().requires_grad_()
    y = leaf
    for model in models:
        y = model.forward(y, group)[0]
    y.backward(dy.to(y.dtype))
    assert leaf.grad is not None, "x trains"
    return y.detach(), leaf.grad


def _clear(layer: torch.nn.Module, *models: Model) -> None:
    layer.zero_grad(set_to_none=True)
    for parameter in layer.parameters():
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)  # type: ignore[attr-defined]
    for model in models:
        model.zero()


def _one_microbatch(
    comparison: Comparison,
    layer: Any,
    twin: Model,
    reference: Model,
    setting: Setting,
    group: Group,
    key: int,
) -> None:
    rank, partition, manager = twin.rank, group.partition, layer.manager
    rows = slice(0, partition.total) if group.whole else partition.rows(rank)
    x = setting.draw(rank, (partition.total, setting.hidden), "x", key)
    column = twin.kind.startswith("linear")
    width = setting.features if column else setting.hidden
    dys = [setting.draw(rank, (partition.total, width), "dy", key, q if column else 0) for q in range(group.size)]
    shard = x[rows].clone().requires_grad_()
    how = key if not group.whole else 4 * key + key % 3  # T cannot be inferred as R times the rows of a whole input
    with said(manager, partition, how) as explicit:
        packed = _packed(twin.kind, partition.total, shard.device, key)
        y = layer(shard, *packed, partition=explicit)
        with torch.no_grad() if key % 2 else torch.inference_mode():
            comparison.same("y without autograd", layer(shard, *packed, partition=explicit), y.detach())
    manager.set_active_shape(partition.total % manager.capacity_shape[0] + 1)  # backward must not read it
    (y_twin, dx), (y_reference, dx_reference) = (model.train(x, dys, group) for model in (twin, reference))
    out_rows = slice(0, partition.total) if column or group.whole else rows
    comparison.close("y", y, y_twin[out_rows], y_reference[out_rows])
    y.backward(dys[rank][out_rows])
    if layer.need_backward_dw():
        layer.backward_dw()
    comparison.close("dx", shard.grad, dx[rows], dx_reference[rows])


def _packed(kind: str, num_tokens: int, device: torch.device, key: int) -> tuple[Any, ...]:
    """``cu_seqlens`` in one of the ways there are; nothing for layers that take none."""
    if kind.startswith(("linear", "mlp")):
        return ()
    offsets = sequence_offsets(num_tokens)
    if key % 3 == 0:
        return (PackedSequences(offsets, num_tokens, device),)
    return (torch.tensor(offsets, dtype=torch.int32, device=device if key % 3 == 1 else "cpu"),)


def _compare_gradients(
    comparison: Comparison, layer: Any, twin: Model, reference: Model, group: Group, *, accumulates: bool
) -> None:
    expected = 0 if group.whole else len(twin.replicated)
    comparison.true("replicated parameters", sync_replicated_grads(layer, layer.manager.group) == expected)
    for name, parameter in layer.named_parameters():
        grads = [model.grad_of(name, summed=not group.whole) for model in (twin, reference)]
        fused = accumulates and name.endswith("weight") and not name.endswith("norm_weight")
        actual = parameter.grad
        if fused:
            comparison.absent(f"d {name} beside main_grad", parameter.grad)
            actual = parameter.main_grad.to(grads[0].dtype)
        comparison.close(f"d {name}", actual, *grads)
