"""Fit a device's parameters to observations, stage by stage: a stage's numbers come from rows without others."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from benchmarks.observations import OURS, Observation
from benchmarks.pattern_search import pattern_search
from tpoverlap.tuning import DeviceModel, collective_us, estimate, gemm_time_us, plain
from tpoverlap.tuning.device import GemmRates, OneKernel, Rate
from tpoverlap.tuning.model import PLAIN, launched_as


@dataclass(frozen=True)
class Fitted:
    """A device, and what is not the device's: how much slower each run's clock was, and other code's launches.

    ``slowness``: by file, of GEMMs; its geometric mean is 1. ``host_us``: by code, as `DeviceModel.host_us`.
    """

    device: DeviceModel
    slowness: Mapping[str, float] = field(default_factory=dict)
    host_us: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    _devices: dict[tuple[str, str, bool], DeviceModel] = field(default_factory=dict, init=False, compare=False)

    def of_run(self, seen: Observation, *, known_run: bool = True) -> DeviceModel:
        """The device as it was when ``seen`` was measured; ``known_run`` False: that run's clock is unknown."""
        key = (seen.source, seen.code, known_run)
        if key not in self._devices:  # a fit asks thousands of times
            factor = self.slowness.get(seen.source, 1.0) if known_run else 1.0
            gemm = self.device.gemm
            slower = replace(gemm, tile_us_per_k=gemm.tile_us_per_k * factor, tile_fixed_us=gemm.tile_fixed_us * factor)
            self._devices[key] = replace(self.device, gemm=slower, host_us=self.host_us.get(seen.code, {}))
        return self._devices[key]

    def predict_us(self, seen: Observation, *, known_run: bool = True) -> float:
        """What the model says about one observation."""
        device = self.of_run(seen, known_run=known_run)
        if seen.quantity == "copy":
            return device.copy.time_us(seen.size_bytes)
        problem = seen.problem
        assert problem is not None, "only copies have no problem"
        if seen.quantity == "gemm":
            return gemm_time_us(device, *problem.gemm_shape, problem.itemsize_bytes)
        if seen.quantity in ("gather", "scatter"):
            return collective_us(device, problem)
        if seen.quantity == "plain":  # a GEMM and the library's collective, one after the other
            return plain(device, problem).time_us
        assert seen.candidate is not None, "a method's time has a candidate"
        return estimate(device, problem, seen.candidate, current=seen.current, traded=seen.traded).time_us


def fit(start: DeviceModel, observations: Sequence[Observation]) -> Fitted:
    """``start`` with its rates and latencies fitted; counts, the memory's rate and texts stay."""

    def pick(quantity: str, method: str = "") -> list[Observation]:
        of_quantity = [seen for seen in observations if seen.quantity == quantity and not seen.code]
        return [seen for seen in of_quantity if seen.candidate is None or seen.candidate.method == method]

    fitted = _fit_gemm(Fitted(start), [seen for seen in observations if seen.quantity == "gemm"])
    for key in ("copy", "gather", "scatter"):
        rate: Rate = getattr(start, key)

        def with_rate(one: DeviceModel, v: Sequence[float], key: str = key) -> DeviceModel:
            return replace(one, **{key: Rate(v[0], v[1])})  # type: ignore[arg-type]

        fitted = _search(fitted, (rate.latency_us, rate.gb_s), with_rate, pick(key))
    fitted = _search(
        fitted,
        (start.step_us, start.add.latency_us, start.add.gb_s),
        lambda one, v: replace(one, step_us=max(1.0, v[0]), add=Rate(max(1.0, v[1]), min(v[2], one.memory_gb_s))),
        pick("method", "ring_exchange"),
    )
    by_form: dict[str, list[Observation]] = {"fused": [], "one_launch": []}
    for seen in pick("method", "fused"):
        assert seen.problem is not None and seen.candidate is not None, "a method has both"
        by_form[launched_as(seen.problem, seen.candidate)].append(seen)
    exchange = start.exchange
    fitted = _search(
        fitted,
        (exchange.latency_us, exchange.gb_s),
        lambda one, v: replace(one, trade=Rate(v[0], min(v[1], one.copy.gb_s))),  # no kernel is faster than the link
        [seen for seen in pick("method", "sequential") if _launches(seen) == "traded"],
    )
    fitted = _search(
        fitted,
        (start.fused.fixed_us, start.fused.gemm_factor),
        lambda one, v: replace(one, fused=OneKernel(v[0], max(1.0, v[1]))),
        by_form["fused"],
    )
    fitted = _search(
        fitted,
        (start.one_launch.fixed_us, start.one_launch.gemm_factor),
        lambda one, v: replace(one, one_launch=OneKernel(v[0], max(1.0, v[1]))),
        by_form["one_launch"],
    )
    codes = sorted({seen.code for seen in observations if seen.code})
    hosts = {code: _host_times(fitted, [seen for seen in observations if seen.code == code]) for code in codes}
    ours = {**start.host_us, **hosts.get(OURS, {}), **hosts.get(PLAIN, {})}
    return replace(fitted, host_us=hosts, device=replace(fitted.device, host_us=ours))


