"""Probe processes that touch the NVIDIA driver: inventory, NVML, symmetric memory.

Standalone (see worker.py): each task is ``task(settings, emit)``. The ``read_*`` functions take the library they
ask (torch, pynvml, the driver bindings) as an argument, so that tests can hand them a fake.

NO PROBE MAY CREATE A MULTICAST OBJECT: on some hosts one program's multicast can take the GPUs, which others share,
out of service. torch's `rendezvous` creates one wherever the device supports it unless
TORCH_SYMM_MEM_DISABLE_MULTICAST=1, so `symmetric_memory` refuses to run without that variable.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

Emit = Callable[[str, dict[str, Any]], None]
Settings = dict[str, Any]

_ATTRIBUTES = {
    "stream_mem_ops_64_bit": "CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS",
    "virtual_memory_management": "CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED",
    "handle_posix_fd": "CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED",
    "handle_fabric": "CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED",
    "multicast": "CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED",
}


def inventory(settings: Settings, emit: Emit) -> None:
    """What torch and the driver say of the GPUs: devices, peer access, attributes. One section each, as it comes."""
    emit("step", {"name": "import torch"})
    import torch

    emit("step", {"name": "initialise CUDA"})
    available = torch.cuda.is_available()
    count = torch.cuda.device_count() if available else 0
    emit("cuda", {"available": available, "count": count, "cuda": torch.version.cuda})
    if not count:
        return
    for name, read in (("devices", read_devices), ("peer_access", read_peer_access), ("libraries", read_libraries)):
        emit("step", {"name": name})
        emit(name, read(torch))
    emit("step", {"name": "device attributes"})
    try:
        from cuda.bindings import driver  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        emit("attributes", {"error": f"cuda.bindings cannot be imported ({error})"})
    else:
        emit("attributes", read_attributes(driver, count))


def read_devices(torch: Any) -> dict[str, Any]:
    """``{"devices": [{index, name, memory_bytes, capability, num_sms, uuid}]}``, torch's visible devices."""
    devices = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        devices.append(
            {
                "index": index,
                "name": properties.name,
                "memory_bytes": int(properties.total_memory),
                "capability": f"{properties.major}.{properties.minor}",
                "num_sms": int(properties.multi_processor_count),
                "uuid": str(getattr(properties, "uuid", "")),
            }
        )
    return {"devices": devices}


def read_peer_access(torch: Any) -> dict[str, Any]:
    """``{"pairs": {"0-1": bool}}`` for every ordered pair of devices."""
    count = torch.cuda.device_count()
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    return {"pairs": {f"{a}-{b}": bool(torch.cuda.can_device_access_peer(a, b)) for a, b in pairs}}


def read_libraries(torch: Any) -> dict[str, Any]:
    """NCCL's version as torch sees it, and torch's symmetric-memory backend for CUDA; None where it cannot say."""
    nccl = _ask(torch.cuda.nccl, "version")
    return {"nccl": None if nccl is None else ".".join(str(part) for part in nccl)}


def read_attributes(driver: Any, count: int) -> dict[str, Any]:
    """``{"devices": [{attribute: int | None}]}``; None: this driver does not know the attribute."""
    (status,) = driver.cuInit(0)
    if int(status):
        return {"error": f"cuInit returned {status}"}
    devices = []
    for ordinal in range(count):
        status, device = driver.cuDeviceGet(ordinal)
        if int(status):
            return {"error": f"cuDeviceGet({ordinal}) returned {status}"}
        values: dict[str, int | None] = {}
        for name, constant in _ATTRIBUTES.items():
            attribute = getattr(driver.CUdevice_attribute, constant, None)
            status, value = driver.cuDeviceGetAttribute(attribute, device) if attribute is not None else (1, 0)
            values[name] = None if int(status) else int(value)
        devices.append(values)
    return {"devices": devices}


def nvml(settings: Settings, emit: Emit) -> None:
    """Driver version, links and fabric membership of the GPUs whose UUIDs are in ``settings["uuids"]``, from NVML."""
    emit("step", {"name": "import pynvml"})
    import pynvml  # type: ignore[import-not-found, unused-ignore]

    emit("step", {"name": "initialise NVML"})
    pynvml.nvmlInit()
    version = pynvml.nvmlSystemGetDriverVersion()
    emit("driver", {"version": version.decode() if isinstance(version, bytes) else version})
    # By UUID: NVML numbers all GPUs of the host, torch only those in CUDA_VISIBLE_DEVICES.
    uuids = [uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}" for uuid in settings["uuids"]]
    emit("step", {"name": "find the GPUs by UUID"})
    handles = [pynvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids]
    emit("step", {"name": "numbers and MIG"})
    emit("host", read_host(pynvml, handles))
    emit("step", {"name": "links"})
    emit("links", read_links(pynvml, handles))
    emit("step", {"name": "fabric"})
    emit("fabric", read_fabric(pynvml, handles))


