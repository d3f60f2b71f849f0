"""Which form of `fused` an operation takes: a pure function of sizes that all ranks agree on."""

from __future__ import annotations

from typing import Final, Literal

Form = Literal["engine"]
FORMS: Final[tuple[Form, ...]] = ("engine",)
"""engine: rows travel by copy engine (or copy programs) beside the kernels."""


def choose_form(direction: str, num_tokens: int, in_features: int, out_features: int) -> Form:
    """The form for T tokens and a GEMM of [out_features, in_features]."""
    return "engine"
