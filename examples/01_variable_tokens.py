"""A plain training loop whose token count changes every step: nothing is padded, nothing is set up again.

    python examples/01_variable_tokens.py                                         # starts two ranks itself
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 examples/01_variable_tokens.py  # or any number of ranks

The ranks share each microbatch: rank r holds T_r of its T rows (sequence parallel) and 1/R of the MLP's weights (tensor
parallel). fc1 gathers the rows while it multiplies, fc2 scatters the sums while it multiplies. What is replicated
(embedding, norm, head, the bias of fc2) sees only its rank's rows: hence `sync_replicated_grads` in the loop.
"""

from __future__ import annotations

import os
import random
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn

import tpoverlap as tpo

CAPACITY, HIDDEN, FFN, VOCAB = 256, 64, 240, 97  # at most CAPACITY tokens in a microbatch, ever
NUM_STEPS = 30


class Model(nn.Module):
    """Embedding, one MLP block over tensor-parallel ranks, head. All inputs and outputs are this rank's rows."""

    def __init__(self, mgr: tpo.UserBufferManager, device: torch.device) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN, device=device)
        self.norm = nn.RMSNorm(HIDDEN, device=device)
        kwargs = {"manager": mgr, "device": device, "dtype": torch.float32}
        self.fc1 = tpo.nn.Linear(HIDDEN, FFN, parallel_mode="column", ub_name="fc1", **kwargs)
        self.fc2 = tpo.nn.Linear(FFN, HIDDEN, parallel_mode="row", ub_name="fc2", **kwargs)
        self.head = nn.Linear(HIDDEN, VOCAB, device=device)
        for module in (self.embedding, self.norm, self.head):
            for parameter in module.parameters():
                parameter.sequence_parallel = True  # replicated; sync_replicated_grads adds up what the ranks saw

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)  # [T_r, H]
        x = x + self.fc2(F.gelu(self.fc1(self.norm(x))))  # [T_r, H] -> [T, FFN/R] -> [T_r, H]
        return self.head(x)  # [T_r, VOCAB]


def packed_microbatch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A few sequences of random lengths end to end, and the token that follows each. The same on every rank."""
    lengths = random.Random(step).choices(range(1, 60), k=4)
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCAB, (sum(lengths),), generator=generator)
    return tokens, (5 * tokens + 3) % VOCAB


def train(rank: int, world_size: int, rendezvous: str | None) -> None:
    use_cuda = torch.cuda.device_count() >= world_size
    device = torch.device("cuda", rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if use_cuda else "gloo", init_method=rendezvous, rank=rank, world_size=world_size
    )
    group = dist.group.WORLD

    with tpo.UserBufferManager(group, capacity_shape=(CAPACITY, HIDDEN), dtype=torch.float32, device=device) as mgr:
        torch.manual_seed(1)
        model = Model(mgr, device)
        with torch.no_grad():  # the same full weights on every rank, of which each keeps its slice
            full_fc1, full_fc2 = nn.Linear(HIDDEN, FFN), nn.Linear(FFN, HIDDEN)
            model.fc1.weight.copy_(full_fc1.weight.chunk(world_size, dim=0)[rank])
            model.fc1.bias.copy_(full_fc1.bias.chunk(world_size)[rank])
            model.fc2.weight.copy_(full_fc2.weight.chunk(world_size, dim=1)[rank])
            model.fc2.bias.copy_(full_fc2.bias)
        for parameter in model.parameters():
            if getattr(parameter, "sequence_parallel", False):
                dist.broadcast(parameter.data, src=0)  # replicas start equal
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

        first = last = 0.0
        for step in range(NUM_STEPS):
            tokens, targets = (tensor.to(device) for tensor in packed_microbatch(step))
            num_tokens = tokens.numel()  # T, a host integer: never read from the device
            with mgr.microbatch(num_tokens) as partition:
                counts = partition.counts  # balanced: the first T mod R ranks own one row more
                rows = partition.rows(rank)
                logits = model(tokens[rows])
            # A sum over own rows, divided by the T of all ranks: the ranks' losses and gradients then add up.
            loss = F.cross_entropy(logits, targets[rows], reduction="sum") / num_tokens
            loss.backward()
            tpo.sync_replicated_grads(model, group)
            mgr.check()  # waits for the device; an error of an overlapped operation is raised here, before it is learnt
            optimizer.step()
            optimizer.zero_grad()

            total = loss.detach().clone()
            dist.all_reduce(total)
            first, last = (total.item() if step == 0 else first), total.item()
            if rank == 0:
                print(f"step {step:2d}  T = {num_tokens:3d}  rows of each rank {counts}  loss {last:.4f}")
        if rank == 0:
            print(mgr.explain("fc1_fprop", num_tokens))
    dist.destroy_process_group()
    assert last < first, f"the loss did not fall: {first:.4f} -> {last:.4f}"


if __name__ == "__main__":
    if "RANK" in os.environ:  # torchrun
        train(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), None)
    else:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(train, args=(2, f"file://{folder}/rendezvous"), nprocs=2)
