"""A small model that several checks train: blocks of RMSNorm, column layer, GELU and row layer, with residuals.

Every block uses the same two names, so all of them share buffers. The norm's weight and the row bias are replicated.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
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
_EPSILON = 1e-5


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[T, H]; works row by row, so shards need no communication."""
    return torch.nn.functional.rms_norm(x, (x.shape[1],), weight, _EPSILON)


class Block(torch.nn.Module):
    """x [T_r, H] -> x + row(gelu(column(norm(x)))) [T_r, H]."""

    def __init__(self, manager: UserBufferManager, setting: Setting) -> None:
        super().__init__()
        hidden, ffn = setting.hidden, setting.features * manager.tp_size
        where = {"device": manager.device, "dtype": setting.dtype}
        self.norm_weight = torch.nn.Parameter(torch.ones(hidden, **where))
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


RECOMPUTATIONS: Mapping[str, Callable[..., Any] | None] = MappingProxyType(
    {
        "none": None,
        "full": checkpoint_context_fn,
        "selective": functools.partial(
            checkpoint_context_fn, functools.partial(create_selective_checkpoint_contexts, _save_gelu)
        ),
    }
)


class Stack(torch.nn.Module):
    """``NUM_BLOCKS`` blocks, each recomputed in backward if ``recomputation`` says so.

    ``partition_argument``: recomputation re-enters T because the layers were given it, not by ``context_fn``.
    """

    def __init__(
        self, manager: UserBufferManager, setting: Setting, recomputation: str = "none", num_blocks: int = NUM_BLOCKS
    ) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block(manager, setting) for _ in range(num_blocks))
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
                x = checkpoint(block, x, partition, use_reentrant=False)  # type: ignore[no-untyped-call]
            else:
                context_fn = RECOMPUTATIONS[self.recomputation]
                x = checkpoint(block, x, use_reentrant=False, context_fn=context_fn)  # type: ignore[no-untyped-call]
        return x


class Twin:
    """The same model on one rank, from the shards of all ranks, by ``torch.autograd``.

    Args:
        dtype: the tested one for the twin, the reference one for the reference.
    """

    def __init__(self, rank: int, size: int, setting: Setting, dtype: torch.dtype, num_blocks: int = NUM_BLOCKS) -> None:
        self.rank, self.size = rank, size
        hidden, features = setting.hidden, setting.features

        def parameter(shape: Sequence[int], *key: object, scale: float = 1.0) -> torch.Tensor:
            return setting.draw(rank, shape, "stack", *key, scale=scale).to(dtype)

        self.parameters: dict[str, list[torch.Tensor]] = {}
        for i in range(num_blocks):
            columns = [parameter((features, hidden), i, "c", q, scale=hidden**-0.5) for q in range(size)]
            rows = [parameter((hidden, features), i, "r", q, scale=(features * size) ** -0.5) for q in range(size)]
            self.parameters[f"blocks.{i}.norm_weight"] = [parameter((hidden,), i, "n", scale=0.1) + 1]
            self.parameters[f"blocks.{i}.column.weight"] = columns
            self.parameters[f"blocks.{i}.column.bias"] = [parameter((features,), i, "cb", q) for q in range(size)]
            self.parameters[f"blocks.{i}.row.weight"] = rows
            self.parameters[f"blocks.{i}.row.bias"] = [parameter((hidden,), i, "rb")]
        self.num_blocks = num_blocks
        for shards in self.parameters.values():
            for shard in shards:
                shard.requires_grad_()

    def shard_of(self, name: str, first_block: int = 0) -> torch.Tensor:
        """This rank's shard of a parameter of a `Stack` that starts with block ``first_block``."""
        _, index, rest = name.split(".", 2)
        shards = self.parameters[f"blocks.{int(index) + first_block}.{rest}"]
        return shards[self.rank] if len(shards) > 1 else shards[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H] -> [T, H]."""
        for i in range(self.num_blocks):
            get = functools.partial(self._get, i)
            normed = rms_norm(x, get("norm_weight")[0])
            inner = [
                gelu(plain.linear(normed, weight, bias))
                for weight, bias in zip(get("column.weight"), get("column.bias"), strict=True)
            ]
            x = x + plain.row_linear(inner, get("row.weight"), get("row.bias")[0])
        return x

    def _get(self, block: int, name: str) -> list[torch.Tensor]:
        return self.parameters[f"blocks.{block}.{name}"]
