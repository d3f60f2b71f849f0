"""Rank functions of `test_tape_words`: what streams and cublasLt are given by a tape, beside what they are without."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch

import tpoverlap as tpo
from tests.comm import operations as ops
from tests.comm.quick_ring_ranks import cut_early
from tests.comm.taped import NullTapedBackend, NullTapedDriver, Played, tapes_played
from tests.gemm.columns import Columns
from tpoverlap.gemm import PartialGemm, RowGemm
from tpoverlap.memory.driver import OPERATION_BYTES, PACK, MemoryOperations
from tpoverlap.overlap import OperationContext, quick_ring, registry, tapes
from tpoverlap.tokens import TokenPartition

WIDTH, FEATURES, CAPACITY = 16, 24, 60
KINDS = ("gather", "gather, read", "dgrad", "scatter", "scatter, bias", "bulk gather", "bulk scatter", "nested")
Log = list[tuple[Any, ...]]
Place = tuple[str, int, int]
"""What, first byte, end."""


class _Words(NullTapedDriver):
    def __init__(self) -> None:
        super().__init__()
        self.log: Log = []

    def submit(self, stream: int, operations: MemoryOperations) -> None:
        super().submit(stream, operations)
        size_bytes = operations.count * OPERATION_BYTES
        self.log.append(("submit", stream, list(PACK.iter_unpack(bytes(operations.buffer[:size_bytes])))))

    def copy(self, stream: int, target: int, source: int, size_bytes: int) -> None:
        super().copy(stream, target, source, size_bytes)
        self.log.append(("copy", stream, target, source, size_bytes))

    def follow(self, stream: int, leader: int) -> None:
        super().follow(stream, leader)
        self.log.append(("follow", stream, leader))


class _WordsBackend(NullTapedBackend):
    def driver(self) -> NullTapedDriver:
        return _Words()


class _Products(Columns):
    """Notes each product like `_without_tapes` does."""

    log: Log | None = None

    def multiply(self, *arguments: int) -> int:
        if self.log is not None:
            product, _, right, _, left, b, _, addend, _, out, d, *_ = arguments
            layout, attributes = self.layouts[d], self.products[product]
            bias = attributes.get(8, 0)  # BIAS_POINTER
            added = 0 if addend == out else addend
            self.log.append(
                ("gemm", left, right, added, bias, out, layout.columns, layout.rows, self.layouts[b].leading)
            )
        return 0


@contextmanager
def _logged_products(log: Log) -> Iterator[None]:
    """Without tapes: the same entries, of what torch multiplies. Results stay garbage."""

    def rows(gemm: RowGemm, x: torch.Tensor, start: int) -> None:
        for matrix, bias, out in zip(gemm.matrices, gemm.biases, gemm.outs, strict=True):
            if x.shape[0]:
                target, added = out[start : start + x.shape[0]], 0 if bias is None else bias.data_ptr()
                log.append(_entry(x, matrix, 0, added, target))

    def partial(gemm: PartialGemm, start: int, stop: int, out: torch.Tensor, *, owned: bool = False) -> None:
        added = gemm.bias.data_ptr() if owned and gemm.bias is not None else 0
        if start < stop:
            log.append(_entry(gemm.lefts[0][start:stop], gemm.matrices[0], 0, added, out))

    def added(gemm: PartialGemm, start: int, stop: int, received: torch.Tensor, out: torch.Tensor) -> None:
        bias = 0 if gemm.bias is None else gemm.bias.data_ptr()
        log.append(_entry(gemm.lefts[0][start:stop], gemm.matrices[0], received.data_ptr(), bias, out))

    with (
        mock.patch.object(RowGemm, "rows", rows),
        mock.patch.object(PartialGemm, "rows", partial),
        mock.patch.object(PartialGemm, "rows_added", added),
    ):
        yield


def _entry(left: torch.Tensor, right: torch.Tensor, addend: int, bias: int, out: torch.Tensor) -> tuple[Any, ...]:
    rows, features = out.shape
    return "gemm", left.data_ptr(), right.data_ptr(), addend, bias, out.data_ptr(), rows, features, left.stride(0)


class _Kept(PartialGemm):
    """Its partial sums lie where they lay before."""

    __slots__ = ("sums",)

    def empty(self, num_rows: int, width: int) -> torch.Tensor:
        sums: torch.Tensor = self.sums  # type: ignore[attr-defined]
        assert sums.shape == (num_rows, width)
        return sums


class Operands(NamedTuple):
    """Of all operations of one partition: they lie at the same addresses with tapes as without."""

    x: torch.Tensor
    up: RowGemm
    dgrad: RowGemm
    down: PartialGemm
    down_biased: PartialGemm
    out: torch.Tensor


def _operands(partition: TokenPartition, rank: int) -> Operands:
    half, total, own = torch.bfloat16, partition.total, partition.counts[rank]

    def new(*shape: int) -> torch.Tensor:
        return torch.ones(*shape, dtype=half)

    def down(bias: torch.Tensor | None) -> PartialGemm:
        made = _Kept([new(total, FEATURES)], [new(WIDTH, FEATURES).t()], None, bias)
        made.sums = new(total, WIDTH)  # type: ignore[attr-defined]
        return made

    up = RowGemm(
        [new(FEATURES, WIDTH).t(), new(8, WIDTH).t()], [new(FEATURES), None], [new(total, FEATURES), new(total, 8)]
    )
    dgrad = RowGemm([new(WIDTH, FEATURES)], [None], [new(total, FEATURES)])
    return Operands(new(own, WIDTH), up, dgrad, down(None), down(new(WIDTH)), new(own, WIDTH))


def _operate(mgr: tpo.UserBufferManager, kind: str, partition: TokenPartition, given: Operands, log: Log) -> None:
    def context(name: str, *, scatter: bool) -> OperationContext:
        beside = mgr.get(name).config.method == "bulk"
        return mgr.operation(mgr.get(name), partition, scatter=scatter, beside=beside)

    def read(whole: torch.Tensor) -> None:
        log.append(("read", whole.data_ptr(), tuple(whole.shape)))

    def work() -> None:
        log.append(("work",))

    if kind.startswith("gather"):
        reads = read if kind == "gather, read" else None
        registry.gather_then_gemm(context("qkv_fprop", scatter=False), given.x, given.up, reads)
    elif kind == "dgrad":
        registry.gather_then_gemm(context("fc2_dgrad", scatter=False), given.x, given.dgrad, None)
    elif kind.startswith("scatter"):
        gemm = given.down if kind == "scatter" else given.down_biased
        registry.gemm_then_scatter(context("fc2_fprop", scatter=True), gemm, given.out)
    elif kind == "bulk gather":
        registry.gather_beside(context("qkv_dgrad", scatter=False), given.x, work, read)
    elif kind == "bulk scatter":
        sums = given.down.empty(partition.total, WIDTH)
        registry.scatter_beside(context("qkv_wgrad", scatter=True), sums, work, given.out)
    else:
        assert kind == "nested", kind
        with registry.open_gather(context("qkv_dgrad", scatter=False), given.x) as gather:
            gather.run_beside(work)
            registry.gemm_then_scatter(context("fc2_fprop", scatter=True), given.down, given.out)
            gather.read(read)


def _manager() -> tpo.UserBufferManager:
    config = {
        "qkv_fprop": {"method": "ring_exchange"},
        "fc2_fprop": {"method": "ring_exchange"},
        "fc2_dgrad": {"method": "ring_exchange"},
    }
    return tpo.UserBufferManager(
        None, (CAPACITY, WIDTH), torch.bfloat16, "cpu", config, backend=_WordsBackend, timeout_s=30.0,
        max_rows_per_rank=CAPACITY,
    )  # fmt: skip


def _given(
    turns: list[tuple[TokenPartition, Operands]], narrow: bool, *, taped: bool
) -> tuple[list[tuple[str, Log]], Played]:
    """What each operation's streams were given."""
    found: list[tuple[str, Log]] = []
    with ExitStack() as stack:
        played = stack.enter_context(tapes_played(_Products))
        stack.enter_context(mock.patch.object(ops, "WIDTH", WIDTH))
        stack.enter_context(cut_early(narrow=narrow))
        if not taped:
            stack.enter_context(mock.patch.object(tapes, "_new_maker", lambda channel: None))
        mgr = stack.enter_context(_manager())
        assert mgr.channel is not None, "several ranks"
        driver: Any = mgr.channel.transport.driver  # type: ignore[attr-defined]
        log: Log = driver.log
        places = _places(mgr)

        def add(blocks: Any, out: torch.Tensor) -> None:
            log.append(("sum", [block.data_ptr() for block in blocks], out.data_ptr()))

        stack.enter_context(mock.patch.object(quick_ring, "sum_in_rank_order", add))
        stack.enter_context(_logged_products(log))
        for partition, given in turns:
            for kind in KINDS:
                log.clear()
                before = played.tapes
                _operate(mgr, kind, partition, given, log)
                for library in played.products:  # made with the first tape
                    library.log = log  # type: ignore[attr-defined]
                found.append((f"{kind} {partition.counts}", _named(log, places)))
                if played.tapes > before:
                    played.kinds.add(kind)
    return found, played


