"""The largest TP that makes sense: the most GPUs of which every two write to each other at NVLink's rate, measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from tpoverlap.tools.doctor.bandwidth import GPU_ROW
from tpoverlap.tools.doctor.report import Row, Status

NAME: Final = "largest TP"
ALIKE: Final = 0.5
"""A pair belongs to the domain when it reaches this part of the fastest pair: the slowest link sets a group's pace."""
PCIE_GB_S: Final = 63.0
"""One direction of PCIe 5.0 with 16 lanes. Where NVML does not say what a link is, a faster one is no such link."""


def largest_tp_row(rows: Sequence[Row]) -> Row:
    """From the rows ``link bandwidth`` and ``links``; no name of a GPU or a machine is looked at.

    ``data``: ``tp``, ``gpus`` (one such group), ``pair_gb_s`` (its slowest pair alone), ``all_gb_s`` (its slowest rank
    to all peers at once; None when the group is not all GPUs, because that was measured with all) and ``reason``.
    """
    by_name = {row.name: row for row in rows}
    how = f"the largest set of GPUs whose every pair was measured at {ALIKE:.0%} of the fastest or more, over NVLink"
    devices = by_name["devices"].data.get("devices", []) if "devices" in by_name else []
    if not devices:
        return Row("gpu", NAME, Status.SKIPPED, "no GPU", how)
    if len(devices) == 1:
        return _row(1, [0], None, None, "torch sees one GPU", how)
    measured = by_name.get(GPU_ROW)
    if measured is None or not measured.ok:
        why = (
            "the links were not measured" if measured is None else f"the links could not be measured: {measured.detail}"
        )
        return Row("gpu", NAME, Status.UNKNOWN, why, how, "see 'symmetric memory' and 'link bandwidth'")
    pairs = {_pair(key): rate for key, rate in measured.data["pairs"].items()}
    links = by_name["links"].data.get("pairs", {}) if "links" in by_name else {}
    usable = {pair: rate for pair, rate in pairs.items() if _is_nvlink(links, pair, rate)}
    fastest = max(pairs.values())
    if not usable:
        reason = (
            f"no two GPUs write to each other over NVLink: the fastest pair reaches {fastest:.0f} GB/s, what PCIe "
            "gives. A larger group works, but what it exchanges will show"
        )
        return _row(1, [0], None, None, reason, how)
    least = ALIKE * max(usable.values())
    joined = {(a, b) for a, b in usable if a < b and min(usable[a, b], usable.get((b, a), 0.0)) >= least}
    group = _largest_clique(len(devices), joined)
    inside = [pairs[a, b] for a in group for b in group if a != b]
    pair_gb_s = min(inside) if inside else None
    is_all = len(group) == len(devices)
    all_gb_s = min(measured.data["all_at_once"].values()) if is_all else None
    reason = f"GPUs {_listed(group)} write to each other over NVLink at {min(inside):.0f} GB/s or more, a pair alone"
    if all_gb_s is not None and len(group) > 2:
        reason += f"; {all_gb_s:.0f} GB/s a rank to all peers at once"
    if not is_all:
        outside = [gpu for gpu in range(len(devices)) if gpu not in group]
        slow = max((pairs[a, b] for a in group for b in outside), default=0.0)
        reason += f"; beyond them it is {slow:.0f} GB/s at most (GPUs {_listed(outside)})"
    return _row(len(group), group, pair_gb_s, all_gb_s, reason, how)


def _row(tp: int, gpus: list[int], pair_gb_s: float | None, all_gb_s: float | None, reason: str, how: str) -> Row:
    data: dict[str, Any] = {
        "tp": tp,
        "gpus": gpus,
        "pair_gb_s": pair_gb_s,
        "all_gb_s": all_gb_s,
        "reason": reason,
    }
    return Row("gpu", NAME, Status.OK, f"TP {tp}: {reason}", how, data=data)


def _pair(key: str) -> tuple[int, int]:
    source, _, target = key.partition("-")
    return int(source), int(target)


def _is_nvlink(links: Mapping[str, Any], pair: tuple[int, int], rate: float) -> bool:
    """What NVML says about the pair; where it says nothing (or nvidia-smi's matrix stands there), its rate."""
    low, high = sorted(pair)
    link = links.get(f"{low}-{high}")
    if isinstance(link, str):
        return link.startswith("NV")
    if isinstance(link, Mapping) and link.get("nvlink") is not None:
        return bool(link["nvlink"])
    return rate > PCIE_GB_S


def _largest_clique(count: int, joined: set[tuple[int, int]]) -> list[int]:
    """The largest set of which every two are joined; the first of several. ``count`` is that of one host's GPUs."""
    best: list[int] = [0]

    def grow(members: list[int], rest: list[int]) -> None:
        nonlocal best
        if len(members) > len(best):
            best = members
        for index, one in enumerate(rest):
            if len(members) + len(rest) - index <= len(best):
                return
            grow([*members, one], [other for other in rest[index + 1 :] if (one, other) in joined])

    grow([], list(range(count)))
    return best


def _listed(gpus: Sequence[int]) -> str:
    return ", ".join(map(str, gpus))
