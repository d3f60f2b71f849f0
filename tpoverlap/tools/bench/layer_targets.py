"""The layers suite's rows against ``data/targets.json``. Pure, like `tpoverlap.tools.bench.targets`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tpoverlap.tools.bench.formulas import ratio
from tpoverlap.tools.bench.layer_items import COMPUTE_ONLY, TWIN
from tpoverlap.tools.bench.targets import describe, targets

Row = dict[str, Any]


def judge_layer(row: Row) -> list[Row]:
    """What the targets say of one row; a value of None means that it was not timed: a miss."""
    rules = targets()["layers"]
    judged: list[Row] = []
    for rule in _rules_of(row):
        ours = row["methods"].get(rules["method"], {})
        alone, twin = row["methods"].get(COMPUTE_ONLY, {}), row["methods"].get(TWIN, {})
        for key, other in (("of_compute_only", alone), ("of_twin", twin)):
            if key in rule:
                judged += [
                    _at_most(key, mode, ratio(ours.get(f"{mode}_us"), other.get(f"{mode}_us")), rule[key])
                    for mode in rules["modes"]
                    # the device alone: only where all of it was queued behind the delay
                    if mode == "eager" or (ours.get("queued_us") and other.get("queued_us"))
                ]
        for key, one in (("ms", ours), ("compute_only_ms", alone)):
            if key in rule:
                time_us = one.get("eager_us")
                judged.append(_at_most(key, "eager", None if time_us is None else time_us / 1e3, rule[key]))
        if "host_of_twin" in rule:
            value = ratio(ours.get("host_us"), twin.get("host_us"))
            judged.append(_at_most("host_of_twin", "host", value, rule["host_of_twin"]))
    return judged


def is_ruled(row: Row) -> bool:
    """Whether the targets say anything of this row."""
    return bool(_rules_of(row))


def _rules_of(row: Row) -> list[Row]:
    rules = targets()["layers"]
    return [
        rule
        for rule in rules["rows"]
        if all(row[key] == rule[key] for key in ("kind", "hidden", "numbers"))
        and row["num_tokens"] in rule["tokens"]
        and row["capacity_tokens"] == rules["capacity_tokens"]
    ]


def _at_most(rule: str, mode: str, value: float | None, bound: float) -> Row:
    return {"rule": rule, "mode": mode, "value": value, "bound": bound, "passed": value is not None and value <= bound}


def summarise_layers(rows: Sequence[Row]) -> Row:
    """How many targets were judged, and the misses."""
    judged = [(row["label"], one) for row in rows for one in row["targets"]]
    missed = [f"{label}: {describe(one)}" for label, one in judged if not one["passed"]]
    return {"judged": len(judged), "missed": missed, "rows": len(rows)}
