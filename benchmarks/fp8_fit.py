"""What FP8 changes in a device's model, fitted to FP8 GEMMs and kernels on one GPU, with the error that it has.

Observations come from the files of ``benchmarks.gemm_alone`` and ``benchmarks.fp8_kernels`` in ``benchmarks/results``.
In the error every (K, N) is left out in turn at all of its T, and every width of the kernels' tensors. Whole operations
are not among them: their time is put together of these parts and of what the device's model says about links and waits
(`benchmarks.fp8_operations` checks that, where there are any).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Final

from benchmarks.fp8_operations import fit_fused, operation_errors, read_operations
from benchmarks.fp8_search import search
from benchmarks.observations import RESULTS
from tpoverlap.tuning import DeviceModel, Problem
from tpoverlap.tuning.device import Fp8Rates, GemmRates, Rate
from tpoverlap.tuning.model import gemm_alone_us

START: Final = Fp8Rates(GemmRates(3.5, 0.0055, 1.8, 0.1, 0.9, 0.1), Rate(2.5, 3400.0), 30.0, "")

GEMMS: Final = {
    ("forward", "e4m3 fast"): "fprop",
    ("forward", "e5m2"): "dgrad",
    ("weight", "e5m2"): "wgrad",
}
"""Of `gemm_alone`'s variants those that layers run, see ``gemm/fp8/scaled_mm.py``."""
PASSES: Final = {
    "measure": (2,),
    "by maxima": (3,),
    "local and transposed": (2, 4),
    "transpose": (2,),
    "pack": (3,),
    "unpack": (5,),
}
"""Of `gemm_alone`'s: bytes an element of each kernel that it launches. ``measure`` has one more, over the maxima."""
_HOST_ROWS: Final = 64
"""Up to so many rows, one kernel takes the processor longer than the device: then its eager time is the former's."""
_MAXIMA_BYTES: Final = 2048
"""What `Quantizer.measure` puts the magnitude together of, in one more kernel: some hundred parts' maxima."""
_KERNELS: Final = {
    **{"amax": 2, "quantize": 3, "quantize and transpose": 4},
    **{"transpose": 2, "pack rows": 3, "unpack rows": 5},
}
"""The same of `fp8_kernels`."""


@dataclass(frozen=True)
class Seen:
    """One measured time. ``group``: what is left out together. ``problem``: of a GEMM; ``passes``: bytes of kernels."""

    source: str
    kind: str
    time_us: float
    group: tuple[int, ...]
    problem: Problem | None = None
    passes: tuple[int, ...] = ()

    def predict_us(self, device: DeviceModel) -> float:
        """What ``device`` says about it."""
        if self.problem is not None:
            return gemm_alone_us(device, self.problem)
        assert device.fp8 is not None, "the fit gave it one"
        return sum(device.fp8.pass_over.time_us(size) for size in self.passes)


def read_fp8(folder: Path = RESULTS, gpu: str = "H200") -> tuple[list[Seen], list[float]]:
    """Times on a GPU whose name ends in ``gpu``; and microseconds of the processor for one kernel."""
    seen: list[Seen] = []
    hosts: list[float] = []
    for path in sorted(folder.glob("*.json")):
        data = json.loads(path.read_text(encoding="utf-8"))
        gpus = data.get("environment", {}).get("gpus") or [""] if isinstance(data, dict) else [""]
        if not all(name.endswith(gpu) for name in gpus):
            continue
        if _is_gemm_alone(data):
            seen += [one for row in data["rows"] for one in _gemm_alone(path.name, row)]
            hosts += [
                row["times"][name]["eager_us"]
                for row in data["rows"]
                for name in ("by maxima", "transpose", "pack", "unpack")
                if row["kind"] == "quantise" and row["sizes"][0] <= _HOST_ROWS and name in row["times"]
            ]
        elif "kernels" in data and "gemms" in data and "row_wise" in data:
            seen += _fp8_kernels(path.name, data)
            hosts += [row["host_us"] for row in data["kernels"] if row["operation"] in _KERNELS]
    return seen, hosts


def _is_gemm_alone(data: dict[str, Any]) -> bool:
    rows = data.get("rows")
    return isinstance(rows, list) and bool(rows) and {"kind", "sizes", "relative_errors"} <= set(rows[0])


def _gemm_alone(source: str, row: dict[str, Any]) -> list[Seen]:
    kind, sizes, found = row["kind"], tuple(row["sizes"]), []
    for name, times in row["times"].items():
        time_us = times["queued_us"]
        if time_us is None:
            continue
        if kind == "quantise" and name in PASSES:
            elements = sizes[0] * sizes[1]
            passes = tuple(each * elements for each in PASSES[name])
            passes += (_MAXIMA_BYTES,) if name == "measure" else ()
            found.append(Seen(source, name, time_us, sizes[1:], passes=passes))
        elif (kind, name) in GEMMS:
            tokens, k, n = sizes
            problem = Problem("gather" if kind == "forward" else "beside-scatter", tokens, k, n, 1, fp8=True)
            found.append(Seen(source, GEMMS[kind, name], time_us, (k, n), problem))
    return found


