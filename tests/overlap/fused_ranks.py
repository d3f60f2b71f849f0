"""Rank functions: the two halves of a method, called as the registry calls them, against plain torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

import torch

from tpoverlap.gemm import PartialGemm, RowGemm
from tpoverlap.manager import UserBufferManager
from tpoverlap.nn.functional import all_gather_gemm
from tpoverlap.overlap import OperationContext, bulk, fused, ring_exchange, sequential
from tpoverlap.testing.conformance.setting import Setting
from tpoverlap.testing.faults import delay_transfers
from tpoverlap.testing.numeric import assert_close_to_twin
from tpoverlap.tokens import TokenPartition

GATHERS: Mapping[str, Callable[..., None]] = {
    "fused": fused.all_gather,
    "ring_exchange": ring_exchange.all_gather,
    "sequential": sequential.all_gather,
}
SCATTERS: Mapping[str, Callable[..., None]] = {
    "fused": fused.reduce_scatter,
    "ring_exchange": ring_exchange.reduce_scatter,
    "sequential": sequential.reduce_scatter,
}


def late_rows(manager: UserBufferManager, delay_s: float, source: int) -> AbstractContextManager[None]:
    """Transfers of ``source`` come late; 0: nobody's, and nobody counts transfers."""
    return delay_transfers(manager, delay_s, only_source=source) if delay_s else nullcontext()


def context_of(
    manager: UserBufferManager, partition: TokenPartition, *, scatter: bool, method: str = "fused", use_ce: bool = True
) -> OperationContext:
    """The context that the manager would hand to a method, for another method than the configured one."""
    comm = manager.get("proj_fprop" if scatter else "qkv_fprop")
    made = manager.operation(comm, partition, scatter=scatter)
    return replace(made, method=method, config=replace(made.config, method=method, use_ce=use_ce, num_sm=2))


@contextmanager
def forced_form(form: str) -> Iterator[None]:
    """Within the block `fused` has that form ("": as it chooses)."""
    chosen = fused.choose_form
    if form:
        fused.choose_form = lambda direction, num_tokens: form  # type: ignore[assignment,return-value]
    try:
        yield
    finally:
        fused.choose_form = chosen


def gather(
    rank: int,
    size: int,
    setting: Setting,
    partitions: Sequence[TokenPartition],
    method: str = "fused",
    use_ce: bool = True,
    num_weights: int = 1,
    dgrad_layout: bool = False,
    delay_s: float = 0.0,
    form: str = "",
) -> int:
    """All-gather + GEMM for every partition; returns how many comparisons were made."""
    run = GATHERS[method]
    high = setting.reference_dtype
    compared = 0
    with setting.open_manager(rank) as manager:
        for turn, partition in enumerate(partitions):
            own = partition.rows(rank)
            x = setting.draw(rank, (partition.total, setting.hidden), "x", turn)
            matrices, biases, outs = [], [], []
            for number in range(num_weights):
                features = setting.features + 8 * number
                if dgrad_layout:
                    matrices.append(setting.draw(rank, (setting.hidden, features), "w", rank, number))
                else:
                    matrices.append(setting.draw(rank, (features, setting.hidden), "w", rank, number).t())
                biases.append(setting.draw(rank, (features,), "b", rank, number) if (turn + number) % 2 else None)
                outs.append(x.new_full((partition.total, features), float("nan")))
            gathered: list[torch.Tensor] = []
            # Who reads the gathered rows gets the copy-engine form, so one launch is never asked to.
            wants = turn % 2 == 0 and form != "one_launch"
            reads = (lambda whole, keep=gathered: keep.append(whole.clone())) if wants else None
            with late_rows(manager, delay_s, turn % size), forced_form(form):
                context = context_of(manager, partition, scatter=False, method=method, use_ce=use_ce)
                run(context, x[own].contiguous(), RowGemm(matrices, biases, outs), reads)
            for matrix, bias, out in zip(matrices, biases, outs, strict=True):
                twin = torch.mm(x, matrix) if bias is None else torch.addmm(bias, x, matrix)
                reference = x.to(high) @ matrix.to(high) + (0 if bias is None else bias.to(high))
                assert_close_to_twin(out, twin, reference, what=f"rank {rank} T={partition.total} {partition.counts}")
                compared += 1
            if reads is not None:
                assert torch.equal(gathered[0], x), "gathered x"
        manager.check()
    return compared


