"""What `predict` computes: for every GEMM of a layer and every T or bucket the best method and what it is worth."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from tpoverlap.config import KNOWN_NAMES, legal_methods
from tpoverlap.memory_report import memory_estimate
from tpoverlap.overlap.fp8 import METHODS as FP8_METHODS
from tpoverlap.tools.predict.tokens import TokenSpec
from tpoverlap.tools.predict.topology import Topology, is_another_link, on_topology
from tpoverlap.tuning import (
    DeviceModel,
    Problem,
    best_in_bucket,
    break_even,
    candidates,
    estimate,
    methods_known,
    plain,
)
from tpoverlap.tuning.layer import LayerShape
from tpoverlap.tuning.quantising import weight_us


@dataclass(frozen=True)
class Row:
    """One T, or one bucket ``above`` < T <= ``tokens``; microseconds are those of ``tokens``.

    ``gain_over_..``: how many times as fast. Plain is torch's GEMM and the group's collective, NCCL and cuBLAS, without
    this library; sequential is our own method of that name. Padding runs the best method at C. Of an FP8 row
    ``quantise_us`` is the part of every one of these times that makes FP8 of activations, and ``wide_us`` the best
    method's time at the same T without FP8; else 0 and None.
    """

    above: int
    tokens: int
    method: str
    options: dict[str, int | bool]
    time_us: float
    gemm_us: float
    exposed_us: float
    sequential_us: float
    plain_us: float
    padded_us: float
    host_bound: bool
    quantise_us: float = 0.0
    wide_us: float | None = None

    @property
    def gain_over_plain(self) -> float:
        """Time of plain NCCL and cuBLAS over this one's."""
        return self.plain_us / self.time_us

    @property
    def gain_over_sequential(self) -> float:
        """Sequential's time over this one's."""
        return self.sequential_us / self.time_us

    @property
    def gain_over_padding(self) -> float:
        """Time of the same GEMM padded to the capacity over this one's."""
        return self.padded_us / self.time_us

    @property
    def gain_over_wide(self) -> float:
        """Time without FP8 over this one's; 1 where this one is not FP8. The weights' quantising is not in it."""
        return 1.0 if self.wide_us is None else self.wide_us / self.time_us

    def to_dict(self) -> dict[str, Any]:
        """Plain data, gains included."""
        gains = {
            "gain_over_plain": self.gain_over_plain,
            "gain_over_sequential": self.gain_over_sequential,
            "gain_over_padding": self.gain_over_padding,
        }
        gains |= {} if self.wide_us is None else {"gain_over_wide": self.gain_over_wide}
        return asdict(self) | {key: round(value, 3) for key, value in gains.items()}


@dataclass(frozen=True)
class GemmPrediction:
    """One GEMM; ``break_even_tokens`` None: no overlap beats sequential at any T up to 65536.

    ``weight_us``: of quantising its weight in both orientations, once a forward or, cached, once a version; 0 without
    FP8, and in backward, which reads what forward made.
    """

    name: str
    problem: Problem
    rows: tuple[Row, ...]
    break_even_tokens: int | None
    weight_us: float = 0.0


