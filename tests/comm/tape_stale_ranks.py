"""Rank functions of `test_tape_stale`: what changes between operations that tapes were written for."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch

import tpoverlap as tpo
from tests.comm.quick_ring_ranks import OTHER, TwoCallersDriver
from tests.comm.tape_ranks import bits
from tests.comm.taped import Played, TapedBackend, TapedDriver, tapes_played
from tpoverlap.gemm import RowGemm
from tpoverlap.gemm.fp8 import QuantizedTensor, ScaledPartialGemm, ScaledRowGemm
from tpoverlap.overlap import registry, tapes
from tpoverlap.tokens import TokenPartition

WIDTH, FEATURES, CAPACITY = 16, 32, 48
BF16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
CONFIG = {"qkv_fprop": {"method": "ring_exchange"}, "fc2_fprop": {"method": "ring_exchange"}}


class _CallersDriver(TwoCallersDriver, TapedDriver):
    """Two callers' streams."""


class _CallersBackend(TapedBackend):
    def driver(self) -> TapedDriver:
        return _CallersDriver()


def _manager() -> tpo.UserBufferManager:
    return tpo.UserBufferManager(None, (CAPACITY, WIDTH), BF16, "cpu", CONFIG, backend=_CallersBackend, timeout_s=30.0)


def moved(tensor: torch.Tensor, by: int) -> torch.Tensor:
    """The same numbers, ``by`` bytes behind a multiple of 64."""
    memory = torch.zeros(tensor.numel() * tensor.element_size() + 128, dtype=torch.uint8)
    start = -memory.data_ptr() % 64 + by
    there = memory[start : start + tensor.numel() * tensor.element_size()].view(tensor.dtype).view(tensor.shape)
    there.copy_(tensor)
    return there


def _gather(mgr: Any, partition: TokenPartition, seed: int, change: Callable[[Any], Any] = lambda given: given) -> None:
    """One all-gather, its operands changed by ``change``; its result is checked."""
    given = {
        "x": bits(seed, partition.total, WIDTH)[partition.rows(mgr.rank)],
        "w": bits(seed + 1000 + mgr.rank, FEATURES, WIDTH),
        "b": None,
    }
    given = change(given)
    whole = bits(seed, partition.total, WIDTH)
    y = tpo.all_gather_gemm(given["x"], given["w"], mgr.layer("qkv"), given["b"], partition=partition)
    wanted = whole.float() @ given["w"].float().t() + (0 if given["b"] is None else given["b"].float())
    assert torch.equal(y.float(), wanted), f"gather, seed {seed}"


def _scatter(
    mgr: Any, partition: TokenPartition, seed: int, change: Callable[[Any], Any] = lambda given: given
) -> None:
    lefts = [bits(seed + r, partition.total, FEATURES) for r in range(mgr.tp_size)]
    weights = [bits(seed + 50 + r, WIDTH, FEATURES) for r in range(mgr.tp_size)]
    given = change({"x": lefts[mgr.rank], "w": weights[mgr.rank], "b": None})
    y = tpo.gemm_reduce_scatter(given["x"], given["w"], mgr.layer("fc2", row=True), given["b"], partition=partition)
    own = partition.rows(mgr.rank)
    wanted = torch.stack([a.float() @ w.float().t() for a, w in zip(lefts, weights, strict=True)]).sum(0)[own]
    assert torch.equal(y.float(), wanted + (0 if given["b"] is None else given["b"].float())), f"scatter, seed {seed}"


