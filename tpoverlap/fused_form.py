"""Which form of `fused` an operation takes: a pure function of what all ranks agree on, and its one table."""

from __future__ import annotations

from typing import Final, Literal

Form = Literal["engine", "one_launch"]
FORMS: Final[tuple[Form, ...]] = ("engine", "one_launch")
"""engine: rows travel by copy engine (or copy programs) beside the kernels.
one_launch: the kernel moves them itself; for few tokens, where further launches and flags cost more than they hide."""

_MOST_TOKENS: Final = {"gather": 1024, "scatter": 512}
"""one_launch up to this T (benchmarks/small_tokens.py; docs/design/0006)."""


def choose_form(direction: Literal["gather", "scatter"], num_tokens: int) -> Form:
    """The form of an operation over T tokens."""
    return "one_launch" if num_tokens <= _MOST_TOKENS[direction] else "engine"
