"""Rank functions of `test_tape_blocks`: what kernels are given by a tape, beside what they are given without one."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch

import tpoverlap as tpo
from tests.comm.taped import NullTapedBackend, NullTapedDriver, Played, tapes_played
from tests.costs.null_kernels import NullKernelDriver, no_compiler
from tests.overlap.fused_ranks import context_of, forced_form
from tpoverlap.comm.epochs import MASK
from tpoverlap.gemm import PartialGemm, RowGemm
from tpoverlap.gemm.triton.kernel_driver import LaunchConfig
from tpoverlap.gemm.triton.launcher import GemmLauncher
from tpoverlap.gemm.triton.prepared import PackedLaunch
from tpoverlap.gemm.triton.trade_launcher import CHANGING, PackedTrade, TradeLauncher
from tpoverlap.memory.layout import DESCRIPTOR_BYTES, DESCRIPTOR_RING
from tpoverlap.overlap import fused, fused_launch, kernel_trader, registry, sequential
from tpoverlap.tokens import TokenPartition

TOKENS, WIDTH, OUT, TURNS = 64, 32, 48, 3
HALF = torch.float16
Start = tuple[Any, ...]


@contextmanager
def _device(kernels: NullKernelDriver) -> Iterator[tuple[tpo.UserBufferManager, Played]]:
    names = {name: {"method": "sequential"} for name in ("fc1_fprop", "fc1_dgrad", "fc2_fprop")}
    with ExitStack() as stack:
        for owner, name, made in (
            (fused, "GemmLauncher", partial(GemmLauncher, driver=kernels)),
            (fused, "require_kernels", lambda *given: None),
            (kernel_trader, "TradeLauncher", partial(TradeLauncher, driver=kernels)),
            (kernel_trader, "kernels_missing", lambda device: None),
        ):
            stack.enter_context(mock.patch.object(owner, name, made))
        played = stack.enter_context(tapes_played())
        stack.enter_context(no_compiler())
        options: dict[str, Any] = {"backend": NullTapedBackend, "timeout_s": 30.0, "max_rows_per_rank": TOKENS}
        mgr = stack.enter_context(tpo.UserBufferManager(None, (TOKENS, WIDTH), HALF, "cpu", names, **options))
        driver: Any = mgr.channel.transport.driver  # type: ignore[union-attr]
        assert isinstance(driver, NullTapedDriver), "the backend's"
        driver.start = kernels._start
        yield mgr, played


def _flight(mgr: tpo.UserBufferManager) -> Any:
    """The descriptor of the operation that started last."""
    return list(mgr.channel.in_flight._flights)[-1].descriptor  # type: ignore[union-attr]


def _epoch(mgr: tpo.UserBufferManager, region: str) -> int:
    return mgr.channel.regions[region].uses  # type: ignore[union-attr]


# -- the launches of `fused` ----------------------------------------------------------------------------------------


def fused_blocks(rank: int, size: int, num_weights: int, counts: tuple[int, ...]) -> tuple[list[str], int]:
    """Of `fused` in one launch: where blocks of parameters differ, and how many tapes were played.

    The operands of three turns take turns; their weights have the same shape.
    """
    partition, rows = TokenPartition.from_counts(counts), counts[rank]
    kernels = NullKernelDriver()
    launched: dict[int, PackedLaunch] = {}
    starts: list[Start] = []
    mgr: tpo.UserBufferManager
    region = ""

    def seen(grid: int, parameters: int) -> None:
        found = launched[parameters]
        block = bytearray(found._block)
        (epoch,) = struct.unpack_from("<I", block, found._epoch_at)
        assert epoch == _epoch(mgr, region) & MASK, "the operation's epoch"
        block[found._epoch_at : found._epoch_at + 4] = bytes(4)
        starts.append((id(found), grid, bytes(block)))

    real = PackedLaunch.__init__

    def init(launch: PackedLaunch, *arguments: Any, **options: Any) -> None:
        real(launch, *arguments, **options)
        launched[launch._parameters_at] = launch

    def new(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=HALF)

    weights = [[new(OUT, WIDTH) for _ in range(num_weights)] for _ in range(TURNS)]
    outs = [[new(partition.total, OUT) for _ in range(num_weights)] for _ in range(TURNS)]
    gathers = [
        (new(rows, WIDTH), RowGemm([one.t() for one in weights[n]], [None] * num_weights, outs[n]))
        for n in range(TURNS)
    ]
    scatters = [
        (PartialGemm([new(partition.total, OUT)], [new(WIDTH, OUT).t()], None, new(WIDTH)), new(rows, WIDTH))
        for _ in range(TURNS)
    ]
    wrong = []
    with (
        mock.patch.object(PackedLaunch, "__init__", init),
        _device(kernels) as (mgr, played),
        forced_form("one_launch"),
    ):
        kernels.seen = seen
        for scatter in (False, True):
            context = context_of(mgr, partition, scatter=scatter)
            region = context.region

            def operate(turn: int, context: Any = context, scatter: bool = scatter) -> list[Start]:
                starts.clear()
                if scatter:
                    fused.reduce_scatter(context, *scatters[turn % TURNS])
                else:
                    fused.all_gather(context, *gathers[turn % TURNS], None)
                return list(starts)

            with mock.patch.object(fused_launch, "_play", lambda *given: False):
                direct = [operate(turn) for turn in range(2 * TURNS)]
            for turn in range(2 * TURNS * 4):
                found, wanted = operate(turn), direct[turn % (2 * TURNS)]
                if found != wanted:
                    same = [one == other for one, other in zip(found, wanted, strict=True)]
                    wrong.append(f"scatter {scatter}, turn {turn}: {same}")
    return wrong, played.tapes


# -- the exchange kernels of `sequential` -----------------------------------------------------------------------------


KINDS = ("gather", "gather, read", "open", "scatter", "scatter, bias", "only scatter")


def trade_blocks(rank: int, size: int, counts: tuple[int, ...]) -> tuple[list[str], dict[str, int]]:
    """Of `sequential` with its kernels: where blocks of parameters differ, and how many tapes each kind played."""
    partition, rows, total = TokenPartition.from_counts(counts), counts[rank], sum(counts)
    kernels = NullKernelDriver()
    launched: dict[int, tuple[PackedTrade, str, int]] = {}
    starts: list[Start] = []
    real = PackedTrade.__init__

    def init(trade: PackedTrade, driver: Any, kernel: Any, *arguments: Any, **options: Any) -> None:
        real(trade, driver, kernel, *arguments, **options)
        launched[trade._parameters_at] = trade, kernel.name, len(kernel.arguments)

    def seen(grid: int, parameters: int) -> None:
        trade, name, count = launched[parameters]
        addresses = (ctypes.c_uint64 * count).from_address(parameters)
        block = [ctypes.c_uint64.from_address(address).value for address in addresses]
        changing, descriptor = block[: CHANGING[name]], _flight(mgr)
        entry = descriptor.sequence % DESCRIPTOR_RING * DESCRIPTOR_BYTES
        of_use = [_epoch(mgr, region) & MASK, descriptor.record, descriptor.digest, entry]
        first = 1 if name == "trade_gather" else 3
        assert changing[first : first + 4] == of_use, f"{changing} instead of {of_use}"
        if name == "trade_scatter":
            signals = mgr.channel.transport.signals  # type: ignore[union-attr]
            number = signals._done
            where = signals._done_words.address + 4 * (number % 4096)
            assert changing[7:] == [where, number & MASK, 1], f"{changing[7:]}: the host's word"
        stream = LaunchConfig.from_address(trade._config_at).stream
        starts.append((id(trade), grid, stream, changing[:first], block[len(changing) :]))

    def new(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=HALF)

    owns = [new(rows, WIDTH) for _ in range(TURNS)]
    gemms = [RowGemm([new(OUT, WIDTH).t()], [new(OUT)], [new(total, OUT)]) for _ in range(TURNS)]
    sums, results = [new(total, WIDTH) for _ in range(TURNS)], [new(rows, WIDTH) for _ in range(TURNS)]
    lefts, weight, bias = new(total, OUT), new(WIDTH, OUT), new(WIDTH)
    wrong: list[str] = []
    plays: dict[str, int] = {}
    with mock.patch.object(PackedTrade, "__init__", init), _device(kernels) as (mgr, played), torch.no_grad():
        for kind in KINDS:
            name = "fc1_dgrad" if kind == "open" else "fc2_fprop" if "scatter" in kind else "fc1_fprop"
            context = mgr.operation(mgr.get(name), partition, scatter="scatter" in kind)
            assert context.method == "sequential"
            region = context.region

            def operate(turn: int, context: Any = context, kind: str = kind) -> list[Start]:
                starts.clear()
                at = turn % TURNS

                def read(whole: torch.Tensor) -> None:
                    starts.append((whole.data_ptr(),))

                if kind.startswith("gather"):
                    registry.gather_then_gemm(context, owns[at], gemms[at], None if kind == "gather" else read)
                elif kind == "open":
                    with registry.open_gather(context, owns[at]) as gather:
                        gather.run_beside(lambda: None)
                        gather.read(read)
                elif kind == "only scatter":
                    sequential.scatter(context, sums[at], results[at])
                else:
                    gemm = _Into([lefts], [weight.t()], None, bias if kind == "scatter, bias" else None)
                    gemm.sums = sums[at]
                    registry.gemm_then_scatter(context, gemm, results[at])
                return list(starts)

            with mock.patch.object(sequential, "_kinds", lambda context: None):
                kernels.seen = None
                for turn in range(2):  # the first use of a region is no quick one
                    operate(turn)
                kernels.seen = seen
                direct = [operate(turn) for turn in range(2 * TURNS)]
            before = played.tapes
            for turn in range(2 * TURNS * 3):
                found, wanted = operate(turn), direct[turn % (2 * TURNS)]
                if found != wanted:
                    wrong.append(f"{kind}, turn {turn}: {found} instead of {wanted}")
            plays[kind] = played.tapes - before
    return wrong, plays


class _Into(PartialGemm):
    __slots__ = ("sums",)
    sums: torch.Tensor

    def empty(self, num_rows: int, width: int) -> torch.Tensor:
        return self.sums
