"""Rows about NVIDIA GPUs, made from what the worker processes read. Every row comes from a question that was asked."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from itertools import combinations
from typing import Any

from tpoverlap.tools.doctor.children import ChildResult, run_ranks
from tpoverlap.tools.doctor.probes_cpu import outcome_row
from tpoverlap.tools.doctor.report import Row, Status

SECTION = "gpu"
# What a probe process must not inherit otherwise: nothing here may create a multicast object (see worker_cuda.py).
SAFE_ENV = {
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
    "TORCH_SYMMMEM_IMPLICIT_POOL": "0",  # pool memory can be reused in an order that corrupts it (pytorch#190977)
}
_PCIE = {0: "same board", 10: "one PCIe switch", 20: "several PCIe switches", 30: "one host bridge"}
_PCIE |= {40: "one NUMA node", 50: "across CPU sockets"}
Sections = Mapping[str, Mapping[str, Any]]


def devices_row(inventory: ChildResult) -> Row:
    """The GPUs that torch sees."""
    how = "torch.cuda in a process of its own"
    remedy = "see nvidia-smi and CUDA_VISIBLE_DEVICES; torch needs a build for CUDA and a driver new enough for it"
    found = inventory.sections.get("devices")
    if found is not None:
        parts = [
            f"{d['index']}: {d['name']}, {d['memory_bytes'] / 2**30:.0f} GiB, {d['num_sms']} SMs, sm_{d['capability']}"
            for d in found["devices"]
        ]
        return Row(SECTION, "devices", Status.OK, "; ".join(parts), how, data=dict(found))
    if inventory.ok:
        return Row(SECTION, "devices", Status.SKIPPED, "torch sees no CUDA device", how, remedy)
    return Row(SECTION, "devices", inventory.status, inventory.why(), how, remedy)


def links_row(nvml: ChildResult, count: int, topology: str | None) -> Row:
    """What connects the GPUs: NVML, else nvidia-smi's matrix."""
    links = nvml.sections.get("links")
    how = "NVML: NvLinkState, NvLinkRemoteDeviceType, P2PStatus, TopologyCommonAncestor"
    if links is not None:
        gpus, pairs = links["gpus"], links["pairs"]
        ends = ", ".join(f"GPU {i}: {g['active']} ({g['to_switch']} to a switch)" for i, g in enumerate(gpus))
        between = "; ".join(f"{pair}: {_describe_pair(link)}" for pair, link in pairs.items())
        detail = f"active NVLinks {ends}" + (f"; {between}" if between else "")
        return Row(SECTION, "links", Status.OK, detail, how, data=dict(links))
    matrix = parse_topology(topology or "")
    if matrix:
        detail = "; ".join(f"{pair}: {link}" for pair, link in matrix.items())
        return Row(SECTION, "links", Status.OK, detail, "nvidia-smi topo -m (host numbering)", data={"pairs": matrix})
    if count == 1 and topology:
        return Row(SECTION, "links", Status.SKIPPED, "one GPU: no other to be linked to", "nvidia-smi topo -m")
    status = Status.TIMEOUT if nvml.timed_out else Status.UNKNOWN
    return Row(SECTION, "links", status, nvml.why(), f"{how}; nvidia-smi topo -m", "pip install nvidia-ml-py")


def _describe_pair(link: Mapping[str, Any]) -> str:
    """``nvlink`` None means that NVML would not say, which is not a no."""
    nvlink = {True: "NVLink", False: "no NVLink", None: "NVLink unknown"}[link["nvlink"]]
    direct = f" ({link['direct_links']} direct)" if link["direct_links"] else ""
    return f"{nvlink}{direct}, PCIe {_PCIE.get(link['pcie'], 'path unknown')}"


