"""A small job and a made-up outcome, for tests that start no rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tpoverlap.tools.train.batching import plan_steps
from tpoverlap.tools.train.corpus import Corpus
from tpoverlap.tools.train.job import CompareRecord, StepRecord, TrainJob, TrainOutcome
from tpoverlap.tools.train.methods import VARIANTS
from tpoverlap.tools.train.weights import ModelConfig

DOCUMENTS = tuple(bytes([97 + i]) * (5 + 7 * i) for i in range(8))
CORPUS = Corpus((*DOCUMENTS, b"z" * 500), "made up", 1, 0, 700, False)


def small_job(**changes: Any) -> TrainJob:
    job = TrainJob(
        model=ModelConfig(hidden=32, layers=1, heads=4, ffn=24),
        steps=plan_steps(DOCUMENTS, capacity_tokens=128, num_steps=5, tp_size=2),
        tp_size=2,
        device_type="cpu",
        num_gpus=0,
        ranks_per_host=2,
        dtype_name="float32",
        capacity_tokens=128,
        method="auto",
        learning_rate=1e-3,
        seed=0,
        compare_steps=0,
        want_gradients=False,
        timeout_s=20.0,
    )
    return replace(job, **changes)


def made_up_outcome(job: TrainJob, losses: list[float], compare_losses: list[float] | None = None) -> TrainOutcome:
    steps = tuple(
        StepRecord(
            step=index + 1,
            active_tokens=step.num_tokens,
            num_sequences=len(step.documents),
            rows_per_rank=step.partition.counts,
            loss=loss,
            time_ms=1000.0 if index == 0 else 10.0 + index,
            communicated_rows=step.num_tokens,
        )
        for index, (step, loss) in enumerate(zip(job.steps, losses, strict=True))
    )
    comparison = tuple(
        CompareRecord(variant.name, (50, 60), (128, 128) if variant.padded else (50, 60), (loss, loss), (8.0, 9.0))
        for variant, loss in zip(VARIANTS, compare_losses or [], strict=bool(compare_losses))
    )
    gradients = {"norm": torch.ones(4), "head": torch.full((2, 2), 2.0)}
    return TrainOutcome(steps, {"qkv_fprop": "ring_exchange"}, "shared", 0, gradients, comparison)
