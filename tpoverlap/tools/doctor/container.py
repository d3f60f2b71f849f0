"""Rows about what a container or a launcher does to the GPUs: CUDA_VISIBLE_DEVICES, MIG, and handle exchange."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from tpoverlap.tools.doctor.report import Row, Status

_SECTION = "gpu"
_NAMES = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "NVIDIA_VISIBLE_DEVICES")
_CAP_SYS_PTRACE = 19


def visible_devices_row(
    devices: Sequence[Mapping[str, Any]],
    host: Mapping[str, Any] | None,
    environ: Mapping[str, str] = os.environ,
) -> Row:
    """How torch's numbers map to the host's, and what in CUDA_VISIBLE_DEVICES torch did not take.

    Args:
        devices: of `worker_cuda.inventory`; empty where torch sees none.
        host: NVML's ``{"indices": [..], "count": n}`` for those devices; None where it could not be asked.
    """
    name, how = "visible devices", f"{', '.join(_NAMES)}; NVML's index of each UUID that torch reports"
    given = {key: environ[key] for key in _NAMES if key in environ}
    wanted = given.get("CUDA_VISIBLE_DEVICES")
    entries = [] if wanted is None else [entry.strip() for entry in wanted.split(",") if entry.strip()]
    data: dict[str, Any] = {"environment": given, "entries": entries, "host_indices": host and host.get("indices")}
    said = ", ".join(f"{key}={value!r}" for key, value in given.items()) or "none of the variables is set"
    if len(set(entries)) < len(entries):
        remedy = "name every device once: with a repeated one CUDA may show none at all"
        return Row(_SECTION, name, Status.FAILED, f"{said}: a device is there twice", how, remedy, data)
    if wanted is not None and not devices:
        remedy = "unset CUDA_VISIBLE_DEVICES, or name devices that nvidia-smi -L lists"
        status = Status.FAILED if entries and host else Status.SKIPPED
        return Row(_SECTION, name, status, f"{said}: torch sees no device", how, remedy, data)
    if not devices:
        return Row(_SECTION, name, Status.SKIPPED, f"no CUDA device; {said}", how, data=data)
    if entries and len(entries) != len(devices):
        # CUDA reads the list up to the first entry that it does not know, and says nothing.
        taken = entries[: len(devices)]
        remedy = f"CUDA stops at the first entry that it does not know; it took {', '.join(taken)}"
        detail = f"{said}: {len(entries)} entries, torch sees {len(devices)} devices"
        return Row(_SECTION, name, Status.FAILED, detail, how, remedy, data)
    if host is None:
        return Row(_SECTION, name, Status.OK, f"{said}; torch sees {len(devices)}, the host's numbers unknown", how,
                   data=data)  # fmt: skip
    indices = list(host["indices"])
    mapping = ", ".join(f"{ours} is the host's {theirs}" for ours, theirs in enumerate(indices))
    is_plain = indices == list(range(len(indices)))
    detail = f"{said}; {len(devices)} of the host's {host['count']} GPUs, " + (
        "numbered alike" if is_plain else f"renumbered: {mapping}"
    )
    remedy = "" if is_plain else "nvidia-smi and NVML count as the host does: compare by UUID, not by number"
    return Row(_SECTION, name, Status.OK, detail, how, remedy, data)


def mig_row(devices: Sequence[Mapping[str, Any]], modes: Sequence[Any] | None) -> Row:
    """Whether the devices are slices of a GPU: slices cannot write to each other, so no TP over them.

    Args:
        modes: NVML's current MIG mode of each device, 1 for on; None where NVML does not know.
    """
    name, how = "MIG", "NVML: MigMode of each GPU; MIG- in the UUIDs that torch reports"
    if not devices:
        return Row(_SECTION, name, Status.SKIPPED, "no CUDA device", how)
    slices = [device["index"] for device in devices if str(device.get("uuid", "")).startswith("MIG-")]
    on = [index for index, mode in enumerate(modes or []) if mode == 1]
    data = {"slices": slices, "modes": None if modes is None else list(modes)}
    remedy = "run one rank a whole GPU: an administrator can turn MIG off (nvidia-smi -mig 0)"
    if slices or on:
        detail = f"on for devices {sorted({*slices, *on})}: a process sees one slice, and slices have no peer access"
        return Row(_SECTION, name, Status.FAILED, detail, how, remedy, data)
    if modes is None or any(mode is None for mode in modes):
        return Row(_SECTION, name, Status.UNKNOWN if modes is None else Status.OK,
                   "no slice among the devices" + ("; NVML was not there to ask" if modes is None else ""), how,
                   data=data)  # fmt: skip
    return Row(_SECTION, name, Status.OK, "off", how, data=data)


def may_ptrace(status: Mapping[str, str]) -> bool | None:
    """Whether the effective capabilities in ``/proc/self/status`` hold CAP_SYS_PTRACE; None where none are there."""
    text = status.get("CapEff", "").strip()
    try:
        return bool(int(text, 16) >> _CAP_SYS_PTRACE & 1)
    except ValueError:
        return None
