import os, sys; sys.path.insert(0, os.getcwd())
import torch, cProfile, pstats, io, time
import tpoverlap as tpo
from tpoverlap.testing import run_ranks
def prof(rank, size):
    dev = torch.device("cuda", rank % torch.cuda.device_count()); torch.cuda.set_device(dev)
    C, H = 4096, 512
    mgr = tpo.UserBufferManager(None, (C, H), device=dev)
    w = torch.randn(256, H, device=dev, dtype=torch.bfloat16); w2 = torch.randn(H, 256, device=dev, dtype=torch.bfloat16)
    x = torch.randn(1024, H, device=dev, dtype=torch.bfloat16)
    out = ""
    with torch.no_grad():
        y = tpo.all_gather_gemm(x, w, mgr.layer("qkv"))
        for name, one in (("AG", lambda: tpo.all_gather_gemm(x, w, mgr.layer("qkv"))), ("RS", lambda: tpo.gemm_reduce_scatter(y, w2, mgr.layer("proj")))):
            for _ in range(20): one()
            mgr.check()
            ts=[]
            for _ in range(30):
                t=time.perf_counter(); one(); ts.append(time.perf_counter()-t); mgr.check()
            ts.sort(); out += f"{name} median host {ts[15]*1e6:.0f} us\n"
            pr = cProfile.Profile()
            for _ in range(30):
                pr.enable(); one(); pr.disable(); mgr.check()
            st = io.StringIO(); pstats.Stats(pr, stream=st).sort_stats("tottime").print_stats(22)
            out += "\n".join(l[:110] for l in st.getvalue().splitlines()[6:])
    mgr.close()
    return out
if __name__ == "__main__":
    print(run_ranks(prof, 2, device="cuda", timeout_s=60)[0])
