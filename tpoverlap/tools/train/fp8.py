"""``--fp8``: the recipes by name, and the reference's linear layers, which quantise as R ranks do, in one process.

What a tensor's scale covers depends on how tensor parallelism cuts it, so the reference cuts alike (T rows, R ranks)::

    column (qkv, gate with up)  q(x [T, H]) once for all ranks;  q(W_r), q(dy_r [T, N/R]) each rank for itself
    row (proj, down)            q(dy [T, H]) once for all ranks; q(x_r [T, K/R]), q(W_r) each rank for itself

Quantisation and GEMMs are those of `tpoverlap.testing.conformance.plain_fp8`: no code of the layers under test.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from tpoverlap.errors import ConfigError
from tpoverlap.gemm.fp8 import DelayedScaling, Float8CurrentScaling, Float8RowwiseScaling, Recipe, require_device
from tpoverlap.gemm.fp8.quantize import ALIGNMENT
from tpoverlap.testing.conformance.plain import rank_sum
from tpoverlap.testing.conformance.plain_fp8 import PlainQuantizer, PlainTensor, product
from tpoverlap.tools.train.weights import ModelConfig, shard, unshard

RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {"current": Float8CurrentScaling(), "delayed": DelayedScaling(), "rowwise": Float8RowwiseScaling()}
)


def require_fp8(config: ModelConfig, tp_size: int, layer_style: str, device_type: str) -> None:
    """Raise ConfigError unless FP8 layers of these sizes run here."""
    if layer_style != "te-style":
        raise ConfigError("--fp8 runs in Transformer Engine style layers only: add --layers te-style")
    step = ALIGNMENT * tp_size
    for name, size in (("hidden", config.hidden), ("ffn", config.ffn)):
        if size % step:
            raise ConfigError(
                f"--fp8 needs {name} in multiples of {ALIGNMENT} on each of {tp_size} ranks, got {name}={size}; "
                f"choose --{name} {-(-size // step) * step}"
            )
    if device_type == "cuda":
        require_device(torch.device("cuda", 0))


class Fp8Linears:
    """The reference's linear layers, by the names of their weights. Keeps what delayed scaling remembers.

    Args:
        recipe: of all layers.
        tp_size: R: into how many parts each tensor is cut before it is quantised.
    """

    def __init__(self, recipe: Recipe, tp_size: int) -> None:
        self._recipe, self._tp_size = recipe, tp_size
        self._linears: dict[tuple[str, ...], _Linear] = {}

    def __call__(self, x: Tensor, weights: Mapping[str, Tensor], *names: str) -> tuple[Tensor, ...]:
        """``x`` [T, K] times each named weight [N, K] transposed; several are one GEMM with one scale a rank."""
        if names not in self._linears:
            column = names[0].rpartition(".")[2] not in ("proj", "down")
            self._linears[names] = _Linear(names, self._recipe, self._tp_size, column)
        function = _Column if self._linears[names].column else _Row
        outputs: tuple[Tensor, ...] = function.apply(  # type: ignore[no-untyped-call]
            self._linears[names], x, *(weights[name] for name in names)
        )
        return outputs


class _Linear:
    """How the tensors of one GEMM are cut and quantised."""

    def __init__(self, names: tuple[str, ...], recipe: Recipe, tp_size: int, column: bool) -> None:
        self.names, self.recipe, self.tp_size, self.column = names, recipe, tp_size, column
        inputs, grads = (1, tp_size) if column else (tp_size, 1)
        self.input = [PlainQuantizer(recipe, "input", column) for _ in range(inputs)]
        self.weight = [PlainQuantizer(recipe, "weight", False) for _ in range(tp_size)]
        self.grad = [PlainQuantizer(recipe, "grad", not column) for _ in range(grads)]

    def weights8(self, weights: Sequence[Tensor]) -> list[tuple[PlainTensor, PlainTensor]]:
        """Each rank's weight in FP8, as [N, K] and as dgrad reads it, [K, N]."""
        made = []
        for rank, quantize in enumerate(self.weight):
            own = torch.cat(
                [shard(n, w.detach(), rank, self.tp_size) for n, w in zip(self.names, weights, strict=True)]
            )
            quantised = quantize(own)
            # Row-wise scales belong to output features: along the other axis they are computed anew.
            rowwise = isinstance(self.recipe, Float8RowwiseScaling)
            made.append((quantised, quantize(own.t()) if rowwise else quantised.t()))
        return made

    def weight_grads(self, pairs: Sequence[tuple[PlainTensor, PlainTensor]]) -> list[Tensor]:
        """DW of each name, whole, from each rank's (dy, x)."""
        parts = [self._weight_grad(dy, x).chunk(len(self.names)) for dy, x in pairs]
        return [unshard(name, [part[i] for part in parts]) for i, name in enumerate(self.names)]

    def _weight_grad(self, dy: PlainTensor, x: PlainTensor) -> Tensor:
        if isinstance(self.recipe, Float8RowwiseScaling):  # its scales do not leave a sum over tokens: original dtype
            return dy.wide().to(dy.dtype).t() @ x.wide().to(x.dtype)
        return product(dy.t(), x.t(), "twin")

    def cut_features(self, whole: Sequence[Tensor]) -> list[Tensor]:
        """Each rank's columns of the GEMM's outputs [T, N], in the order of its weight's rows."""
        return [
            torch.cat([shard(n, y.t(), rank, self.tp_size).t() for n, y in zip(self.names, whole, strict=True)], 1)
            for rank in range(self.tp_size)
        ]

    def join_features(self, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The inverse."""
        cut = [part.t().chunk(len(self.names)) for part in parts]
        return tuple(unshard(name, [one[i] for one in cut]).t() for i, name in enumerate(self.names))


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, linear: _Linear, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        x8, ctx.weights8 = linear.input[0](x.detach()), linear.weights8(weights)
        ctx.linear, ctx.x8 = linear, x8
        return linear.join_features([product(x8, weight8, "twin") for weight8, _ in ctx.weights8])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        linear: _Linear = ctx.linear
        dys = linear.cut_features(grads)
        dys8 = [quantize(dy) for quantize, dy in zip(linear.grad, dys, strict=True)]
        dx = rank_sum([product(dy8, w8_t, "twin") for dy8, (_, w8_t) in zip(dys8, ctx.weights8, strict=True)])
        return None, dx, *linear.weight_grads([(dy8, ctx.x8) for dy8 in dys8])


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, linear: _Linear, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        xs = x.detach().chunk(linear.tp_size, dim=1)
        ctx.linear, ctx.weights8 = linear, linear.weights8(weights)
        ctx.xs8 = [quantize(part) for quantize, part in zip(linear.input, xs, strict=True)]
        return (rank_sum([product(x8, w8, "twin") for x8, (w8, _) in zip(ctx.xs8, ctx.weights8, strict=True)]),)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        linear: _Linear = ctx.linear
        dy8 = linear.grad[0](grads[0])
        dx = torch.cat([product(dy8, w8_t, "twin") for _, w8_t in ctx.weights8], dim=1)
        return None, dx, *linear.weight_grads([(dy8, x8) for x8 in ctx.xs8])
