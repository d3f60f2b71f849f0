"""Pass or miss: the rows against ``data/targets.json``. Pure; looks at plain JSON rows, so it also judges old files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from tpoverlap.tools.bench.formulas import geometric_mean

Row = dict[str, Any]


@lru_cache(maxsize=1)
def targets() -> dict[str, Any]:
    """The file's content."""
    content: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "targets.json").read_text())
    return content


def judge_gemm(row: Row) -> list[Row]:
    """What the targets say of one gemm row: ``rule``, ``mode``, ``value``, ``bound`` and ``passed`` each.

    A value of None means that the method was not timed: a miss. Nothing is said of a mode that was not measured.
    """
    rules = targets()["gemm"]
    label = rules["method"]
    measured = row["methods"].get(label)
    if measured is None:
        return [{"rule": "measured", "mode": "", "value": None, "bound": None, "passed": False}]
    judged: list[Row] = []
    for mode in ("eager", "queued"):
        time_us = measured[f"{mode}_us"]
        if time_us is None:
            continue
        if _is_limit_row(row):
            if mode in rules["limit"]["modes"]:
                judged += _at_least(
                    "limit", mode, measured["of_limit"].get(mode), rules["limit"]["of_limit"][row["direction"]]
                )
        elif mode in rules["otherwise"]["modes"]:
            judged += _otherwise(row, mode, time_us, rules["otherwise"])
        if mode in rules["sequential"]["modes"]:
            judged += _sequential(row, mode, time_us, rules["sequential"])
        if mode in rules["best_baseline"]["modes"]:
            judged += _best_baseline(row, mode, time_us, rules["best_baseline"])
    return judged


def _is_limit_row(row: Row) -> bool:
    rule = targets()["gemm"]["limit"]
    return row["num_tokens"] >= rule["min_tokens"] and row["c"] is not None and row["c"] <= rule["max_c"]


def _at_least(rule: str, mode: str, value: float | None, bound: float) -> list[Row]:
    return [
        {"rule": rule, "mode": mode, "value": value, "bound": bound, "passed": value is not None and value >= bound}
    ]


def _at_most(rule: str, mode: str, value: float, bound: float, **more: Any) -> list[Row]:
    return [{"rule": rule, "mode": mode, "value": value, "bound": bound, "passed": value <= bound, **more}]


def _otherwise(row: Row, mode: str, time_us: float, rule: Row) -> list[Row]:
    gemm, transfer = row["alone"]["gemm alone"][f"{mode}_us"], row["transfer_us"][mode]
    if gemm is None or transfer is None:
        return []
    bound = max(gemm, transfer) + rule["shorter_factor"] * min(gemm, transfer) + rule["extra_us"]
    return _at_most("sum of parts", mode, time_us, bound)


def _sequential(row: Row, mode: str, time_us: float, rule: Row) -> list[Row]:
    sequential = row["methods"].get("plain sequential")
    if sequential is None or sequential[f"{mode}_us"] is None:
        return []
    bound = rule["ratio"] * sequential[f"{mode}_us"]
    if row["num_tokens"] <= rule["small_tokens"]:
        bound += rule["small_extra_us"]
    return _at_most("sequential", mode, time_us, bound)


def _best_baseline(row: Row, mode: str, time_us: float, rule: Row) -> list[Row]:
    times = {
        label: one[f"{mode}_us"]
        for label, one in row["methods"].items()
        if one["kind"] == "baseline" and one[f"{mode}_us"] is not None
    }
    if not times:
        return []
    best = min(times, key=lambda label: times[label])
    return _at_most("best baseline", mode, time_us, rule["ratio"] * times[best], baseline=best)


def summarise_gemm(rows: Sequence[Row]) -> Row:
    """Geometric means of ``of_limit`` by direction and method over the rows of the limit rule, and the misses."""
    rules = targets()["gemm"]
    means: dict[str, dict[str, float | None]] = {}
    judged: list[Row] = []
    mode = rules["limit"]["modes"][0]
    kinds = dict.fromkeys((row["direction"], row.get("numbers") == "fp8") for row in rows)
    for direction, fp8 in (("ag", False), ("rs", False), *(kind for kind in kinds if kind[1])):
        kind = f"{direction} fp8" if fp8 else direction
        mine = [row for row in rows if (row["direction"], row.get("numbers") == "fp8") == (direction, fp8)]
        chosen = [row for row in mine if _is_limit_row(row)]
        labels = dict.fromkeys(label for row in chosen for label in row["methods"])
        means[kind] = {
            label: geometric_mean(
                value
                for row in chosen
                if (value := row["methods"].get(label, {}).get("of_limit", {}).get(mode)) is not None
            )
            for label in labels
        }
        mean = means[kind].get(rules["method"])
        if mean is not None:
            judged += _at_least(f"geometric mean {kind}", mode, mean, rules["limit"]["geometric_mean"][direction])
    if not any(row["targets"] for row in rows):
        judged = []  # another machine than the targets are for
    missed = [f"{row['label']}: {describe(one)}" for row in rows for one in row["targets"] if not one["passed"]]
    missed += [describe(one) for one in judged if not one["passed"]]
    return {"geometric_mean_of_limit": means, "targets": judged, "missed": missed, "rows": len(rows)}


