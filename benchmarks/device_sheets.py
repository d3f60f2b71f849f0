"""Public figures of devices that were not measured here; their cost model is the measured one, scaled by these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tpoverlap.tuning import DeviceModel
from tpoverlap.tuning.device import ESTIMATE, Fp8Rates, GemmRates, Rate


@dataclass(frozen=True)
class Sheet:
    """Peak figures: dense bfloat16 and FP8 TFLOP/s (None: no FP8 tensor cores), memory TB/s, NVLink GB/s in one
    direction.
    """

    name: str
    multiprocessors: int
    tflops: float
    fp8_tflops: float | None
    memory_tb_s: float
    link_gb_s: float
    nvlink_domain: int
    source: str
    match: Mapping[str, Any] = field(default_factory=dict)


MEASURED_SHEET = Sheet(
    "h200",
    132,
    989.0,
    1979.0,
    4.8,
    450.0,
    8,
    "NVIDIA H200 data sheet",
    {"capability": [9, 0], "multiprocessors": 132, "memory_gib": [130, 150]},
)

SHEETS = (
    Sheet(
        "h100",
        132,
        989.0,
        1979.0,
        3.35,
        450.0,
        8,
        "NVIDIA H100 data sheet, SXM5: 1979 TFLOP/s bfloat16 and 3958 FP8 with sparsity, 3.35 TB/s, NVLink "
        "900 GB/s both ways",
        {"capability": [9, 0], "multiprocessors": 132, "memory_gib": [70, 86]},
    ),
    Sheet(
        "gh200",
        132,
        989.0,
        1979.0,
        4.0,
        450.0,
        1,
        "NVIDIA GH200 data sheet, 96 GB: 1979 TFLOP/s bfloat16 and 3958 FP8 with sparsity, 4 TB/s; nodes with one, two "
        "or four GPUs in an NVLink domain are sold, one is assumed: see --topology",
        {"capability": [9, 0], "multiprocessors": 132, "memory_gib": [90, 100]},
    ),
    Sheet(
        "b200",
        148,
        2250.0,
        4500.0,
        8.0,
        900.0,
        8,
        "NVIDIA DGX B200 data sheet, an eighth: 2.25 PFLOP/s dense bfloat16 and 4.5 FP8, 8 TB/s, NVLink 1.8 TB/s both "
        "ways; 148 multiprocessors as the driver reports them",
        {"capability": [10, 0], "multiprocessors": 148, "memory_gib": [165, 195]},
    ),
    Sheet(
        "gb200-nvl72",
        148,
        2500.0,
        5000.0,
        8.0,
        900.0,
        72,
        "NVIDIA GB200 NVL72 data sheet, a 72nd: 2.5 PFLOP/s dense bfloat16 and 5 FP8, 8 TB/s, NVLink 1.8 TB/s both "
        "ways; the multiprocessors of a B200 assumed",
    ),
)


def scaled(measured: DeviceModel, sheet: Sheet) -> DeviceModel:
    """``measured`` with rates in proportion to the peaks; latencies, launches and the processor's times as measured."""
    base = MEASURED_SHEET
    assert base.fp8_tflops is not None, "it has them"
    link, memory = sheet.link_gb_s / base.link_gb_s, sheet.memory_tb_s / base.memory_tb_s

    def of_peak(gemm: GemmRates, tflops: float, base_tflops: float) -> GemmRates:
        a_multiprocessor = (tflops / sheet.multiprocessors) / (base_tflops / base.multiprocessors)
        return replace(
            gemm,
            tile_us_per_k=round(gemm.tile_us_per_k / a_multiprocessor, 6),
            tile_fixed_us=round(gemm.tile_fixed_us / a_multiprocessor, 4),
        )

    def faster(rate: Rate, factor: float) -> Rate:
        return Rate(rate.latency_us, round(rate.gb_s * factor, 1))

    fp8: Fp8Rates | None = None
    if measured.fp8 is not None and sheet.fp8_tflops is not None:
        fp8 = replace(
            measured.fp8,
            gemm=of_peak(measured.fp8.gemm, sheet.fp8_tflops, base.fp8_tflops),
            pass_over=faster(measured.fp8.pass_over, memory),
            source=f"the GEMMs of {base.name} in proportion to the peaks of {sheet.fp8_tflops:g} and "
            f"{base.fp8_tflops:g} TFLOP/s dense, its kernels in proportion to the memories' rates",
            error={},
        )
    return replace(
        measured,
        name=sheet.name,
        basis=ESTIMATE,
        source=f"{sheet.source}. Nothing was measured on it: the model of {base.name} with rates in proportion to the "
        "peaks, and its latencies",
        multiprocessors=sheet.multiprocessors,
        memory_gb_s=round(measured.memory_gb_s * memory, 1),
        nvlink_domain=sheet.nvlink_domain,
        gemm=of_peak(measured.gemm, sheet.tflops, base.tflops),
        copy=faster(measured.copy, link),
        gather=faster(measured.gather, link),
        scatter=faster(measured.scatter, link),
        add=faster(measured.add, memory),
        match=sheet.match,
        error={},
        fp8=fp8,
    )
