"""The option keys of one GEMM and their value types. Pure data: what is *legal* stands in ``legality.py``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

METHODS: Final = ("ring_exchange", "pipeline", "bulk", "fused", "sequential", "auto", "external")
"""Every legal value of ``method``; ``auto`` is ours, ``external`` is accepted for Transformer Engine's files only."""

OptionValue = str | bool | int | None
"""A value after normalisation: what an option key may hold."""


class OptionKind(Enum):
    """Type of an option's value; the enum's value is what an error message calls it."""

    METHOD = "the name of a method"
    FLAG = "true or false (or 1 or 0)"
    COUNT = "a whole number of at least 1"
    PRIORITY = "a CUDA stream priority (a whole number, smaller is more urgent) or null"


OPTION_KINDS: Final[Mapping[str, OptionKind]] = {
    "method": OptionKind.METHOD,
    "is_reduce_scatter": OptionKind.FLAG,
    "num_sm": OptionKind.COUNT,
    "cga_size": OptionKind.COUNT,
    "set_sm_margin": OptionKind.FLAG,
    "num_splits": OptionKind.COUNT,
    "aggregate": OptionKind.FLAG,
    "atomic_gemm": OptionKind.FLAG,
    "use_ce": OptionKind.FLAG,
    "fp8_buf": OptionKind.FLAG,
    "comm_priority": OptionKind.PRIORITY,
    "gemm_priority": OptionKind.PRIORITY,
    "pipeline_rs_overlap_first_gemm": OptionKind.FLAG,
    "num_max_streams": OptionKind.COUNT,
}
OPTION_KEYS: Final = tuple(OPTION_KINDS)

_INT32_MAX: Final = 2**31 - 1  # counts and priorities end up as C ints


@dataclass(frozen=True)
class OverlapConfig:
    """All options of one GEMM, every default filled in. ``docs/configuration.md`` says what each does in each method.

    ``comm_priority`` and ``gemm_priority``: None is the most and the least urgent priority that the device offers.
    Built by ``resolve`` and ``default_config``; a config built by hand is checked when it is passed to ``resolve``.
    """

    method: str
    is_reduce_scatter: bool
    num_sm: int
    cga_size: int
    set_sm_margin: bool
    num_splits: int
    aggregate: bool
    atomic_gemm: bool
    use_ce: bool
    fp8_buf: bool
    comm_priority: int | None
    gemm_priority: int | None
    pipeline_rs_overlap_first_gemm: bool
    num_max_streams: int

    def to_dict(self) -> dict[str, OptionValue]:
        """All keys and values, in the order of ``OPTION_KEYS``."""
        return {key: getattr(self, key) for key in OPTION_KEYS}  # asdict copies deeply, ten times slower

    @property
    def direction(self) -> str:
        """``"reduce-scatter"`` or ``"all-gather"``."""
        return direction_name(self.is_reduce_scatter)

    @property
    def atomic_selects_fused(self) -> bool:
        """Whether ``atomic_gemm`` has ``fused`` run in place of ``method``."""
        return self.atomic_gemm and self.method in ("ring_exchange", "pipeline", "auto")


def direction_name(is_reduce_scatter: bool) -> str:
    """The word for a direction that messages use."""
    return "reduce-scatter" if is_reduce_scatter else "all-gather"


def has_right_type(kind: OptionKind, value: Any) -> bool:
    """Whether ``value`` has the type of ``kind``; counts below 1 and unknown methods are rules of their own."""
    if kind is OptionKind.METHOD:
        return isinstance(value, str)
    if kind is OptionKind.FLAG:
        return isinstance(value, bool) or (isinstance(value, int) and value in (0, 1))
    if kind is OptionKind.PRIORITY and value is None:
        return True
    # bool is an int in Python, but ``num_sm: true`` is a slip, not a 1
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _INT32_MAX


def normalise(key: str, value: Any) -> OptionValue:
    """``value`` as plain str, bool, int or None; only for values that ``has_right_type`` accepted."""
    kind = OPTION_KINDS[key]
    if kind is OptionKind.METHOD:
        return str(value)
    if kind is OptionKind.FLAG:
        return bool(value)
    return None if value is None else int(value)
