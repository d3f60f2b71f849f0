"""Temporary: correctness of fused on a shared GPU, then kernel times."""
import json
import os
import statistics
import sys
import time
import traceback

import torch

from tests.overlap import fused_ranks as f
from tpoverlap.testing import RankPool
from tpoverlap.testing.conformance.setting import Setting

OUT = os.environ.get("OUT", "/tmp")
BUDGET = float(sys.argv[1]) if len(sys.argv) > 1 else 60
START = time.time()

def left(): return BUDGET - (time.time() - START)

def correctness():
    for size in (2, 4):
        with RankPool(size, device="cuda") as pool:
            for dt in (torch.bfloat16, torch.float16, torch.float32):
                for dims in (dict(capacity=260, hidden=24, features=20), dict(capacity=1030, hidden=256, features=320)):
                    S = Setting(device="cuda", dtype=dt, **dims)
                    parts = S.partitions(size)
                    runs = [(f.gather, S, parts, "fused", True, 2, False), (f.scatter, S, parts)]
                    if size == 2:
                        runs += [(f.gather, S, parts[::2], "fused", True, 1, True, 0.001), (f.scatter, S, parts[::2], "fused", True, 3, True),
                                 (f.gather, S, parts[::3], "ring_exchange", False), (f.scatter, S, parts[::3], "fused", False),
                                 (f.gather, S, parts[::3], "fused", False), (f.bulk_by_programs, S, parts[::3])]
                    if size == 4 and dt == torch.float16: continue
                    for args in runs:
                        if left() < 0: print("out of time", flush=True); return
                        t = time.time()
                        try:
                            r = pool.run(*args, timeout_s=40); ok = f"ok {r[0]}"
                        except Exception as e:
                            ok = "FAIL " + str(e)[-1500:]
                        print(size, dt, dims["hidden"], args[0].__name__, args[3:], ok, f"{time.time()-t:.1f}s", flush=True)

def bench():
    from tpoverlap.gemm import PartialGemm
    from tpoverlap.gemm.triton import PieceRows, RowBlock
    from tpoverlap.gemm.triton.launcher import Gate, GemmLauncher, Received
    from tpoverlap.gemm.triton.tiles import TileShape
    d = torch.device("cuda", 0)
    L0 = GemmLauncher(d, 5.0)
    flags = torch.full((256,), 5, dtype=torch.int32, device=d)
    counters = torch.zeros(256, dtype=torch.int32, device=d)
    tiles = {"auto": None, "128x256s3w8": TileShape(128,256,64,3,8), "256x128s3w8": TileShape(256,128,64,3,8), "128x128s4w4": TileShape(128,128,64,4,4), "128x128s4w8": TileShape(128,128,64,4,8),
             "64x256s4w4": TileShape(64,256,64,4,4), "64x128s5w4": TileShape(64,128,64,5,4), "64x64d128s4w4": TileShape(64,64,128,4,4)}
    res = []
    for T, K, N in ((8192,8192,8192),(4096,8192,4096),(8192,8192,1280),(2048,8192,4096),(1024,8192,4096),(512,8192,4096),(256,8192,4096),(128,8192,4096)):
        if left() < 0: break
        x = torch.randn(T, K, device=d, dtype=torch.bfloat16); w = torch.randn(N, K, device=d, dtype=torch.bfloat16)
        out = torch.empty(T, N, device=d, dtype=torch.bfloat16); h = T // 2
        own = RowBlock(0, h); blocks = (RowBlock(h, T, (PieceRows(64, h, T),)),)
        recv = torch.randn(1, h, N, device=d, dtype=torch.bfloat16); outh = torch.empty(h, N, device=d, dtype=torch.bfloat16)
        gemm = PartialGemm([x], [w.t()])
        fns = {"mm": lambda: torch.mm(x, w.t(), out=out)}
        ls = {}
        for name, tile in tiles.items():
            if name != "auto" and ((T >= 4096 and name.startswith("64")) or (T < 4096 and T*0 + 0)): continue
            L = GemmLauncher(d, 5.0, tile=tile) ; ls[name] = L
            fns["ag " + name] = lambda L=L: L.gathered_rows(x[:h], own, x, blocks, w.t(), None, out, Gate(flags.data_ptr(), 5))
            if name in ("auto",):
                fns["rs1 " + name] = lambda L=L: L.partial_rows(gemm, blocks, out, counters)
                fns["rs2 " + name] = lambda L=L: L.own_rows(gemm, own, outh, Received(recv.data_ptr(), 0, 2))
                fns["mm half"] = lambda: torch.mm(x[:h], w.t(), out=outh)
                fns["addmm half"] = lambda: torch.addmm(recv[0], x[:h], w.t(), out=outh)
        row = {"shape": (T, K, N), "auto": str(ls["auto"].tile_for((h, h), N, x.dtype)), "half": str(ls["auto"].tile_for((h,), N, x.dtype))}
        ok = {}
        for name in list(fns):
            try:
                fns[name](); torch.cuda.synchronize()
            except Exception as e:
                print(T, K, N, name, "FAIL", repr(e)[:300], flush=True); del fns[name]
        fns["mm"](); ref = out.clone(); fns["ag auto"](); torch.cuda.synchronize()
        row["ag maxdiff"] = (out.float() - ref.float()).abs().max().item()
        times = {n: [] for n in fns}; reps = 4 if T >= 4096 else 20
        for rnd in range(7):
            for n, fn in fns.items():
                torch.cuda._sleep(400000 if T < 4096 else 100000)
                a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                a.record()
                for _ in range(reps): fn()
                b.record(); torch.cuda.synchronize()
                times[n].append(a.elapsed_time(b) / reps * 1e3)
        row["us"] = {n: round(statistics.median(v), 1) for n, v in times.items()}
        t = time.perf_counter()
        if T <= 512:
            for _ in range(50): fns["ag auto"]()
            row["host_us"] = round((time.perf_counter() - t) / 50 * 1e6, 1); torch.cuda.synchronize()
        print(json.dumps(row), flush=True); res.append(row)
    json.dump(res, open(OUT + "/fused_bench.json", "w"))

if __name__ == "__main__":
    for part in (bench, correctness) if len(sys.argv) > 2 else (correctness, bench):
        try: part()
        except Exception: traceback.print_exc()
        print(part.__name__, "done at", round(time.time() - START, 1), flush=True)
