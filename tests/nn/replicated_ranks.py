"""Rank function of `test_replicated`."""

from __future__ import annotations

import copy

import torch

import tpoverlap as tpo


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
