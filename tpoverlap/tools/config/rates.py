"""The two rates without which nothing can be said about time. They are always stated, never guessed."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpoverlap.errors import ConfigError


@dataclass(frozen=True)
class Rates:
    """``gemm_tflops``: what such a GEMM reaches on one GPU; ``link_gb_s``: what a rank sends, in 1e9 bytes/s."""

    gemm_tflops: float
    link_gb_s: float
    source: str

    def gemm_us(self, flops: int) -> float:
        """Microseconds for so many floating-point operations."""
        return flops / self.gemm_tflops * 1e-6

    def copy_us(self, size_bytes: int) -> float:
        """Microseconds for so many bytes, latency left out."""
        return size_bytes / self.link_gb_s * 1e-3


def rates_from(tflops: float | None, link_gb_s: float | None, path: str | None) -> Rates | None:
    """The rates that were given as options or in a JSON file; None where none were.

    The file holds ``gemm_tflops``, ``link_gb_s`` and optionally ``source``; an option overrides its value.

    Raises:
        ConfigError: only one of the two is known, a value is no positive number, or the file cannot be read.
    """
    stated: dict[str, Any] = {}
    if path is not None:
        try:
            stated = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:  # ValueError: no JSON, or not UTF-8
            raise ConfigError(f"cannot read the rates in {path}: {error}; check the file") from error
        if not isinstance(stated, dict):
            raise ConfigError(f"{path} must hold an object with gemm_tflops and link_gb_s, got {type(stated).__name__}")
    given = {"gemm_tflops": tflops, "link_gb_s": link_gb_s}
    values = {key: stated.get(key) if value is None else value for key, value in given.items()}
    if all(value is None for value in values.values()):
        if path is not None:
            raise ConfigError(f"{path} has neither gemm_tflops nor link_gb_s; write both")
        return None
    for key, value in values.items():
        good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0
        if not good:
            raise ConfigError(f"{key} must be a positive number, got {value!r}; state both rates, or none")
    source = str(stated.get("source", path)) if path is not None else "assumed, given as options"
    return Rates(float(values["gemm_tflops"] or 0.0), float(values["link_gb_s"] or 0.0), source)
