"""``layers``: forward + backward of a whole layer: overlapped in every mode, without overlap, padded, compute-only.

Compute-only is the same layer, at the same T, with every TP collective taken out: the limit. See
`tpoverlap.tools.bench.compute_only`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import torch

from tpoverlap.tools.bench import formulas
from tpoverlap.tools.bench.baselines import Run
from tpoverlap.tools.bench.job import BenchJob
from tpoverlap.tools.bench.layer_check import bound_of, compare, require_finite
from tpoverlap.tools.bench.layer_items import COMPUTE_ONLY, TWIN, LayerItem, layer_items
from tpoverlap.tools.bench.layer_models import LayerStage, Step, why_no_fp8
from tpoverlap.tools.bench.layer_targets import is_ruled, judge_layer, summarise_layers
from tpoverlap.tools.bench.methods import AUTO
from tpoverlap.tools.bench.session import Session
from tpoverlap.tools.bench.suite import Row, Runner, Suite
from tpoverlap.tools.bench.targets import targets
from tpoverlap.tools.bench.timing import Times, measure
from tpoverlap.tools.bench.variants import PADDED

if TYPE_CHECKING:
    from rich.table import Table

_MODES: Final = ("eager", "queued")
_JUDGED: Final = (COMPUTE_ONLY, TWIN, AUTO)
"""What targets compare: the same operations in two columns have been seen to differ by as much as a target allows."""
_HOST_CALLS: Final = 2
"""Of a host-time round: few enough that the launch queue does not fill up and make the host wait."""


class LayersSuite(Suite):
    """See the module."""

    name = "layers"

    def items(self, job: BenchJob) -> list[LayerItem]:
        return layer_items(job)

    def start(self, session: Session, items: Sequence[LayerItem]) -> Runner:
        return _LayersRunner(session)

    def summary(self, rows: Sequence[Row]) -> dict[str, Any]:
        return summarise_layers(rows)

    def table(self, rows: Sequence[Row]) -> Table:
        from tpoverlap.tools.bench.tables import layers_table

        return layers_table(rows)

    def conclusions(self, rows: Sequence[Row]) -> list[str]:
        """Every missed target, or that there is none for this machine."""
        summary, rules = self.summary(rows), targets()["layers"]
        if not summary["judged"]:
            return [f"targets are not judged: they hold for {rules['holds_for']}"]
        lines = [f"targets ({rules['source']}) missed: {len(summary['missed'])} of {summary['judged']}"]
        return [*lines, *(f"  {line}" for line in summary["missed"])]


class _LayersRunner(Runner):
    def __init__(self, session: Session) -> None:
        self._session = session
        self._stage: LayerStage | None = None

    def _stage_of(self, item: LayerItem) -> LayerStage:
        """One hidden size at a time: items come in that order, and buffers of both need not fit together."""
        if self._stage is None or self._stage.hidden != item.size.hidden:
            self.close()
            self._stage = LayerStage(self._session, item.size.hidden, item.capacity_tokens)
        return self._stage

    def measure(self, item: LayerItem) -> Row:
        row: Row = {
            "suite": "layers",
            "label": item.label,
            **item.as_dict(),
            "methods": {},
            "errors": {},
            "skipped": {},
            "measured": False,
            "problems": [],
            "targets": [],
        }
        reason = why_no_fp8(self._session.device) if item.is_fp8 else None
        if reason is not None:
            row["skipped"]["fp8"] = reason
            return row
        stage = self._stage_of(item)
        checked = _Checked(stage, item)
        row["errors"] = checked.errors
        row["problems"] = [f"{label}: {error}" for label, error in checked.errors.items()]
        if checked.good:
            steps = {label: stage.step(item, label) for label in checked.good}
            calls = self._calls(item)
            runs: dict[str, Run] = {label: _first_of(step) for label, step in steps.items()}
            twice = _JUDGED if is_ruled(item.as_dict()) else ()
            times = measure(self._session, runs, calls=calls, queued_operations=calls, twice=twice)
            host = self._host_us(steps)
            row["methods"] = {label: _figures(label, times, host, checked) for label in checked.good}
        stage.manager.check()
        row["measured"] = AUTO in row["methods"]
        row["targets"] = judge_layer(row) if self._session.job.is_judged else []
        return row

    def _calls(self, item: LayerItem) -> int:
        """Layers a round: one that takes tens of milliseconds needs no company for the clock."""
        if not self._session.is_cuda or item.num_tokens == item.capacity_tokens:
            return 2
        return 3 if item.num_tokens > item.capacity_tokens // 4 else 6

    def _host_us(self, steps: dict[str, Step]) -> dict[str, float]:
        """Microseconds until forward and backward return, interleaved, median, slowest rank."""
        samples: dict[str, list[float]] = {label: [] for label in steps}
        for _ in range(self._session.job.rounds):
            for label, step in steps.items():
                self._session.barrier()
                begin_s = time.perf_counter()
                for _ in range(_HOST_CALLS):
                    step()
                samples[label].append(1e6 * (time.perf_counter() - begin_s) / _HOST_CALLS)
        everyone: list[dict[str, float]] = self._session.agree({key: median(some) for key, some in samples.items()})
        return {label: max(rank[label] for rank in everyone) for label in steps}

    def close(self) -> None:
        if self._stage is not None:
            self._stage.close()
            self._stage = None


class _Checked:
    """Each variant run once and compared with the twin. Collective; what fails on one rank is refused on all.

    Attributes:
        good: what may be timed. errors: what may not, and why.
        differences: largest relative difference from the twin; NaN for what has no numbers to compare.
        operations: of the manager, in one forward and backward: how many by which method.
    """

    def __init__(self, stage: LayerStage, item: LayerItem) -> None:
        self._stage, self._item = stage, item
        self._bound = bound_of(stage.session.job.dtype, fp8=item.is_fp8)
        self.good: list[str] = []
        self.errors: dict[str, str] = {}
        self.differences: dict[str, float] = {}
        self.operations: dict[str, dict[str, int]] = {}
        self._twin: tuple[torch.Tensor, ...] = ()
        # The twin first: without it nothing else can be judged.
        for label in (TWIN, *(label for label in item.variants if label != TWIN)):
            if label != TWIN and TWIN in self.errors:
                break
            self._add(label)
        self._twin = ()
        self.good = [label for label in item.variants if label not in self.errors and label in self.differences]

    def _add(self, label: str) -> None:
        difference, problem, raised = self._try(label)
        answers: list[tuple[float, str | None, bool]] = self._stage.session.agree((difference, problem, raised))
        problems = [f"rank {rank}: {one}" for rank, (_, one, _) in enumerate(answers) if one is not None]
        if problems:
            self.errors[label] = problems[0]
            if any(one for _, _, one in answers):
                self._stage.renew()  # whatever it raised, no later operation may suffer from it
            return
        self.differences[label] = max(one for one, _, _ in answers)

    def _try(self, label: str) -> tuple[float, str | None, bool]:
        """(difference, problem or None, whether it raised)."""
        stage, item = self._stage, self._item
        try:
            names = stage.names(item)
            before = stage.operations()
            results = tuple(result.detach() for result in stage.step(item, label)())
            self.operations[label] = dict(stage.operations() - before)
            if stage.session.is_cuda:
                torch.cuda.synchronize(stage.session.device)
            if label == TWIN:
                self._twin = results
                return *require_finite(names, results, results), False
            if label == COMPUTE_ONLY:
                if self.operations[label]:
                    return math.nan, f"compute-only began {self.operations[label]} operations; it has none", False
                return *require_finite(names, results, self._twin), False
            if label == PADDED:
                whole = [result.detach() for result in stage.step(_at_capacity(item), TWIN)()]
                return *compare(names, results, whole, self._bound), False
            return *compare(names, results, self._twin, self._bound), False
        except Exception as error:  # of any kind: the other ranks are about to agree on it
            return math.nan, f"{type(error).__name__}: {str(error)[:500]}", True


def _at_capacity(item: LayerItem) -> LayerItem:
    capacity = item.capacity_tokens
    return LayerItem(item.kind, item.size, item.numbers, capacity, capacity, item.sequence_unit)


def _first_of(step: Step) -> Run:
    return lambda: step()[0]


def _figures(label: str, times: dict[str, Times], host: dict[str, float], checked: _Checked) -> Row:
    own = times[label]
    difference = checked.differences[label]

    def over(other: str) -> dict[str, float | None]:
        if other not in times:
            return {}
        return {mode: formulas.ratio(own.of(mode), times[other].of(mode)) for mode in _MODES}

    return {
        "kind": "baseline" if label in (TWIN, PADDED, COMPUTE_ONLY) else "ours",
        "eager_us": own.eager_us,
        "queued_us": own.queued_us,
        "queued_operations": own.queued_operations,
        "host_us": host[label],
        "of_compute_only": over(COMPUTE_ONLY),
        "of_twin": over(TWIN),
        "difference": None if math.isnan(difference) else difference,
        "operations": checked.operations[label],
    }
