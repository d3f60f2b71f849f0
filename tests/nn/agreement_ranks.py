"""Rank functions of `test_agreement`."""

from __future__ import annotations

from collections.abc import Callable

import torch

import tpoverlap as tpo
from tpoverlap.nn.cross_entropy import _CrossEntropy
from tpoverlap.nn.vocab import _Embed

HIDDEN, FEATURES = 16, 16


def _manager(**options: object) -> tpo.UserBufferManager:
    return tpo.UserBufferManager(None, (32, HIDDEN), torch.float32, "cpu", timeout_s=10.0, **options)  # type: ignore[arg-type]


def _error(work: Callable[[], object]) -> str:
    try:
        work()
    except Exception as error:
        return type(error).__name__
    return "ok"


def recipes_differ(rank: int, size: int, what: str) -> str:
    """The error of an FP8 gather whose ranks were given recipes that differ in ``what``."""
    recipes = {
        "epsilon": tpo.Float8CurrentScaling(amax_epsilon=100.0 * rank),
        "margin": tpo.DelayedScaling(margin=rank),
        "powers": tpo.Float8CurrentScaling(use_power_2_scales=rank == 0),
        "class": tpo.Float8CurrentScaling("e4m3") if rank else tpo.Float8RowwiseScaling(),
    }
    with _manager(quantization_modes=["none", "fp8"]) as manager:
        x, weight = torch.randn(4, HIDDEN), torch.randn(FEATURES, HIDDEN)
        return _error(lambda: tpo.all_gather_gemm(x, weight, manager.layer("qkv"), fp8=tpo.Fp8State(recipes[what])))


def histories_differ(rank: int, size: int, how: str) -> list[str]:
    """Steps, with a write to delayed scaling's history as ``how`` says after two: what each ends with, and why."""
    outcomes = []
    with _manager(quantization_modes=["none", "fp8"]) as manager:
        state, other = tpo.Fp8State(tpo.DelayedScaling()), tpo.Fp8State(tpo.DelayedScaling())
        x, weight = torch.randn(4, HIDDEN), torch.randn(FEATURES, HIDDEN)
        other.input.record(torch.tensor([[100.0]]))

        def step() -> None:
            tpo.all_gather_gemm(x, weight, manager.layer("qkv"), fp8=state)
            manager.check()

        for turn in range(4):
            if turn == 2 and (rank == 1 or how == "all load"):
                if how == "in place":
                    state.input.amax_history.copy_(other.input.amax_history)
                else:
                    state.load_state_dict(other.state_dict(), assign=how == "assign")
            try:
                step()
            except tpo.TpOverlapError as error:
                outcomes.append(f"{type(error).__name__}: {error}")
                break
            outcomes.append("ok")
    return outcomes


def vocabularies_differ(rank: int, size: int, what: str) -> str:
    """The error where each rank takes the vocabulary for one entry larger than the rank before."""
    vocab_size = 2 * FEATURES + 1 + rank  # both cut to as many rows on either rank, or one more
    with _manager() as manager:
        if what == "embedding":
            embedding = tpo.nn.VocabParallelEmbedding(vocab_size, HIDDEN, manager=manager)
            return _error(lambda: embedding(torch.arange(8)))
        own = tpo.TokenPartition.balanced(vocab_size, size).counts[rank]
        logits, targets = torch.randn(8, own), torch.arange(8)
        return _error(lambda: tpo.nn.vocab_parallel_cross_entropy(logits, targets, vocab_size, manager))


