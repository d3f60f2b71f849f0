"""Rank functions of `test_replicated`."""

from __future__ import annotations

import copy

import torch

import tpoverlap as tpo
from tpoverlap.nn import ShardSpec


def copied_layers_are_synchronised(rank: int, size: int) -> dict[str, list[bool]]:
    """Whether gradients were summed, for a layer, its deep copy, and a copy made anew by ``to_empty``.

    Each replicated parameter's gradient is rank + 1 before.
    """
    found: dict[str, list[bool]] = {}
    with tpo.UserBufferManager(None, (16, 8), torch.float32, "cpu", timeout_s=30.0) as manager:
        layer = tpo.nn.LayerNormLinear(8, 8, manager=manager, ub_name="qkv", normalization="LayerNorm")
        copied = copy.deepcopy(layer)
        for name, module in {
            "layer": layer,
            "deep copy": copied,
            "made anew": copy.deepcopy(layer).to_empty(device="cpu"),
        }.items():
            for parameter in module.parameters():
                parameter.grad = torch.full_like(parameter, rank + 1.0)
            tpo.sync_replicated_grads(module, None)
            total = size * (size + 1) / 2
            norms = [p for key, p in module.named_parameters() if "norm" in key]
            found[name] = [bool((p.grad == total).all()) for p in norms]
    return found


def counted_once(rank: int, size: int, sequence_parallel: bool) -> dict[str, float]:
    """The gradient norm as docs/thd.md computes it, by Megatron's flags; and that of the full gradients."""
    with tpo.UserBufferManager(None, (16, 16), torch.float32, "cpu", timeout_s=30.0) as manager:
        common = {"manager": manager, "sequence_parallel": sequence_parallel}
        model = torch.nn.ModuleDict(
            {
                "layer": tpo.nn.TransformerLayer(16, 8 * size, size, kv_channels=4, activation="swiglu", **common),
                "head": tpo.nn.VocabParallelHead(16, 4 * size + 1, **common),
                "embedding": tpo.nn.VocabParallelEmbedding(4 * size + 1, 16, manager=manager),
                "own norm": torch.nn.RMSNorm(16),
            }
        )
        square = torch.zeros(())
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                spec = getattr(module, "shard_specs", {}).get(name, ShardSpec(tuple(parameter.shape)))
                full = torch.randn(spec.full_shape, generator=torch.Generator().manual_seed(len(name)))
                square += full.square().sum()
                parameter.grad = torch.empty_like(parameter)
                if spec.dim is None:
                    parameter.grad.copy_(full)
                else:
                    at = [torch.arange(start, start + length) for start, length in spec.pieces(rank, size)]
                    parameter.grad.copy_(full.index_select(spec.dim, torch.cat(at)))
                    assert parameter.partition_dim == spec.dim and parameter.partition_stride == 1
        counted = [
            p.grad
            for p in model.parameters()
            if p.grad is not None and (getattr(p, "tensor_model_parallel", False) or manager.rank == 0)
        ]
        found = torch.nn.utils.get_total_norm(counted) ** 2
        torch.distributed.all_reduce(found)
    return {"found": found.sqrt().item(), "expected": square.sqrt().item()}