def describe(one: Row) -> str:
    """A judged target in a line."""
    against = f" ({one['baseline']})" if "baseline" in one else ""
    return f"{one['rule']} {one['mode']}: {_show(one['value'])}, bound {_show(one['bound'])}{against}"


def _show(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.3f}" if value < 10 else f"{value:.1f}"


def summarise_dynamic(rows: Sequence[Row]) -> Row:
    """Speed-ups a walk, summed over all shapes and directions; misses where the rows hold for the targets.

    What was not timed is a miss, and so are sums over fewer shapes than the targets are about.
    """
    rules = targets()["dynamic"]
    walks: dict[str, Row] = {}
    missed: list[str] = []
    num_targets = 0
    for name in dict.fromkeys(name for row in rows for name in row["walks"]):
        done = [row for row in rows if len(row["walks"][name]["total_us"]) == _NUM_WALK_VARIANTS]
        missed += [f"{row['label']}, {name}: not every variant was timed" for row in rows if row not in done]
        if not done:
            continue
        walk = walks[name] = _summed(done, name)
        over_mean = walk["capacity_over_mean"] = done[0]["walks"][name]["capacity_over_mean"]
        walk["num_rows"] = len(done)
        walk["num_shapes"] = len({(row["in_features"], row["out_features"]) for row in done})
        walk["by_direction"] = {
            direction: _summed([row for row in done if row["direction"] == direction], name)
            for direction in dict.fromkeys(row["direction"] for row in done)
        }
        for what, key, wanted in (
            ("padding", "padded_speed_up", rules["padded_speed_up_of_capacity_over_mean"] * over_mean),
            ("plain sequential", "sequential_speed_up", rules["sequential_speed_up_over_all_shapes"]),
        ):
            num_targets += 1
            if walk[key] < wanted:
                missed.append(f"{name}: speed-up over {what} {walk[key]:.3f}, wanted {wanted:.3f}")
        if walk["num_shapes"] < rules["shapes"]:
            missed.append(f"{name}: sums over {walk['num_shapes']} shapes, wanted {rules['shapes']}")
    bound = rules["exact_capacity_ratio"]
    for row in rows:
        for one in row["exact_capacity"]:
            num_targets += 1
            if one["ratio"] is None or one["ratio"] > bound:
                modes = ", ".join(f"{mode} {_show(value)}" for mode, value in one["ratios"].items()) or "not measured"
                what = f"{modes} of a manager of capacity T, wanted at most {bound}"
                missed.append(f"{row['label']}, T={one['tokens']}: {what}")
    judged = any(row["judged"] for row in rows)
    return {"walks": walks, "missed": missed if judged else [], "num_targets": num_targets, "judged": judged}


def _summed(rows: Sequence[Row], walk: str) -> Row:
    totals = [row["walks"][walk]["total_us"] for row in rows]
    total = {label: sum(one[label] for one in totals) for label in totals[0]}
    return {
        "total_us": total,
        "padded_speed_up": total["padded to capacity"] / total["auto"],
        "sequential_speed_up": total["plain sequential"] / total["auto"],
    }


_NUM_WALK_VARIANTS = 3


def summarise_host(rows: Sequence[Row]) -> Row:
    """Misses of the host-time targets, and how many there are; none where they are not for this machine."""
    rules = targets()["host"]
    missed: list[str] = []
    num_targets = 0
    for row in rows:
        if not row["judged"] or row["operation"] not in rules["methods"]:
            continue
        for kind in ("no_grad", "autograd"):
            for key in ("same", "new"):
                value, bound = row["host_us"].get(f"{kind}_{key}"), rules[f"{kind}_us"]
                num_targets += 1
                if value is None or value > bound:
                    missed.append(f"{row['label']}, {kind}, {key} T: {_show(value)}, wanted at most {bound:.0f}")
    return {"missed": missed, "num_targets": num_targets, "judged": any(row["judged"] for row in rows)}
