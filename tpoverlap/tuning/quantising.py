"""What FP8 adds to an operation besides faster GEMMs and fewer bytes: kernels that pass over tensors, and the exchange
of magnitudes. Per-tensor current scaling is taken, see ``overlap/fp8.py`` and ``nn/fp8``.

===============  =================================================================================================
kind             before or beside its GEMM, on one rank
===============  =================================================================================================
gather           magnitude of own rows [T_r, H], exchange of magnitudes, own rows to FP8
scatter          magnitude of x [T, features]; x to FP8, and turned for wgrad, in one kernel
beside-gather    the same of dy [T, features], which the GEMM beside the gather reads
beside-scatter   gathered x [T, H] turned for wgrad, beside the scatter
packed scatter   rows packed before they travel; all blocks unpacked to float32 before they are added
===============  =================================================================================================

Weights are not counted here: they are quantised once a forward or once a version (`weight_us`).
"""

from __future__ import annotations

from typing import Final

from tpoverlap.fused_form import choose_sequential_form
from tpoverlap.tuning.device import DeviceModel, Fp8Rates
from tpoverlap.tuning.problem import Problem

_KERNELS: Final = {"gather": 2, "scatter": 2, "beside-gather": 2, "beside-scatter": 1}


def quantise_us(device: DeviceModel, problem: Problem, exchange_us: float | None = None) -> float:
    """Of the table above, the packed scatter's part excepted; 0 for other than FP8.

    ``exchange_us``: of the magnitudes; None: by this library, a gather of 2 KiB a rank at most.
    """
    if not problem.fp8:
        return 0.0
    rates, item, moved = _rates(device), problem.itemsize_bytes, problem.num_tokens * problem.width
    if problem.kind == "gather":
        own = problem.rows_per_rank * problem.width
        if problem.tp_size == 1:
            exchange_us = 0.0
        elif exchange_us is None:
            by_kernel = choose_sequential_form(0, problem.tp_size) == "kernel"
            exchange_us = device.exchange.latency_us if by_kernel else device.copy.latency_us + device.step_us
        return _pass_us(rates, item, own) + exchange_us + _pass_us(rates, item + 1, own)
    if problem.kind == "beside-scatter":
        return _pass_us(rates, 2, moved)
    return _both_ways_us(rates, item, problem.num_tokens * problem.features)


def quantise_host_us(device: DeviceModel, problem: Problem) -> float:
    """What the processor does for that; 0 where its time does not count (``host_us`` is empty)."""
    if not problem.fp8 or not device.host_us:
        return 0.0
    exchange = problem.kind == "gather" and problem.tp_size > 1
    kernels = _KERNELS[problem.kind] + (1 + problem.tp_size if problem.is_packed else 0)
    engine_us = device.host_us.get("ag sequential", 0.0)
    by_kernel = choose_sequential_form(0, problem.tp_size) == "kernel"
    exchange_us = device.host_us.get("ag traded", engine_us) if by_kernel else engine_us
    return kernels * _rates(device).host_us + (exchange_us if exchange else 0.0)


def weight_us(device: DeviceModel, problem: Problem) -> float:
    """Of one weight [features, H] in both orientations: once a forward, or once a version if it is cached."""
    return _both_ways_us(_rates(device), problem.itemsize_bytes, problem.features * problem.width)


def _both_ways_us(rates: Fp8Rates, item: int, elements: int) -> float:
    """Magnitude; then FP8 and the turned copy in one kernel. ``item``: bytes of one element."""
    return _pass_us(rates, item, elements) + _pass_us(rates, item + 2, elements)


def pack_us(device: DeviceModel, problem: Problem, rows: int, columns: int) -> float:
    """Of so many rows and columns of a packed scatter's sums; 0 for any other."""
    return _pass_us(_rates(device), problem.itemsize_bytes + 1, rows * columns) if problem.is_packed else 0.0


def unpack_us(device: DeviceModel, problem: Problem) -> float:
    """Of every rank's block of own rows, to float32."""
    return problem.tp_size * _pass_us(_rates(device), 5, problem.rows_per_rank * problem.width)


def _pass_us(rates: Fp8Rates, bytes_each: int, elements: int) -> float:
    return rates.pass_over.time_us(bytes_each * elements)


def _rates(device: DeviceModel) -> Fp8Rates:
    assert device.fp8 is not None, "DeviceModel.in_fp8 raises before anything is asked"
    return device.fp8
