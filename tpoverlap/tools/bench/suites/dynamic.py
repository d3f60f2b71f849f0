"""``dynamic``: a whole recorded walk of T, by dispatch, by plain collectives at the same T, and padded to capacity.

Beside it, for a few T of the walk, the same operation on a manager whose capacity is exactly that T: being ready for
more tokens must cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from tpoverlap.tools.bench import formulas, targets
from tpoverlap.tools.bench.baselines import Run
from tpoverlap.tools.bench.correctness import Reference
from tpoverlap.tools.bench.job import BenchJob, Direction
from tpoverlap.tools.bench.methods import AUTO, Methods
from tpoverlap.tools.bench.rows import GemmRow
from tpoverlap.tools.bench.session import Operands, Session
from tpoverlap.tools.bench.suite import Row, Runner, Suite
from tpoverlap.tools.bench.suites.gemm import TABLE_FEATURES
from tpoverlap.tools.bench.timing import measure
from tpoverlap.tools.bench.variants import PADDED, PLAIN, Checked, RowInputs, Sizes, build_variants, check
from tpoverlap.tools.bench.walks import Walk, recorded_walks

if TYPE_CHECKING:
    from rich.table import Table

LABELS: Final = (AUTO, PLAIN, PADDED)
_CPU_SHAPES: Final = ((512, 128, 96), (512, 96, 128))
_CPU_QUICK: Final = ((128, 64, 48),)
_CPU_STEPS: Final = 8
_LEAD_STEPS: Final = 2
"""Of a walk, run before its clock starts: a whole walk would take as long as what it leads in."""
_EXACT_QUEUED: Final = 20


class DynamicSuite(Suite):
    """See the module."""

    name = "dynamic"

    def items(self, job: BenchJob) -> list[GemmRow]:
        """One a (C, K, N) and direction, at T = C. ``--shape`` gives C as its T; ``--tokens`` does not matter here."""
        if job.shapes:
            shapes = job.shapes
        elif job.device_type == "cuda":
            capacity = recorded_walks()[0].capacity_tokens
            shapes = tuple((capacity, *features) for features in TABLE_FEATURES[: 2 if job.quick else None])
        else:
            shapes = _CPU_QUICK if job.quick else _CPU_SHAPES
        return [GemmRow(direction, c, k, n, c) for c, k, n in dict.fromkeys(shapes) for direction in job.directions]

    def start(self, session: Session, items: Sequence[GemmRow]) -> Runner:
        return _DynamicRunner(session, items)

    def summary(self, rows: Sequence[Row]) -> dict[str, Any]:
        return targets.summarise_dynamic(rows)

    def table(self, rows: Sequence[Row]) -> Table:
        from tpoverlap.tools.bench.tables import dynamic_table

        return dynamic_table(rows)

    def conclusions(self, rows: Sequence[Row]) -> list[str]:
        """Speed-ups over all shapes, a walk each, and what was missed."""
        summary = self.summary(rows)
        lines = [
            f"{name}: over padding {walk['padded_speed_up']:.3f} (C / mean T = {walk['capacity_over_mean']:.3f}), "
            f"over plain sequential {walk['sequential_speed_up']:.3f} ("
            + ", ".join(f"{one} {figures['sequential_speed_up']:.3f}" for one, figures in walk["by_direction"].items())
            + f"), summed over {walk['num_rows']} rows of {walk['num_shapes']} shapes"
            for name, walk in summary["walks"].items()
        ]
        rules = targets.targets()
        if not summary["judged"]:
            return [*lines, f"targets are not judged: they hold for {rules['holds_for']}"]
        lines.append(f"targets ({rules['source']}) missed: {len(summary['missed'])} of {summary['num_targets']}")
        return [*lines, *(f"  {line}" for line in summary["missed"])]


def walks_for(job: BenchJob, capacity_tokens: int) -> list[Walk]:
    """The recorded walks at a row's capacity; the first steps only on the CPU."""
    steps = _CPU_STEPS if job.device_type == "cpu" else None
    cut = [Walk(w.name, w.rule, w.capacity_tokens, w.num_tokens[:steps]) for w in recorded_walks()]
    return [walk.scaled_to(capacity_tokens, job.tp_size) for walk in cut]


