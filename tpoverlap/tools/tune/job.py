"""What is measured: for every GEMM of a layer its buckets of T, and for each bucket the candidates. Plain data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median_low
from typing import Any, Final, Literal

from tpoverlap.config import KNOWN_NAMES, default_method, legal_methods
from tpoverlap.tools.predict.tokens import TokenSpec
from tpoverlap.tuning import Candidate, DeviceModel, Kind, Problem, candidates, entry_key, estimated_table, samples
from tpoverlap.tuning.layer import LayerShape

DTYPES: Final = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass(frozen=True)
class Ask:
    """One interleaved run on all ranks: every candidate at every T of ``tokens``, ``rounds`` times in turn.

    ``share_s``: seconds that it should take: with three rounds or more done by then, the others are left out.
    ``limit_s``: seconds after which the ranks give up together and return nothing.
    """

    kind: Kind
    width: int
    features: int
    tokens: tuple[int, ...]
    candidates: tuple[Candidate, ...]
    dtype: str
    device_type: Literal["cpu", "cuda"]
    rounds: int
    timeout_s: float
    share_s: float = math.inf
    limit_s: float = math.inf


@dataclass(frozen=True)
class Bucket:
    """(``low``, ``high``] of T for the shape of ``problem``, seen at ``tokens``. ``candidates[default]`` runs untuned.

    ``names``: of the layer's GEMMs with this very shape.
    """

    names: tuple[str, ...]
    problem: Problem
    low: int
    high: int
    tokens: tuple[int, ...]
    candidates: tuple[Candidate, ...]
    default: int

    @property
    def key(self) -> str:
        """What its result is filed under in the state file."""
        return f"{entry_key(self.problem)}, T {self.low + 1}..{self.high} at {','.join(map(str, self.tokens))}"

    def ask(self, job: TuneJob, which: Sequence[int], share_s: float = math.inf, limit_s: float = math.inf) -> Ask:
        """The run of the candidates with the indices ``which``; for the seconds see `Ask`."""
        problem = self.problem
        return Ask(
            problem.kind,
            problem.width,
            problem.features,
            self.tokens,
            tuple(self.candidates[index] for index in which),
            job.layer.dtype,
            job.device_type,
            job.rounds,
            job.timeout_s,
            share_s,
            limit_s,
        )


@dataclass(frozen=True)
class TuneJob:
    """Everything that was asked for. ``lengths``: the T of a recorded run, empty where a range was given."""

    layer: LayerShape
    tokens: TokenSpec
    lengths: tuple[int, ...]
    device_type: Literal["cpu", "cuda"]
    rounds: int
    timeout_s: float

    def key(self, machine: dict[str, Any]) -> dict[str, Any]:
        """What a state file has to agree with to be continued."""
        layer = self.layer
        return {
            "machine": machine,
            "width": layer.hidden,
            "features": layer.widths,
            "tp_size": layer.tp_size,
            "dtype": layer.dtype,
        }

    def buckets(self, multiprocessors: int, model: DeviceModel | None = None) -> list[Bucket]:
        """Every bucket once, however many GEMMs share its shape; the largest T first: a budget ends in small T.

        ``model``: the cost model that a manager on this device asks where nothing was tuned; None: it asks none, and
        a name keeps its default method at every T.
        """
        found: dict[tuple[str, int], Bucket] = {}
        for name, problem in self.layer.problems().items():
            legal = legal_methods(name, KNOWN_NAMES[name].is_reduce_scatter)
            if self.device_type == "cpu":
                legal = tuple(method for method in legal if method != "fused")  # its kernels need a GPU
            for low, high in self.tokens.ends(problem, multiprocessors):
                points = self._points(low, high)
                key = (entry_key(problem), high)
                if key in found:
                    found[key] = replace(found[key], names=(*found[key].names, name))
                elif points:
                    choice = candidates(problem, legal)
                    untuned = Candidate(default_method(name))
                    if model is not None:
                        table = estimated_table(model, problem, self.tokens.largest, legal, {})
                        untuned = table.at(high).candidate
                    default = next(i for i, one in enumerate(choice) if one == untuned)
                    found[key] = Bucket((name,), problem, low, high, points, choice, default)
        return sorted(found.values(), key=lambda bucket: -bucket.high)

    def _points(self, low: int, high: int) -> tuple[int, ...]:
        if not self.lengths:
            return samples(low, high)[-2:]
        inside = [tokens for tokens in self.lengths if low < tokens <= high]
        return tuple(sorted({median_low(inside), max(inside)})) if inside else ()