def changes(rank: int, size: int) -> dict[str, tuple[int, int]]:
    """For each change: tapes that its first gather and its first scatter played, after those of others were written."""

    def put(**changed: Callable[[torch.Tensor | None], torch.Tensor]) -> Callable[[Any], Any]:
        return lambda given: given | {name: make(given[name]) for name, make in changed.items()}

    def columns(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.t().contiguous().t()

    def pitched(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor, torch.full_like(tensor, 7)], 1)[:, : tensor.shape[1]]

    bias = {True: bits(7, FEATURES), False: bits(8, WIDTH)}
    found = {}
    even, other = TokenPartition.even(CAPACITY, size), TokenPartition.balanced(CAPACITY - 8, size)
    with tapes_played() as played, torch.no_grad(), _manager() as mgr:
        driver: Any = mgr.channel.transport.driver  # type: ignore[union-attr]
        for operate, gathers in ((_gather, True), (_scatter, False)):
            for seed in range(8):
                operate(mgr, even, seed)
            cases: dict[str, Callable[[int], None]] = {
                "nothing": lambda seed: operate(mgr, even, seed),  # noqa: B023
                "weights elsewhere": lambda seed: operate(mgr, even, seed, put(w=lambda w: moved(w, 16))),  # noqa: B023
                "a bias": lambda seed: operate(mgr, even, seed, put(b=lambda b: bias[gathers])),  # noqa: B023
                "weights of columns": lambda seed: operate(mgr, even, seed, put(w=columns)),  # noqa: B023
                "weights of a wider one": lambda seed: operate(mgr, even, seed, put(w=pitched)),  # noqa: B023
                "an unaligned x": lambda seed: operate(mgr, even, seed, put(x=lambda x: moved(x, 2))),  # noqa: B023
                "an unaligned weight": lambda seed: operate(mgr, even, seed, put(w=lambda w: moved(w, 8))),  # noqa: B023
                "an unaligned bias": lambda seed: operate(  # noqa: B023
                    mgr,
                    even,
                    seed,
                    put(b=lambda b: moved(bias[gathers], 2)),  # noqa: B023
                ),
                "another T": lambda seed: operate(mgr, other, seed),  # noqa: B023
                "nothing again": lambda seed: operate(mgr, even, seed),  # noqa: B023
            }
            for number, (what, case) in enumerate(cases.items()):
                before = played.tapes
                case(100 + number)
                found.setdefault(what, []).append(played.tapes > before)
            # On another stream everything is new; the first operation there is none of a few calls.
            driver.current_handle = OTHER
            before = played.tapes
            for seed in range(4):
                operate(mgr, even, 200 + seed)
            found.setdefault("another stream", []).append(played.tapes > before)
            driver.current_handle = 0
        if size > 1:
            with _manager() as second:  # whose slots lie elsewhere
                before = played.tapes
                for seed in range(4):
                    _gather(second, even, 300 + seed)
                found["another manager"] = [played.tapes > before] * 2
                for seed in range(6):
                    _gather(second, even, 310 + seed)
                    _gather(mgr, even, 310 + seed)
        mgr.check()
    return {what: (one, two) for what, (one, two) in found.items()}


