"""`sequential` whose exchange is one kernel: the code for GPUs on a simulated device, kernels in the interpreter."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.overlap import trade_ranks
from tpoverlap.testing import RankPool
from tpoverlap.testing.conformance.setting import Setting
from tpoverlap.testing.simulated import SimulatedBackend
from tpoverlap.tokens import TokenPartition

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
KINDS = ("sequential_ag", "sequential_rs")


@pytest.fixture
def pool(interpreted_pool: Callable[[int], RankPool]) -> RankPool:
    return interpreted_pool(2)


def setting(dtype: torch.dtype = torch.float32, timeout_s: float = 30.0, **sizes: Any) -> Setting:
    return Setting(dtype=dtype, backend=SimulatedBackend, capacity=40, timeout_s=timeout_s, **sizes)  # type: ignore[arg-type]


@pytest.mark.parametrize(("dtype", "hidden"), [(torch.float16, 24), (torch.float16, 23), (torch.float32, 23)])
def test_any_rows(pool: RankPool, dtype: torch.dtype, hidden: int) -> None:
    """In vectors and element by element; fewer rows than ranks; uneven rows; with and without a bias."""
    turns = [TokenPartition.from_counts(counts) for counts in ([1, 0], [20, 17], [0, 9])]
    assert pool.run(trade_ranks.conform, setting(dtype, hidden=hidden), turns) == [True] * 2


def test_many_in_a_row(pool: RankPool) -> None:
    assert pool.run(trade_ranks.many, setting(), 12) == [True] * 2


@pytest.mark.parametrize("scatter", [False, True])
def test_a_peer_that_never_comes_is_an_error(pool: RankPool, scatter: bool) -> None:
    message, _ = pool.run(trade_ranks.stays_away, setting(timeout_s=1.5), scatter)
    assert message.startswith("PeerTimeoutError") and "rank 1" in message, message


@pytest.mark.parametrize("scatter", [False, True])
def test_another_t_is_an_error_on_every_rank(pool: RankPool, scatter: bool) -> None:
    for message in pool.run(trade_ranks.another_t, setting(timeout_s=20.0), scatter):
        assert message.startswith("RankMismatchError"), message


def test_late_ranks(pool: RankPool) -> None:
    assert pool.run(trade_ranks.late, 6) == [{"gather": 6, "add": 6}] * 2


def test_three_ranks(interpreted_pool: Callable[[int], RankPool]) -> None:
    more = interpreted_pool(3)
    assert more.run(trade_ranks.late, 4) == [{"gather": 4, "add": 4}] * 3
    assert more.run(trade_ranks.odd_turns, 4)[2]["gather"] > 4


def test_held_slots_refreshed_flags_and_ranks_of_different_forms(pool: RankPool) -> None:
    """Rank 0 leaves two of six partitions to the copy engine; one operation under a trace each."""
    mixed, plain = pool.run(trade_ranks.odd_turns, 6)
    assert (plain["gather"], plain["add"]) == (7, 6) and (mixed["gather"], mixed["add"]) == (5, 4)


@pytest.mark.parametrize("method", ["sequential", "fused"])
def test_strided_biases(pool: RankPool, method: str) -> None:
    """Kernels read a bias by its address: of `sequential` few rows' exchange, of `fused` all."""
    assert pool.run(trade_ranks.strided_biases, method) == [[]] * 2


def test_two_callers_streams(pool: RankPool) -> None:
    """Uses 1 and 2 of a slot, on the first stream, have no reader before them; 4 and 5, on the second, have one on the
    first; 3 and 6 follow one on their own. The first use of a region refreshes flags.
    """
    calls = {"gather": 6, "add": 6}
    assert pool.run(trade_ranks.two_streams, 6) == [(calls, 2 * 3)] * 2


def test_what_fp8_layers_gather(pool: RankPool) -> None:
    assert pool.run(trade_ranks.small_numbers) == [{"gather": 9, "add": 0}] * 2


@pytest.mark.parametrize("scatter", [False, True])
def test_a_rank_raises(pool: RankPool, scatter: bool) -> None:
    peer, raising = pool.run(trade_ranks.raises_inside, scatter)
    assert raising.startswith("TpOverlapError") and "something in the model" in raising, raising
    assert peer.startswith("PeerTimeoutError") and "rank 1" in peer, peer


def test_explain_says_which_form(pool: RankPool) -> None:
    for few, many in pool.run(trade_ranks.explained):
        assert "form: one small kernel exchanges the rows" in few, few
        assert "form: rows by copy engine" in many and "more than the kernel is for" in many, many