def _fit_gemm(fitted: Fitted, observations: Sequence[Observation]) -> Fitted:
    """Rates and every run's clock in turn: the one needs the other."""
    for _ in range(4):
        gemm = fitted.device.gemm
        fitted = _search(
            fitted,
            (
                gemm.launch_us,
                gemm.tile_us_per_k,
                gemm.tile_fixed_us,
                gemm.small_tile_exponent,
                gemm.quantisation,
                gemm.sustained_exponent,
            ),
            lambda one, v: replace(one, gemm=GemmRates(v[0], v[1], v[2], min(v[3], 0.9), min(v[4], 1.0), v[5])),
            observations,
        )
        logs: dict[str, list[float]] = {}
        for seen in observations:
            ratio = seen.time_us / fitted.predict_us(seen, known_run=False)
            logs.setdefault(seen.source, []).append(math.log(ratio))
        means = {source: median(values) for source, values in logs.items()}
        centre = sum(means.values()) / len(means) if means else 0.0
        fitted = replace(fitted, slowness={source: math.exp(mean - centre) for source, mean in means.items()})
    return fitted


_FAR = 1.5
"""Times what the model says of the device: more than it errs, or than a clock that follows the power explains."""


def _host_times(fitted: Fitted, observations: Sequence[Observation]) -> dict[str, float]:
    """Processor time by direction and method: the median over rows that the device alone would finish far earlier.

    Where there is no such row the processor was never the limit: it takes no longer than the shortest row, nor than
    the start says, nor (no start) than a ring's launches.
    """
    bound: dict[tuple[str, str, int], list[float]] = {}
    alone: dict[tuple[str, str, int], list[float]] = {}  # where they were timed by themselves, that is what counts
    shortest: dict[tuple[str, str, int], float] = {}
    idle = replace(fitted, host_us={})
    for seen in observations:
        if seen.quantity == "plain":
            shortest["", "plain", 0] = min(seen.time_us, shortest.get(("", "plain", 0), seen.time_us))
            if seen.time_us >= _FAR * idle.predict_us(seen):
                bound.setdefault(("", "plain", 0), []).append(seen.time_us)
        if seen.quantity == "host" and seen.candidate is None:
            alone.setdefault(("", "plain", 0), []).append(seen.time_us)
        if seen.quantity not in ("method", "host") or seen.candidate is None:
            continue
        assert seen.problem is not None, "a method has one"
        if seen.candidate.aggregate:
            continue
        launches = _launches(seen)
        key = ("rs" if seen.problem.is_scatter else "ag", launches, seen.candidate.num_splits)
        if seen.quantity == "host":
            alone.setdefault(key, []).append(seen.time_us)
            continue
        shortest[key] = min(seen.time_us, shortest.get(key, seen.time_us))
        if seen.time_us >= _FAR * idle.predict_us(seen):
            bound.setdefault(key, []).append(seen.time_us)
    starts, times = fitted.device.host_us, {key: median(values) for key, values in bound.items()}
    for key, time_us in shortest.items():
        if key not in times:
            ring = times.get((key[0], "ring_exchange", 0), time_us)
            times[key] = min(time_us, starts.get(f"{key[0]} {key[1]}", ring))
    times |= {key: median(values) for key, values in alone.items()}
    for way in ("ag", "rs"):  # by copy engine it is more calls than by one kernel
        by_engine, by_kernel = (way, "sequential", 0), (way, "traded", 0)
        if by_engine in times:
            times[by_engine] = max(times[by_engine], times.get(by_kernel, 0.0))
    host = {f"{way} {method}".strip(): round(value, 1) for (way, method, splits), value in times.items() if not splits}
    by_splits = sorted((splits, value) for (_, _, splits), value in times.items() if splits)
    if len(by_splits) >= 2:
        (few, fast), (many, slow) = by_splits[0], by_splits[-1]
        each = max(0.0, (slow - fast) / (many - few))
        host |= {"rs pipeline": round(each, 1), "rs fixed": round(max(0.0, fast - few * each), 1)}
    return host


def _launches(seen: Observation) -> str:
    assert seen.problem is not None and seen.candidate is not None, "a method's time has both"
    return launched_as(seen.problem, seen.candidate, traded=seen.traded)


def _search(
    fitted: Fitted,
    start: Sequence[float],
    build: Callable[[DeviceModel, Sequence[float]], DeviceModel],
    observations: Sequence[Observation],
    rounds: int = 80,
) -> Fitted:
    """The least squared log ratio."""
    if not observations:
        return fitted

    def loss(values: Sequence[float]) -> float:
        candidate = replace(fitted, device=build(fitted.device, values))
        return sum(math.log(candidate.predict_us(seen) / seen.time_us) ** 2 for seen in observations)

    return replace(fitted, device=build(fitted.device, pattern_search(loss, start, rounds)))