def many_kinds(rank: int, size: int, kinds: int) -> tuple[int, int]:
    """Weights of many shapes, round and round: tapes played; the most that were kept for one plan at a time."""
    even, most = TokenPartition.even(8, size), 0
    made: list[tapes.Kinds] = []
    real = tapes.Kinds.__init__

    def init(self: tapes.Kinds, maker: tapes.TapeMaker) -> None:
        real(self, maker)
        made.append(self)

    with ExitStack() as stack:
        played: Played = stack.enter_context(tapes_played())
        stack.enter_context(mock.patch.object(tapes.Kinds, "__init__", init))
        stack.enter_context(mock.patch.object(tapes, "_MOST_KINDS", 6))
        stack.enter_context(mock.patch.object(tapes, "_MOST_SEEN", 9))
        stack.enter_context(torch.no_grad())
        mgr = stack.enter_context(_manager())
        for seed in range(12 * kinds):
            features = 8 * (1 + seed // 12)

            def narrower(given: Any, features: int = features) -> Any:
                return given | {"w": bits(seed, features, WIDTH)}  # noqa: B023

            _gather(mgr, even, seed, narrower)
            most = max([most, *[len(one._tapes) for one in made], *[len(one._seen) - 3 for one in made]])
        for seed in range(200):  # none often enough
            _gather(mgr, even, seed, lambda given: given | {"w": bits(seed, 8 + 8 * (seed % 30), WIDTH)})  # noqa: B023
            most = max([most, *[len(one._tapes) for one in made], *[len(one._seen) - 3 for one in made]])
        library = played.products[0]
        for one in made:
            one._tapes.clear()
        owned = [layout for layout in library.freed if layout >= 0]
        assert len(owned) > 3 * kinds, "layouts of tapes that are gone are freed"
    return played.tapes, most


def fp8(rank: int, size: int) -> dict[str, int]:
    """FP8 operands on tapes: how many each kind played; row-wise scales have none."""
    partition, found = TokenPartition.even(32, size), dict[str, int]()
    own = partition.rows(rank)

    def scale(value: float, rows: int = 1) -> torch.Tensor:
        return torch.full((rows, 1), value)

    def quantised(seed: int, rows: int, columns: int, value: float, by_row: bool = False) -> QuantizedTensor:
        return QuantizedTensor(bits(seed, rows, columns).to(E4M3), scale(value, rows if by_row else 1), BF16)

    with tapes_played() as played, torch.no_grad(), _manager() as mgr:
        for what in ("one", "biased", "several", "rowwise"):
            count, biased, by_row = (3 if what == "several" else 1), what == "biased", what == "rowwise"
            context = mgr.operation(mgr.get("qkv_fprop"), partition, scatter=False)
            context = context.variant(tag=f"/{what}", dtype=torch.uint8)
            before = played.tapes
            for turn in range(10):
                x8 = bits(turn, 32, WIDTH).to(E4M3)
                weights = [quantised(10 * turn + n, FEATURES, WIDTH, 0.5 + turn % 2, by_row) for n in range(count)]
                outs = [torch.full((32, FEATURES), 9.0, dtype=BF16) for _ in range(count)]
                biases = [bits(turn + 3, FEATURES) if biased else None for _ in range(count)]
                gemm = ScaledRowGemm(
                    weights=weights, biases=biases, outs=outs, x_scale=scale(2.0 + turn, 32 if by_row else 1),
                    x_format=E4M3,
                )  # fmt: skip
                registry.gather_then_gemm(context, x8[own].view(torch.uint8), gemm)
                for weight, out, bias in zip(weights, outs, biases, strict=True):
                    wanted = (2.0 + turn) * (0.5 + turn % 2) * (x8.float() @ weight.data.float().t())
                    wanted = wanted if bias is None else wanted + bias.float()
                    assert torch.equal(out, wanted.bfloat16()), f"gather, {what}, turn {turn}"
            found[f"gather {what}"] = played.tapes - before
            if what == "several":
                continue
            context = mgr.operation(mgr.get("fc2_fprop"), partition, scatter=True).variant(tag=f"/{what}")
            before = played.tapes
            for turn in range(10):
                lefts = [quantised(turn + r, 32, FEATURES, 0.5, by_row) for r in range(size)]
                weights = [quantised(turn + 40 + r, WIDTH, FEATURES, 2.0 + turn % 2, by_row) for r in range(size)]
                bias, out = (bits(turn, WIDTH) if biased else None), torch.empty(32 // size, WIDTH, dtype=BF16)
                registry.gemm_then_scatter(
                    context, ScaledPartialGemm(terms=[(lefts[rank], weights[rank])], bias=bias), out
                )
                pairs = zip(lefts, weights, strict=True)
                wanted = sum([a.data.float() @ w.data.float().t() for a, w in pairs], start=torch.zeros(()))
                wanted = 0.5 * (2.0 + turn % 2) * wanted[own] + (0 if bias is None else bias.float())
                assert torch.equal(out.float(), wanted), f"scatter, {what}, turn {turn}"
            found[f"scatter {what}"] = played.tapes - before
        mgr.check()
    return found


def many_matrices(rank: int, size: int) -> int:
    """More matrices than a tape has registers for; tapes played."""
    partition = TokenPartition.even(8, size)
    with tapes_played() as played, torch.no_grad(), _manager() as mgr:
        context = mgr.operation(mgr.get("qkv_fprop"), partition, scatter=False)
        for turn in range(6):
            x, weights = bits(turn, 8, WIDTH), [bits(turn + n, 8, WIDTH) for n in range(90)]
            outs = [torch.empty(8, 8, dtype=BF16) for _ in weights]
            gemm = RowGemm([weight.t() for weight in weights], [None] * 90, outs)
            registry.gather_then_gemm(context, x[partition.rows(rank)], gemm)
            for weight, out in zip(weights, outs, strict=True):
                assert torch.equal(out.float(), x.float() @ weight.float().t()), f"turn {turn}"
    return played.tapes
