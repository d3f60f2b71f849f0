"""Probe processes that run each overlap method through the public names, against plain torch.

The one worker that imports tpoverlap: it asks the library itself, on one of its backends, after the other probes have
asked the machine.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

Emit = Callable[[str, dict[str, Any]], None]
Settings = dict[str, Any]

_CAPACITY, _WIDTH, _NUM_TOKENS = 64, 16, 37  # a T that no group size above 1 divides
_UB_CFGS = {
    "proj_fprop": {"method": "pipeline", "num_splits": 2},
    "qkv_fprop": {"method": "sequential"},
    "fc1_fprop": {"method": "ring_exchange"},
    "fc2_fprop": {"method": "ring_exchange"},
}


def run(settings: Settings, emit: Emit) -> None:
    """Run every method on ``settings["backend"]`` and ``settings["device"]``; one section a method that was right."""
    emit("step", {"name": "import tpoverlap"})
    import torch
    import torch.distributed as dist

    import tpoverlap as tpo

    rank, num_ranks = settings["rank"], settings["num_ranks"]
    device = torch.device("cpu")
    if settings["device"] == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    emit("step", {"name": "init_process_group"})
    store = torch._C._distributed_c10d.FileStore(f"{settings['scratch']}/store", num_ranks)
    dist.init_process_group(
        settings["process_group"],
        store=store,
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=settings["timeout_s"]),
    )
    emit("step", {"name": "UserBufferManager"})
    mgr = tpo.UserBufferManager(
        dist.group.WORLD,
        (_CAPACITY, _WIDTH),
        torch.float32,
        device,
        ub_cfgs=_UB_CFGS,
        backend=settings["backend"],
        timeout_s=settings["timeout_s"],
    )

    generator = torch.Generator().manual_seed(0)  # every rank makes the same full tensors

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device)

    x, weight = random(_NUM_TOKENS, _WIDTH), random(8, _WIDTH)
    partial = [random(_NUM_TOKENS, 8) for _ in range(num_ranks)]  # each rank's input features
    partial_weight = [random(_WIDTH, 8) for _ in range(num_ranks)]
    summands = [random(_NUM_TOKENS, _WIDTH) for _ in range(num_ranks)]

    with mgr.microbatch(_NUM_TOKENS) as partition:
        rows = partition.rows(rank)
        scattered = torch.stack([a @ b.T for a, b in zip(partial, partial_weight, strict=True)]).sum(0)[rows]

        def gather(name: str) -> None:
            result = tpo.all_gather_gemm(x[rows], weight, mgr.get(name))
            assert isinstance(result, torch.Tensor), "one weight gives one output"
            _require_close(torch, f"{name}: all_gather_gemm", result, x @ weight.T)

        def scatter(name: str) -> None:
            result = tpo.gemm_reduce_scatter(partial[rank], partial_weight[rank], mgr.get(name))
            _require_close(torch, f"{name}: gemm_reduce_scatter", result, scattered)

        def bulk_gather(name: str) -> None:
            gathered, product = tpo.bulk_all_gather(x[rows], mgr.get(name), gemm=(x, weight))
            _require_close(torch, "bulk_all_gather", gathered, x)
            _require_close(torch, "the GEMM beside bulk_all_gather", product, x @ weight.T)

        def bulk_scatter(name: str) -> None:
            summed, _ = tpo.bulk_reduce_scatter(summands[rank], mgr.get(name), gemm=(x, weight))
            _require_close(torch, "bulk_reduce_scatter", summed, torch.stack(summands).sum(0)[rows])

        # Sequential first: where it is wrong already, the fault is not in an overlap.
        methods: dict[str, dict[str, Callable[[str], None]]] = {
            "sequential": {"qkv_fprop": gather},
            "ring_exchange": {"fc1_fprop": gather, "fc2_fprop": scatter},
            "pipeline": {"proj_fprop": scatter},
            "bulk": {"qkv_dgrad": bulk_gather, "qkv_wgrad": bulk_scatter},
        }
        for method, operations in methods.items():
            emit("step", {"name": method})
            for name, operation in operations.items():
                operation(name)
                if not mgr.stats()[name].get(f"method_{method}"):
                    raise RuntimeError(f"{name} did not run as {method}: {mgr.stats()[name]}")
            mgr.check()
            emit(method, {"backend": mgr.backend_name})
    emit("step", {"name": "close"})
    mgr.close()


def _require_close(torch: Any, what: str, found: Any, expected: Any) -> None:
    if found.shape != expected.shape:
        raise RuntimeError(f"{what} returned {list(found.shape)}, expected {list(expected.shape)}")
    if not torch.allclose(found, expected, rtol=1e-4, atol=1e-4):
        raise RuntimeError(f"{what} is off by up to {(found - expected).abs().max().item():.3g}")