def parse_topology(text: str) -> dict[str, str]:
    """``{"0-1": "NV18"}`` from the matrix of ``nvidia-smi topo -m``; empty when there is none (or one GPU)."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in text.splitlines()]
    header = next((words for words in lines if words[:1] == ["GPU0"] and words[1:2] != ["X"]), [])
    columns = [name for name in header if re.fullmatch(r"GPU\d+", name)]
    matrix = {}
    for words in lines:
        if words[:1] and words[0] in columns and len(words) > len(columns) and words is not header:
            matrix.update({(words[0], column): word for column, word in zip(columns, words[1:], strict=False)})
    numbers = {name: int(name.removeprefix("GPU")) for name in columns}
    pairs = [pair for pair in combinations(columns, 2) if pair in matrix]
    return {f"{numbers[a]}-{numbers[b]}": matrix[a, b] for a, b in pairs}


def read_topology(timeout_s: float = 10.0) -> str | None:
    """Output of ``nvidia-smi topo -m``, None when it is not there or does not answer."""
    executable = shutil.which("nvidia-smi")
    if executable is None:
        return None
    try:
        return subprocess.run([executable, "topo", "-m"], capture_output=True, text=True, timeout=timeout_s).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def domain_row(nvml: ChildResult) -> Row:
    """Which GPUs can map each other's memory over NVLink, by fabric membership and NVLink peer-to-peer status."""
    name, how = "NVLink domain", "NVML: GpuFabricInfo (cluster, clique, state), P2PStatus"
    fabric, links = nvml.sections.get("fabric"), nvml.sections.get("links")
    if fabric is None or links is None:
        return Row(SECTION, name, Status.UNKNOWN, nvml.why() or "NVML did not say", how, "pip install nvidia-ml-py")
    silent = all("error" in gpu for gpu in fabric["gpus"])
    if silent and not any(link["nvlink"] for link in links["pairs"].values()):
        return Row(SECTION, name, Status.UNKNOWN, f"NVML would not say: {fabric['gpus'][0]['error']}", how)
    cliques: dict[str, list[int]] = {}
    states = set()
    for index, gpu in enumerate(fabric["gpus"]):
        states.add(gpu.get("state") or gpu["error"])
        if gpu.get("state") == "completed" and gpu["cluster"]:
            cliques.setdefault(f"{gpu['cluster']}/{gpu['clique']}", []).append(index)
    count = len(fabric["gpus"])
    pairs = links["pairs"]
    joined = [pair for pair, link in pairs.items() if link["nvlink"]]
    data = {"fabric": fabric["gpus"], "cliques": cliques, "nvlink_pairs": joined}
    state = "fabric state " + ", ".join(sorted(states))
    if cliques:
        where = "; ".join(f"GPUs {gpus} in {clique}" for clique, gpus in cliques.items())
        detail = f"{state}; fabric clique (may span hosts): {where}"
    elif count == 1:
        detail = f"{state}; one GPU in no multi-host clique"
    elif len(joined) == len(pairs):
        detail = f"{state}; all {count} GPUs of this host, no multi-host clique"
    else:
        detail = f"{state}; no multi-host clique; NVLink between {', '.join(joined) or 'no pair'} of {len(pairs)} pairs"
    return Row(SECTION, name, Status.OK, detail, how, data=data)


def peer_access_row(inventory: ChildResult, count: int) -> Row:
    """Whether each GPU can address each other one's memory."""
    name, how = "peer access", "torch.cuda.can_device_access_peer for each ordered pair"
    if count == 1:
        return Row(SECTION, name, Status.SKIPPED, "one GPU", how)
    found = inventory.sections.get("peer_access")
    if found is None:
        return Row(SECTION, name, inventory.status, inventory.why(), how)
    refused = [pair for pair, allowed in found["pairs"].items() if not allowed]
    if not refused:
        return Row(SECTION, name, Status.OK, f"all {len(found['pairs'])} ordered pairs", how, data=dict(found))
    remedy = "ranks on these pairs need backend='process_group'; virtual machines and IOMMU/ACS settings can forbid it"
    return Row(SECTION, name, Status.FAILED, f"not between {', '.join(refused)}", how, remedy, dict(found))


