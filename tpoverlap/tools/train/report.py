"""The result of a run as data (``--json``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from tpoverlap.tools.train.batching import usable_documents
from tpoverlap.tools.train.corpus import Corpus
from tpoverlap.tools.train.job import CompareRecord, TrainJob, TrainOutcome
from tpoverlap.tools.train.verdict import LOSS_TOLERANCE, Verdict


@dataclass(frozen=True)
class Report:
    """Everything that the table, the JSON and the plot show."""

    job: TrainJob
    corpus: Corpus
    outcome: TrainOutcome
    reference_losses: tuple[float, ...] | None
    verdict: Verdict | None

    @property
    def total_tokens(self) -> int:
        """T summed over the steps."""
        return sum(record.active_tokens for record in self.outcome.steps)

    @property
    def padded_tokens(self) -> int:
        """Rows that the buffers carried beyond T, summed over the steps; 0 unless something padded."""
        return sum(record.communicated_rows for record in self.outcome.steps) - self.total_tokens

    @property
    def tokens_per_s(self) -> float:
        """Over all steps but the first, which warms up."""
        timed = self.outcome.steps[1:] or self.outcome.steps
        return sum(record.active_tokens for record in timed) / sum(record.time_ms for record in timed) * 1e3

    @property
    def problems(self) -> tuple[str, ...]:
        """Why the run failed; empty when all that was asked for holds."""
        problems = self.verdict.problems if self.verdict else ()
        if self.outcome.comparison:
            comparison = self.outcome.comparison
            tolerance = LOSS_TOLERANCE[self.job.numbers]
            if self.job.numbers != "float32":
                # Differences in rounding grow with every update: the first batch is judged, the others are shown.
                comparison = tuple(replace(one, losses=one.losses[:1]) for one in comparison)
                tolerance *= max(1.0, abs(comparison[0].losses[0]))
            difference = variants_loss_difference(comparison)
            if not difference <= tolerance:  # written so that NaN fails
                text = f"the compared variants' losses differ by {difference:.2e}, allowed is {tolerance:.0e}"
                problems = (*problems, text)
        return problems

    def to_dict(self) -> dict[str, Any]:
        """Plain data: ``steps``, ``summary`` and, where asked for, ``gradients`` and ``comparison``."""
        job, outcome = self.job, self.outcome
        references = self.reference_losses or (None,) * len(outcome.steps)
        result: dict[str, Any] = {
            "steps": [
                {
                    "step": record.step,
                    "active_tokens": record.active_tokens,
                    "num_sequences": record.num_sequences,
                    "loss": record.loss,
                    "reference_loss": reference,
                    "time_ms": record.time_ms,
                    "rows_per_rank": list(record.rows_per_rank),
                }
                for record, reference in zip(outcome.steps, references, strict=True)
            ],
            "summary": {
                "tp_size": job.tp_size,
                "device": job.device_type,
                "dtype": job.dtype_name,
                "fp8": job.fp8,
                "backend": outcome.memory_backend,
                "capacity_tokens": job.capacity_tokens,
                "total_tokens": self.total_tokens,
                "padded_tokens": self.padded_tokens,
                "tokens_per_s": self.tokens_per_s,
                "allocations_after_setup": outcome.allocations_after_setup,
                "max_abs_loss_difference": self.verdict.max_abs_loss_difference if self.verdict else None,
                "methods": outcome.methods,
                "layers": job.layer_style,
                "backward_mode": job.backward_mode,
                "pipeline_microbatches": job.microbatches,
                "corpus": self.corpus_facts(),
                "model": asdict(job.model),
                "seed": job.seed,
                "problems": list(self.problems),
            },
        }
        if self.verdict is not None:
            result["gradients"] = self.verdict.gradient_differences
        if outcome.comparison:
            result["comparison"] = [
                {**asdict(record), "median_ms": median(record.times_ms)} for record in outcome.comparison
            ]
        return result

    def corpus_facts(self) -> Mapping[str, Any]:
        """What was read, and how many documents are too long (or too short) to be used whole."""
        corpus = self.corpus
        usable = len(usable_documents(corpus.documents, self.job.capacity_tokens))
        return {
            "source": corpus.source,
            "files": corpus.num_files,
            "binary_files_left_out": corpus.num_binary_files,
            "bytes": corpus.size_bytes,
            "truncated": corpus.truncated,
            "documents": len(corpus.documents),
            "documents_skipped": len(corpus.documents) - usable,
        }


def variants_loss_difference(comparison: tuple[CompareRecord, ...]) -> float:
    """Largest difference of any variant's loss from the first one's, over all steps; NaN if one is NaN."""
    first, *others = comparison
    differences = [abs(a - b) for other in others for a, b in zip(first.losses, other.losses, strict=True)]
    return max(differences, key=lambda d: (d != d, d))
