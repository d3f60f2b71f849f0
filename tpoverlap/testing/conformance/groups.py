"""Case 11: tensor parallelism inside a larger world. Rank functions on four ranks, as in `gemms`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tpoverlap.nn.replicated import sync_replicated_grads
from tpoverlap.setup import resolve_group
from tpoverlap.testing.conformance import plain
from tpoverlap.testing.conformance.comparison import Comparison
from tpoverlap.testing.conformance.microbatches import microbatch_partitions, one_forward_one_backward
from tpoverlap.testing.conformance.setting import Setting
from tpoverlap.testing.conformance.stack import Stack, Twin
from tpoverlap.tokens import TokenPartition

TP_SIZE = 2
LAYOUTS = ("contiguous", "strided", "mesh", "mesh_strided")


def check_data_parallel(rank: int, size: int, setting: Setting, layout: str) -> dict[str, Any]:
    """TP 2 x DP: the TP groups run at the same time, with T that differ in every microbatch, and share gradients.

    ``contiguous``: [0,1], [2,3]. ``strided``: [0,2], [1,3]. ``mesh``, ``mesh_strided``: 1-D slices of a DeviceMesh.
    """
    tp_group, dp_group = _tp_and_dp_groups(rank, size, layout)
    process_group, replicas = resolve_group(tp_group), resolve_group(dp_group)
    tp_rank, dp_rank = process_group.rank(), replicas.rank()
    comparison = Comparison(f"rank {rank} = TP rank {tp_rank} of replica {dp_rank}, {layout}")
    comparison.true("two ranks share a TP group", process_group.size() == TP_SIZE)
    tokens = [[(7 + 31 * step + 57 * replica) % setting.capacity + 1 for replica in range(replicas.size())]
              for step in range(4)]  # fmt: skip
    with setting.open_manager(rank, tp_group) as manager:
        comparison.true(f"R is {manager.tp_size}", (manager.tp_size, manager.rank) == (TP_SIZE, tp_rank))
        stack = Stack(manager, setting)
        # One twin a replica, since each replica rounds its own sums.
        twins, references = (
            [Twin(tp_rank, TP_SIZE, setting, dtype) for _ in range(replicas.size())]
            for dtype in (setting.dtype, setting.reference_dtype)
        )
        stack.load(twins[0])
        for step, row in enumerate(tokens):
            for replica, num_tokens in enumerate(row):
                partition = TokenPartition.balanced(num_tokens, TP_SIZE)
                x = setting.draw(rank, (num_tokens, setting.hidden), "x", step, replica)
                dy = setting.draw(rank, (num_tokens, setting.hidden), "dy", step, replica)
                (y, dx), (y_reference, dx_reference) = (
                    models[replica].train(x, dy, partition) for models in (twins, references)
                )
                if replica != dp_rank:
                    continue
                own = partition.rows(tp_rank)
                shard = x[own].clone().requires_grad_()
                with manager.microbatch(partition):
                    out = stack(shard)
                out.backward(dy[own])
                comparison.close("y", out, y[own], y_reference[own])
                comparison.close("dx", shard.grad, dx[own], dx_reference[own])
        sync_replicated_grads(stack, tp_group)
        for name, parameter in stack.named_parameters():
            assert parameter.grad is not None, name
            summed = parameter.grad.float().cpu()  # one way for Gloo and NCCL, and for 16 bits
            dist.all_reduce(summed, group=replicas)
            parameter.grad.copy_(summed)
            sums = (plain.rank_sum([model.grad_of(name) for model in models]) for models in (twins, references))
            comparison.close(f"d {name}", parameter.grad, *sums)
        manager.check()
    return comparison.summary()


def _tp_and_dp_groups(rank: int, size: int, layout: str) -> tuple[Any, Any]:
    num_replicas = size // TP_SIZE
    if layout.startswith("mesh"):
        names, shape = ("dp", "tp"), (num_replicas, TP_SIZE)
        if layout == "mesh_strided":
            names, shape = ("tp", "dp"), (TP_SIZE, num_replicas)
        # A CPU mesh also where the devices are GPUs: ranks that share one have no NCCL group.
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        return mesh["tp"], mesh["dp"]
    step = num_replicas if layout == "strided" else 1
    first_ranks = range(num_replicas) if layout == "strided" else range(0, size, TP_SIZE)
    groups = [[first + step * i for i in range(TP_SIZE)] for first in first_ranks]
    made = [dist.new_group(ranks) for ranks in groups]
    replicas = [[group[i] for group in groups] for i in range(TP_SIZE)]
    made_replicas = [dist.new_group(ranks) for ranks in replicas]
    mine = next(i for i, group in enumerate(groups) if rank in group)
    return made[mine], made_replicas[groups[mine].index(rank)]


def check_pipeline_parallel(rank: int, size: int, setting: Setting) -> dict[str, Any]:
    """TP 2 x PP 2, one block a stage: real 1F1B, so the two stages hold different T at the same time."""
    num_stages = size // TP_SIZE
    groups = [dist.new_group([stage * TP_SIZE + i for i in range(TP_SIZE)]) for stage in range(num_stages)]
    stage, tp_rank = divmod(rank, TP_SIZE)
    last = stage == num_stages - 1
    comparison, mail = Comparison(f"rank {rank} = TP rank {tp_rank} of stage {stage}"), _Mail(setting, rank)
    partitions = microbatch_partitions(setting, TP_SIZE)
    with setting.open_manager(rank, groups[stage]) as manager:
        stack = Stack(manager, setting, num_blocks=1)
        twin, reference = (
            Twin(tp_rank, TP_SIZE, setting, dtype, num_blocks=num_stages)
            for dtype in (setting.dtype, setting.reference_dtype)
        )
        stack.load(twin, first_block=stage)
        inputs, outputs = {}, {}
        for phase, index in one_forward_one_backward(len(partitions), num_stages - 1 - stage):
            partition = partitions[index]
            own, shape = partition.rows(tp_rank), (partition.counts[tp_rank], setting.hidden)
            x, dy = (setting.draw(rank, (partition.total, setting.hidden), what, index) for what in ("x", "dy"))
            if phase == "F":
                manager.set_active_shape(partition)
                received = mail.receive(shape, rank - TP_SIZE) if stage else x[own].clone()
                inputs[index] = received.requires_grad_()
                outputs[index] = stack(inputs[index])
                if not last:
                    mail.send(outputs[index], rank + TP_SIZE)
                continue
            outputs[index].backward(dy[own] if last else mail.receive(shape, rank + TP_SIZE))
            if stage:
                mail.send(inputs[index].grad, rank - TP_SIZE)
            (y, dx), (y_reference, dx_reference) = (m.train(x, dy, partition) for m in (twin, reference))
            if last:
                comparison.close("y", outputs[index], y[own], y_reference[own])
            if not stage:
                comparison.close("dx", inputs[index].grad, dx[own], dx_reference[own])
        mail.finish()
        sync_replicated_grads(stack, groups[stage])
        for name, parameter in stack.named_parameters():
            comparison.close(f"d {name}", parameter.grad, twin.grad_of(name, stage), reference.grad_of(name, stage))
        manager.check()
    return comparison.summary()


class _Mail:
    """Activations between stages, through the host; sends do not block, or 1F1B would deadlock."""

    def __init__(self, setting: Setting, rank: int) -> None:
        self._device, self._dtype = setting.rank_device(rank), setting.dtype
        self._sent: list[tuple[Any, torch.Tensor]] = []

    def send(self, value: torch.Tensor | None, to: int) -> None:
        assert value is not None, "nothing to send"
        if value.numel():  # both sides know the partition
            copy = value.detach().float().cpu()
            self._sent.append((dist.isend(copy, to), copy))

    def receive(self, shape: tuple[int, int], source: int) -> torch.Tensor:
        value = torch.empty(shape)
        if value.numel():
            dist.recv(value, source)
        return value.to(self._device, self._dtype)

    def finish(self) -> None:
        for work, _ in self._sent:
            work.wait()