def read_host(nvml: Any, handles: list[Any]) -> dict[str, Any]:
    """``{"count": GPUs of the host, "indices": [the host's number of each], "mig": [1 | 0 | None]}``; None: unknown."""
    modes = [_ask(nvml, "nvmlDeviceGetMigMode", handle) for handle in handles]
    return {
        "count": _ask(nvml, "nvmlDeviceGetCount"),
        "indices": [_ask(nvml, "nvmlDeviceGetIndex", handle) for handle in handles],
        "mig": [None if mode is None else int(mode[0]) for mode in modes],
    }


def read_links(nvml: Any, handles: list[Any]) -> dict[str, Any]:
    """Active NVLinks a GPU and what is at their other end; for each pair NVLink peer-to-peer and the PCIe distance.

    Returns:
        ``{"gpus": [{"active": int, "to_switch": int, "to_gpu": int}],
        "pairs": {"0-1": {"nvlink": bool | None, "direct_links": int, "pcie": int | None}}}``
    """
    remotes: list[list[str]] = []
    gpus = []
    for handle in handles:
        types, buses = [], []
        for link in range(getattr(nvml, "NVML_NVLINK_MAX_LINKS", 18)):
            if _ask(nvml, "nvmlDeviceGetNvLinkState", handle, link) != nvml.NVML_FEATURE_ENABLED:
                continue
            types.append(_ask(nvml, "nvmlDeviceGetNvLinkRemoteDeviceType", handle, link))
            buses.append(_bus_id(_ask(nvml, "nvmlDeviceGetNvLinkRemotePciInfo", handle, link)))
        to_switch = types.count(nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH)
        to_gpu = types.count(nvml.NVML_NVLINK_DEVICE_TYPE_GPU)
        gpus.append({"active": len(types), "to_switch": to_switch, "to_gpu": to_gpu})
        remotes.append(buses)
    own_bus = [_bus_id(_ask(nvml, "nvmlDeviceGetPciInfo", handle)) for handle in handles]
    pairs = {}
    for a in range(len(handles)):
        for b in range(a + 1, len(handles)):
            index = nvml.NVML_P2P_CAPS_INDEX_NVLINK
            state = _ask(nvml, "nvmlDeviceGetP2PStatus", handles[a], handles[b], index)
            pairs[f"{a}-{b}"] = {
                "nvlink": None if state is None else state == nvml.NVML_P2P_STATUS_OK,
                "direct_links": remotes[a].count(own_bus[b]) if own_bus[b] else 0,
                "pcie": _ask(nvml, "nvmlDeviceGetTopologyCommonAncestor", handles[a], handles[b]),
            }
    return {"gpus": gpus, "pairs": pairs}


def read_fabric(nvml: Any, handles: list[Any]) -> dict[str, Any]:
    """``{"gpus": [{"state": str, "cluster": str, "clique": int} | {"error": str}]}``; cluster "": not in a fabric."""
    names = {0: "not supported", 1: "not started", 2: "in progress", 3: "completed"}
    gpus: list[dict[str, Any]] = []
    for handle in handles:
        try:
            if hasattr(nvml, "nvmlDeviceGetGpuFabricInfoV") and hasattr(nvml, "c_nvmlGpuFabricInfo_v2_t"):
                info, query = nvml.c_nvmlGpuFabricInfo_v2_t(), nvml.nvmlDeviceGetGpuFabricInfoV
            else:
                info, query = nvml.c_nvmlGpuFabricInfo_t(), nvml.nvmlDeviceGetGpuFabricInfo
            query(handle, ctypes.byref(info))  # by reference: pynvml passes on what it is given
            cluster = bytes(info.clusterUuid)
            state = names.get(int(info.state), str(info.state))
            gpus.append(
                {"state": state, "cluster": cluster.hex() if any(cluster) else "", "clique": int(info.cliqueId)}
            )
        except Exception as error:
            gpus.append({"error": f"{type(error).__name__}: {error}"})
    return {"gpus": gpus}


