"""Pattern search for FP8's parameters: deterministic, and needs no derivative (waves of tiles have none)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

from tpoverlap.tuning import DeviceModel


class Observed(Protocol):
    """A measured time and what a device says about it."""

    @property
    def time_us(self) -> float: ...

    def predict_us(self, device: DeviceModel) -> float: ...


def search(
    build: Callable[[Sequence[float]], DeviceModel], start: Sequence[float], seen: Sequence[Observed]
) -> DeviceModel:
    """The device, of those that ``build`` makes of numbers, with the least squared log ratios over ``seen``."""

    def loss(values: Sequence[float]) -> float:
        device = build(values)
        return sum(math.log(one.predict_us(device) / one.time_us) ** 2 for one in seen)

    best, values, step = loss(start), list(start), 0.3
    for _ in range(80 if seen else 0):
        improved = False
        for index in range(len(values)):
            for factor in (1.0 + step, 1.0 / (1.0 + step)):
                trial = [*values[:index], max(values[index] * factor, 1e-6), *values[index + 1 :]]
                value = loss(trial)
                if value < best:
                    best, values, improved = value, trial, True
        if not improved:
            step /= 2
            if step < 1e-3:
                break
    return build([float(f"{value:.4g}") for value in values])
