"""All ways to run one row: built on every rank alike, checked one by one, and only then handed to the clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import torch

from tpoverlap.tokens import TokenPartition
from tpoverlap.tools.bench import baselines
from tpoverlap.tools.bench.baselines import PlainTransfer, Run
from tpoverlap.tools.bench.correctness import TWIN_FACTOR, Reference
from tpoverlap.tools.bench.fp8_rows import NO_ASYNC_TP, Fp8Row
from tpoverlap.tools.bench.methods import AUTO, Methods, method_labels, runnable, why_no_kernels
from tpoverlap.tools.bench.rows import GemmRow
from tpoverlap.tools.bench.session import Operands, Session

GEMM: Final = "gemm alone"
COLLECTIVE: Final = "collective alone"
PUSH: Final = "transfer alone, push"
PULL: Final = "transfer alone, pull"
PLAIN: Final = "plain sequential"
ASYNC_TP: Final = "torch async-TP"
QUANTISATION: Final = "quantisation alone"
PADDED: Final = "padded to capacity"
ALONE: Final = (GEMM, QUANTISATION, COLLECTIVE, PUSH, PULL)

Kind = Literal["ours", "baseline"]


@dataclass(frozen=True)
class Variant:
    """One way to run a row.

    Attributes:
        label: its name in tables and JSON.
        kind: "ours" goes through the manager; a baseline does not, or is what users without us do.
        build: makes the call; runs again after a manager was renewed.
        first_row: row of the whole output that the result's first row is.
        factor: how much farther from the reference than the twin it may be.
        uses_manager: whether a failure may have left the manager unusable.
    """

    label: str
    kind: Kind
    build: Callable[[], Run]
    first_row: int
    factor: float = TWIN_FACTOR
    uses_manager: bool = True


@dataclass
class Checked:
    """What may be timed, and what became of the rest.

    ``errors``: wrong or raised, never timed. ``skipped``: cannot run here, with the reason.
    """

    runs: dict[str, Run] = field(default_factory=dict)
    relative_errors: dict[str, float] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    kinds: dict[str, Kind] = field(default_factory=dict)


class RowInputs:
    """The operands of one row on this rank, as views."""

    def __init__(self, session: Session, operands: Operands, row: GemmRow, num_tokens: int) -> None:
        self.partition = TokenPartition.balanced(num_tokens, session.tp_size)
        own = self.partition.rows(session.rank)
        if row.direction == "ag":
            self.x_all = operands.activation(num_tokens, row.in_features)
            self.x = self.x_all[own]
        else:
            self.x_all = self.x = operands.own_activation(num_tokens, row.in_features)
        self.weight = operands.weight(row.out_features, row.in_features)
        self.first_row = 0 if row.direction == "ag" else own.start


def fp8_row(session: Session, operands: Operands, row: GemmRow) -> Fp8Row | None:
    """The FP8 operands of an FP8 row, else None."""
    inputs = RowInputs(session, operands, row, row.num_tokens)
    return Fp8Row(inputs.x_all, inputs.weight) if row.is_fp8 else None


def build_variants(
    session: Session,
    operands: Operands,
    methods: Methods,
    row: GemmRow,
    labels: tuple[str, ...] | None = None,
    fp8: Fp8Row | None = None,
) -> list[Variant]:
    """Every method and baseline of ``row`` with a result to check, or those of ``labels``; ``fp8``: of an FP8 row."""
    inputs = RowInputs(session, operands, row, row.num_tokens)
    even = RowInputs(session, operands, row, baselines.even_rows(row, session.tp_size))

    def ours(label: str, at: RowInputs) -> Callable[[], Run]:
        if fp8 is not None:
            return lambda: methods.prepare(label, row, at.x, fp8.weight, at.partition, fp8.state)
        return lambda: methods.prepare(label, row, at.x, at.weight, at.partition)

    def plain() -> Run:
        if fp8 is not None:
            return fp8.plain_sequential(session, row, even.x)
        return baselines.plain_sequential(session, row, even.x, even.weight)

    # NCCL and async-TP round after every addition, R - 1 times, where the twin rounds the sum once.
    baseline_factor = TWIN_FACTOR * (session.tp_size - 1 if row.direction == "rs" else 1)
    variants = []
    if baselines.why_no_nccl(session) is None:
        variants.append(
            Variant(
                PLAIN,
                "baseline",
                plain,
                even.first_row,
                baseline_factor,
                uses_manager=False,
            )
        )
    variants += [
        Variant(label, "ours", ours(label, inputs), inputs.first_row)
        for label in method_labels(row.direction, session.tp_size, runnable(session.device.type))
    ]
    if row.capacity_tokens > row.num_tokens:
        padded = RowInputs(session, operands, row, row.capacity_tokens)
        variants.append(Variant(PADDED, "baseline", ours(AUTO, padded), padded.first_row))
    if why_no_async_tp(session, row) is None:
        variants.append(
            Variant(
                ASYNC_TP,
                "baseline",
                lambda: baselines.async_tp(session, row, inputs.x, inputs.weight),
                inputs.first_row,
                baseline_factor,
                uses_manager=False,
            )
        )
    return [variant for variant in variants if labels is None or variant.label in labels]


def why_no_async_tp(session: Session, row: GemmRow) -> str | None:
    """Why torch's async-TP is not beside this row."""
    return NO_ASYNC_TP if row.is_fp8 else baselines.why_no_async_tp(session, row)


