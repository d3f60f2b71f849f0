"""The whole run of one rank, inside an initialised process group."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from tpoverlap.tools.train.compare import compare_variants
from tpoverlap.tools.train.job import Progress, ProgressListener, StepRecord, TrainJob, TrainOutcome
from tpoverlap.tools.train.packing import pack
from tpoverlap.tools.train.trainer import RankContext, RankTrainer
from tpoverlap.tools.train.weights import full_weights


def train_rank(
    job: TrainJob, group: dist.ProcessGroup, rank: int, device: torch.device, on_progress: ProgressListener
) -> TrainOutcome:
    """Train, and compare if asked to. Every rank returns the same but ``first_gradients``, which rank 0 alone has."""
    context = RankContext(job, rank, device, group)
    full = full_weights(job.model, job.seed)
    trainer = RankTrainer(context, full, job.method)
    allocations_before = _allocations(trainer, group)
    records: list[StepRecord] = []
    gradients: dict[str, torch.Tensor] = {}
    for index, microbatches in enumerate(job.step_groups):
        trainer.zero_grad()
        result = trainer.step([(pack(step.documents).to(device), step.partition) for step in microbatches])
        records.append(
            StepRecord(
                step=index + 1,
                active_tokens=sum(step.num_tokens for step in microbatches),
                num_sequences=sum(len(step.documents) for step in microbatches),
                rows_per_rank=tuple(map(sum, zip(*(step.partition.counts for step in microbatches), strict=True))),
                loss=result.loss,
                time_ms=result.time_ms,
                communicated_rows=result.communicated_rows,
            )
        )
        if index == 0 and job.want_gradients:
            gradients = trainer.whole_gradients()
        on_progress(Progress("train", index + 1, len(job.step_groups)))
    allocations = _allocations(trainer, group) - allocations_before
    methods = _methods(trainer)
    backend = trainer.manager.backend_name
    trainer.close()
    comparison = compare_variants(context, full, on_progress) if job.compare_steps else ()
    return TrainOutcome(tuple(records), methods, backend, allocations, gradients, comparison)


def _allocations(trainer: RankTrainer, group: dist.ProcessGroup) -> int:
    """Communication memory allocated so far, summed over the ranks.

    On the CPU these are the process's writable shared mappings, as the kernel lists them; elsewhere the manager's own
    count (on GPUs the driver's list is not ours alone: NCCL maps memory of its own when it is first used).
    """
    maps = Path("/proc/self/maps")
    if trainer.context.device.type == "cpu" and maps.exists():
        mine = sum(line.split(maxsplit=2)[1] == "rw-s" for line in maps.read_text().splitlines())
    else:
        mine = trainer.manager.memory_report()["allocations"]
    count = torch.tensor([mine], dtype=torch.int64, device=trainer.context.device)
    dist.all_reduce(count, group=group)
    return int(count.item())


def _methods(trainer: RankTrainer) -> dict[str, str]:
    """What ran, not what was asked for: for every GEMM name the methods that the manager counted."""
    prefix = "method_"
    return {
        name: ", ".join(key.removeprefix(prefix) for key, calls in row.items() if key.startswith(prefix) and calls)
        for name, row in trainer.manager.stats().items()
    }
