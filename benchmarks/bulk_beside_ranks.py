"""What each rank of `benchmarks.bulk_beside` does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch
import torch.distributed as dist

from benchmarks.bulk_operations import BulkInputs, BulkReference, BulkRow, Managers, Results, open_managers, variants
from benchmarks.gemm_clock import GemmClock
from tpoverlap.testing.specs import CPU_SHAPES, GEMM_SHAPES, TP8_SHAPES, token_counts
from tpoverlap.tools.bench import baselines
from tpoverlap.tools.bench.baselines import PlainTransfer, Run
from tpoverlap.tools.bench.job import DIRECTIONS, BenchJob
from tpoverlap.tools.bench.session import Operands, Session
from tpoverlap.tools.bench.timing import Times, measure
from tpoverlap.tools.bench.variants import COLLECTIVE, GEMM, PULL, PUSH

Row = dict[str, Any]
NCCL_BESIDE: Final = "NCCL beside"
NCCL_IN_TURN: Final = "NCCL, then the GEMM"
ADD: Final = "add alone"
NOTHING_BESIDE: Final = ", nothing beside"
_QUEUED: Final = 12
_K: Final = 8192


def rows_of(device_type: str) -> list[BulkRow]:
    """The collective much shorter than the GEMM, shorter, about as long, and (few tokens) longer."""
    if device_type == "cpu":
        shapes = [(s.num_tokens // 2 * 2, s.in_features, s.out_features) for s in CPU_SHAPES[::2]]
    else:
        by_features = {(s.in_features, s.out_features): s.num_tokens for s in (*GEMM_SHAPES, *TP8_SHAPES)}
        shapes = [(by_features[(_K, n)], _K, n) for n in (1280, 8192, 3584)]
        shapes.insert(2, (token_counts(shapes[0][0], 2)["eighth"], *shapes[0][1:]))
    return [BulkRow(direction, *shape) for shape in shapes for direction in DIRECTIONS]


def measure_all(rank: int, size: int, job: BenchJob, progress: str) -> Row:
    """Every row; rank 0 writes those so far to ``progress``."""
    group = dist.group.WORLD
    assert group is not None, "the pool made it"
    session = Session(job, group, rank)
    rows = rows_of(job.device_type)
    operands = Operands(session, *BulkInputs.sizes(rows))
    transfer = PlainTransfer(session, max(r.num_tokens * r.in_features for r in rows) * job.dtype.itemsize)
    options, left_out = variants(session.device)
    found: Row = {"options": options, "not_honoured": left_out, "rows": [], "left_out": []}
    for width in dict.fromkeys(row.in_features for row in rows):
        mine = [row for row in rows if row.in_features == width]
        managers = open_managers(session, width, max(row.num_tokens for row in mine), options)
        for row in mine:
            if found["left_out"] or session.out_of_time():
                found["left_out"].append(row.label)
                continue
            with torch.no_grad():
                found["rows"].append(_row(session, operands, transfer, managers, row, tuple(options)))
            if rank == 0:
                Path(progress).write_text(json.dumps(found, indent=1))
        managers.check_and_close()
    transfer.close()
    return found


def _row(
    session: Session,
    operands: Operands,
    transfer: PlainTransfer,
    managers: Managers,
    row: BulkRow,
    labels: Sequence[str],
) -> Row:
    inputs = BulkInputs(session, operands, row)
    errors = {label: "its manager failed at an earlier row" for label in labels if label not in managers}
    errors |= _check(session, inputs, managers)
    skipped: dict[str, str] = {}
    clocks = {label: GemmClock(session.is_cuda) for label in (GEMM, *managers, NCCL_BESIDE, NCCL_IN_TURN)}
    runs: dict[str, Run] = {GEMM: clocks[GEMM].around(inputs.gemm)}
    for label, manager in managers.items():
        if label not in errors:
            runs[label] = _last(partial(inputs.ours, manager, clocks[label].around(inputs.gemm)))
            runs[label + NOTHING_BESIDE] = _last(partial(inputs.ours, manager, lambda: inputs.sent))
    if (reason := baselines.why_no_nccl(session)) is not None:
        skipped |= dict.fromkeys((COLLECTIVE, NCCL_BESIDE, NCCL_IN_TURN), reason)
    else:
        runs[COLLECTIVE] = baselines.collective(session, row.moved, inputs.sent)
        for label in (NCCL_BESIDE, NCCL_IN_TURN):
            if label not in errors:
                work = clocks[label].around(inputs.gemm)
                runs[label] = _last(partial(inputs.nccl, work, beside=label == NCCL_BESIDE))
    _add_transfer(session, operands, transfer, row, runs, skipped, errors)
    if row.direction == "rs":
        runs[ADD] = inputs.add
    gemm_us: dict[str, list[float]] = {label: [] for label in clocks}

    def note(label: str, mode: str, calls: int) -> None:
        if label in clocks:
            time_us = clocks[label].take(calls)  # the other mode's too: those marks have to go
            if mode == ("queued" if session.is_cuda else "eager"):
                gemm_us[label].append(time_us)

    times = measure(session, runs, queued_operations=_QUEUED, after_round=note)
    mine = {label: median(values) for label, values in gemm_us.items() if values}
    return {
        "label": row.label,
        "direction": row.direction,
        "num_tokens": row.num_tokens,
        "in_features": row.in_features,
        "out_features": row.out_features,
        "comm_bytes": row.moved.comm_bytes(session.tp_size, session.job.dtype.itemsize),
        "times": {label: _figures(one) for label, one in times.items()},
        **_of_all_ranks(session.agree(mine)),
        "errors": errors,
        "skipped": skipped,
    }


def _last(operation: Any) -> Run:
    return lambda: operation()[1]  # type: ignore[no-any-return]  # the product


def _figures(times: Times) -> dict[str, float | None]:
    return {"eager_us": times.eager_us, "queued_us": times.queued_us}


def _of_all_ranks(everyone: Sequence[dict[str, float]]) -> Row:
    """``gemm_us`` of the slowest rank; ``gemm_ratio``: of the rank whose GEMM suffers most, to its own GEMM alone."""
    labels = [label for label in everyone[0] if all(label in rank for rank in everyone)]
    ratios = {}
    if GEMM in labels:
        ratios = {label: max(rank[label] / rank[GEMM] for rank in everyone) for label in labels}
    return {"gemm_us": {label: max(rank[label] for rank in everyone) for label in labels}, "gemm_ratio": ratios}


def _check(session: Session, inputs: BulkInputs, managers: Managers) -> dict[str, str]:
    """Label -> what is wrong with it on any rank; such a one is not timed. A manager that raised is given up."""
    reference = BulkReference(session, inputs)
    tries = {label: partial(inputs.ours, manager, inputs.gemm, keeps=True) for label, manager in managers.items()}
    if baselines.why_no_nccl(session) is None:
        tries |= {label: partial(inputs.nccl, inputs.gemm, beside=label == NCCL_BESIDE) for label in _NCCL}
    errors: dict[str, str] = {}
    for label, operate in tries.items():
        problem, raised = _try(session, operate, reference)
        answers: list[tuple[str | None, bool]] = session.agree((problem, raised))
        problems = [f"rank {rank}: {one}" for rank, (one, _) in enumerate(answers) if one is not None]
        if problems:
            errors[label] = problems[0]
        if label in managers and any(one for _, one in answers):
            managers.drop(label)
    return errors


_NCCL = (NCCL_BESIDE, NCCL_IN_TURN)


def _try(session: Session, operate: Any, reference: BulkReference) -> tuple[str | None, bool]:
    try:
        results: Results = operate()
        if session.is_cuda:
            torch.cuda.synchronize(session.device)
        return reference.problem(results), False
    except Exception as error:  # of any kind: the other ranks are about to agree on it
        return f"{type(error).__name__}: {str(error)[:500]}", True


def _add_transfer(
    session: Session,
    operands: Operands,
    transfer: PlainTransfer,
    row: BulkRow,
    runs: dict[str, Run],
    skipped: dict[str, str],
    errors: dict[str, str],
) -> None:
    if transfer.reason is not None:
        skipped[PUSH] = transfer.reason
        return
    source = operands.activation(row.num_tokens, row.in_features)  # alike on all ranks: arrivals can be compared
    push = transfer.push(row.moved, source)
    push()
    session.barrier()
    problem = session.first_problem(transfer.problem_after_push(row.moved, source))
    if problem is not None:
        errors[PUSH] = problem
        return
    runs[PUSH], runs[PULL] = push, transfer.pull(row.moved, source)
