"""Which method an operation uses: a pure look-up from (name, direction, T) to a decision with its source and reason.

Order: pinned plan, explicit configuration, tuned cache (not in this release), default.
"""

from __future__ import annotations

from dataclasses import dataclass

from tpoverlap.config import OverlapConfig


@dataclass(frozen=True)
class Decision:
    """The method for one operation, where the choice came from ("plan", "explicit", "default", ...), and why."""

    method: str
    source: str
    reason: str


AUTO_METHOD = "ring_exchange"
"""What ``auto`` means until measurements say otherwise: the method that FACTS-like figures favour in both directions."""


def choose(
    config: OverlapConfig,
    *,
    config_source: str,
    tp_size: int,
    num_tokens: int | None,
    max_tokens: int,
    overflow: bool = False,
    planned_method: str | None = None,
) -> Decision:
    """Decide for one operation.

    Args:
        config: the name's options.
        config_source: "explicit" or "default".
        num_tokens: T, or None when it does not matter to the caller.
        max_tokens: capacity of this name.
        overflow: T or a rank's rows exceed what is registered, and ``on_overflow="sequential"``.
        planned_method: from a pinned plan.
    """
    if tp_size == 1:
        return Decision("sequential", "default", "R = 1: nothing is communicated")
    if overflow:
        return Decision(
            "sequential", "overflow", f"T={num_tokens} does not fit the capacity of {max_tokens} tokens or its rows a rank"
        )
    if planned_method is not None:
        return Decision(planned_method, "plan", "pinned by plan=")
    if config.method == "auto":
        return Decision(AUTO_METHOD, "default", "method auto: no measurement is recorded, ring_exchange is the default")
    if config.method == "external":
        return Decision("sequential", config_source, "external means that the layer gathers by itself")
    return Decision(config.method, config_source, f"configured method ({config_source})")
