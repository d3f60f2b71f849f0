"""The plan: every dispatch choice of a manager, serialisable, hashed and pinnable."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

from tpoverlap.config import ResolvedConfig, legal_methods
from tpoverlap.config.options import direction_name
from tpoverlap.errors import ConfigError
from tpoverlap.tuning import Evidence

PLAN_VERSION = 1


def make_plan(
    names: Mapping[str, tuple[str, bool]],
    tp_size: int,
    capacity_shape: tuple[int, int],
    evidence: Evidence | None = None,
) -> dict[str, Any]:
    """A plan from name -> (method, is_reduce_scatter).

    A method "auto" depends on T: ``evidence`` is then all that the choice rests on, so that a pinned plan chooses alike
    on another machine.
    """
    content: dict[str, Any] = {
        "version": PLAN_VERSION,
        "tp_size": tp_size,
        "capacity_shape": list(capacity_shape),
        "methods": {
            name: {"method": method, "is_reduce_scatter": scatter} for name, (method, scatter) in sorted(names.items())
        },
    }
    if evidence is not None and not evidence.is_empty:
        content["by_tokens"] = evidence.to_dict()
    return content | {"hash": plan_hash(content)}


def plan_hash(plan: Mapping[str, Any]) -> str:
    """16 hex digits over everything but the hash itself."""
    content = {key: value for key, value in plan.items() if key != "hash"}
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=8).hexdigest()


def pinned_methods(plan: Mapping[str, Any] | None, tp_size: int, config: ResolvedConfig) -> dict[str, str]:
    """Name -> method of a plan passed to ``plan=``. Names that ``config`` lacks wait until they are registered.

    Raises:
        ConfigError: another version, another tp_size, a changed file, a direction that is not the configured one, or a
            method that is illegal for its name.
    """
    if plan is None:
        return {}
    if not isinstance(plan, Mapping) or plan.get("version") != PLAN_VERSION or "methods" not in plan:
        got = f"version {plan.get('version')!r}" if isinstance(plan, Mapping) else type(plan).__name__
        if isinstance(plan, Mapping) and "methods" not in plan:
            got += " without its 'methods'"
        raise ConfigError(f"plan= must be what mgr.plan() returned (version {PLAN_VERSION}), got {got}")
    if (odd := _not_plain(plan, "plan")) is not None:
        raise ConfigError(f"{odd}; plan= must be what mgr.plan() returned, or the same read back from JSON")
    if plan.get("tp_size") != tp_size:
        raise ConfigError(
            f"the plan was made for tp_size={plan.get('tp_size')}, this group has {tp_size}; take one made for it"
        )
    if plan.get("hash") != plan_hash(plan):
        raise ConfigError(
            f"the plan's hash {plan.get('hash')} does not match its contents ({plan_hash(plan)}): it was edited; "
            "take mgr.plan() again, or configure methods in ub_cfgs"
        )
    try:
        return _legal_rows(plan["methods"], config)
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"plan= is not what mgr.plan() returned: {error!r} in its methods") from error


def pinned_evidence(plan: Mapping[str, Any] | None) -> Evidence | None:
    """What a checked plan's choices by T rest on; nothing else may enter them. None: no plan, so look for evidence.

    Raises:
        ConfigError: the plan's ``by_tokens`` is not what ``mgr.plan()`` wrote.
    """
    if plan is None:
        return None
    return Evidence.from_dict(plan["by_tokens"]) if "by_tokens" in plan else Evidence()


def _not_plain(value: Any, where: str) -> str | None:
    """The first part of ``value`` that mgr.plan() cannot have written: not of JSON, which the hash is made of."""
    if isinstance(value, Mapping):
        for key, one in value.items():
            if not isinstance(key, str):
                return f"{where} has the key {key!r}, a {type(key).__name__} and no text"
            if (odd := _not_plain(one, f"{where}[{key!r}]")) is not None:
                return odd
        return None
    if isinstance(value, list | tuple):
        found = (_not_plain(one, f"{where}[{index}]") for index, one in enumerate(value))
        return next((odd for odd in found if odd is not None), None)
    if isinstance(value, float) and not math.isfinite(value):
        return f"{where} is {value!r}, no finite number"
    if value is None or isinstance(value, str | int | float):
        return None
    return f"{where} is {value!r}, a {type(value).__name__}"


def _legal_rows(rows: Mapping[str, Any], config: ResolvedConfig) -> dict[str, str]:
    methods: dict[str, str] = {}
    for name, row in rows.items():
        configured = config.get(name)
        if configured is not None and configured.is_reduce_scatter != row["is_reduce_scatter"]:
            raise ConfigError(
                f"the plan pins {name} for {direction_name(row['is_reduce_scatter'])}, but here it is configured for "
                f"{configured.direction}; make the plan with the same ub_cfgs"
            )
        legal = (*legal_methods(name, row["is_reduce_scatter"]), "sequential", "auto")
        if row["method"] not in legal:
            raise ConfigError(f"the plan pins {name} to {row['method']!r}; legal here: {', '.join(legal)}")
        methods[name] = row["method"]
    return methods
