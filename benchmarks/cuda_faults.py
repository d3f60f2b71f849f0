"""What a GPU rank sees when its peer disagrees, stalls or dies: run by `scripts/gpu_check`, one scenario a spawn."""

from __future__ import annotations

import os
import time
from typing import Any

import torch

import tpoverlap as tpo

STALL_TIMEOUT_S = 5.0


def run_scenario(rank: int, world_size: int, scenario: str) -> dict[str, Any]:
    """Rank 1 misbehaves in its second operation; every other rank reports the error it got, and when.

    ``poisoned`` says whether rows that never arrived became NaN.
    """
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    timeout_s = STALL_TIMEOUT_S if scenario == "stall" else 60.0
    manager = tpo.UserBufferManager(None, (512, 256), device=device, timeout_s=timeout_s, tuning_cache=False)
    weight = torch.randn(64, 256, device=device, dtype=torch.bfloat16)
    x = torch.randn(100, 256, device=device, dtype=torch.bfloat16)
    tpo.all_gather_gemm(x, weight, manager.layer("qkv"))
    manager.check()
    if rank == 1 and scenario == "die":
        os._exit(3)
    if rank == 1 and scenario == "stall":
        time.sleep(2 * STALL_TIMEOUT_S)
        manager.abort()
        return {"error": None}
    if rank == 1 and scenario == "mismatch":
        x = x[:90]
    begin = time.monotonic()
    output = None
    try:
        output = tpo.all_gather_gemm(x.contiguous(), weight, manager.layer("qkv"))
        manager.check()
    except tpo.TpOverlapError as error:
        elapsed_s = time.monotonic() - begin
        assert isinstance(output, torch.Tensor), "the call itself returned, the check raised"
        rows = x.shape[0]
        peer_rows = output[rows:] if rank == 0 else output[: output.shape[0] - rows]
        poisoned = bool(torch.isnan(peer_rows).all())
        manager.close()
        return {
            "error": type(error).__name__,
            "message": str(error),
            "after_s": round(elapsed_s, 2),
            "poisoned": poisoned,
        }
    return {"error": None}


EXPECTED = {"mismatch": "RankMismatchError", "stall": "PeerTimeoutError", "die": "PeerTimeoutError"}