def symmetric_memory(settings: Settings, emit: Emit) -> None:
    """Ranks map each other's memory, write a pattern to every peer, read it back, and signal by stream operations."""
    if os.environ.get("TORCH_SYMM_MEM_DISABLE_MULTICAST") != "1":
        raise RuntimeError("refused: TORCH_SYMM_MEM_DISABLE_MULTICAST is not 1, rendezvous would create multicast")
    emit("step", {"name": "import torch"})
    import torch
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symm_mem

    rank, num_ranks, timeout_s = settings["rank"], settings["num_ranks"], settings["timeout_s"]
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    emit("step", {"name": "init_process_group('gloo')"})
    store = torch._C._distributed_c10d.FileStore(f"{settings['scratch']}/store", num_ranks)
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timeout)
    group = dist.group.WORLD
    assert group is not None, "init_process_group did not set the default group"

    emit("step", {"name": "allocate symmetric memory"})
    words = 16384  # int32 elements that each rank writes into each peer
    mine = symm_mem.empty((num_ranks + 1) * words, dtype=torch.int32, device=device)
    mine.zero_()
    torch.cuda.synchronize(device)
    emit("step", {"name": "rendezvous"})
    handle = symm_mem.rendezvous(mine, group.group_name)
    multicast = bool(handle.multicast_ptr)
    peers = [p for p in range(num_ranks) if p != rank]
    views = {p: handle.get_buffer(p, (mine.numel(),), torch.int32) for p in peers}
    dist.barrier()

    emit("step", {"name": "write a pattern into every peer"})
    for peer in peers:
        views[peer][rank * words : (rank + 1) * words].copy_(_pattern(torch, rank, peer, words, device))
    torch.cuda.synchronize(device)
    dist.barrier()
    emit("step", {"name": "compare what the peers wrote here and what arrived there"})
    for peer in peers:
        arrived, remote = mine[peer * words :][:words], views[peer][rank * words :][:words]
        if not torch.equal(arrived, _pattern(torch, peer, rank, words, device)):
            raise RuntimeError(f"what rank {peer} wrote did not arrive: {arrived[:4].tolist()}..")
        if not torch.equal(remote, _pattern(torch, rank, peer, words, device)):
            raise RuntimeError(f"reading back from rank {peer} gave {remote[:4].tolist()}..")
    emit("symmetric_memory", {"device": str(device), "ranks": len(handle.buffer_ptrs), "multicast": multicast})

    emit("step", {"name": "import cuda.bindings"})
    from cuda.bindings import driver  # type: ignore[import-not-found, unused-ignore]

    emit("step", {"name": "cuStreamWriteValue32 to every peer, cuStreamWaitValue32 here"})
    flags_at = 4 * num_ranks * words  # bytes; the last block of words holds one flag a source rank
    torch.cuda.current_stream(device).synchronize()
    stream = driver.CUstream(torch.cuda.current_stream(device).cuda_stream)
    for peer in peers:  # all writes before the first wait: one hardware queue must do
        _check(driver.cuStreamWriteValue32(stream, views[peer].data_ptr() + flags_at + 4 * rank, 7 + rank, 0))
    at_least = int(driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ)
    for peer in peers:
        _check(driver.cuStreamWaitValue32(stream, mine.data_ptr() + flags_at + 4 * peer, 7 + peer, at_least))
    passed = torch.cuda.Event()  # type: ignore[no-untyped-call, unused-ignore]
    passed.record()
    deadline = time.monotonic() + min(10.0, timeout_s)
    # Polled, never synchronize(): a wait that is not released would hang there.
    while not passed.query():  # type: ignore[no-untyped-call, unused-ignore]
        if time.monotonic() > deadline:
            raise TimeoutError("a stream wait was not released by the peer's stream write")
        time.sleep(0.001)
    emit("stream_operations", {})
    emit("step", {"name": "leave"})
    dist.barrier()  # nobody's memory goes away while a peer may still read it


def _pattern(torch: Any, source: int, target: int, words: int, device: Any) -> Any:
    return torch.arange(words, dtype=torch.int32, device=device) * 3 + (1_000_000 * (source + 1) + 1000 * target)


def _check(result: tuple[Any, ...]) -> None:
    if int(result[0]):
        raise RuntimeError(f"the driver returned {result[0]}")


def _bus_id(info: Any) -> str:
    bus = getattr(info, "busId", "") or ""
    return (bus.decode() if isinstance(bus, bytes) else str(bus)).lower()


def _ask(library: Any, function: str, *arguments: Any) -> Any:
    """What ``library.function(*arguments)`` returns, or None where this GPU, driver or binding cannot say."""
    try:
        return getattr(library, function)(*arguments)
    except Exception:
        return None