def _fp8_kernels(source: str, data: dict[str, Any]) -> list[Seen]:
    found = []
    for row in data["kernels"]:
        each, (rows, width) = _KERNELS.get(row["operation"]), row["shape"]
        if each is not None:
            found.append(Seen(source, row["operation"], row["us"], (width,), passes=(each * rows * width,)))
    for row in data["gemms"]:
        tokens, k, n = row["shape"]
        if row["gemm"] in ("per-tensor fast", "per-tensor"):
            kind = "fprop" if row["gemm"].endswith("fast") else "dgrad"
            problem = Problem("gather", tokens, k, n, 1, fp8=True)
            found.append(Seen(source, kind, row["us"], (k, n), problem))
    return found


def fit_fp8(device: DeviceModel, seen: Sequence[Seen], host_us: float = START.host_us) -> DeviceModel:
    """``device`` with FP8's rates fitted to ``seen``."""
    start = START if device.fp8 is None else device.fp8
    device, gemm = replace(device, fp8=replace(start, host_us=host_us)), start.gemm

    def with_gemm(values: Sequence[float]) -> DeviceModel:
        assert device.fp8 is not None
        rates = GemmRates(*values[:3], min(values[3], 0.9), min(values[4], 1.0), values[5])
        return replace(device, fp8=replace(device.fp8, gemm=rates))

    device = search(
        with_gemm,
        (
            *(gemm.launch_us, gemm.tile_us_per_k, gemm.tile_fixed_us),
            *(gemm.small_tile_exponent, gemm.quantisation, gemm.sustained_exponent),
        ),
        [one for one in seen if one.problem is not None],
    )

    def with_passes(values: Sequence[float]) -> DeviceModel:
        assert device.fp8 is not None
        return replace(device, fp8=replace(device.fp8, pass_over=Rate(values[0], values[1])))

    rate = start.pass_over
    return search(with_passes, (rate.latency_us, rate.gb_s), [one for one in seen if one.passes])


def cross_validate_fp8(
    device: DeviceModel, seen: Sequence[Seen], groups: Sequence[tuple[int, ...]] | None = None
) -> list[tuple[Seen, float]]:
    """Every group (of ``groups``) left out in turn: its observations, and what the fit to the rest says of them."""
    found = []
    for group in sorted({one.group for one in seen}) if groups is None else groups:
        fitted = fit_fp8(device, [one for one in seen if one.group != group])
        found += [(one, one.predict_us(fitted)) for one in seen if one.group == group]
    return found


def fp8_errors(rows: Sequence[tuple[Seen, float]]) -> dict[str, Any]:
    """Percent, for the device's file."""
    off = [(one, abs(predicted / one.time_us - 1.0)) for one, predicted in rows]
    gemms = [error for one, error in off if one.problem is not None]
    kernels = [error for one, error in off if one.passes]
    return {
        "rows": len(rows),
        "left_out": "every K x N at all T, every width of the kernels' tensors",
        "median_percent": _percent(median(error for _, error in off)),
        "gemm_median_percent": _percent(median(gemms)),
        "gemm_nine_in_ten_within_percent": _percent(sorted(gemms)[int(0.9 * len(gemms))]),
        "kernels_median_percent": _percent(median(kernels)),
        "kernels_nine_in_ten_within_percent": _percent(sorted(kernels)[int(0.9 * len(kernels))]),
    }


def calibrate_fp8(device: DeviceModel, folder: Path = RESULTS) -> tuple[DeviceModel, list[tuple[Seen, float]]]:
    """``device`` with FP8's part, fitted anew, its error in it; and the rows behind that error."""
    seen, hosts = read_fp8(folder)
    operations = read_operations(folder)
    fitted = fit_fused(fit_fp8(replace(device, fp8=None), seen, round(median(hosts), 1)), operations)
    rows = cross_validate_fp8(replace(device, fp8=None), seen)
    assert fitted.fp8 is not None
    error = fp8_errors(rows) | operation_errors(fitted, operations)
    source = source_of([one.source for one in seen], [one.source for one in operations])
    return replace(fitted, fp8=replace(fitted.fp8, source=source, error=error)), rows


def source_of(parts: Sequence[str], operations: Sequence[str]) -> str:
    """Where the numbers come from, in words; from the files of GEMMs and kernels, and of whole operations."""
    fitted = f"GEMMs and kernels fitted by benchmarks/calibrate.py to {', '.join(sorted(set(parts)))}; "
    together = "put together of these and of what bfloat16 takes for links and launches"
    if not operations:
        return f"{fitted}whole operations were not timed: they are {together}"
    return f"{fitted}whole operations are {together}, which was checked by {', '.join(sorted(set(operations)))}"


def _percent(share: float) -> float:
    return round(100.0 * share, 1)
