"""The figures of a row. Pure arithmetic; times in microseconds; None where a figure says nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable


def hidden(time_us: float, gemm_us: float | None, sequential_us: float | None) -> float | None:
    """Part of what sequential takes beyond its GEMM that is gone: 1 - (t - t_gemm) / (t_seq - t_gemm).

    1 is the GEMM's own time, 0 is no gain, negative is slower than no overlap. None where sequential is not slower
    than its GEMM alone: there is nothing to hide.
    """
    if gemm_us is None or sequential_us is None or sequential_us <= gemm_us:
        return None
    return 1.0 - (time_us - gemm_us) / (sequential_us - gemm_us)


def of_limit(time_us: float, gemm_us: float | None, transfer_us: float | None) -> float | None:
    """max(t_gemm, comm_bytes / link_rate) / t: 1 is the physical limit. ``transfer_us`` is comm_bytes / link_rate."""
    if gemm_us is None or transfer_us is None or time_us <= 0:
        return None
    return max(gemm_us, transfer_us) / time_us


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    """The quotient, or None where a part is missing or the denominator is no positive number."""
    if numerator is None or denominator is None or denominator <= 0:
        return None
    return numerator / denominator


def link_rate_gb_per_s(size_bytes: float, transfer_us: float | None) -> float | None:
    """Bytes that a rank receives per time, in 10**9 bytes a second."""
    return None if not transfer_us else size_bytes / transfer_us / 1e3


def geometric_mean(values: Iterable[float]) -> float | None:
    """Of positive numbers; None of none."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else None
