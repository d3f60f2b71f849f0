"""``gemm``: one GEMM with its collective, at the shapes that peers were measured on, and over T at one of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from tpoverlap.errors import ConfigError
from tpoverlap.gemm.fp8.quantize import ALIGNMENT
from tpoverlap.testing.specs import GEMM_SHAPES, TP8_SHAPES
from tpoverlap.tools.bench import baselines, formulas, targets
from tpoverlap.tools.bench.correctness import Reference
from tpoverlap.tools.bench.job import BenchJob, Direction
from tpoverlap.tools.bench.methods import AUTO, Methods
from tpoverlap.tools.bench.rows import GemmRow
from tpoverlap.tools.bench.session import Operands, Session
from tpoverlap.tools.bench.suite import Row, Runner, Suite
from tpoverlap.tools.bench.timing import Times, measure
from tpoverlap.tools.bench.variants import (
    ALONE,
    GEMM,
    PLAIN,
    PULL,
    PUSH,
    RowInputs,
    Sizes,
    add_alone,
    build_variants,
    check,
    fp8_row,
)

if TYPE_CHECKING:
    from rich.table import Table

Shape = tuple[int, int, int]
MODES: Final = ("eager", "queued")
_TABLE_SHAPES: Final[tuple[Shape, ...]] = tuple(
    dict.fromkeys((s.num_tokens, s.in_features, s.out_features) for s in (*GEMM_SHAPES, *TP8_SHAPES))
)
TABLE_FEATURES: Final = tuple(dict.fromkeys((s.in_features, s.out_features) for s in GEMM_SHAPES))
"""(K, N) of the nine shapes that peers were measured on."""
_SWEEP_TOKENS: Final = (16, 64, 128, 256, 512, 1024, 2048, 16384)
_SWEEP: Final[tuple[Shape, ...]] = (*((t, 8192, 4096) for t in _SWEEP_TOKENS), (512, 4096, 3072))
_QUICK: Final[tuple[Shape, ...]] = (
    (8192, 8192, 8192),
    (4096, 8192, 4096),
    (8192, 8192, 1280),
    (128, 8192, 4096),
    (512, 8192, 4096),
    (2048, 8192, 4096),
)
_CPU: Final[tuple[Shape, ...]] = (
    *((t, 512, 512) for t in (16, 64, 256, 512, 1024)),
    (1024, 512, 128),
    (1024, 128, 512),
)
_CPU_QUICK: Final[tuple[Shape, ...]] = ((64, 128, 96), (256, 128, 96))


def shapes_of(job: BenchJob) -> tuple[Shape, ...]:
    """(T, K, N) of a run, each once."""
    if job.shapes:
        shapes = job.shapes
    elif job.device_type == "cuda":
        shapes = _QUICK if job.quick else (*_TABLE_SHAPES, *_SWEEP)
    else:
        shapes = _CPU_QUICK if job.quick else _CPU
    if job.tokens:
        shapes = tuple(
            (tokens, *features) for features in dict.fromkeys(s[1:] for s in shapes) for tokens in job.tokens
        )
    return tuple(dict.fromkeys(shapes))


class GemmSuite(Suite):
    """See the module."""

    name = "gemm"

    def items(self, job: BenchJob) -> list[GemmRow]:
        shapes = shapes_of(job)
        capacity: dict[tuple[int, int], int] = {}
        for tokens, *features in shapes:
            key = (features[0], features[1])
            capacity[key] = max(capacity.get(key, 0), tokens)
        small = [shape for shape in shapes if shape[0] < job.tp_size]
        if small:
            raise ConfigError(f"T={small[0][0]} is less than one row a rank of {job.tp_size}; give a larger T")
        if "fp8" in job.numbers:
            odd = [shape for shape in shapes if shape[1] % ALIGNMENT or shape[2] % ALIGNMENT]
            if odd:
                raise ConfigError(
                    f"--numbers fp8 needs K and N in multiples of {ALIGNMENT}, got {'x'.join(map(str, odd[0]))}; "
                    "change the shape, or give --numbers bfloat16"
                )
        return [
            GemmRow(direction, tokens, k, n, capacity[(k, n)], numbers)
            for numbers in job.numbers
            for tokens, k, n in shapes
            for direction in job.directions
        ]

    def start(self, session: Session, items: Sequence[GemmRow]) -> Runner:
        return _GemmRunner(session, items)

    def summary(self, rows: Sequence[Row]) -> dict[str, Any]:
        return targets.summarise_gemm(rows)

    def table(self, rows: Sequence[Row]) -> Table:
        from tpoverlap.tools.bench.tables import gemm_table

        return gemm_table(rows)

    def conclusions(self, rows: Sequence[Row]) -> list[str]:
        """Geometric means and every missed target."""
        summary = self.summary(rows)
        lines = [
            f"geometric mean of_limit, {direction}, rows of the limit rule: "
            + ", ".join(f"{label} {mean:.3f}" for label, mean in means.items() if mean is not None)
            for direction, means in summary["geometric_mean_of_limit"].items()
            if any(mean is not None for mean in means.values())
        ]
        if any(row["targets"] for row in rows):
            lines.append(f"targets ({targets.targets()['source']}) missed: {len(summary['missed'])}")
            lines += [f"  {line}" for line in summary["missed"]]
        else:
            lines.append(f"targets are not judged: they hold for {targets.targets()['holds_for']}")
        lines += [
            f"{label} was refused at {row['label']}: {reason}"
            for row in rows
            for label, reason in row["errors"].items()
        ]
        skipped: dict[str, list[str]] = {}
        for row in rows:
            for label, reason in row["skipped"].items():
                skipped.setdefault(f"{label} skipped: {reason}", []).append(row["label"])
        return [*lines, *(f"{reason} ({len(where)} rows)" for reason, where in skipped.items())]


class _GemmRunner(Runner):
    def __init__(self, session: Session, rows: Sequence[GemmRow]) -> None:
        self._session = session
        sizes = Sizes.of(rows, session.tp_size)
        widths: dict[tuple[Direction, int], int] = {}
        for row in rows:
            key = (row.direction, row.width)
            widths[key] = max(widths.get(key, 0), row.capacity_tokens)
        self._operands = Operands(session, sizes.activation, sizes.weight)
        self._methods = Methods(session, widths, fp8=any(row.is_fp8 for row in rows))
        self._transfer = baselines.PlainTransfer(session, sizes.moved * session.job.dtype.itemsize)

    def measure(self, item: GemmRow) -> Row:
        session, row = self._session, item
        with torch.no_grad():
            fp8 = fp8_row(session, self._operands, row)
            variants = build_variants(session, self._operands, self._methods, row, fp8=fp8)
            inputs = RowInputs(session, self._operands, row, row.num_tokens)
            reference = Reference(session, row, inputs.x_all, inputs.weight, fp8)
            checked = check(session, self._methods, variants, reference)
            add_alone(session, self._operands, self._transfer, row, checked, fp8)
            times = measure(session, checked.runs)
        self._methods.manager.check()
        figures = _figures(session, row, times)
        methods = {
            label: {
                "kind": checked.kinds[label],
                "eager_us": times[label].eager_us,
                "queued_us": times[label].queued_us,
                "queued_operations": times[label].queued_operations,
                "relative_error": checked.relative_errors[label],
                **_judged(times[label], times),
            }
            for label in checked.relative_errors
        }
        ours = [label for label, kind in checked.kinds.items() if kind == "ours"]
        result: Row = {
            "suite": "gemm",
            "label": row.label,
            **row.as_dict(),
            **figures,
            "methods": methods,
            "errors": checked.errors,
            "skipped": checked.skipped,
            "auto": self._methods.explain(AUTO, row).splitlines()[:3],
            "measured": any(label in methods for label in ours),
            "problems": [f"{label}: {checked.errors[label]}" for label in ours if label in checked.errors],
        }
        result["targets"] = targets.judge_gemm(result) if session.job.is_judged else []
        return result

    def close(self) -> None:
        self._transfer.close()
        self._methods.close()


def _figures(session: Session, row: GemmRow, times: dict[str, Times]) -> Row:
    """The parts alone, c and the link rate of a row."""
    comm_bytes = row.comm_bytes(session.tp_size, session.job.dtype.itemsize)
    alone: dict[str, dict[str, float | None]] = {
        label: {"eager_us": times[label].eager_us, "queued_us": times[label].queued_us}
        for label in ALONE
        if label in times
    }
    mode = "queued" if times[GEMM].queued_us is not None else "eager"
    transfer = _transfer_us(times, mode)
    return {
        "comm_bytes": comm_bytes,
        "alone": alone,
        "transfer_us": {one: _transfer_us(times, one) for one in MODES},
        "link_rate_gb_per_s": formulas.link_rate_gb_per_s(comm_bytes, transfer),
        "c": formulas.ratio(transfer, times[GEMM].of(mode)),
    }


def _transfer_us(times: dict[str, Times], mode: str) -> float | None:
    """The fastest plain transfer of the same bytes."""
    values = [value for label in (PUSH, PULL) if label in times if (value := times[label].of(mode)) is not None]
    return min(values, default=None)


def _judged(own: Times, times: dict[str, Times]) -> dict[str, dict[str, float | None]]:
    """``hidden``, ``of_limit`` and ``of_sequential``, each by mode."""
    figures: dict[str, dict[str, float | None]] = {"hidden": {}, "of_limit": {}, "of_sequential": {}}
    for mode in MODES:
        time_us = own.of(mode)
        gemm_us = times[GEMM].of(mode)
        sequential_us = times[PLAIN].of(mode) if PLAIN in times else None
        if time_us is None:
            continue
        figures["hidden"][mode] = formulas.hidden(time_us, gemm_us, sequential_us)
        figures["of_limit"][mode] = formulas.of_limit(time_us, gemm_us, _transfer_us(times, mode))
        figures["of_sequential"][mode] = formulas.ratio(time_us, sequential_us)
    return figures