def _places(mgr: tpo.UserBufferManager) -> list[Place]:
    channel: Any = mgr.channel
    signals, found = channel.transport.signals, []
    for number, arena in enumerate(channel.arenas):
        for rank in range(mgr.tp_size):
            start = arena.address(rank)
            found.append((f"arena {number} of rank {rank}", start, start + arena.size_bytes))
    found.append(("host words", signals._done_words.address, signals._done_words.address + 4 * 4096))
    return found


def _named(log: Log, places: list[Place]) -> Log:
    def name(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(name(one) for one in value)
        if isinstance(value, int) and value > 1 << 20:
            for what, start, stop in places:
                if start <= value < stop:
                    return f"{what} + {value - start}"
        return value

    return [name(entry) for entry in log]


def _turns(rank: int, size: int, repeats: int) -> list[tuple[TokenPartition, Operands]]:
    partitions = [
        TokenPartition.balanced(CAPACITY, size),
        TokenPartition.from_counts([0, *[9] * (size - 1)]),
        TokenPartition.from_counts([*[13] * (size - 1), 0]),
        TokenPartition.from_counts([1, *[0] * (size - 1)]),
    ]
    return [one for partition in partitions for one in [(partition, _operands(partition, rank))] * repeats]


def differences(rank: int, size: int, narrow: bool, repeats: int) -> tuple[list[str], set[str]]:
    """What a tape gives differently, and the kinds of operations that had tapes."""
    turns = _turns(rank, size, repeats)
    with torch.no_grad():
        mine, played = _given(turns, narrow, taped=True)
        its, unplayed = _given(turns, narrow, taped=False)
    assert not unplayed.tapes, "without tapes"
    wrong = []
    for number, ((what, taped), (_, direct)) in enumerate(zip(mine, its, strict=True)):
        for one, other in zip(taped + [("end",)] * 40, direct + [("end",)] * 40, strict=False):
            if one != other:
                wrong.append(f"operation {number}, {what}: {one} instead of {other}")
                break
    return wrong, played.kinds
