"""Which ranks of a TP group reach each other over NVLink: from ``doctor --json``, or from a preset."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from tpoverlap.errors import ConfigError
from tpoverlap.tuning import DeviceModel
from tpoverlap.tuning.device import ESTIMATE, Rate

ANOTHER_LINK: Final = 0.2
"""Share by which a measured rate has to differ: doctor's includes the launch, and runs differ by a tenth."""

NETWORK_GB_S: Final = 50.0
"""Between NVLink domains where nobody says more: one network adapter of 400 Gbit/s a GPU."""

_NETWORK_LATENCY_US: Final = 10.0


@dataclass(frozen=True)
class Topology:
    """Which GPUs reach each other over NVLink.

    Attributes:
        nvlink_domain: how many of them; of a measured one the largest TP that makes sense there.
        basis: "measured" (by the rate of every pair), "probed" (by what NVML says) or "assumed".
        pair_gb_s, all_gb_s: what a rank sends to one peer alone, and to all at once; None where not measured.
    """

    name: str
    nvlink_domain: int
    basis: str
    source: str
    pair_gb_s: float | None = None
    all_gb_s: float | None = None

    def link_gb_s(self, tp_size: int) -> float | None:
        """What a rank of such a group sends: to its one peer, or to all of them; None where that was not measured."""
        return self.pair_gb_s if tp_size == 2 else self.all_gb_s


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
    return probed_topology(Path(given))


def probed_topology(path: Path) -> Topology:
    """What ``doctor --json`` wrote: by the measured rates where there are some, else by what NVML says.

    Raises:
        ConfigError: the file cannot be read, is none of doctor's, or doctor could not tell.
    """
    names = ", ".join(preset.name for preset in PRESETS)
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # ValueError: no JSON, or not UTF-8
        raise ConfigError(
            f"--topology {path} is neither a preset ({names}) nor a file that can be read: {error}; "
            "write one with tpoverlap doctor --json FILE"
        ) from error
    rows = report.get("rows") if isinstance(report, dict) else None
    rows = [row for row in rows or [] if isinstance(row, dict)]
    measured = next((row for row in rows if row.get("name") == "largest TP" and row.get("status") == "ok"), None)
    if measured is not None:
        return _measured(path, measured)
    found = [row for row in rows if row.get("name") == "NVLink domain"]
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


def _measured(path: Path, row: dict[str, Any]) -> Topology:
    try:
        data = row["data"]
        rates = [None if data[key] is None else float(data[key]) for key in ("pair_gb_s", "all_gb_s")]
        tp_size, reason = int(data["tp"]), str(data["reason"])
        if tp_size < 1 or any(rate is not None and not rate > 0 for rate in rates):
            raise ValueError(f"TP {tp_size} at {rates} GB/s")
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"--topology {path}: its row 'largest TP' is not doctor's: {error!r}") from error
    return Topology(str(path), tp_size, "measured", f"{reason}, by doctor", rates[0], rates[1])


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


def is_another_link(device: DeviceModel, measured_gb_s: float) -> bool:
    """Whether ``measured_gb_s`` is not the link of the device's file."""
    return abs(measured_gb_s / device.copy.gb_s - 1.0) > ANOTHER_LINK


def on_topology(device: DeviceModel, topology: Topology, tp_size: int, network_gb_s: float) -> DeviceModel:
    """``device`` as a TP group sees it: where the group leaves the domain, its slowest link sets the pace.

    A link that was measured and is another one than the device's file knows takes its place.
    """
    if tp_size <= topology.nvlink_domain:
        measured = topology.link_gb_s(tp_size)
        if measured is None or not is_another_link(device, measured):
            return device
        share = measured / device.copy.gb_s

        def at_share(rate: Rate) -> Rate:
            return Rate(rate.latency_us, rate.gb_s * share)

        copy = Rate(device.copy.latency_us, measured)
        gather, scatter = at_share(device.gather), at_share(device.scatter)
        trade = at_share(device.exchange)
        return replace(device, basis=ESTIMATE, copy=copy, gather=gather, scatter=scatter, trade=trade)

    def slower(rate: Rate) -> Rate:
        return Rate(rate.latency_us + _NETWORK_LATENCY_US, min(rate.gb_s, network_gb_s))

    return replace(
        device,
        basis=ESTIMATE,
        copy=slower(device.copy),
        gather=slower(device.gather),
        scatter=slower(device.scatter),
        trade=slower(device.exchange),
    )
