"""What the ranks are told and what they answer: plain picklable data, complete before any rank starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch

from tpoverlap.tools.train.batching import StepPlan
from tpoverlap.tools.train.weights import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor

DType = Literal["float32", "bfloat16"]
Fp8Name = Literal["current", "delayed", "rowwise"]
LayerStyle = Literal["plain", "te-style"]
BackwardMode = Literal["auto", "bulk", "rs_dgrad"]


@dataclass(frozen=True)
class TrainJob:
    """One run. Everything in it was validated by `options.make_job`.

    Attributes:
        steps: microbatches; ``microbatches`` of them, one after another, make a step.
        layer_style: which decoder, "plain" or "te-style". backward_mode: see `methods.choose`.
        fp8: recipe of the layers' GEMMs (`fp8.RECIPES`); None: ``dtype_name``. Embedding, norms and head stay in that.
        compare_steps: steps of ``--compare``, 0 for none; the first ones of ``steps``.
        want_gradients: gather every gradient of the first step, for ``--check-reference``.
        timeout_s: a rank that is silent for so long has hung.
        num_gpus: GPUs of this host; 0 on CPU. More ranks than GPUs share them.
        ranks_per_host: ranks on this host (fewer than ``tp_size`` only under a ``torchrun`` over several hosts).
    """

    model: ModelConfig
    steps: tuple[StepPlan, ...]
    tp_size: int
    device_type: Literal["cpu", "cuda"]
    num_gpus: int
    ranks_per_host: int
    dtype_name: DType
    capacity_tokens: int
    method: str
    learning_rate: float
    seed: int
    compare_steps: int
    want_gradients: bool
    timeout_s: float
    layer_style: LayerStyle = "plain"
    backward_mode: BackwardMode = "auto"
    microbatches: int = 1
    fp8: Fp8Name | None = None

    @property
    def step_groups(self) -> tuple[tuple[StepPlan, ...], ...]:
        """The microbatches of each step."""
        count = self.microbatches
        return tuple(self.steps[i : i + count] for i in range(0, len(self.steps), count))

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.dtype_name == "float32" else torch.bfloat16

    @property
    def numbers(self) -> str:
        """What decides how far two runs may differ: the dtype, after "fp8" where layers run in it."""
        return self.dtype_name if self.fp8 is None else f"fp8 {self.dtype_name}"

    @property
    def shares_gpus(self) -> bool:
        """More ranks than GPUs: NCCL refuses two ranks on one GPU, so the group is Gloo's."""
        return self.device_type == "cuda" and self.ranks_per_host > self.num_gpus

    @property
    def group_backend(self) -> str:
        """``torch.distributed`` backend of the TP group."""
        return "gloo" if self.device_type == "cpu" or self.shares_gpus else "cpu:gloo,cuda:nccl"

    def device(self, rank: int) -> torch.device:
        """Device of ``rank`` on this host."""
        return (
            torch.device("cpu")
            if self.device_type == "cpu"
            else torch.device("cuda", rank % self.ranks_per_host % self.num_gpus)
        )


@dataclass(frozen=True)
class StepRecord:
    """One step as the whole group saw it.

    ``time_ms``: forward, backward, gradient synchronisation, ``check`` and the optimizer, on the slowest rank.
    ``communicated_rows``: rows that one gather of that step moved, as the manager counted them; T unless padded.
    """

    step: int
    active_tokens: int
    num_sequences: int
    rows_per_rank: tuple[int, ...]
    loss: float
    time_ms: float
    communicated_rows: int


@dataclass(frozen=True)
class CompareRecord:
    """Timed steps of one variant of ``--compare`` (`compare.VARIANTS`), on the same batches as the others."""

    variant: str
    active_tokens: tuple[int, ...]
    communicated_rows: tuple[int, ...]
    losses: tuple[float, ...]
    times_ms: tuple[float, ...]


@dataclass(frozen=True)
class TrainOutcome:
    """What rank 0 hands back.

    Attributes:
        first_gradients: every gradient of the first step, whole (float32, CPU); empty unless asked for.
        methods: GEMM name -> method that ran.
        memory_backend: what the manager's bytes live in, in its words.
        allocations_after_setup: symmetric allocations made between the manager's set-up and the last step, all ranks.
    """

    steps: tuple[StepRecord, ...]
    methods: dict[str, str]
    memory_backend: str
    allocations_after_setup: int
    first_gradients: dict[str, Tensor] = field(default_factory=dict)
    comparison: tuple[CompareRecord, ...] = ()


@dataclass(frozen=True)
class Progress:
    """``done`` of ``total`` steps of ``phase`` are finished."""

    phase: str
    done: int
    total: int


ProgressListener = Callable[[Progress], None]
