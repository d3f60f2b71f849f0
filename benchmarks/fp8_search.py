"""FP8's parameters: those with the least squared log ratios over what was measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

from benchmarks.pattern_search import pattern_search
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

    return build(pattern_search(loss, start, rounds=80 if seen else 0))
