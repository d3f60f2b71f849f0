"""Rank functions of `test_blocked_driver`."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch

import tpoverlap as tpo

TIMEOUT_S = 5.0


def held_up(rank: int, size: int, blocks: str, ending: str) -> tuple[str, float]:
    """What rank 0 gets, and when: it waits for rank 1, and then calls what waits for its own streams."""
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    config = {"qkv_fprop": {"method": "ring_exchange"}}
    manager = tpo.UserBufferManager(None, (512, 256), device=device, ub_cfgs=config, timeout_s=TIMEOUT_S)
    weight = torch.randn(64, 256, device=device, dtype=torch.bfloat16)
    x = torch.randn(100, 256, device=device, dtype=torch.bfloat16)
    numbers = torch.rand(1000, device=device)
    spare = torch.empty(64 << 20, dtype=torch.uint8, device=device)
    tpo.all_gather_gemm(x, weight, manager.layer("qkv"))
    torch.cuda.synchronize()
    manager.check()
    side: Any = manager.channel.transport.driver._side  # type: ignore[union-attr]
    assert len(side._shares) == 1, "another process can reach this rank's memory"
    if rank == 1:
        time.sleep(0.5)
        if ending == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(4 * TIMEOUT_S)
        manager.abort()
        return "", 0.0
    started = time.monotonic()
    try:
        tpo.all_gather_gemm(x, weight, manager.layer("qkv"))
        if blocks == "memory is freed":
            del spare
            torch.cuda.empty_cache()
        else:
            torch.special.bessel_j0(numbers)
        torch.cuda.synchronize()
        manager.check()
        return "nothing", time.monotonic() - started
    except tpo.TpOverlapError as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - started
    finally:
        manager.abort()
