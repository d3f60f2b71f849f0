"""Microbatches of different T in flight at once, in 1F1B order, with activation recomputation.

    python examples/02_pipeline_1f1b.py
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 examples/02_pipeline_1f1b.py

One pipeline stage's view: it runs a few forwards ahead, then alternates one forward, one backward. When the backward
of an early microbatch runs, the manager already holds the T of a later one. The gradients are those of one microbatch
after the other, which this example checks.
"""

from __future__ import annotations

import os
import tempfile
from collections import deque

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import tpoverlap as tpo

CAPACITY, HIDDEN, FFN = 128, 32, 96
NUM_WARMUP = 2  # forwards that run ahead of the first backward
TOKEN_COUNTS = [128, 37, 1, 90, 64, 5]  # T of each microbatch; with T = 1 some rank owns no row


class Stage(nn.Module):
    def __init__(self, mgr: tpo.UserBufferManager, recompute: bool, device: torch.device) -> None:
        super().__init__()
        kwargs = {"manager": mgr, "device": device, "dtype": torch.float32}
        self.fc1 = tpo.nn.Linear(HIDDEN, FFN, parallel_mode="column", ub_name="fc1", **kwargs)
        self.fc2 = tpo.nn.Linear(FFN, HIDDEN, parallel_mode="row", ub_name="fc2", **kwargs)
        self.recompute = recompute

    def block(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fc2(F.silu(self.fc1(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.recompute:
            # Backward re-runs block() when the manager holds another T: context_fn re-enters the first partition.
            return checkpoint(self.block, x, use_reentrant=False, context_fn=tpo.checkpoint_context_fn)
        return self.block(x)


def gradients(
    stage: Stage, mgr: tpo.UserBufferManager, group: dist.ProcessGroup, order: list[tuple[str, int]]
) -> list[torch.Tensor]:
    """Run forwards and backwards in the given order; returns the gradients of all parameters."""
    rank = group.rank()
    device = stage.fc1.weight.device
    losses: dict[int, torch.Tensor] = {}
    stage.zero_grad()
    for action, index in order:
        if action == "forward":
            with mgr.microbatch(TOKEN_COUNTS[index]) as partition:  # around forward only
                generator = torch.Generator().manual_seed(index)
                x = torch.randn(TOKEN_COUNTS[index], HIDDEN, generator=generator).to(device)
                losses[index] = stage(x[partition.rows(rank)]).square().sum()
        else:
            losses.pop(index).backward()  # uses the partition of its own forward
    tpo.sync_replicated_grads(stage, group)  # the bias of fc2 saw only this rank's rows
    mgr.check()
    return [parameter.grad.clone() for parameter in stage.parameters()]


def one_after_the_other(count: int) -> list[tuple[str, int]]:
    return [(action, index) for index in range(count) for action in ("forward", "backward")]


def one_forward_one_backward(count: int) -> list[tuple[str, int]]:
    order, in_flight = [], deque[int]()
    for index in range(count):
        order.append(("forward", index))
        in_flight.append(index)
        if index >= NUM_WARMUP:
            order.append(("backward", in_flight.popleft()))
    return order + [("backward", index) for index in in_flight]


def run(rank: int, world_size: int, rendezvous: str | None) -> None:
    use_cuda = torch.cuda.device_count() >= world_size
    device = torch.device("cuda", rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if use_cuda else "gloo", init_method=rendezvous, rank=rank, world_size=world_size
    )
    group, count = dist.group.WORLD, len(TOKEN_COUNTS)
    with tpo.UserBufferManager(group, capacity_shape=(CAPACITY, HIDDEN), dtype=torch.float32, device=device) as mgr:
        torch.manual_seed(0)  # the replicated bias must be equal on all ranks
        stage = Stage(mgr, recompute=False, device=device)
        expected = gradients(stage, mgr, group, one_after_the_other(count))
        for recompute in (False, True):
            stage.recompute = recompute
            found = gradients(stage, mgr, group, one_forward_one_backward(count))
            worst = max((a - b).abs().max().item() for a, b in zip(found, expected, strict=True))
            scale = max(b.abs().max().item() for b in expected)
            if rank == 0:
                what = "with" if recompute else "without"
                print(f"1F1B {what} recomputation: largest gradient difference {worst:.2e} of {scale:.2e}")
            assert worst <= 1e-5 * scale, "1F1B gave other gradients than one microbatch after the other"
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:  # torchrun
        run(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), None)
    else:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(run, args=(2, f"file://{folder}/rendezvous"), nprocs=2)