def stream_operations_row(inventory: ChildResult) -> Row:
    """The driver's attribute for 64-bit stream memory operations (the 32-bit ones are tried by the memory probe)."""
    name, how = "stream memory operations", "cuDeviceGetAttribute(CAN_USE_64_BIT_STREAM_MEM_OPS)"
    values = _attribute(inventory.sections, "stream_mem_ops_64_bit")
    if values is None:
        detail = inventory.sections.get("attributes", {}).get("error") or inventory.why()
        return Row(SECTION, name, Status.UNKNOWN, detail, how, "pip install cuda-bindings (tpoverlap needs it on GPUs)")
    data = {"devices": values, "attributes": inventory.sections["attributes"].get("devices")}
    if all(values):
        return Row(SECTION, name, Status.OK, f"supported on all {len(values)} devices", how, data=data)
    without = [index for index, value in enumerate(values) if not value]
    return Row(SECTION, name, Status.FAILED, f"not supported on devices {without}", how, "update the driver", data)


def multicast_row(inventory: ChildResult, environ: Mapping[str, str] = os.environ) -> Row:
    """On or off, by the device attribute and the environment. Nothing is created to find out."""
    name = "multicast"
    how = "cuDeviceGetAttribute(MULTICAST_SUPPORTED) and the environment; no multicast object was created"
    disabled = environ.get("TORCH_SYMM_MEM_DISABLE_MULTICAST") == "1"
    values = _attribute(inventory.sections, "multicast")
    data = {"device": values, "disabled_by_environment": disabled}
    if disabled:
        supported = "not known" if values is None else "supports it" if all(values) else "does not support it"
        return Row(
            SECTION, name, Status.OK, f"off (TORCH_SYMM_MEM_DISABLE_MULTICAST=1); device: {supported}", how, data=data
        )
    if values is None:
        return Row(SECTION, name, Status.UNKNOWN, "the device attribute could not be read", how, data=data)
    if not all(values):
        return Row(SECTION, name, Status.OK, "off: not supported by every device", how, data=data)
    remedy = "where hosts are shared: export TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NCCL_NVLS_ENABLE=0"
    detail = "on: supported and not disabled, so torch's rendezvous creates multicast objects; tpoverlap uses none"
    return Row(SECTION, name, Status.OK, detail, how, remedy, data)


def _attribute(sections: Sections, name: str) -> list[int] | None:
    devices = sections.get("attributes", {}).get("devices")
    if not devices or any(device[name] is None for device in devices):
        return None
    return [device[name] for device in devices]


def symmetric_memory_row(count: int, timeout_s: float) -> Row:
    """Real ranks (one a GPU, or two on the only one) map, write, read and signal each other's memory."""
    num_ranks = max(count, 2)
    env = dict(SAFE_ENV)
    if num_ranks > count:
        env["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    results = run_ranks("cuda:symmetric_memory", num_ranks, timeout_s=timeout_s, env=env)
    where = "one a GPU" if num_ranks == count else f"sharing {count} GPU"
    how = f"{num_ranks} processes ({where}): torch symmetric memory, patterns both ways, cuStreamWrite/WaitValue32"
    remedy = "see 'handle exchange' and 'peer access'; without peer memory use backend='process_group'"
    detail = f"{num_ranks} ranks wrote, read and signalled each other's memory"
    return outcome_row(SECTION, "symmetric memory", results, detail, how, remedy)


def nccl_row(count: int, timeout_s: float) -> Row:
    """Point-to-point and a collective over NCCL, one rank a GPU."""
    name = "process group (nccl)"
    how = "one process a GPU: init_process_group('nccl'), batch_isend_irecv around the ring, all_gather_into_tensor"
    if count < 2:
        return Row(SECTION, name, Status.SKIPPED, "needs two GPUs: NCCL refuses two ranks on one", how)
    results = run_ranks("cpu:process_group", count, timeout_s=timeout_s, settings={"backend": "nccl"}, env=SAFE_ENV)
    remedy = "run with NCCL_DEBUG=INFO; containers may need a larger /dev/shm"
    return outcome_row(SECTION, name, results, f"{count} ranks exchanged and gathered tensors", how, remedy)
