"""Another library's NCCL kernels on another stream, issued in opposite order on each rank: no method may deadlock.

Rank 0 launches a large all-reduce (of FSDP, say) before the operation, rank 1 after it. The all-reduce's kernel spins
for the peer's; if an operation held every multiprocessor, or every hardware queue, while it waits for the peer, neither
side would get on. Numbers are compared too: the first and last result of many.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist

import tpoverlap as tpo
from tpoverlap.config.rules import SUPPORTED

ITERATIONS = 40
_TOKENS, _HIDDEN, _FEATURES = 2050, 4096, 4096
_FEW_TOKENS = 258
"""Few enough for `fused` in one launch, and for the kernel that exchanges `sequential`'s rows."""
_BYTES_REDUCED = 64 << 20


def operations() -> dict[str, tuple[str, dict[str, Any]]]:
    """Label -> (direction, options) of everything that may run here."""
    found: dict[str, tuple[str, dict[str, Any]]] = {
        "ag ring_exchange": ("ag", {"method": "ring_exchange"}),
        "ag bulk": ("bulk", {"method": "bulk"}),
        "ag sequential": ("ag", {"method": "sequential"}),
        "rs ring_exchange": ("rs", {"method": "ring_exchange"}),
        "rs pipeline": ("rs", {"method": "pipeline", "num_splits": 4}),
        "rs sequential": ("rs", {"method": "sequential"}),
        "ag sequential, few tokens": ("ag", {"method": "sequential"}),
        "rs sequential, few tokens": ("rs", {"method": "sequential"}),
    }
    if "fused" in SUPPORTED:
        found["ag fused"] = ("ag", {"method": "fused"})
        found["rs fused"] = ("rs", {"method": "fused"})
        found["ag fused, few tokens"] = found["ag fused"]
        found["rs fused, few tokens"] = found["rs fused"]
    return found


def opposite_order(rank: int, world_size: int, label: str, other_library: bool) -> dict[str, Any]:
    """Run one operation `ITERATIONS` times beside an all-reduce (or, ``other_library`` False, without one).

    Returns:
        Milliseconds an iteration, and the relative difference of the last result to the first.
    """
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    other = dist.new_group(list(range(world_size)))
    direction, options = operations()[label]
    name = {"ag": "qkv_fprop", "bulk": "qkv_dgrad", "rs": "proj_fprop"}[direction]
    manager = tpo.UserBufferManager(None, (_TOKENS, _HIDDEN), device=device, ub_cfgs={name: options}, timeout_s=30.0)
    generator = torch.Generator(device).manual_seed(rank)
    num_tokens = _FEW_TOKENS if "few tokens" in label else _TOKENS
    partition = tpo.TokenPartition.balanced(num_tokens, world_size)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16, generator=generator)

    shard, whole = draw(partition.counts[rank], _HIDDEN), draw(num_tokens, _FEATURES)
    weight = draw(_FEATURES, _HIDDEN) if direction != "rs" else draw(_HIDDEN, _FEATURES)
    reduced = torch.ones(_BYTES_REDUCED // 2, device=device, dtype=torch.bfloat16)
    side = torch.cuda.Stream(device)

    def operate() -> torch.Tensor:
        if direction == "ag":
            result = tpo.all_gather_gemm(shard, weight, manager.get(name))
            assert isinstance(result, torch.Tensor), "one weight, one output"
            return result
        if direction == "bulk":
            return tpo.bulk_all_gather(shard, manager.get(name), gemm=(whole, weight))[0]
        return tpo.gemm_reduce_scatter(whole, weight, manager.get(name))

    def reduce() -> None:
        with torch.cuda.stream(side):
            dist.all_reduce(reduced, op=dist.ReduceOp.MAX, group=other)

    with torch.no_grad(), manager.microbatch(partition):
        first = operate().float()
        reduce()
        manager.check()
        torch.cuda.synchronize(device)
        begin = time.perf_counter()
        for _ in range(ITERATIONS):
            if other_library and rank % 2 == 0:
                reduce()
            last = operate()
            if other_library and rank % 2 == 1:
                reduce()
        manager.check()
        torch.cuda.synchronize(device)
        elapsed_ms = 1e3 * (time.perf_counter() - begin) / ITERATIONS
    difference = float((last.float() - first).norm() / first.norm())
    manager.close()
    if not difference < 1e-2:
        raise AssertionError(f"{label}: the last result differs from the first by {difference:.2e}")
    queues = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
    return {"label": label, "ms": round(elapsed_ms, 3), "difference": difference, "hardware_queues": queues}
