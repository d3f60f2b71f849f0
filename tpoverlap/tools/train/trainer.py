"""One rank's model, manager and optimizer, and one training step through them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

import tpoverlap as tpo
from tpoverlap.testing.conformance.microbatches import one_forward_one_backward
from tpoverlap.tokens import TokenPartition
from tpoverlap.tools.train.decoder import TensorParallelDecoder
from tpoverlap.tools.train.fp8 import RECIPES
from tpoverlap.tools.train.job import TrainJob
from tpoverlap.tools.train.methods import choose
from tpoverlap.tools.train.packing import PackedBatch
from tpoverlap.tools.train.reference import make_optimizer
from tpoverlap.tools.train.te_decoder import TeStyleDecoder

if TYPE_CHECKING:
    from tpoverlap.manager import UserBufferManager


MAX_IN_FLIGHT = 4
"""Microbatches between their forward and their backward."""


@dataclass(frozen=True)
class RankContext:
    """Where a rank stands: its number, its device and the TP group."""

    job: TrainJob
    rank: int
    device: torch.device
    group: dist.ProcessGroup


@dataclass(frozen=True)
class StepResult:
    """Loss over all targets (nats), slowest rank's time, active rows of the buffers."""

    loss: float
    time_ms: float
    communicated_rows: int


class RankTrainer:
    """A fresh model on the ``full`` weights, with its own `UserBufferManager`. ``close`` is collective."""

    def __init__(self, context: RankContext, full: Mapping[str, Tensor], method: str) -> None:
        job = context.job
        self.context = context
        self.manager: UserBufferManager = tpo.UserBufferManager(
            context.group,
            capacity_shape=(job.capacity_tokens, job.model.hidden),
            dtype=job.dtype,
            device=context.device,
            ub_cfgs=choose(method, job.backward_mode).ub_cfgs,
            max_rows_per_rank=job.capacity_tokens,  # an aligned step may give every row to one rank
            quantization_modes=None if job.fp8 is None else ["none", "fp8"],
        )
        self.model = self._make_model(full)
        self.optimizer = make_optimizer(list(self.model.parameters()), job.learning_rate)

    def _make_model(self, full: Mapping[str, Tensor]) -> TeStyleDecoder | TensorParallelDecoder:
        context, job = self.context, self.context.job
        common: dict[str, Any] = {
            "rank": context.rank,
            "tp_size": job.tp_size,
            "device": context.device,
            "dtype": job.dtype,
        }
        if job.layer_style == "plain":
            return TensorParallelDecoder(job.model, full, self.manager, **common)
        recipe = None if job.fp8 is None else RECIPES[job.fp8]
        return TeStyleDecoder(job.model, full, self.manager, fp8_recipe=recipe, **common)

    def step(self, batches: Sequence[tuple[PackedBatch, TokenPartition]]) -> StepResult:
        """Train on microbatches (on the device) whose rows the partitions deal out, in 1F1B order. Collective.

        One is a plain step. With more, up to `MAX_IN_FLIGHT` are in flight, as on the first of four pipeline stages:
        every backward then runs while the manager's last T is another one.
        """
        context = self.context
        rows_before = self._rows_moved()
        num_targets = sum(batch.num_targets for batch, _ in batches)
        own_loss = torch.zeros((), dtype=torch.float64, device=context.device)
        in_flight: dict[int, Tensor] = {}
        dist.barrier(context.group)  # so that the time below starts together
        started = time.perf_counter()
        for phase, index in one_forward_one_backward(len(batches), min(len(batches), MAX_IN_FLIGHT) - 1):
            if phase == "F":
                batch, partition = batches[index]
                with self.manager.microbatch(partition):
                    loss_sum, own_share = self.model.losses(batch, partition)
                # Dividing by everyone's targets, of all microbatches, makes the gradients add up.
                in_flight[index] = loss_sum / num_targets
                own_loss += own_share
            else:
                in_flight.pop(index).backward()
        tpo.sync_replicated_grads(self.model, context.group)
        self.manager.check()  # an error of this step must not reach the weights
        self.optimizer.step()
        if context.device.type == "cuda":
            torch.cuda.synchronize(context.device)
        time_ms = (time.perf_counter() - started) * 1e3
        rows_moved = self._rows_moved() - rows_before
        return StepResult(
            *self._over_ranks(own_loss, num_targets, time_ms),
            communicated_rows=rows_moved // context.job.model.layers,
        )

    def zero_grad(self) -> None:
        """Drop the gradients; kept apart from ``step`` so that they can be read after it."""
        self.optimizer.zero_grad(set_to_none=True)

    def whole_gradients(self) -> dict[str, Tensor]:
        """Every gradient put together over the ranks, on rank 0; {} elsewhere. Collective."""
        context = self.context
        mine = self.model.shard_gradients()
        everyone: list[dict[str, Tensor]] | None = [{}] * context.job.tp_size if context.rank == 0 else None
        dist.gather_object(mine, everyone, dst=0, group=context.group)
        if everyone is None:
            return {}
        return {name: self.model.unshard(name, [shards[name] for shards in everyone]) for name in mine}

    def close(self) -> None:
        """Release the manager."""
        self.manager.close()

    def _rows_moved(self) -> int:
        """Rows that the manager counted for qkv_fprop so far: one operation a layer and step."""
        return int(self.manager.stats().get("qkv_fprop", {}).get("tokens", 0))

    def _over_ranks(self, loss_sum: Tensor, num_targets: int, time_ms: float) -> tuple[float, float]:
        device = self.context.device
        total = loss_sum.detach().double().reshape(1).to(device)
        slowest = torch.tensor([time_ms], dtype=torch.float64, device=device)
        dist.all_reduce(total, group=self.context.group)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=self.context.group)
        return total.item() / num_targets, slowest.item()
