"""Norm weights and row biases: with `sync_replicated_grads` they train as the twin's do, without it they do not."""

from __future__ import annotations

from typing import Any

import torch

from tpoverlap.nn.replicated import sync_replicated_grads
from tpoverlap.testing.conformance.comparison import Comparison
from tpoverlap.testing.conformance.setting import Setting
from tpoverlap.testing.conformance.stack import REPLICATED, Stack, Twin
from tpoverlap.testing.numeric import relative_error
from tpoverlap.tokens import TokenPartition

LEARNING_RATE = 1e-3
NUM_STEPS = 3


def check_replicated_grads(rank: int, size: int, setting: Setting, syncs: bool) -> dict[str, Any]:
    """Three steps of SGD at different T, compared with the twin; ``syncs`` False expects them to go wrong.

    Returns:
        `Comparison.summary`; without ``syncs`` also ``drift``: relative error of each replicated parameter's update.
    """
    comparison, high = Comparison(f"rank {rank}, syncs {syncs}"), setting.reference_dtype
    with setting.open_manager(rank) as manager:
        stack = Stack(manager, setting)
        twin, reference = (Twin(rank, size, setting, dtype) for dtype in (setting.dtype, high))
        stack.load(twin)
        before = {name: parameter.detach().clone() for name, parameter in stack.named_parameters()}
        optimizer = torch.optim.SGD(stack.parameters(), lr=LEARNING_RATE)
        for step in range(NUM_STEPS):
            partition = TokenPartition.balanced((setting.capacity - 1) // (step + 1), size)
            x = setting.draw(rank, (partition.total, setting.hidden), "x", step)
            dy = setting.draw(rank, (partition.total, setting.hidden), "dy", step)
            with manager.microbatch(partition):
                y = stack(x[partition.rows(rank)])
            optimizer.zero_grad()
            y.backward(dy[partition.rows(rank)])
            if syncs:
                sync_replicated_grads(stack, manager.group)
            manager.check()
            optimizer.step()
            for model in (twin, reference):
                model.train(x, dy, partition)
                model.step(LEARNING_RATE)
        drift = {}
        for name, parameter in stack.named_parameters():
            if syncs:
                comparison.close(name, parameter, twin.shard_of(name), reference.shard_of(name))
            elif name.endswith(REPLICATED):
                moved = plain_update(parameter, before[name], high)
                drift[name] = relative_error(moved, plain_update(reference.shard_of(name), before[name], high))
                expected = size > 1
                comparison.true(f"{name} is off by {drift[name]:.2g} of its update", (drift[name] > 0.1) == expected)
    return comparison.summary() | ({} if syncs else {"drift": drift})


def plain_update(after: torch.Tensor, before: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """How far a parameter moved."""
    return after.detach().to(dtype) - before.to(dtype)
