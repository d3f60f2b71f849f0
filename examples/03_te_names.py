"""Transformer Engine's names on tpoverlap's engine: initialise at capacity, then set the active shape.

    python examples/03_te_names.py
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 examples/03_te_names.py

For code that calls the userbuffer functions itself. Transformer Engine's own layers keep its own buffers.
"""

from __future__ import annotations

import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import tpoverlap as tpo
from tpoverlap import te

CAPACITY, HIDDEN, FFN = 128, 32, 96
UB_CFGS = {
    "fc1_fprop": {"method": "ring_exchange"},
    "fc2_fprop": {"method": "pipeline", "num_splits": 2},
}


def run(rank: int, world_size: int, rendezvous: str | None) -> None:
    use_cuda = torch.cuda.device_count() >= world_size
    device = torch.device("cuda", rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if use_cuda else "gloo", init_method=rendezvous, rank=rank, world_size=world_size
    )

    te.initialize_ub([CAPACITY, HIDDEN], world_size, dtype=torch.float32, ub_cfgs=UB_CFGS, device=device)
    assert te.is_ub_initialized()
    generator = torch.Generator().manual_seed(0)  # the same full tensors on every rank
    full_w1 = torch.randn(FFN, HIDDEN, generator=generator).to(device)
    full_w2 = torch.randn(HIDDEN, FFN, generator=generator).to(device)
    w1, w2 = full_w1.chunk(world_size, dim=0)[rank], full_w2.chunk(world_size, dim=1)[rank].contiguous()

    for num_tokens in (128, 50, 1, 77):  # any T up to the capacity, divisible by the ranks or not
        te.set_ub_active_shape([num_tokens, HIDDEN])
        x = torch.randn(num_tokens, HIDDEN, generator=generator).to(device)
        rows = tpo.TokenPartition.balanced(num_tokens, world_size).rows(rank)

        gather, scatter = te.get_ub("fc1_fprop", use_fp8=False), te.get_ub("fc2_fprop", use_fp8=False)
        assert tuple(gather.get_buffer_active_shape()) == (num_tokens, HIDDEN)
        assert tuple(gather.get_buffer_capacity_shape()) == (CAPACITY, HIDDEN)
        hidden = tpo.all_gather_gemm(x[rows], w1, gather)  # [T_r, H] -> [T, FFN/R]
        y_shard_t = tpo.gemm_reduce_scatter(hidden, w2, scatter)  # [T, FFN/R] -> [T_r, H]

        expected = (x @ full_w1.T @ full_w2.T)[rows]
        worst = (y_shard_t - expected).abs().max().item() if y_shard_t.numel() else 0.0
        scale = (x @ full_w1.T @ full_w2.T).abs().max().item()
        print(f"rank {rank}  T = {num_tokens:3d}  own rows {y_shard_t.shape[0]:2d}  largest difference {worst:.1e}")
        assert y_shard_t.shape == expected.shape and worst <= 1e-4 * scale

    te.destroy_ub()
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:  # torchrun
        run(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), None)
    else:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(run, args=(2, f"file://{folder}/rendezvous"), nprocs=2)
