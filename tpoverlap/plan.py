"""The plan: every dispatch choice of a manager, serialisable, hashed and pinnable."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from tpoverlap.config import legal_methods
from tpoverlap.errors import ConfigError

PLAN_VERSION = 1


def make_plan(names: Mapping[str, tuple[str, bool]], tp_size: int, capacity_shape: tuple[int, int]) -> dict[str, Any]:
    """A plan from name -> (method, is_reduce_scatter)."""
    content: dict[str, Any] = {
        "version": PLAN_VERSION,
        "tp_size": tp_size,
        "capacity_shape": list(capacity_shape),
        "methods": {
            name: {"method": method, "is_reduce_scatter": scatter} for name, (method, scatter) in sorted(names.items())
        },
    }
    return content | {"hash": plan_hash(content)}


def plan_hash(plan: Mapping[str, Any]) -> str:
    """16 hex digits over everything but the hash itself."""
    content = {key: value for key, value in plan.items() if key != "hash"}
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=8).hexdigest()


def pinned_methods(plan: Mapping[str, Any] | None, tp_size: int) -> dict[str, str]:
    """name -> method of a plan passed to ``plan=``.

    Raises:
        ConfigError: another version, another tp_size, a changed file, or a method that is illegal for its name.
    """
    if plan is None:
        return {}
    if not isinstance(plan, Mapping) or plan.get("version") != PLAN_VERSION or "methods" not in plan:
        raise ConfigError(f"plan= must be what mgr.plan() returned (version {PLAN_VERSION})")
    if plan.get("tp_size") != tp_size:
        raise ConfigError(f"the plan was made for tp_size={plan.get('tp_size')}, this group has {tp_size}")
    if plan.get("hash") != plan_hash(plan):
        raise ConfigError(f"the plan's hash {plan.get('hash')} does not match its contents ({plan_hash(plan)})")
    methods = {}
    for name, row in plan["methods"].items():
        legal = (*legal_methods(name, row["is_reduce_scatter"]), "sequential")
        if row["method"] not in legal:
            raise ConfigError(f"the plan pins {name} to {row['method']!r}; legal here: {', '.join(legal)}")
        methods[name] = row["method"]
    return methods