def inputs_differ(rank: int, size: int, what: str, last: int) -> tuple[str, str]:
    """(error class, message) where rank 1 ends its tokens, targets or cu_seqlens with ``last`` and others with 7.

    Then, where all raised the same (``last`` is -1: every rank has 99), whether the manager still works.
    """
    values = torch.arange(8)
    if last < 0 or rank == 1:
        values[-1] = 99 if last < 0 else last
    with _manager(quantization_modes=["none", "fp8"]) as manager:
        logits = torch.randn(8, tpo.TokenPartition.balanced(16, size).counts[rank])

        def cross_entropy(targets: torch.Tensor) -> torch.Tensor:
            return tpo.nn.vocab_parallel_cross_entropy(logits, targets, 16, manager)

        def attend(offsets: torch.Tensor) -> torch.Tensor:
            recipe = tpo.Float8CurrentScaling() if what == "cu_seqlens, FP8" else None
            more = {"sequence_parallel": what != "cu_seqlens, whole rows", "fp8_recipe": recipe}
            layer = tpo.nn.MultiheadAttention(HIDDEN, size, kv_channels=16, manager=manager, **more)
            x = torch.randn(8, HIDDEN)
            with manager.microbatch(8) as partition:
                found = layer(x[partition.rows(rank)] if more["sequence_parallel"] else x, offsets)
            assert isinstance(found, torch.Tensor)
            return found

        embedding = tpo.nn.VocabParallelEmbedding(16, HIDDEN, manager=manager)
        calls: dict[str, Callable[[], object]] = {
            "tokens": lambda: embedding(values.to(torch.int32) if rank else values),  # the dtype is nobody's business
            "targets": lambda: cross_entropy(values),
        }
        offsets = torch.tensor([0, 2, 8] if rank == 1 else [0, 3, 8])
        try:
            calls.get(what, lambda: attend(offsets))()
            manager.check()
        except tpo.TpOverlapError as error:
            if last < 0:
                cross_entropy(torch.arange(8))
                embedding(torch.arange(8))
                manager.check()
            return type(error).__name__, str(error)
        return "ok", ""


def unseen_values(rank: int, size: int) -> None:
    """What a GPU makes of values outside the vocabulary that no host looks at: NaN in their rows, on every rank."""
    values = torch.tensor([1, 99, 5, -1, -100])
    with _manager() as manager:
        logits = torch.randn(5, 16 // size).requires_grad_()
        own = slice(rank * 16 // size, (rank + 1) * 16 // size)
        losses = _CrossEntropy.apply(manager, logits, values, own, -100, 16)
        losses.sum().backward()
        wrong = torch.tensor([False, True, False, True, False])
        assert torch.equal(losses.isnan(), wrong) and losses[4] == 0
        assert logits.grad is not None and torch.equal(logits.grad.isnan().all(1), wrong)
        assert logits.grad[~wrong].isfinite().all() and not logits.grad[4].any()
        embedding = tpo.nn.VocabParallelEmbedding(16, HIDDEN, manager=manager)
        partition = tpo.TokenPartition.balanced(5, size)
        x = _Embed.apply(embedding.comm.fprop, partition, values, embedding.weight, own, 16)
        outside = torch.tensor([False, True, False, True, True])[partition.rows(rank)]
        assert torch.equal(x.isnan().all(1), outside) and x[~outside].isfinite().all()
        x.sum().backward()
        assert embedding.weight.grad is not None and embedding.weight.grad.isfinite().all()
        manager.check()


def views_are_overwritten(rank: int, size: int, what: str) -> float:
    """Largest difference of the weight's gradient when the input was a view that was written again before backward."""
    with _manager() as manager:
        partition = tpo.TokenPartition.from_counts([0, 6] if what == "empty rank" else [3, 3])
        manager.set_active_shape(partition=partition)
        weight = torch.randn(FEATURES, HIDDEN, generator=torch.Generator().manual_seed(1)).requires_grad_()
        numbers = torch.randn(6, HIDDEN, generator=torch.Generator().manual_seed(2))
        if what == "staging":
            comm = manager.get("proj_fprop")
            comm.copy_into_buffer(numbers)
            y = tpo.gemm_reduce_scatter(comm.get_buffer(), weight, manager.layer("proj"))
            comm.copy_into_buffer(torch.zeros_like(numbers))
            y.sum().backward()
            expected = numbers.sum(0).expand(FEATURES, HIDDEN)
        else:
            comm = manager.get("qkv_fprop")
            own = numbers[partition.rows(rank)]
            comm.copy_into_buffer(own, local_chunk=True)
            gathered = tpo.all_gather_gemm(comm.get_buffer(local_chunk=True), weight, manager.layer("qkv"))
            comm.copy_into_buffer(torch.zeros_like(own), local_chunk=True)
            assert isinstance(gathered, torch.Tensor), "one weight"
            gathered.sum().backward()
            expected = numbers.sum(0).expand(FEATURES, HIDDEN)
        assert weight.grad is not None, "it was asked for"
        return float((weight.grad - expected).abs().max())


def odd_tuning_cache(rank: int, size: int) -> str:
    """What a manager does with a cache folder that is none, while the other rank is about to wait."""

    def make() -> None:
        with _manager(tuning_cache=5) as manager:
            tpo.all_gather_gemm(torch.randn(2, HIDDEN), torch.randn(FEATURES, HIDDEN), manager.layer("qkv"))

    return _error(make)
