"""``--compare``: overlapped, not overlapped and padded to capacity, side by side on the same batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from tpoverlap.tokens import TokenPartition
from tpoverlap.tools.train.batching import StepPlan
from tpoverlap.tools.train.job import CompareRecord, Progress, ProgressListener
from tpoverlap.tools.train.methods import VARIANTS
from tpoverlap.tools.train.packing import pack
from tpoverlap.tools.train.trainer import RankContext, RankTrainer, StepResult


def compare_variants(
    context: RankContext, full: Mapping[str, Tensor], on_progress: ProgressListener
) -> tuple[CompareRecord, ...]:
    """Train a fresh model a variant on the job's first steps, the variants taking turns batch by batch. Collective.

    The first batch is run once before for warming up and is not timed. Which variant goes first moves on every batch,
    so that a slow moment of the machine does not hit the same one each time.
    """
    job = context.job
    steps = (job.step_groups[0], *job.step_groups[: job.compare_steps])
    trainers = [RankTrainer(context, full, variant.method or job.method) for variant in VARIANTS]
    results: list[list[StepResult]] = [[] for _ in VARIANTS]
    for index, step in enumerate(steps):
        for turn in range(len(VARIANTS)):
            which = (index + turn) % len(VARIANTS)
            result = _run(trainers[which], step, padded=VARIANTS[which].padded)
            if index > 0:
                results[which].append(result)
        on_progress(Progress("compare", index + 1, len(steps)))
    for trainer in trainers:
        trainer.close()
    return tuple(
        CompareRecord(
            variant.name,
            active_tokens=tuple(sum(one.num_tokens for one in step) for step in steps[1:]),
            communicated_rows=tuple(r.communicated_rows for r in rs),
            losses=tuple(r.loss for r in rs),
            times_ms=tuple(r.time_ms for r in rs),
        )
        for variant, rs in zip(VARIANTS, results, strict=True)
    )


def _run(trainer: RankTrainer, step: Sequence[StepPlan], padded: bool) -> StepResult:
    job, device = trainer.context.job, trainer.context.device
    batches = [(pack(one.documents), one.partition) for one in step]
    if padded:
        whole = TokenPartition.balanced(job.capacity_tokens, job.tp_size)
        batches = [(batch.padded_to(job.capacity_tokens), whole) for batch, _ in batches]
    trainer.zero_grad()
    return trainer.step([(batch.to(device), partition) for batch, partition in batches])
