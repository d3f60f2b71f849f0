"""Rank functions of `test_tapes`."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch

import tpoverlap as tpo
from tests.comm import operations as ops
from tests.comm.quick_ring_ranks import cut_early
from tests.comm.taped import TapedBackend, tapes_played
from tpoverlap.native import Tape
from tpoverlap.tokens import TokenPartition

WIDTH, OUT, CAPACITY = 16, 24, 64
RING = {"qkv_fprop": {"method": "ring_exchange"}, "fc2_fprop": {"method": "ring_exchange"}}


def bits(seed: int, *shape: int, device: str = "cpu") -> torch.Tensor:
    """-1, 0 or 1: sums of a few hundred products are exact in bfloat16's eight bits only while they are small."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, 2, shape, generator=generator).bfloat16().to(device)


def _close(actual: torch.Tensor | None, wanted: torch.Tensor, what: str) -> None:
    assert actual is not None and actual.shape == wanted.shape, what
    wanted = wanted.bfloat16()
    assert torch.equal(actual, wanted), f"{what}: off by {(actual.float() - wanted.float()).abs().max()}"


def train(rank: int, size: int, turns: int, pieces: bool, biased: bool) -> tuple[int, int]:
    """Forward and backward of two layers, T after T, each several times; tapes played, and operations."""
    cut = cut_early() if pieces else nullcontext()
    with tapes_played() as played, cut, mock.patch.object(ops, "WIDTH", WIDTH):
        with tpo.UserBufferManager(
            None, (CAPACITY, WIDTH), torch.bfloat16, "cpu", RING, backend=TapedBackend, timeout_s=30.0,
            max_rows_per_rank=CAPACITY,
        ) as mgr:  # fmt: skip
            _train(mgr, turns, (CAPACITY, 17, size - 1, 40), OUT, biased)
        return played.tapes, 4 * turns


def train_on_gpus(
    rank: int, size: int, config: dict[str, Any], turns: int, tokens: tuple[int, ...], biased: bool
) -> int:
    """The same on a device, with larger layers; tapes played."""
    played, real = [0], Tape.play

    def play(tape: Tape, *registers: int) -> None:
        played[0] += 1
        real(tape, *registers)

    capacity = max(tokens)
    with (
        mock.patch.object(Tape, "play", play),
        tpo.UserBufferManager(
            None, (capacity, 256), torch.bfloat16, "cuda", config, timeout_s=30.0, max_rows_per_rank=capacity
        ) as mgr,
    ):
        _train(mgr, turns, tokens, 320, biased)
    return played[0]


def _train(mgr: tpo.UserBufferManager, turns: int, tokens: tuple[int, ...], features: int, biased: bool) -> None:
    ts = [TokenPartition.balanced(t, mgr.tp_size) for t in tokens]
    ts.append(TokenPartition.from_counts([0, *[9] * (mgr.tp_size - 1)]))
    for turn in range(turns):
        _one(mgr, ts[turn % len(ts)], turn, features, biased)
    mgr.check()


def _one(mgr: tpo.UserBufferManager, partition: TokenPartition, seed: int, features: int, biased: bool) -> None:
    rank, size, width, device = mgr.rank, mgr.tp_size, mgr.get("qkv_fprop").width, str(mgr.device)
    rows, total, ranks = partition.rows(mgr.rank), partition.total, range(mgr.tp_size)

    def make(number: int, *shape: int) -> torch.Tensor:
        return bits(100 * seed + number, *shape, device=device)

    x, dy, end = make(0, total, width), make(1, total, width), make(2, width)
    up, down = [make(10 + r, features, width) for r in ranks], [make(20 + r, width, features) for r in ranks]
    biases, inner = [make(30 + r, features) for r in ranks], [make(40 + r, total, features) for r in ranks]
    upper = [make(50 + r, total, features) for r in ranks]
    shard, h = x[rows].clone().requires_grad_(), inner[rank].clone().requires_grad_()
    w1, w2 = up[rank].clone().requires_grad_(), down[rank].clone().requires_grad_()
    b1, b2 = (biases[rank], end) if biased else (None, None)

    hidden = tpo.all_gather_gemm(shard, w1, mgr.layer("qkv"), b1, partition=partition)
    _close(hidden, x.float() @ up[rank].float().t() + (biases[rank].float() if biased else 0), f"AG T={total}")
    y = tpo.gemm_reduce_scatter(h, w2, mgr.layer("fc2", row=True), b2, partition=partition)
    summed = torch.stack([inner[r].float() @ down[r].float().t() for r in range(size)]).sum(0)[rows]
    _close(y, summed + (end.float() if biased else 0), f"RS T={total}")
    y.backward(dy[rows])
    _close(h.grad, dy.float() @ down[rank].float(), f"dgrad T={total}")
    _close(w2.grad, dy.float().t() @ inner[rank].float(), f"wgrad T={total}")
    hidden.backward(upper[rank])
    dx = torch.stack([upper[r].float() @ up[r].float() for r in range(size)]).sum(0)[rows]
    _close(shard.grad, dx, f"dx T={total}")
    _close(w1.grad, upper[rank].float().t() @ x.float(), f"dw T={total}")


def repeats(rank: int, size: int, config: dict[str, Any], turns: int, tokens: tuple[int, ...], fp8: bool) -> int:
    """Layers give the same bits from a tape as without one; tapes played."""
    played, real = [0], Tape.play

    def play(tape: Tape, *registers: int) -> None:
        played[0] += 1
        real(tape, *registers)

    recipe = tpo.Float8CurrentScaling() if fp8 else None
    with (
        mock.patch.object(Tape, "play", play),
        tpo.UserBufferManager(
            None,
            (max(tokens), 256),
            torch.bfloat16,
            "cuda",
            config,
            timeout_s=30.0,
            max_rows_per_rank=max(tokens),
            quantization_modes=["none", "fp8"],
        ) as mgr,
    ):
        torch.manual_seed(7 + rank)
        up = tpo.nn.Linear(256, 320 * size, parallel_mode="column", manager=mgr, ub_name="qkv", fp8_recipe=recipe)
        down = tpo.nn.Linear(320 * size, 256, parallel_mode="row", manager=mgr, ub_name="fc2", fp8_recipe=recipe)
        first: dict[int, list[torch.Tensor]] = {}
        for turn in range(turns):
            total = tokens[turn % len(tokens)]
            partition = TokenPartition.balanced(total, size)
            x = torch.randn(total, 256, generator=torch.Generator().manual_seed(total)).bfloat16().cuda()
            shard = x[partition.rows(rank)].clone().requires_grad_()
            with mgr.microbatch(partition=partition):
                y = down(up(shard))
                y.float().pow(2).sum().backward()
            found = [y.detach(), shard.grad, up.weight.grad, down.weight.grad]
            up.weight.grad = down.weight.grad = None
            for number, (one, wanted) in enumerate(zip(found, first.setdefault(total, found), strict=True)):
                assert one is not None and torch.equal(one, wanted), f"T={total}, turn {turn}, result {number}"
        mgr.check()
    return played[0]