@dataclass(frozen=True)
class Prediction:
    """The whole answer. ``label``: "measured model" where nothing was extrapolated, else ``why`` says what was."""

    layer: LayerShape
    device: DeviceModel
    topology: Topology
    capacity_tokens: int
    label: str
    why: tuple[str, ...]
    gemms: tuple[GemmPrediction, ...]
    memory: dict[str, Any]

    @property
    def ranks_outside(self) -> int:
        """Ranks of the TP group that the first rank does not reach over NVLink."""
        return max(0, self.layer.tp_size - self.topology.nvlink_domain)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for ``--json``."""
        return {
            "label": self.label,
            "why": list(self.why),
            "gpu": self.device.name,
            "source": self.device.source,
            "error_of_the_model": dict(self.device.error),
            "error_of_fp8": dict(self.device.fp8.error) if self.layer.fp8 and self.device.fp8 else {},
            "layer": asdict(self.layer),
            "capacity_tokens": self.capacity_tokens,
            "topology": asdict(self.topology) | {"ranks_outside_the_domain": self.ranks_outside},
            "memory_bytes_a_rank": self.memory,
            "gemms": [
                {
                    "name": gemm.name,
                    "kind": gemm.problem.kind,
                    "features": gemm.problem.features,
                    "break_even_tokens": gemm.break_even_tokens,
                    "weight_us": gemm.weight_us,
                    "rows": [row.to_dict() for row in gemm.rows],
                }
                for gemm in self.gemms
            ],
        }


def predict(
    layer: LayerShape,
    device: DeviceModel,
    topology: Topology,
    tokens: TokenSpec,
    *,
    capacity_tokens: int | None = None,
    network_gb_s: float,
    launches_hidden: bool = False,
) -> Prediction:
    """Ask the cost model about every GEMM of ``layer``.

    Args:
        capacity_tokens: C, what padding would pad to; None: the largest T asked about.
        network_gb_s: of a link outside the NVLink domain.
        launches_hidden: the processor is ahead of the device (or a graph is replayed), so its time does not count.

    Raises:
        ConfigError: the layer is FP8, of which ``device`` knows nothing.
    """
    import torch

    capacity = tokens.largest if capacity_tokens is None else capacity_tokens
    seen = on_topology(device, topology, layer.tp_size, network_gb_s)
    if launches_hidden:
        seen = replace(seen, host_us={})
    gemms = tuple(_gemm(name, problem, seen, tokens, capacity) for name, problem in layer.problems().items())
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[layer.dtype]
    memory = memory_estimate((capacity, layer.hidden), layer.tp_size, dtype=dtype, fp8=layer.fp8)
    why = _extrapolations(layer, device, topology, network_gb_s)
    label = "estimate" if why else "measured model"
    return Prediction(layer, device, topology, capacity, label, why, gemms, memory)


def _gemm(name: str, problem: Problem, device: DeviceModel, tokens: TokenSpec, capacity: int) -> GemmPrediction:
    legal = legal_methods(name, KNOWN_NAMES[name].is_reduce_scatter)
    wide, every = replace(problem, fp8=False, fp8_buf=False), legal
    if problem.fp8:
        legal = methods_known(device, problem, [method for method in legal if method in FP8_METHODS])
    asked = tokens.ends(problem, device.multiprocessors)
    padded = _padded_us(device, problem, legal, capacity, asked)
    rows = []
    for low, high in asked:
        at = problem.at(high)
        best, time_us, sequential_us = best_in_bucket(device, problem, low, high, candidates(at, legal))
        found = estimate(device, at, best)
        without = best_in_bucket(device, wide, low, high, candidates(wide.at(high), every))[1] if problem.fp8 else None
        rows.append(
            Row(
                low,
                high,
                best.method,
                best.options,
                time_us,
                found.gemm_us,
                round(found.exposed_us, 1),
                sequential_us,
                plain(device, at).time_us,
                padded,
                found.host_bound,
                found.quantise_us,
                without,
            )
        )
    weight = round(weight_us(device, problem), 1) if problem.fp8 and name.endswith("_fprop") else 0.0
    return GemmPrediction(name, problem, tuple(rows), break_even(device, problem, legal), weight)


def _padded_us(
    device: DeviceModel, problem: Problem, legal: Sequence[str], capacity: int, asked: Iterable[tuple[int, int]]
) -> float:
    """At the capacity, by the method that would run there: the row's, where the table has one."""
    low, high = next(((low, high) for low, high in asked if high == capacity), (capacity - 1, capacity))
    best = best_in_bucket(device, problem, low, high, candidates(problem.at(capacity), legal))[0]
    return estimate(device, problem.at(capacity), best).time_us


def _extrapolations(layer: LayerShape, device: DeviceModel, topology: Topology, network_gb_s: float) -> tuple[str, ...]:
    why = []
    if not device.is_measured:
        why.append(f"{device.name} was not measured: {device.source}")
    if layer.tp_size > 2:
        why.append(f"TP {layer.tp_size}: measured was TP 2")
    if layer.tp_size > topology.nvlink_domain:
        outside = layer.tp_size - topology.nvlink_domain
        why.append(
            f"{outside} of {layer.tp_size} ranks are outside the NVLink domain of {topology.nvlink_domain} "
            f"({topology.basis}: {topology.source}); every rank waits for the link to them, "
            f"taken as {network_gb_s:g} GB/s"
        )
    measured = topology.link_gb_s(layer.tp_size)
    if layer.tp_size <= topology.nvlink_domain and measured is not None and is_another_link(device, measured):
        why.append(
            f"the link is taken as {measured:g} GB/s, as doctor measured; the model of {device.name} was fitted at "
            f"{device.copy.gb_s:g}"
        )
    if layer.fp8:
        assert device.fp8 is not None, "an estimate would have raised"
        why.append(f"FP8: {device.fp8.source}")
    if layer.dtype == "fp32":
        why.append("fp32: measured was bf16; twice its time a tile is assumed")
    return tuple(why)
