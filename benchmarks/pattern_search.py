"""Pattern search for a model's parameters: deterministic, and needs no derivative (waves of tiles have none)."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def pattern_search(loss: Callable[[Sequence[float]], float], start: Sequence[float], rounds: int = 80) -> list[float]:
    """The positive numbers, four digits each, with the least ``loss`` that steps by factors from ``start`` find."""
    best, values, step = loss(start), list(start), 0.3
    for _ in range(rounds):
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
    return [float(f"{value:.4g}") for value in values]
