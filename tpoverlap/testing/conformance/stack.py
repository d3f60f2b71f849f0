"""A small model that several checks train: blocks of RMSNorm, column layer, GELU and row layer, with residuals.

Every block uses the same two names, so all of them share buffers. The norm's weight and the row bias are replicated.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch.nn.functional import gelu
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tpoverlap.manager import UserBufferManager
from tpoverlap.nn.linear import Linear
from tpoverlap.nn.recompute import checkpoint_context_fn
from tpoverlap.testing.conformance import plain
from tpoverlap.testing.conformance.setting import Setting
from tpoverlap.tokens import TokenPartition

SCHEMES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "default": {},
        "scatter_in_dgrad": {
            "fc1_fprop": {"method": "ring_exchange", "aggregate": True},
            "fc1_dgrad": {"method": "ring_exchange"},
            "fc2_fprop": {"method": "pipeline", "num_splits": 2},
        },
        "sequential": {
            name: {"method": "sequential"} for name in ("fc1_fprop", "fc1_dgrad", "fc1_wgrad", "fc2_fprop", "fc2_dgrad")
        },
    }
)
NUM_BLOCKS = 2
REPLICATED = ("norm_weight", "row.bias")
"""Ends of the names of parameters that every rank holds whole."""
_EPSILON = 1e-5


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[T, H]; works row by row, so shards need no communication."""
    return torch.nn.functional.rms_norm(x, (x.shape[1],), weight, _EPSILON)


class Block(torch.nn.Module):
    """x [T_r, H] -> x + row(gelu(column(norm(x)))) [T_r, H]."""

    def __init__(self, manager: UserBufferManager, setting: Setting) -> None:
        super().__init__()
        hidden, ffn = setting.hidden, setting.features * manager.tp_size
        self.norm_weight = torch.nn.Parameter(torch.ones(hidden, device=manager.device, dtype=setting.dtype))
        self.norm_weight.sequence_parallel = True  # type: ignore[attr-defined]  # read by sync_replicated_grads
        self.column = Linear(hidden, ffn, parallel_mode="column", manager=manager, ub_name="fc1")
        self.row = Linear(ffn, hidden, parallel_mode="row", manager=manager, ub_name="fc2")

    def forward(self, x: torch.Tensor, partition: TokenPartition | None = None) -> torch.Tensor:
        """T comes from ``partition``, else from the manager."""
        normed = rms_norm(x, self.norm_weight)
        y: torch.Tensor = x + self.row(gelu(self.column(normed, partition)), partition)
        return y


def _save_gelu(context: object, operation: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    saves = operation == torch.ops.aten.gelu.default
    return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE


CONTEXT_FUNCTIONS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "full": checkpoint_context_fn,
        "selective": functools.partial(
            checkpoint_context_fn, functools.partial(create_selective_checkpoint_contexts, _save_gelu)
        ),
    }
)


RECOMPUTATIONS = ("none", *CONTEXT_FUNCTIONS)


class Stack(torch.nn.Module):
    """``NUM_BLOCKS`` blocks, each recomputed in backward if ``recomputation`` says so.

    ``partition_argument``: recomputation re-enters T because the layers were given it, not by ``context_fn``.
    """

    def __init__(
        self, manager: UserBufferManager, setting: Setting, recomputation: str = "none", num_blocks: int = NUM_BLOCKS
    ) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block(manager, setting) for _ in range(num_blocks))
        self.manager = manager
        self.recomputation = recomputation

    def load(self, twin: Twin, first_block: int = 0) -> None:
        """Take this rank's shards of the twin's parameters, from block ``first_block`` on."""
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(twin.shard_of(name, first_block).detach())

    def forward(self, x: torch.Tensor, partition: TokenPartition | None = None) -> torch.Tensor:
        """[T_r, H] -> [T_r, H]."""
        for block in self.blocks:
            if self.recomputation == "none":
                x = block(x, partition)
            elif partition is not None or self.recomputation == "forgotten":
                x = checkpoint(block, x, partition, use_reentrant=False)
            else:
                context_fn = CONTEXT_FUNCTIONS[self.recomputation]
                x = checkpoint(block, x, use_reentrant=False, context_fn=context_fn)
        return x