class _DynamicRunner(Runner):
    def __init__(self, session: Session, rows: Sequence[GemmRow]) -> None:
        self._session = session
        sizes = Sizes.of(rows, session.tp_size)
        self._operands = Operands(session, sizes.activation, sizes.weight)
        self._methods = self._registered(rows, lambda row: row.capacity_tokens)
        self._exact: dict[tuple[int, int], Methods] = {}  # (capacity of the row, T) -> manager of capacity T
        for capacity in dict.fromkeys(row.capacity_tokens for row in rows):
            mine = [row for row in rows if row.capacity_tokens == capacity]
            for tokens in walks_for(session.job, capacity)[-1].probes():
                self._exact[(capacity, tokens)] = self._registered(mine, lambda row, tokens=tokens: tokens)  # type: ignore[misc]

    def _registered(self, rows: Sequence[GemmRow], tokens: Callable[[GemmRow], int]) -> Methods:
        widths: dict[tuple[Direction, int], int] = {}
        for row in rows:
            key = (row.direction, row.width)
            widths[key] = max(widths.get(key, 0), tokens(row))
        return Methods(self._session, widths, (AUTO,))

    def measure(self, item: GemmRow) -> Row:
        with torch.no_grad():
            walks = {walk.name: self._walk(item, walk) for walk in walks_for(self._session.job, item.capacity_tokens)}
            exact = [self._exact_capacity(item, t) for c, t in self._exact if c == item.capacity_tokens]
        self._methods.manager.check()
        problems = [problem for part in (*walks.values(), *exact) for problem in part.pop("problems")]
        return {
            "suite": "dynamic",
            "label": item.label,
            **item.as_dict(),
            "walks": walks,
            "exact_capacity": exact,
            "judged": self._session.job.is_judged,
            "measured": any(walk["total_us"].get(AUTO) is not None for walk in walks.values()),
            "problems": problems,
        }

    def _walk(self, row: GemmRow, walk: Walk) -> Row:
        """Total time of each variant; every probe of the walk is checked first."""
        checked = [self._check(self._at(row, tokens)) for tokens in walk.probes()]
        errors = {label: error for one in checked for label, error in one.errors.items()}
        runs: dict[str, Run] = {}
        leads: dict[str, Run] = {}
        for label in LABELS:
            if label not in errors:
                steps = [self._run(self._at(row, tokens), label) for tokens in walk.num_tokens]
                runs[label], leads[label] = _in_a_row(steps), _in_a_row(steps[:_LEAD_STEPS])
        times = measure(self._session, runs, queued=False, calls=1, leads=leads) if runs else {}
        totals = {label: one.eager_us for label, one in times.items()}
        return {
            "rule": walk.rule,
            "steps": len(walk.num_tokens),
            "capacity_over_mean": walk.capacity_over_mean,
            "total_us": totals,
            "padded_speed_up": formulas.ratio(totals.get(PADDED), totals.get(AUTO)),
            "sequential_speed_up": formulas.ratio(totals.get(PLAIN), totals.get(AUTO)),
            "errors": errors,
            "problems": [f"{walk.name}, {AUTO}: {errors[AUTO]}"] if AUTO in errors else [],
        }

    def _at(self, row: GemmRow, num_tokens: int) -> GemmRow:
        return GemmRow(row.direction, num_tokens, row.in_features, row.out_features, row.capacity_tokens)

    def _check(self, row: GemmRow, methods: Methods | None = None, labels: tuple[str, ...] = LABELS) -> Checked:
        session, methods = self._session, methods or self._methods
        variants = build_variants(session, self._operands, methods, row, labels)
        inputs = RowInputs(session, self._operands, row, row.num_tokens)
        return check(session, methods, variants, Reference(session, row, inputs.x_all, inputs.weight))

    def _run(self, row: GemmRow, label: str) -> Run:
        # A step that fills the capacity has nothing to pad: there "padded" is the dispatcher's choice at C.
        wanted = AUTO if label == PADDED and row.num_tokens == row.capacity_tokens else label
        (variant,) = build_variants(self._session, self._operands, self._methods, row, (wanted,))
        return variant.build()

    def _exact_capacity(self, row: GemmRow, num_tokens: int) -> Row:
        at = self._at(row, num_tokens)
        exact = self._exact[(row.capacity_tokens, num_tokens)]
        errors = {
            name: one.errors[AUTO]
            for name, one in (
                ("capacity C", self._check(at, labels=(AUTO,))),
                ("capacity T", self._check(at, exact, (AUTO,))),
            )
            if AUTO in one.errors
        }
        if errors:
            problems = [f"T={num_tokens}, {name}: {error}" for name, error in errors.items()]
            return {"tokens": num_tokens, "ratios": {}, "ratio": None, "problems": problems}
        inputs = RowInputs(self._session, self._operands, at, num_tokens)

        def on(methods: Methods) -> Run:
            return methods.prepare(AUTO, at, inputs.x, inputs.weight, inputs.partition)

        both = {"capacity C": on(self._methods), "capacity T": on(exact)}
        times = measure(self._session, both, queued_operations=_EXACT_QUEUED)
        ratios = {
            mode: formulas.ratio(times["capacity C"].of(mode), times["capacity T"].of(mode))
            for mode in ("eager", "queued")
        }
        known = [value for value in ratios.values() if value is not None]
        return {"tokens": num_tokens, "ratios": ratios, "ratio": max(known), "problems": []}

    def close(self) -> None:
        for methods in (self._methods, *self._exact.values()):
            methods.close()


def _in_a_row(runs: Sequence[Run]) -> Run:
    def walk() -> torch.Tensor:
        for run in runs:
            last = run()
        return last

    return walk
