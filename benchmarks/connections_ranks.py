"""What each rank of `benchmarks.connections` does: one repetition under one setting, in processes of that setting."""

from __future__ import annotations

import os
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist

from benchmarks.bulk_operations import ENGINE, BulkInputs, BulkReference, BulkRow, Managers, open_managers
from tpoverlap.tools.bench.baselines import Run
from tpoverlap.tools.bench.correctness import Reference
from tpoverlap.tools.bench.job import DIRECTIONS, BenchJob, Direction
from tpoverlap.tools.bench.methods import Methods, runnable
from tpoverlap.tools.bench.rows import GemmRow
from tpoverlap.tools.bench.session import Operands, Session
from tpoverlap.tools.bench.timing import measure
from tpoverlap.tools.bench.variants import RowInputs, Sizes, build_variants, check

VARIABLE: Final = "CUDA_DEVICE_MAX_CONNECTIONS"
FEATURES: Final = {"cuda": (8192, 4096), "cpu": (24, 16)}
"""(K, N) of one rank's GEMM."""
TOKENS: Final = {"cuda": (128, 1024, 8192), "cpu": (16, 48)}
_METHODS: Final = ("ring_exchange", "fused", "sequential")
_BULK: Final = "bulk"
Row = dict[str, Any]


def begin(rank: int, size: int, job: BenchJob) -> None:
    """The device's context is there, and so is the group: nobody starts up beside what another one measures."""
    group = dist.group.WORLD
    assert group is not None, "the pool made it"
    session = Session(job, group, rank)
    torch.zeros(1, device=session.device)
    session.barrier()


def measure_all(rank: int, size: int, job: BenchJob) -> Row:
    """Every row once; ``setting`` is what these processes have in their environment."""
    group = dist.group.WORLD
    assert group is not None, "the pool made it"
    session = Session(job, group, rank)
    (k, n), tokens = FEATURES[job.device_type], TOKENS[job.device_type]
    rows = [GemmRow(direction, t, k, n, max(tokens)) for t in tokens for direction in DIRECTIONS]
    bulk_rows = [BulkRow(direction, t, k, n) for t in tokens for direction in DIRECTIONS]
    sizes, bulk_sizes = Sizes.of(rows, session.tp_size), BulkInputs.sizes(bulk_rows)
    operands = Operands(session, max(sizes.activation, bulk_sizes[0]), max(sizes.weight, bulk_sizes[1]))
    labels = tuple(label for label in _METHODS if label in runnable(job.device_type))
    widths: dict[tuple[Direction, int], int] = {(row.direction, row.width): max(tokens) for row in rows}
    methods = Methods(session, widths, labels)
    managers = open_managers(session, k, max(tokens), {ENGINE: {"method": "bulk"}})
    found: Row = {"setting": os.environ.get(VARIABLE), "rows": {}, "errors": {}, "left_out": []}
    for t in tokens:
        if session.out_of_time():
            found["left_out"].append(t)
            continue
        with torch.no_grad():
            runs: dict[str, Run] = {}
            for row in rows:
                if row.num_tokens == t:
                    runs |= _checked(session, operands, methods, labels, row, found["errors"])
            for bulk_row in bulk_rows:
                if bulk_row.num_tokens == t:
                    runs |= _checked_bulk(session, operands, managers, bulk_row, found["errors"])
            times = measure(session, runs)
        found["rows"] |= {
            label: {"eager_us": one.eager_us, "queued_us": one.queued_us, "queued_operations": one.queued_operations}
            for label, one in times.items()
        }
    methods.manager.check()
    methods.close()
    managers.check_and_close()
    return found


def _checked(
    session: Session,
    operands: Operands,
    methods: Methods,
    labels: tuple[str, ...],
    row: GemmRow,
    errors: dict[str, str],
) -> dict[str, Run]:
    """What may be timed, by ``ag 128x8192x4096 fused``; the others go into ``errors``."""
    inputs = RowInputs(session, operands, row, row.num_tokens)
    variants = build_variants(session, operands, methods, row, labels)
    checked = check(session, methods, variants, Reference(session, row, inputs.x_all, inputs.weight))
    errors |= {f"{row.label} {label}": error for label, error in checked.errors.items()}
    return {f"{row.label} {label}": run for label, run in checked.runs.items()}


def _checked_bulk(
    session: Session, operands: Operands, managers: Managers, row: BulkRow, errors: dict[str, str]
) -> dict[str, Run]:
    inputs, manager = BulkInputs(session, operands, row), managers[ENGINE]
    operate, label = partial(inputs.ours, manager, inputs.gemm), f"{row.label} {_BULK}"
    problem = session.first_problem(BulkReference(session, inputs).problem(operate(keeps=True)))
    if problem is not None:
        errors[label] = problem
        return {}
    return {label: lambda: operate()[1]}
