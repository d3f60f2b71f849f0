"""Which method an operation uses: a pure look-up from (name, direction, T) to a decision with its source and reason.

Order: pinned plan, explicit configuration, then by T: the section ``tpoverlap: by_tokens:`` of the configuration, the
tuned cache, the cost model; then the default. T enters by its bucket only (`tpoverlap.tuning.buckets`), and nothing is
measured here.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache

from tpoverlap.config import OverlapConfig, legal_methods
from tpoverlap.errors import ConfigError
from tpoverlap.overlap import GATHER_METHODS, SCATTER_METHODS


@dataclass(frozen=True)
class Decision:
    """The method for one operation, where the choice came from ("plan", "explicit", "default", ...), and why.

    ``config``: the options to run it with, None for the name's own. ``for_use``: it was made for the very direction and
    use of the operation, so `method_for_use` has nothing left to translate.
    """

    method: str
    source: str
    reason: str
    config: OverlapConfig | None = None
    for_use: bool = False


@dataclass(frozen=True)
class TokenDecisions:
    """A decision for every T: ``decisions[i]`` up to and with ``ends[i]``, the last one beyond."""

    ends: tuple[int, ...]
    decisions: tuple[Decision, ...]

    def at(self, num_tokens: int) -> Decision:
        """The decision for T."""
        return self.decisions[min(bisect_left(self.ends, num_tokens), len(self.decisions) - 1)]


@lru_cache(maxsize=256)  # applying the rules takes longer than a small operation
def auto_method(name: str, *, is_reduce_scatter: bool) -> str:
    """What ``auto`` means until measurements say otherwise: ring_exchange, or bulk where only that is legal."""
    legal = legal_methods(name, is_reduce_scatter)
    return "ring_exchange" if "ring_exchange" in legal else "bulk"


def choose(
    config: OverlapConfig,
    *,
    name: str,
    config_source: str,
    tp_size: int,
    num_tokens: int | None,
    max_tokens: int,
    overflow: bool = False,
    planned_method: str | None = None,
    by_tokens: TokenDecisions | None = None,
) -> Decision:
    """Decide for one operation.

    Args:
        config: the name's options.
        name: GEMM name.
        config_source: "explicit" or "default".
        num_tokens: T, or None when it does not matter to the caller.
        max_tokens: capacity of this name.
        overflow: T or a rank's rows exceed what is registered, and ``on_overflow="sequential"``.
        planned_method: from a pinned plan; "auto" there means ``by_tokens``.
        by_tokens: for names whose method nobody wrote, where something is known about this shape.
    """
    if tp_size == 1:
        return Decision("sequential", "default", "R = 1: nothing is communicated")
    if overflow:
        return Decision(
            "sequential",
            "overflow",
            f"T={num_tokens} does not fit the capacity of {max_tokens} tokens or its rows a rank",
        )
    if by_tokens is not None and num_tokens is not None and planned_method in (None, "auto"):
        return by_tokens.at(num_tokens)
    if planned_method not in (None, "auto"):
        return Decision(str(planned_method), "plan", "pinned by plan=")
    if config.atomic_selects_fused:
        return Decision("fused", config_source, "atomic_gemm asks for one kernel whose tiles wait or signal: fused")
    if config.method == "auto":
        method = auto_method(name, is_reduce_scatter=config.is_reduce_scatter)
        reason = f"method auto: nothing is known about this shape here, {method} is the default"
        return Decision(method, "default", reason)
    if config.method == "external":
        return Decision("sequential", config_source, "external means that the layer gathers by itself")
    reason = "configured for this name" if config_source == "explicit" else "the default method of this name"
    return Decision(config.method, config_source, reason)


def method_for_use(method: str, config: OverlapConfig, *, name: str, scatter: bool, beside: bool) -> str:
    """The method of one operation, from the one that `choose` gave for the name.

    Args:
        method: `choose`'s.
        config: the name's options.
        name: for the message.
        scatter: whether this operation reduce-scatters; a layer may use a name against its configured direction.
        beside: a whole collective beside a GEMM that does not depend on it.

    Raises:
        ConfigError: the method cannot overlap a GEMM that depends on the collective.
    """
    if method == "sequential":
        return method
    if beside:
        return "bulk"
    if scatter != config.is_reduce_scatter:
        return "ring_exchange"  # the configured method says nothing about the other direction
    legal = SCATTER_METHODS if scatter else GATHER_METHODS
    if method not in legal:
        raise ConfigError(
            f"{name}: method {method!r} cannot overlap its {config.direction} with a GEMM that depends on it; "
            f"configure one of {', '.join(legal)}, or call bulk_all_gather or bulk_reduce_scatter"
        )
    return method