def scatter(
    rank: int,
    size: int,
    setting: Setting,
    partitions: Sequence[TokenPartition],
    method: str = "fused",
    use_ce: bool = True,
    num_terms: int = 1,
    addend: bool = False,
    delay_s: float = 0.0,
    form: str = "",
) -> int:
    """GEMM + reduce-scatter for every partition; returns how many comparisons were made."""
    run = SCATTERS[method]
    high, width = setting.reference_dtype, setting.hidden
    compared = 0
    with setting.open_manager(rank) as manager:
        for turn, partition in enumerate(partitions):
            own, total = partition.rows(rank), partition.total

            def task(q: int, total: int = total, turn: int = turn) -> PartialGemm:
                lefts, matrices = [], []
                for term in range(num_terms):
                    depth = setting.features + 8 * term
                    lefts.append(setting.draw(rank, (total, depth), "l", turn, q, term))
                    if num_terms == 1:
                        matrices.append(setting.draw(rank, (width, depth), "w", q, term, scale=depth**-0.5).t())
                    else:
                        matrices.append(setting.draw(rank, (depth, width), "w", q, term, scale=depth**-0.5))
                extra = setting.draw(rank, (total, width), "addend", turn, q) if addend else None
                return PartialGemm(lefts, matrices, extra, setting.draw(rank, (width,), "b") if turn % 2 else None)

            out = setting.draw(rank, (own.stop - own.start, width), "out").fill_(float("nan"))
            with late_rows(manager, delay_s, turn % size), forced_form(form):
                run(context_of(manager, partition, scatter=True, method=method, use_ce=use_ce), task(rank), out)
            reference, twin = None, None
            for q in range(size):
                gemm = task(q)
                exact = sum(
                    left[own].to(high) @ matrix.to(high) for left, matrix in zip(gemm.lefts, gemm.matrices, strict=True)
                )
                assert isinstance(exact, torch.Tensor)
                if gemm.addend is not None:
                    exact = exact + gemm.addend[own].to(high)
                part = gemm.empty(own.stop - own.start, width)
                gemm.rows(own.start, own.stop, part, owned=q == rank)
                if q == rank and gemm.bias is not None:
                    exact = exact + gemm.bias.to(high)
                reference = exact if reference is None else reference + exact
                twin = part.float() if twin is None else twin + part.float()
            assert reference is not None and twin is not None
            twin = twin.to(setting.dtype)
            assert_close_to_twin(out, twin, reference, what=f"rank {rank} T={total} {partition.counts}")
            compared += 1
        manager.check()
    return compared


def bulk_by_programs(rank: int, size: int, setting: Setting, partitions: Sequence[TokenPartition]) -> int:
    """`use_ce: false` under bulk."""
    with setting.open_manager(rank) as manager:
        for turn, partition in enumerate(partitions):
            x = setting.draw(rank, (partition.total, setting.hidden), "x", turn)
            context = context_of(manager, partition, scatter=False, method="bulk", use_ce=False)
            found: list[torch.Tensor] = []
            bulk.all_gather(
                context,
                x[partition.rows(rank)].contiguous(),
                lambda: None,
                lambda w, keep=found: keep.append(w.clone()),
            )
            assert torch.equal(found[0], x)
        manager.check()
    return len(partitions)


def backward_by_programs(rank: int, size: int, partitions: Sequence[TokenPartition]) -> int:
    """dgrad's fused scatter while the gather for wgrad is open, both by programs: one interpreted kernel at a time."""
    config = {"qkv_dgrad": {"method": "fused", "is_reduce_scatter": True, "use_ce": False, "num_sm": 2}}
    width, features, most = 16, 6, max(partition.max_count for partition in partitions)
    with UserBufferManager(
        None, (40, width), torch.float32, "cpu", config, max_rows_per_rank=most, timeout_s=30.0
    ) as manager:
        for turn, partition in enumerate(partitions):
            generator = torch.Generator().manual_seed(turn)
            whole = torch.randn(partition.total, width, generator=generator)
            weights = [torch.randn(features, width, generator=generator) for _ in range(size)]
            x = whole[partition.rows(rank)].clone().requires_grad_()
            weight = weights[rank].clone().requires_grad_()
            y = all_gather_gemm(x, weight, manager.layer("qkv"), partition=partition)
            y.backward(torch.ones_like(y))
            assert x.grad is not None and weight.grad is not None
            expected = torch.stack([w.sum(0) for w in weights]).sum(0).expand_as(x)
            torch.testing.assert_close(x.grad, expected)
            torch.testing.assert_close(weight.grad, whole.sum(0).expand_as(weight))
        manager.check()
    return len(partitions)


def peer_never_comes(rank: int, size: int, setting: Setting, form: str = "") -> str:
    """Rank 1 stays away: rank 0 gets an error within the time-out and no number."""
    partition = TokenPartition.balanced(setting.capacity, size)
    started = time.monotonic()
    manager = setting.open_manager(rank)
    message = ""
    if rank == 0:
        out = torch.zeros(partition.total, setting.features, dtype=setting.dtype, device=setting.rank_device(rank))
        x = setting.draw(rank, (partition.counts[0], setting.hidden), "x")
        weight = setting.draw(rank, (setting.features, setting.hidden), "w")
        try:
            with forced_form(form):
                fused.all_gather(
                    context_of(manager, partition, scatter=False), x, RowGemm([weight.t()], [None], [out]), None
                )
            manager.check()
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
        took_s = time.monotonic() - started
        assert took_s < setting.timeout_s + 20, f"took {took_s:.1f} s"
    else:
        time.sleep(setting.timeout_s + 1.0)
    manager.abort()
    return message
