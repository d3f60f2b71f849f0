"""Rank functions of `test_tape_failures`: native calls that fail."""

from __future__ import annotations

import time
from contextlib import ExitStack, suppress
from typing import Any
from unittest import mock

import torch

import tpoverlap as tpo
from tests.comm import operations as ops
from tests.comm.quick_ring_ranks import cut_early
from tests.comm.rank_functions import Outcome, attempt
from tests.comm.taped import Refused, TapedBackend, TapedDriver, tapes_played
from tests.gemm.columns import Columns
from tpoverlap.tokens import TokenPartition

WIDTH, FEATURES, TOKENS = 16, 24, 32
KINDS = ("gather", "gather, read", "scatter", "cut scatter", "bulk gather", "bulk scatter")


class _Failing(Columns):
    """Products may fail, too."""

    driver: TapedDriver | None = None

    def multiply(self, *arguments: int) -> int:
        if self.driver is not None:
            try:
                self.driver.fail("multiply")
            except Refused as refused:
                return refused.status
        return super().multiply(*arguments)


def _operate(mgr: tpo.UserBufferManager, kind: str, partition: TokenPartition, seed: int) -> None:
    """One operation whose result is checked."""
    rank, size = mgr.rank, mgr.tp_size

    def make(number: int, *shape: int) -> torch.Tensor:
        return torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(100 * seed + number)).bfloat16()

    rows, x = partition.rows(rank), make(0, partition.total, WIDTH)
    if kind.startswith("gather"):
        w = make(1, FEATURES, WIDTH)
        found = tpo.all_gather_gemm(x[rows], w, mgr.layer("qkv"), partition=partition, return_gathered="read" in kind)
        y = found[0] if isinstance(found, tuple) else found
        assert torch.equal(y.float(), x.float() @ w.float().t()), kind
    elif "scatter" in kind and "bulk" not in kind:
        h = [make(10 + r, partition.total, FEATURES) for r in range(size)]
        w = [make(20 + r, WIDTH, FEATURES) for r in range(size)]
        y = tpo.gemm_reduce_scatter(h[rank], w[rank], mgr.layer("fc2", row=True), partition=partition)
        wanted = torch.stack([a.float() @ b.float().t() for a, b in zip(h, w, strict=True)]).sum(0)[rows]
        assert torch.equal(y.float(), wanted), kind
    elif kind == "bulk gather":
        whole, _ = tpo.bulk_all_gather(x[rows], mgr.get("qkv_dgrad"), (x, x), partition=partition)
        assert torch.equal(whole, x)
    else:
        sums = [make(30 + r, partition.total, WIDTH) for r in range(size)]
        y, _ = tpo.bulk_reduce_scatter(sums[rank], mgr.get("qkv_wgrad"), (x, x), partition=partition)
        assert torch.equal(y.float(), torch.stack([one.float() for one in sums]).sum(0)[rows])


def _manager(stack: ExitStack, kind: str, timeout_s: float) -> tuple[Any, TapedDriver, Any]:
    played = stack.enter_context(tapes_played(_Failing))
    stack.enter_context(mock.patch.object(ops, "WIDTH", WIDTH))
    if kind.startswith("cut"):
        stack.enter_context(cut_early())
    config = {"qkv_fprop": {"method": "ring_exchange"}, "fc2_fprop": {"method": "ring_exchange"}}
    mgr = tpo.UserBufferManager(
        None, (TOKENS, WIDTH), torch.bfloat16, "cpu", config, backend=TapedBackend, timeout_s=timeout_s
    )
    driver: Any = mgr.channel.transport.driver  # type: ignore[union-attr]
    return mgr, driver, played


class Position:
    """Raises in native call number ``at`` from now on; ``passed``: how many there were."""

    def __init__(self, at: int, status: int, times: int = 1) -> None:
        self.at, self.status, self.times, self.passed, self.names = at, status, times, 0, list[str]()

    def __call__(self, name: str) -> None:
        self.passed += 1
        if self.at < self.passed <= self.at + self.times:
            self.names.append(name)
            raise Refused(self.status)


def calls_of(rank: int, size: int, kind: str) -> list[str]:
    """The native calls of one operation that is played."""
    partition, names = TokenPartition.even(TOKENS, size), list[str]()
    with ExitStack() as stack, torch.no_grad():
        mgr, driver, played = _manager(stack, kind, 20.0)
        with mgr:
            for seed in range(6):
                _operate(mgr, kind, partition, seed)
            for library in played.products:
                library.driver = driver
            before = played.tapes
            driver.fail = names.append
            _operate(mgr, kind, partition, 6)
            assert played.tapes > before, "it was played"
    return names


def fails(rank: int, size: int, kind: str, positions: list[int], who: int) -> list[tuple[Outcome, Outcome, Outcome]]:
    """For each position: native call of that number of an operation of rank ``who`` fails. The operation, `check`, and
    `close` then.
    """
    return [_fails(rank, size, kind, at, who) for at in positions]


def _fails(rank: int, size: int, kind: str, at: int, who: int) -> tuple[Outcome, Outcome, Outcome]:
    partition = TokenPartition.even(TOKENS, size)
    with ExitStack() as stack, torch.no_grad():
        mgr, driver, played = _manager(stack, kind, 20.0)
        for seed in range(6):
            _operate(mgr, kind, partition, seed)
        for library in played.products:
            library.driver = driver
        position = Position(at if rank == who else 1 << 30, 700)
        driver.fail = position
        started, outcome = time.monotonic(), Outcome("", "", 0.0)
        with suppress(AssertionError):  # a peer's result may be garbage
            outcome = attempt(lambda: _operate(mgr, kind, partition, 6))
        assert rank != who or position.names, "there is no such call"
        check = attempt(mgr.check)
        while check.error == "ok" and time.monotonic() < started + 10.0:
            time.sleep(0.005)
            check = attempt(mgr.check)
        flights = mgr.channel.in_flight
        while flights.oldest() is not None and time.monotonic() < started + 10.0:
            time.sleep(0.005)
        assert flights.oldest() is None, "the host never learns that the device has left it"
        again = attempt(lambda: _operate(mgr, kind, partition, 7))
        assert again.error == check.error, f"later operations raise the same: {again}"
        check = check._replace(seconds=time.monotonic() - started)
        return outcome, check, attempt(mgr.close)


def goes_on(rank: int, size: int, kind: str, position: int) -> tuple[int, int]:
    """Native call number ``position`` of an operation finds no context once, on rank 0; the driver makes it and says
    so. How many tapes were played, and how often the driver was asked.
    """
    partition, asked = TokenPartition.even(TOKENS, size), list[int]()
    with ExitStack() as stack, torch.no_grad():
        real = TapedDriver._failed

        def failed(driver: TapedDriver, status: int, what: str) -> bool:
            asked.append(status)
            return status == 201 or real(driver, status, what)

        stack.enter_context(mock.patch.object(TapedDriver, "_failed", failed))
        mgr, driver, played = _manager(stack, kind, 20.0)
        with mgr:
            for seed in range(12):
                if seed > 6 and rank == 0:
                    driver.fail = Position(position, 201)
                _operate(mgr, kind, partition, seed)
            mgr.check()
    return played.tapes, len(asked)
