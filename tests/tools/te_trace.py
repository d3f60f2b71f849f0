"""Writes ``tests/data/traces/te_like.json``: what torch.profiler records of a Transformer Engine layer, made up.

    python -m tests.tools.te_trace

Kernel and range names are Transformer Engine's; times are round, so that the right answers can be worked out on paper.
"""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import Any

PATH = Path(__file__).parents[1] / "data" / "traces" / "te_like.json"
CPU_THREAD, COMPUTE, COMM = 4711, 7, 20
GEMM = "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT"
RING = "kuserbuffers_pushsend(int*, int*, int4*, int4*, int)"
PIPELINE = "void userbuffers_fp16_sum_inplace_gpu_rr_rs_oop<2>(int, int, int, int, int, int, int, int, void**, int)"

Event = dict[str, Any]


class Writer:
    """Builds events; a kernel's launch is linked to it by ``correlation``, as in a real file."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._numbers = count(100)

    def range(self, name: str, begin: float, end: float, category: str = "user_annotation") -> None:
        self._add(category, name, 1, CPU_THREAD, begin, end)

    def kernel(
        self, name: str, stream: int, begin: float, end: float, launched: float | None, category: str = "kernel"
    ) -> None:
        number = next(self._numbers)
        arguments: Event = {"stream": stream, "device": 0}
        if launched is not None:
            arguments["correlation"] = number
            self._add(
                "cuda_runtime", "cudaLaunchKernelExC", 1, CPU_THREAD, launched, launched + 3, {"correlation": number}
            )
        self._add(category, name, 0, stream, begin, end, arguments)

    def _add(
        self, cat: str, name: str, pid: int, tid: int, begin: float, end: float, args: Event | None = None
    ) -> None:
        event = {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": begin, "dur": end - begin}
        self.events.append(event | {"args": args or {}})


def te_layer() -> Event:
    """qkv_fprop by ring_exchange (all but 20 us hidden), proj_fprop by pipeline (90 us stick out), stray kernels."""
    w = Writer()
    w.range("aten::nothing", 0, 5, "cpu_op")
    # qkv: two GEMM chunks; the copy of the second chunk by the copy engine, its flag by a small kernel
    w.range("_LayerNormLinear", 10, 100, "cpu_op")
    w.range("transformer_engine._LayerNormLinear.forward.qkv.gemm", 20, 90)
    w.kernel(GEMM, COMPUTE, 1000, 1100, 30)
    w.kernel("Memcpy PtoP (Device -> Device)", COMM, 1000, 1110, 40, "gpu_memcpy")
    w.kernel(RING, COMM, 1110, 1120, 50)
    w.kernel(GEMM, COMPUTE, 1120, 1220, 60)
    # proj: four pieces of 50 us, each reduce-scattered in 60 us by multiprocessors; the last one is exposed
    w.range("_Linear", 110, 300, "cpu_op")
    w.range("transformer_engine._Linear.forward.proj.gemm", 120, 290)
    for piece in range(4):
        w.kernel(GEMM, COMPUTE, 2000 + 50 * piece, 2050 + 50 * piece, 130 + 10 * piece)
        w.kernel(PIPELINE, COMM, 2050 + 60 * piece, 2110 + 60 * piece, 134 + 10 * piece)
    # backward of an MLP whose ranges say only the layer
    w.range("_LayerNormMLPBackward", 310, 400, "cpu_op")
    w.kernel(GEMM, COMPUTE, 3000, 3200, 320)
    # communication without a launch (a replayed graph), over qkv's second GEMM; and strangers
    w.kernel("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", 33, 1150, 1160, None)
    w.kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 33, 5000, 5040, 500)
    w.kernel("sm90_xmma_gemm_bf16bf16_bf16f32_tn_n", COMPUTE, 6000, 6070, 600)
    w.kernel("void at::native::vectorized_elementwise_kernel<4>", COMPUTE, 6100, 6130, 610)
    w.events.append({"ph": "s", "id": 1, "pid": 0, "tid": 7, "ts": 1000, "cat": "ac2g", "name": "ac2g"})
    w.events.append({"ph": "i", "name": "Iteration Start", "ts": 0, "s": "g", "pid": "Traces", "tid": "Trace"})
    return {
        "schemaVersion": 1,
        "distributedInfo": {"backend": "nccl", "rank": 1, "world_size": 2},
        "deviceProperties": [],
        "traceEvents": w.events,
        "traceName": "te_like.json",
    }


if __name__ == "__main__":
    PATH.parent.mkdir(parents=True, exist_ok=True)
    PATH.write_text(json.dumps(te_layer(), indent=0) + "\n")