class Twin:
    """The same model on one rank, from the shards of all ranks, by ``torch.autograd``.

    Replicated parameters are one leaf a rank, each for that rank's rows, as in the real thing.

    Args:
        dtype: the tested one for the twin, the reference one for the reference.
        scheme: which of ``SCHEMES`` the model runs under.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        setting: Setting,
        dtype: torch.dtype,
        scheme: str = "default",
        num_blocks: int = NUM_BLOCKS,
    ) -> None:
        self.rank, self.size, self.dtype, self.num_blocks = rank, size, dtype, num_blocks
        method = str(SCHEMES[scheme].get("fc2_fprop", {}).get("method", "ring_exchange"))
        self.fused_bias = plain.fuses_bias(method, size)
        hidden, features = setting.hidden, setting.features

        def shards(block: int, name: str, *shape: int, replicated: bool = False) -> list[torch.Tensor]:
            scale = shape[-1] ** -0.5 if len(shape) == 2 else 0.3
            drawn = [
                setting.draw(rank, shape, block, name, 0 if replicated else q, scale=scale).to(dtype)
                for q in range(size)
            ]
            return [(shard + 1 if name == "norm_weight" else shard).requires_grad_() for shard in drawn]

        self.parameters: dict[str, list[torch.Tensor]] = {}
        for i in range(num_blocks):
            self.parameters |= {
                f"blocks.{i}.norm_weight": shards(i, "norm_weight", hidden, replicated=True),
                f"blocks.{i}.column.weight": shards(i, "column.weight", features, hidden),
                f"blocks.{i}.column.bias": shards(i, "column.bias", features),
                f"blocks.{i}.row.weight": shards(i, "row.weight", hidden, features),
                f"blocks.{i}.row.bias": shards(i, "row.bias", hidden, replicated=True),
            }

    def shard_of(self, name: str, first_block: int = 0) -> torch.Tensor:
        """This rank's shard of a parameter of a `Stack` that starts with block ``first_block``."""
        return self.parameters[_shifted(name, first_block)][self.rank]

    def grad_of(self, name: str, first_block: int = 0) -> torch.Tensor:
        """Its gradient; of a replicated parameter, the sum over ranks."""
        shards = self.parameters[_shifted(name, first_block)]
        grads = [torch.zeros_like(shard) if shard.grad is None else shard.grad for shard in shards]
        return plain.rank_sum(grads) if name.endswith(REPLICATED) else grads[self.rank]

    def forward(self, x: torch.Tensor, partition: TokenPartition) -> torch.Tensor:
        """[T, H] -> [T, H]."""
        for i in range(self.num_blocks):
            norm_weights, columns, column_biases, rows, row_biases = (
                self.parameters[f"blocks.{i}.{name}"]
                for name in ("norm_weight", "column.weight", "column.bias", "row.weight", "row.bias")
            )
            normed = torch.cat([rms_norm(x[partition.rows(q)], weight) for q, weight in enumerate(norm_weights)])
            inner = [
                gelu(plain.linear(copy, weight, bias))
                for copy, weight, bias in zip(plain.fan_out(normed, self.size), columns, column_biases, strict=True)
            ]
            x = x + plain.row_linear(inner, rows, row_biases, partition, self.fused_bias)
        return x

    def train(self, x: torch.Tensor, dy: torch.Tensor, partition: TokenPartition) -> tuple[torch.Tensor, torch.Tensor]:
        """Forward and backward of one microbatch: (y, dx), [T, H] each; gradients add up in the parameters."""
        x = plain.wide(x, self.dtype).clone().requires_grad_()
        y = self.forward(x, partition)
        y.backward(dy.to(self.dtype))
        assert x.grad is not None, "x trains"
        return y.detach(), x.grad

    def step(self, learning_rate: float) -> None:
        """SGD on what `train` summed up, then no gradients."""
        with torch.no_grad():
            for name, shards in self.parameters.items():
                summed = self.grad_of(name)
                for shard in shards:
                    grad = summed if name.endswith(REPLICATED) else shard.grad
                    if grad is not None:
                        shard.sub_(grad, alpha=learning_rate)
            for shards in self.parameters.values():
                for shard in shards:
                    shard.grad = None


def _shifted(name: str, first_block: int) -> str:
    _, index, rest = name.split(".", 2)
    return f"blocks.{int(index) + first_block}.{rest}"
