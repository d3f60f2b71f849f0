"""One rank's surroundings: its device and group, agreement with the others, operands that all rows share."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from tpoverlap.memory.base import agree
from tpoverlap.tools.bench.job import BenchJob

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Session:
    """What every suite gets on every rank."""

    def __init__(self, job: BenchJob, group: ProcessGroup, rank: int) -> None:
        self.job = job
        self.group = group
        self.rank = rank
        self.tp_size = group.size()
        self.device = job.device(rank)
        self.begin_s = time.monotonic()
        self._token = torch.zeros(1)

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def agree(self, value: Any) -> list[Any]:
        """``value`` of every rank, in rank order."""
        return agree(self.group, value)

    def barrier(self) -> None:
        """Host barrier: the device is idle and every rank is here."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)
        dist.all_reduce(self._token, group=self.group)  # a CPU tensor: Gloo, whatever the device

    def first_problem(self, problem: str | None) -> str | None:
        """The first rank's problem, with its rank; None when no rank has one. Collective."""
        for rank, other in enumerate(self.agree(problem)):
            if other is not None:
                return f"rank {rank}: {other}"
        return None

    def out_of_time(self) -> bool:
        """Whether ``--minutes`` are over, by rank 0's clock. Collective."""
        if self.job.minutes is None:
            return False
        return bool(self.agree(time.monotonic() - self.begin_s > 60.0 * self.job.minutes)[0])


class Operands:
    """Random numbers drawn once; every row takes views of them, so rows cost no allocation and no generator.

    Random, never zeros: products of zeros draw less power, and GPUs then run them faster.

    Args:
        session: gives device, dtype and rank.
        activation_elements: the most that one activation takes.
        weight_elements: the most that one weight takes.
    """

    def __init__(self, session: Session, activation_elements: int, weight_elements: int) -> None:
        def draw(count: int, seed: int) -> torch.Tensor:
            generator = torch.Generator(session.device).manual_seed(seed)
            return torch.randn(count, device=session.device, dtype=session.job.dtype, generator=generator)

        self._shared = draw(activation_elements, 1)
        self._own = draw(activation_elements, 2 + session.rank)
        # The largest magnitude is the same at every T, so that rows padded in FP8 have the scale of those that are not.
        self._shared[0] = self._own[0] = 8.0
        self._weights = draw(weight_elements, 1002 + session.rank) / 64

    def activation(self, rows: int, width: int) -> torch.Tensor:
        """[T, K], the same on every rank: what an all-gather puts together."""
        return self._shared[: rows * width].view(rows, width)

    def own_activation(self, rows: int, width: int) -> torch.Tensor:
        """[T, K], another one on every rank: what a row-parallel GEMM multiplies."""
        return self._own[: rows * width].view(rows, width)

    def weight(self, out_features: int, in_features: int) -> torch.Tensor:
        """[N, K], another one on every rank."""
        return self._weights[: out_features * in_features].view(out_features, in_features)
