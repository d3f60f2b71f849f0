"""Which ranks of a TP group reach each other over NVLink: from ``doctor --json``, or from a preset."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from tpoverlap.errors import ConfigError
from tpoverlap.tuning import DeviceModel
from tpoverlap.tuning.device import ESTIMATE, Rate

NETWORK_GB_S: Final = 50.0
"""Between NVLink domains where nobody says more: one network adapter of 400 Gbit/s a GPU."""

_NETWORK_LATENCY_US: Final = 10.0


@dataclass(frozen=True)
class Topology:
    """``nvlink_domain``: GPUs that reach each other over NVLink. ``basis``: "probed" or "assumed"."""

    name: str
    nvlink_domain: int
    basis: str
    source: str


PRESETS: Final = (
    Topology("hgx-8", 8, "assumed", "eight GPUs behind NVSwitch in one host (HGX and DGX boards)"),
    Topology("gh200-x1", 1, "assumed", "one GH200 a node, nodes joined by network only"),
    Topology("gh200-x2", 2, "assumed", "two GH200 joined by NVLink (NVL2)"),
    Topology("gh200-x4", 4, "assumed", "four GH200 in one node, NVLink between every two"),
    Topology("nvl72", 72, "assumed", "72 GPUs in one rack behind NVLink switches, one fabric clique"),
)


def topology_of(device: DeviceModel, given: str | None) -> Topology:
    """The preset called ``given``, the probed one in the file ``given``, or (None) what such devices usually have.

    Raises:
        ConfigError: neither a preset nor a file that ``doctor --json`` wrote.
    """
    if given is None:
        text = f"as machines with {device.name} are usually built; --topology says otherwise"
        return Topology("default", device.nvlink_domain, "assumed", text)
    for preset in PRESETS:
        if preset.name == given.lower():
            return preset
    return _probed(Path(given))


def _probed(path: Path) -> Topology:
    names = ", ".join(preset.name for preset in PRESETS)
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # ValueError: no JSON, or not UTF-8
        raise ConfigError(
            f"--topology {path} is neither a preset ({names}) nor a file that can be read: {error}; "
            "write one with tpoverlap doctor --json FILE"
        ) from error
    rows = report.get("rows") if isinstance(report, dict) else None
    found = [row for row in rows or [] if isinstance(row, dict) and row.get("name") == "NVLink domain"]
    if not found:
        raise ConfigError(f"--topology {path} is not what tpoverlap doctor --json writes: no row 'NVLink domain' in it")
    if found[0].get("status") != "ok":
        raise ConfigError(
            f"--topology {path}: doctor could not tell the NVLink domain there ({found[0].get('detail')}); "
            f"name a preset instead: {names}"
        )
    try:
        domain = _largest_domain(found[0]["data"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"--topology {path}: its row 'NVLink domain' is not doctor's: {error!r}") from error
    return Topology(str(path), domain, "probed", f"{found[0]['detail']}, by doctor")


def _largest_domain(data: dict[str, Any]) -> int:
    """GPUs of the largest clique, or of the largest set that NVLink pairs join; 1 where none do."""
    cliques = [len(members) for members in data["cliques"].values()]
    groups: list[set[int]] = []
    for pair in data["nvlink_pairs"]:
        joined = {int(index) for index in pair.split("-")}
        for group in [group for group in groups if group & joined]:
            groups.remove(group)
            joined |= group
        groups.append(joined)
    return max([1, *cliques, *(len(group) for group in groups)])


def on_topology(device: DeviceModel, topology: Topology, tp_size: int, network_gb_s: float) -> DeviceModel:
    """``device`` as a TP group sees it: where the group leaves the domain, its slowest link sets the pace."""
    if tp_size <= topology.nvlink_domain:
        return device

    def slower(rate: Rate) -> Rate:
        return Rate(rate.latency_us + _NETWORK_LATENCY_US, min(rate.gb_s, network_gb_s))

    return replace(
        device,
        basis=ESTIMATE,
        copy=slower(device.copy),
        gather=slower(device.gather),
        scatter=slower(device.scatter),
    )
