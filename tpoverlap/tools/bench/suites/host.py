"""``host``: microseconds until an operation's call returns: same T again or a new one, with and without autograd.

Of methods that cut the GEMM in parts also microseconds a step, which is a part with its transfer and its flags.

On a GPU nothing waits for the device within a few calls, so this is the host's own work. On a CPU the call does the
work itself, and its time is in the figure.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import torch

from tpoverlap.pieces import gather_piece_rows, multiplies_pieces, scatter_piece_rows
from tpoverlap.tools.bench import baselines, targets
from tpoverlap.tools.bench.correctness import Reference
from tpoverlap.tools.bench.job import BenchJob, Direction
from tpoverlap.tools.bench.methods import Methods, method_labels, runnable
from tpoverlap.tools.bench.rows import GemmRow
from tpoverlap.tools.bench.session import Operands, Session
from tpoverlap.tools.bench.suite import Row, Runner, Suite
from tpoverlap.tools.bench.variants import PLAIN, RowInputs, Sizes, build_variants, check

if TYPE_CHECKING:
    from rich.table import Table

_MM: Final = "torch.mm"
_CALLS: Final = 8
"""Calls of a batch: few enough that no queue fills up and makes the host wait."""
_BATCHES_A_ROUND: Final = 6
_STRIDE: Final = 17
_SAME_T: Final = ("no_grad_same", "autograd_same")
"""Of these the number of steps is known: a new T may have more pieces."""


@dataclass(frozen=True)
class HostItem:
    """One operation: a method of ours, the plain pair, or torch.mm alone."""

    operation: str
    direction: Direction

    @property
    def label(self) -> str:
        """``ag fused``."""
        return self.operation if self.operation == _MM else f"{self.direction} {self.operation}"


class HostSuite(Suite):
    """See the module."""

    name = "host"

    def items(self, job: BenchJob) -> list[HostItem]:
        return [
            HostItem(_MM, job.directions[0]),
            *(
                HostItem(operation, direction)
                for direction in job.directions
                for operation in (PLAIN, *method_labels(direction, job.tp_size, runnable(job.device_type)))
            ),
        ]

    def start(self, session: Session, items: Sequence[HostItem]) -> Runner:
        return _HostRunner(session)

    def summary(self, rows: Sequence[Row]) -> dict[str, Any]:
        return targets.summarise_host(rows)

    def table(self, rows: Sequence[Row]) -> Table:
        from tpoverlap.tools.bench.tables import host_table

        return host_table(rows)

    def conclusions(self, rows: Sequence[Row]) -> list[str]:
        """How many targets were met, and what was missed."""
        summary, rules = self.summary(rows), targets.targets()
        bounds = f"{rules['host']['no_grad_us']:g} us without autograd, {rules['host']['autograd_us']:g} with"
        what = f"{' and '.join(rules['host']['methods'])} ({rules['source']}): at most {bounds}"
        if not summary["judged"]:
            return [f"targets of {what}: not judged, they hold for {rules['holds_for']}"]
        met = summary["num_targets"] - len(summary["missed"])
        lines = [f"targets of {what}: {met} of {summary['num_targets']} met"]
        return lines + [f"  target missed: {line}" for line in summary["missed"]]


def steps_of(operation: str, row: GemmRow, tp_size: int, itemsize: int) -> int | None:
    """Parts that a method cuts the GEMM of ``row`` in, each with a transfer or a sum; None where it cuts nothing."""
    partition = row.partition(tp_size)
    if operation.startswith("pipeline"):
        return int(operation.split()[1])
    if operation == "ring aggregate":
        return -(-tp_size // 2)
    if operation != "ring_exchange":
        return None
    gathers = row.direction == "ag"
    if gathers:
        piece_rows = gather_piece_rows(partition, row.width, itemsize)
    else:
        piece_rows = scatter_piece_rows(partition, row.width, itemsize, row.in_features * itemsize)
    if piece_rows is None or (gathers and not multiplies_pieces(row.features)):
        return tp_size
    pieces = -(-partition.max_count // piece_rows)
    return 1 + (tp_size - 1) * pieces if gathers else tp_size * pieces


class _HostRunner(Runner):
    def __init__(self, session: Session) -> None:
        self._session = session
        capacity, width, features = (4096, 512, 256) if session.is_cuda else (256, 64, 48)
        self._tokens = capacity // 2
        self._new_calls = 0
        self._rows: dict[Direction, GemmRow] = {
            "ag": GemmRow("ag", self._tokens, width, features, capacity),
            "rs": GemmRow("rs", self._tokens, features, width, capacity),
        }
        sizes = Sizes.of(list(self._rows.values()), session.tp_size)
        self._operands = Operands(session, sizes.activation, sizes.weight)
        self._methods = Methods(session, {("ag", width): capacity, ("rs", width): capacity})

    def measure(self, item: HostItem) -> Row:
        row = self._rows[item.direction]
        problems = self._problems(item, row) if item.operation != _MM else []
        figures: dict[str, float] = {}
        if not problems:
            figures = self._figures(item)
        self._methods.manager.check()
        steps = steps_of(item.operation, row, self._session.tp_size, self._session.job.dtype.itemsize)
        return {
            "suite": "host",
            "label": item.label,
            "operation": item.operation,
            "direction": item.direction,
            "shape": [row.num_tokens, row.in_features, row.out_features],
            "host_us": figures,
            "steps": steps,
            "host_us_a_step": {} if steps is None else {k: v / steps for k, v in figures.items() if k in _SAME_T},
            "judged": self._session.job.is_judged,
            "measured": bool(figures),
            "problems": problems,
        }

    def _problems(self, item: HostItem, row: GemmRow) -> list[str]:
        with torch.no_grad():
            inputs = RowInputs(self._session, self._operands, row, row.num_tokens)
            variants = build_variants(self._session, self._operands, self._methods, row, (item.operation,))
            reference = Reference(self._session, row, inputs.x_all, inputs.weight)
            checked = check(self._session, self._methods, variants, reference)
        return [f"{label}: {error}" for label, error in checked.errors.items()]

    def _figures(self, item: HostItem) -> dict[str, float]:
        samples: dict[str, list[float]] = {}
        batches = 2 if self._session.job.quick else _BATCHES_A_ROUND
        for number in range(batches * (self._session.job.rounds + 1)):
            for key, new, autograd in (
                ("same", False, False),
                ("new", True, False),
                ("same", False, True),
                ("new", True, True),
            ):
                if autograd and item.operation == PLAIN:
                    continue  # plain collectives have no backward
                forward, backward = self._batch(item, new=new, autograd=autograd)
                if number < batches:
                    continue  # the first round warms up
                samples.setdefault(f"{'autograd' if autograd else 'no_grad'}_{key}", []).append(forward)
                if autograd:
                    samples.setdefault(f"backward_{key}", []).append(backward)
        mine = {key: median(values) for key, values in samples.items()}
        everyone: list[dict[str, float]] = self._session.agree(mine)
        return {key: max(rank[key] for rank in everyone) for key in mine}

    def _batch(self, item: HostItem, *, new: bool, autograd: bool) -> tuple[float, float]:
        """(forward, backward) microseconds a call; the operands exist before the clock starts."""
        calls = [self._call(item, self._next_tokens() if new else self._tokens, autograd) for _ in range(_CALLS)]
        self._session.barrier()
        with torch.set_grad_enabled(autograd):
            begin_s = time.perf_counter()
            outputs = [call() for call, _ in calls]
            forward_s = time.perf_counter() - begin_s
        if not autograd:
            return 1e6 * forward_s / _CALLS, 0.0
        gradients = [torch.ones_like(output) for output in outputs]
        self._session.barrier()
        begin_s = time.perf_counter()
        for output, gradient, (_, leaves) in zip(outputs, gradients, calls, strict=True):
            torch.autograd.grad(output, leaves, gradient)
        return 1e6 * forward_s / _CALLS, 1e6 * (time.perf_counter() - begin_s) / _CALLS

    def _next_tokens(self) -> int:
        """A T that was not used before, until all of the upper half of the capacity were."""
        self._new_calls += 1
        return self._tokens + 1 + self._new_calls * _STRIDE % (self._tokens - 1)

    def _call(
        self, item: HostItem, num_tokens: int, autograd: bool
    ) -> tuple[Callable[[], torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
        base = self._rows[item.direction]
        row = GemmRow(base.direction, num_tokens, base.in_features, base.out_features, base.capacity_tokens)
        rows = baselines.even_rows(row, self._session.tp_size) if item.operation == PLAIN else num_tokens
        inputs = RowInputs(self._session, self._operands, row, rows)
        x = inputs.x_all if item.operation == _MM else inputs.x
        x, weight = x.detach().requires_grad_(autograd), inputs.weight.detach().requires_grad_(autograd)
        if item.operation == _MM:
            return (lambda: torch.mm(x, weight.t())), (x, weight)
        if item.operation == PLAIN:
            return baselines.plain_sequential(self._session, row, x, weight), (x, weight)
        return self._methods.prepare(item.operation, row, x, weight, inputs.partition), (x, weight)

    def close(self) -> None:
        self._methods.close()
