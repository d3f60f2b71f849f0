"""Whole FP8 operations, timed by ``tpoverlap bench --suite gemm --numbers fp8`` on two GPUs: a check, and ``fused``.

The model of an FP8 operation is put together of parts; no time here enters it. So the error of every method but
``fused`` is one on rows that were not seen. ``fused`` has kernels of its own in FP8: what its two forms add to the GEMM
is fitted to its rows, and as long as there are none for both, nobody chooses it. Queued times only: launches cost the
processor what they cost it in bfloat16, and kernels that quantise, see `Fp8Rates.host_us`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Final

from benchmarks.fp8_search import search
from benchmarks.observations import BENCH_METHODS, RESULTS, candidate_of, former, on_two, problem_of
from tpoverlap.tuning import Candidate, DeviceModel, Problem, estimate, plain
from tpoverlap.tuning.device import OneKernel
from tpoverlap.tuning.model import launched_as

PLAIN_LABEL: Final = "plain sequential"


@dataclass(frozen=True)
class Operation:
    """One row's time by one method, with the GPU alone. ``candidate`` None: NCCL and ``torch._scaled_mm``."""

    source: str
    problem: Problem
    candidate: Candidate | None
    time_us: float

    @property
    def form(self) -> str:
        """ "fused" or "one_launch"; "" for other methods."""
        fused = self.candidate is not None and self.candidate.method == "fused"
        return launched_as(self.problem, Candidate("fused")) if fused else ""

    def predict_us(self, device: DeviceModel) -> float:
        """What ``device`` says about it."""
        if self.candidate is None:
            return plain(device, self.problem).device_us
        return estimate(device, self.problem, self.candidate).device_us


def read_operations(folder: Path = RESULTS, gpu: str = "H200") -> list[Operation]:
    """Every FP8 row of the gemm suite in ``folder``, from two GPUs whose names end in ``gpu``."""
    found: list[Operation] = []
    for path in sorted(folder.glob("*.json")):
        data = json.loads(path.read_text(encoding="utf-8"))
        if "schema" not in data or "rows" not in data or not on_two(data.get("environment", {}), gpu):
            continue
        for row in data["rows"]:
            if row.get("suite") == "gemm" and row.get("numbers") == "fp8":
                operations = _operations(path.name, row, data["environment"].get("tp_size", 2))
                found += [one for one in operations if one.candidate is None or not former(data["environment"])]
    return found


def _operations(source: str, row: dict[str, Any], tp_size: int) -> list[Operation]:
    problem = problem_of(row["direction"], row | {"tokens": row["num_tokens"]}, tp_size)
    problem = replace(problem, fp8=True)
    return [
        Operation(source, problem, None if label == PLAIN_LABEL else candidate_of(label), times["queued_us"])
        for label, times in row["methods"].items()
        if label in BENCH_METHODS and times.get("queued_us")
    ]


def fit_fused(device: DeviceModel, operations: Sequence[Operation]) -> DeviceModel:
    """``device`` with both forms of FP8's ``fused`` fitted; unchanged unless there are rows of both."""
    for form in ("fused", "one_launch"):
        rows = [one for one in operations if one.form == form]
        if len(rows) < 2:
            return replace(device, fp8=None if device.fp8 is None else replace(device.fp8, fused=None, one_launch=None))
        start: OneKernel = getattr(device, form)

        def with_form(values: Sequence[float], device: DeviceModel = device, form: str = form) -> DeviceModel:
            assert device.fp8 is not None, "FP8's GEMMs are fitted before"
            kernel = OneKernel(values[0], max(1.0, values[1]))
            return replace(device, fp8=replace(device.fp8, **{form: kernel}))  # type: ignore[arg-type]

        device = search(with_form, (start.fixed_us, start.gemm_factor), rows)
    return device


def operation_errors(device: DeviceModel, operations: Sequence[Operation]) -> dict[str, Any]:
    """Percent, of all methods but ``fused``; {} where nothing was timed."""
    off = sorted(abs(one.predict_us(device) / one.time_us - 1.0) for one in operations if not one.form)
    if not off:
        return {}
    return {
        "operations": len(off),
        "operations_median_percent": round(100.0 * median(off), 1),
        "operations_nine_in_ten_within_percent": round(100.0 * off[int(0.9 * len(off))], 1),
    }
