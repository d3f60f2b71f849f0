"""`fused` and `use_ce: false` end to end on the CPU: real ranks, real flags, kernels in Triton's interpreter."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.overlap import fused_fp8_ranks, fused_ranks
from tpoverlap import fused_form
from tpoverlap.testing import RankFailure, RankPool
from tpoverlap.testing.conformance.setting import Setting
from tpoverlap.tokens import TokenPartition

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
DTYPES = [torch.float32, torch.float16]  # the interpreter's bfloat16 product is wrong
PLAIN = ("fused", True, 1, False, 0.0)
FORMS = list(fused_form.FORMS)


@pytest.fixture
def pool(interpreted_pool: Callable[[int], RankPool]) -> RankPool:
    return interpreted_pool(2)


def partitions(size: int) -> list[TokenPartition]:
    most = 40 // size
    uneven = [[most] + [0] * (size - 1), [0] * (size - 1) + [most], [3] * (size - 1) + [most]]
    balanced = [TokenPartition.balanced(t, size) for t in (1, size + 1, 37, 40)]
    return [*balanced, *map(TokenPartition.from_counts, uneven)]


def setting(dtype: torch.dtype, timeout_s: float = 30.0) -> Setting:
    return Setting(dtype=dtype, backend="shared", capacity=40, timeout_s=timeout_s)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_gather(pool: RankPool, dtype: torch.dtype, form: str) -> None:
    turns = partitions(2)
    assert pool.run(fused_ranks.gather, setting(dtype), turns, *PLAIN, form) == [len(turns)] * 2


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_reduce_scatter(pool: RankPool, dtype: torch.dtype, form: str) -> None:
    turns = partitions(2)
    assert pool.run(fused_ranks.scatter, setting(dtype), turns, *PLAIN, form) == [len(turns)] * 2


@pytest.mark.parametrize("form", FORMS)
def test_several_pieces(pool: RankPool, form: str) -> None:
    """More rows than one flag stands for, and pieces that tiles do not end with."""
    turns = [TokenPartition.from_counts(counts) for counts in ([150, 141], [131, 0], [20, 150])]
    large = Setting(dtype=torch.float32, backend="shared", capacity=300, hidden=16, features=8, timeout_s=60.0)
    assert pool.run(fused_ranks.gather, large, turns, *PLAIN, form) == [len(turns)] * 2
    assert pool.run(fused_ranks.scatter, large, turns, *PLAIN, form) == [len(turns)] * 2


@pytest.mark.parametrize("form", FORMS)
def test_two_weights_dgrad_layout_and_late_rows(pool: RankPool, form: str) -> None:
    turns = partitions(2)
    ran = pool.run(fused_ranks.gather, setting(torch.float32), turns, "fused", True, 2, True, 0.02, form)
    assert ran == [2 * len(turns)] * 2


@pytest.mark.parametrize("form", FORMS)
def test_three_terms_an_addend_and_late_rows(pool: RankPool, form: str) -> None:
    turns = partitions(2)
    ran = pool.run(fused_ranks.scatter, setting(torch.float32), turns, "fused", True, 3, True, 0.02, form)
    assert ran == [len(turns)] * 2


@pytest.mark.parametrize("method", ["ring_exchange", "fused"])
def test_copy_programs(pool: RankPool, method: str) -> None:
    turns = partitions(2)
    for function in (fused_ranks.gather, fused_ranks.scatter):
        assert pool.run(function, setting(torch.float32), turns, method, False) == [len(turns)] * 2


def test_bulk_by_copy_programs(pool: RankPool) -> None:
    turns = partitions(2)
    assert pool.run(fused_ranks.bulk_by_programs, setting(torch.float16), turns) == [len(turns)] * 2


@pytest.mark.parametrize("size", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_more_ranks(size: int, interpreted_pool: Callable[[int], RankPool]) -> None:
    turns, more = partitions(size)[:: size - 2], interpreted_pool(size)
    for form in FORMS:
        for run in (fused_ranks.gather, fused_ranks.scatter):
            ran = more.run(run, setting(torch.float32), turns, *PLAIN, form, timeout_s=120.0)
            assert ran == [len(turns)] * size
    for run, form in ((fused_fp8_ranks.gather, "engine"), (fused_fp8_ranks.scatter, "one_launch")):
        fp8 = replace(setting(torch.float32), hidden=32, features=16)
        ran = more.run(run, fp8, turns[2:3], "current", "grad", 1, form, ("fused",), timeout_s=60.0)
        assert ran == [1] * size


@pytest.mark.parametrize("form", FORMS)
def test_a_peer_that_never_comes_is_an_error(pool: RankPool, form: str) -> None:
    message, _ = pool.run(fused_ranks.peer_never_comes, setting(torch.float32, timeout_s=2.0), form)
    assert message.startswith("PeerTimeoutError") and "rank 1" in message


def test_backward_by_programs(pool: RankPool) -> None:
    turns = partitions(2)
    assert pool.run(fused_ranks.backward_by_programs, turns) == [len(turns)] * 2


@pytest.mark.parametrize(("method", "use_ce"), [("fused", True), ("ring_exchange", False)])
def test_the_process_group_backend_has_no_flags(pool: RankPool, method: str, use_ce: bool) -> None:
    messages = Setting(backend="process_group", capacity=40)
    with pytest.raises(RankFailure, match=r"BackendUnavailableError.*process_group"):
        pool.run(fused_ranks.gather, messages, partitions(2)[:1], method, use_ce)


def test_without_the_interpreter_the_error_says_so() -> None:
    with (
        RankPool(2, env={"TRITON_INTERPRET": None}) as plain,
        pytest.raises(RankFailure, match=r"BackendUnavailableError.*TRITON_INTERPRET=1"),
    ):
        plain.run(fused_ranks.gather, setting(torch.float32), partitions(2)[:1])