def check(session: Session, methods: Methods, variants: list[Variant], reference: Reference) -> Checked:
    """Run each once and compare. Collective; what fails on one rank is refused on all."""
    checked, good = Checked(), []
    for variant in variants:
        checked.kinds[variant.label] = variant.kind
        error, problem, raised = _try(session, variant, reference)
        answers: list[tuple[float, str | None, bool]] = session.agree((error, problem, raised))
        problems = [f"rank {rank}: {one}" for rank, (_, one, _) in enumerate(answers) if one is not None]
        if not problems:
            checked.relative_errors[variant.label] = max(one for one, _, _ in answers)
            good.append(variant)
            continue
        checked.errors[variant.label] = problems[0]
        if variant.uses_manager and any(one for _, _, one in answers):
            methods.renew()  # whatever it raised, no later operation may suffer from it
    checked.runs = {variant.label: variant.build() for variant in good}
    return checked


def _try(session: Session, variant: Variant, reference: Reference) -> tuple[float, str | None, bool]:
    """(relative error, problem or None, whether it raised)."""
    try:
        output = variant.build()()
        if session.is_cuda:
            torch.cuda.synchronize(session.device)
        return *reference.compare(output, variant.first_row, variant.factor), False
    except Exception as error:  # of any kind: the other ranks are about to agree on it
        return float("nan"), f"{type(error).__name__}: {str(error)[:500]}", True


def add_alone(
    session: Session,
    operands: Operands,
    transfer: PlainTransfer,
    row: GemmRow,
    checked: Checked,
    fp8: Fp8Row | None = None,
) -> None:
    """The parts alone: GEMM, quantisation, collective, plain transfer. Adds runs, or why there is none. Collective."""
    inputs = RowInputs(session, operands, row, row.num_tokens)
    even = RowInputs(session, operands, row, baselines.even_rows(row, session.tp_size))
    weight = inputs.weight
    full = inputs.x_all
    if fp8 is None:
        checked.runs[GEMM] = lambda: torch.mm(full, weight.t())
    else:
        checked.runs[GEMM] = fp8.multiplied
        checked.runs[QUANTISATION] = fp8.quantisation(inputs.x)
    for label in (COLLECTIVE, PLAIN):
        if (reason := baselines.why_no_nccl(session)) is not None:
            checked.skipped[label] = reason
    if COLLECTIVE not in checked.skipped:
        scattered = even.x if row.direction == "ag" else operands.activation(even.partition.total, row.width)
        scattered = scattered if fp8 is None else fp8.sent(row, scattered)
        checked.runs[COLLECTIVE] = baselines.collective(session, row, scattered)
    if (reason := why_no_async_tp(session, row)) is not None:
        checked.skipped[ASYNC_TP] = reason
    if (reason := why_no_kernels(session.device.type)) is not None:
        checked.skipped["fused"] = reason
    if transfer.reason is not None:
        checked.skipped[PUSH] = transfer.reason
        return
    source = operands.activation(row.num_tokens, row.width)  # the same on every rank, so that arrivals can be compared
    source = source if fp8 is None else fp8.sent(row, source)
    push = transfer.push(row, source)
    push()
    session.barrier()
    problem = session.first_problem(transfer.problem_after_push(row, source))
    if problem is not None:
        checked.errors[PUSH] = problem
        return
    checked.runs[PUSH] = push
    checked.runs[PULL] = transfer.pull(row, source)


@dataclass(frozen=True)
class Sizes:
    """The most that any of some rows takes, in elements."""

    activation: int
    weight: int
    moved: int

    @classmethod
    def of(cls, rows: Sequence[GemmRow], tp_size: int) -> Sizes:
        """``moved``: the activation that travels, all ranks' rows together."""
        tokens = [-(-row.capacity_tokens // tp_size) * tp_size for row in rows]
        pairs = list(zip(tokens, rows, strict=True))
        return cls(
            activation=max(count * max(row.in_features, row.width) for count, row in pairs),
            weight=max(row.in_features * row.out_features for row in rows),
            moved=max(count * row.width for count, row in pairs),
        )
