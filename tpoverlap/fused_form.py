"""Which form of `fused` or `sequential` an operation takes: pure functions of what all ranks agree on, and a table."""

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


SequentialForm = Literal["kernel", "engine"]
"""kernel: one small kernel exchanges all rows (`tpoverlap.comm.trader`). engine: copy engine and stream operations,
which take no multiprocessor but longer to begin."""
MOST_TRADED_BYTES: Final = 8 << 20
"""kernel up to this much from one rank to another: what it was measured at (docs/design/0010)."""
TRADING_PROGRAMS: Final = 32
"""Programs of that kernel that send rows, at most: enough to fill a link."""
SUMMING_PROGRAMS: Final = 64
"""Programs that add what arrived, the former among them: few enough that another library's kernels find room beside
those that wait."""
_MOST_TRADING_RANKS: Final = 8


def choose_sequential_form(most_bytes: int, tp_size: int) -> SequentialForm:
    """The form where both can run; ``most_bytes``: what the rank with most rows sends to (or gets from) another one."""
    return "kernel" if most_bytes <= MOST_TRADED_BYTES and 2 <= tp_size <= _MOST_TRADING_RANKS else "engine"
