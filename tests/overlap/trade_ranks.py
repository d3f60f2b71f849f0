"""Rank functions of `test_trade`: `sequential` whose exchange is one kernel, on a simulated device."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any
from unittest import mock

import torch

import tpoverlap as tpo
from tests.comm import operations as ops
from tests.comm.quick_ring_ranks import OTHER, TwoCallersBackend, TwoCallersDriver
from tests.overlap import fused_ranks
from tpoverlap import fused_form
from tpoverlap.comm import Trace, device_exchange, quick_operation, quick_trade
from tpoverlap.gemm import PartialGemm, RowGemm
from tpoverlap.manager import UserBufferManager
from tpoverlap.overlap import gather_beside, sequential
from tpoverlap.overlap.kernel_trader import KernelTrader
from tpoverlap.testing.conformance.setting import Setting
from tpoverlap.testing.simulated import CALLER, SimulatedBackend
from tpoverlap.tokens import TokenPartition

KINDS = ("sequential_ag", "sequential_rs")


class Traded:
    """How often each method of the trader was called, and how many operations `QuickTrade` did."""

    def __init__(self) -> None:
        self.calls = {"gather": 0, "add": 0}
        self.quick = 0


@contextmanager
def counted() -> Iterator[Traded]:
    """Within the block what kernels do is counted."""
    traded = Traded()

    def wrapped(name: str) -> Any:
        real = getattr(KernelTrader, name)

        def call(self: KernelTrader, *arguments: Any) -> None:
            traded.calls[name] += 1
            real(self, *arguments)

        return call

    def quick(name: str) -> Any:
        real = getattr(quick_trade.QuickTrade, name)

        def call(self: quick_trade.QuickTrade, *arguments: Any) -> bool:
            done = bool(real(self, *arguments))
            traded.quick += done
            return done

        return call

    with (
        mock.patch.multiple(KernelTrader, **{name: wrapped(name) for name in traded.calls}),
        mock.patch.multiple(quick_trade.QuickTrade, **{name: quick(name) for name in ("gather", "add")}),
    ):
        yield traded


def open_manager(timeout_s: float = 30.0, **options: Any) -> UserBufferManager:
    return ops.make_manager(SimulatedBackend, timeout_s, **options)  # type: ignore[arg-type]


def conform(rank: int, size: int, setting: Setting, partitions: Sequence[TokenPartition], terms: int = 1) -> bool:
    """Both directions, any dtype and width, against plain torch; whether kernels moved all rows."""
    with counted() as traded:
        plain = "sequential", True, terms, terms > 1
        compared = fused_ranks.gather(rank, size, setting, partitions, *plain)
        assert compared == terms * len(partitions)
        assert fused_ranks.scatter(rank, size, setting, partitions, *plain) == len(partitions)
    return traded.calls["gather"] == traded.calls["add"] == len(partitions)


def many(rank: int, size: int, setting: Setting, turns: int) -> bool:
    """Operations of both directions in a row, no look in between; whether all results were right, bit by bit."""
    with setting.open_manager(rank) as mgr, torch.no_grad():
        partition = TokenPartition.balanced(setting.capacity, size)
        own = partition.rows(rank)
        device = setting.rank_device(rank)
        gather = fused_ranks.context_of(mgr, partition, scatter=False, method="sequential")
        scatter = fused_ranks.context_of(mgr, partition, scatter=True, method="sequential")
        wrong = torch.zeros((), dtype=torch.int64, device=device)
        one = torch.eye(setting.hidden, dtype=setting.dtype, device=device)
        for turn in range(turns):
            whole = torch.full((setting.capacity, setting.hidden), float(turn % 64), dtype=setting.dtype, device=device)
            whole += torch.arange(setting.capacity, device=device)[:, None] % 32
            out = torch.empty_like(whole)
            sequential.all_gather(gather, whole[own], RowGemm([one], [None], [out]), None)
            wrong += (out != whole).sum()
            total = torch.empty_like(whole[own])
            sequential.reduce_scatter(scatter, PartialGemm([whole], [one]), total)
            wrong += (total != size * whole[own]).sum()
        mgr.check()
        return int(wrong) == 0


def _outcome(mgr: UserBufferManager, setting: Setting, rank: int, num_tokens: int, scatter: bool) -> str:
    """What one operation over ``num_tokens`` and a check give: "Error: message"; "": nothing is wrong."""
    partition = TokenPartition.balanced(num_tokens, mgr.tp_size)
    own = partition.counts[rank]
    context = fused_ranks.context_of(mgr, partition, scatter=scatter, method="sequential")
    x = setting.draw(rank, (num_tokens, setting.hidden), "x")
    weight = setting.draw(rank, (setting.hidden, setting.hidden), "w")
    try:
        if scatter:
            sequential.reduce_scatter(context, PartialGemm([x], [weight]), torch.empty_like(x[:own]))
        else:
            sequential.all_gather(context, x[:own], RowGemm([weight], [None], [torch.empty_like(x)]), None)
        deadline = time.monotonic() + 6.0
        while time.monotonic() < deadline:  # an abort word may come after this rank was through
            mgr.check()
            time.sleep(0.02)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def stays_away(rank: int, size: int, setting: Setting, scatter: bool) -> str:
    """Rank 1 takes no part in the second operation: what rank 0 gets."""
    mgr = setting.open_manager(rank)
    found, wanted = "", setting.capacity // 2
    first = fused_ranks.context_of(mgr, TokenPartition.balanced(wanted, size), scatter=False, method="sequential")
    x = setting.draw(rank, (first.partition.counts[rank], setting.hidden), "x")
    weight = setting.draw(rank, (setting.hidden, setting.hidden), "w")
    sequential.all_gather(first, x, RowGemm([weight], [None], [x.new_empty(wanted, setting.hidden)]), None)
    if rank == 0:
        started = time.monotonic()
        found = _outcome(mgr, setting, rank, wanted, scatter)
        took_s = time.monotonic() - started
        assert took_s < setting.timeout_s + 20, f"took {took_s:.1f} s"
    else:
        time.sleep(setting.timeout_s + 1.0)
    mgr.abort()
    return found


def another_t(rank: int, size: int, setting: Setting, scatter: bool) -> str:
    """The last rank's T is one more."""
    mgr = setting.open_manager(rank)
    found = _outcome(mgr, setting, rank, setting.capacity // 2 + (rank == size - 1), scatter)
    mgr.abort()
    return found


def odd_turns(rank: int, size: int, turns: int) -> dict[str, int]:
    """Held slots, flags that are refreshed all the time, ranks of different forms, a trace: results bit by bit."""
    with open_manager() as mgr, counted() as traded:
        assert mgr.channel is not None, "several ranks"
        with (
            mock.patch.object(device_exchange, "REFRESH_EVERY", 3),
            mock.patch.object(quick_operation, "REFRESH_EVERY", 3),
        ):
            for seed, partition in enumerate(ops.partitions(size, turns)):
                hook = (lambda *transfer: None) if seed % 3 == 1 and rank == 0 else None
                mgr.channel.before_copy = hook  # that rank takes the copy engine
                if seed % 3 == 2:
                    mgr.set_active_shape((partition.total, ops.WIDTH), partition)
                    held = mgr.get("plain_ag_fprop").get_buffer(local_chunk=True)
                    assert held.shape[0] == partition.counts[rank]
                for kind in KINDS:
                    ops.run_checked(mgr, kind, partition, seed)
        mgr.channel.before_copy = None
        trace = Trace(mgr.channel.device)
        mgr.channel.record(trace)
        ops.run_checked(mgr, "sequential_ag", partition, turns)
        mgr.channel.record(None)
        ops.run_checked(mgr, "sequential_ag", partition, turns + 1)
        mgr.check()
    return traded.calls


def strided_biases(rank: int, size: int, method: str) -> list[str]:
    """Biases whose elements do not follow one another, in both directions; with an all-reduce, too. What was wrong."""
    names = {"plain_ag_fprop": False, "plain_rs_fprop": True}
    config = {name: {"method": method, "is_reduce_scatter": scatter} for name, scatter in names.items()}
    partition, wrong = TokenPartition.balanced(20, size), []
    with open_manager(ub_cfgs=config) as mgr:
        for what, bias in (("every other", torch.arange(40.0)[::2]), ("one number", torch.ones(1).expand(20))):
            seen = {"gather": ops.run(mgr, "sequential_ag", partition, 1) + bias}
            x, weight = ops._x(partition, 1)[partition.rows(rank)], ops._w(rank, 1, ops.OUT)
            given = {"gather": tpo.all_gather_gemm(x, weight, mgr.layer("plain_ag"), bias, partition)}
            bias = bias[: ops.WIDTH]
            x, weight, layer = ops._inner(rank, partition, 1), ops._w2(rank, 1), mgr.layer("plain_rs", row=True)
            seen["scatter"] = ops.run(mgr, "sequential_rs", partition, 1) + bias
            given["scatter"] = tpo.gemm_reduce_scatter(x, weight, layer, bias, partition)
            linear = tpo.nn.Linear(
                ops.OUT * size, ops.WIDTH, manager=mgr, ub_name="plain_rs", parallel_mode="row", sequence_parallel=False
            )
            linear.load_state_dict({"weight": weight, "bias": bias}, assign=True)
            given["all-reduce"] = linear(x, partition=partition).detach()
            seen["all-reduce"] = sum(ops._inner(r, partition, 1) @ ops._w2(r, 1).t() for r in range(size)) + bias  # type: ignore[assignment]
            wrong += [f"{what}, {key}" for key in seen if not torch.equal(seen[key], given[key])]
        mgr.check()
    return wrong


def two_streams(rank: int, size: int, turns: int) -> tuple[dict[str, int], int]:
    """The same slots from two callers' streams in turn; the second number: operations in few calls."""
    with ops.make_manager(TwoCallersBackend, 30.0) as mgr, counted() as traded:  # type: ignore[arg-type]
        assert mgr.channel is not None, "several ranks"
        driver = mgr.channel.transport.driver
        assert isinstance(driver, TwoCallersDriver), "the backend's"
        for seed, partition in enumerate(ops.partitions(size, turns)):
            for number, kind in enumerate(KINDS):
                driver.current_handle = (CALLER, OTHER)[(seed // 3 + number) % 2]
                ops.run_checked(mgr, kind, partition, seed)
        mgr.check()
    return traded.calls, traded.quick


def raises_inside(rank: int, size: int, scatter: bool) -> str:
    """Rank 1's GEMM raises in the third operation: what each rank gets."""
    boom = mock.patch.object(RowGemm, "rows", _boom), mock.patch.object(PartialGemm, "rows", _boom)
    mgr, partition = open_manager(20.0), TokenPartition.balanced(30, size)
    for seed in range(2):
        ops.run_checked(mgr, KINDS[scatter], partition, seed)
    started = time.monotonic()
    with boom[scatter] if rank == 1 else nullcontext():
        with suppress(Exception):
            ops.run(mgr, KINDS[scatter], partition, 2)
        found = ""
        while not found and time.monotonic() < started + 8.0:
            try:
                mgr.check()
                time.sleep(0.02)
            except Exception as error:
                found = f"{type(error).__name__}: {error}"
    mgr.close()
    return found


def _boom(*arguments: Any) -> None:
    raise ValueError("something in the model")


def late(rank: int, size: int, turns: int) -> dict[str, int]:
    """Each rank in turn comes late to an operation, which then waits in its kernel."""
    with open_manager() as mgr, counted() as traded:
        for seed, partition in enumerate(ops.partitions(size, turns)):
            if rank == seed % size:
                time.sleep(0.05)
            for kind in KINDS:
                ops.run_checked(mgr, kind, partition, seed)
        mgr.check()
    return traded.calls


def small_numbers(rank: int, size: int) -> dict[str, int]:
    """What FP8 layers gather beside nothing: a float32 a rank, bytes of rows, in slots of odd sizes."""
    with open_manager(ub_cfgs={"qkv_fprop": {"method": "sequential"}}) as mgr, counted() as traded:
        for turn in range(3):
            for dtype, width in ((torch.float32, 1), (torch.uint8, 3), (torch.uint8, 16)):
                partition = TokenPartition.from_counts([2] * (size - 1) + [1])
                base = mgr.operation(mgr.get("qkv_fprop"), partition, scatter=False)
                context = base.variant(method="sequential", dtype=dtype, width=width, tag="/fp8-scales")
                whole = torch.arange(partition.total * width).add(turn).view(-1, width).to(dtype)
                found: list[torch.Tensor] = []
                read = partial(_keep, found)
                gather_beside(context, whole[partition.rows(rank)].contiguous(), lambda: None, read)
                assert torch.equal(found[0], whole), (dtype, width, found[0], whole)
        mgr.check()
    return traded.calls


def _keep(found: list[torch.Tensor], whole: torch.Tensor) -> None:
    found.append(whole.clone())


def explained(rank: int, size: int) -> tuple[str, str]:
    """What ``explain`` says about T = 2, and about T at capacity with a smaller limit."""
    with open_manager() as mgr:
        few = mgr.explain("plain_rs_fprop", 2)
        with mock.patch.object(fused_form, "MOST_TRADED_BYTES", 100):
            return few, mgr.explain("plain_rs_fprop", ops.CAPACITY)
