"""Transformer Engine's names: the life of the default manager, what is refused, and what is reported."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.manager.ranks import Outcome
from tests.te import te_ranks
from tpoverlap import te
from tpoverlap.testing import RankPool

Pools = Callable[[int], RankPool]


def require(outcome: Outcome, error: str, says: tuple[str, ...], where: str) -> None:
    assert outcome is not None, f"{where}: nothing was raised"
    assert outcome[0][0] == error, f"{where}: {outcome}"
    for fragment in says:
        assert fragment in outcome[1], f"{where}: {fragment!r} is not in: {outcome[1]}"


def test_before_initialisation(rank_pool: Pools) -> None:
    for outcomes in rank_pool(2).run(te_ranks.before_initialisation, timeout_s=60.0):
        for name, outcome in outcomes.items():
            require(outcome, "NotInitializedError", ("initialize_ub(",), name)


def test_life(rank_pool: Pools) -> None:
    for result in rank_pool(2).run(te_ranks.life, timeout_s=60.0):
        require(result["again"], "ConfigError", ("twice", "destroy_ub()"), "double initialisation")
        require(result["after"], "NotInitializedError", ("initialize_ub(",), "after destroy_ub")


def test_defaults(rank_pool: Pools) -> None:
    for result in rank_pool(2).run(te_ranks.defaults, timeout_s=60.0):
        assert result["dtype"] == "torch.bfloat16"
        assert len(result["lines"]) == 2
        assert "bootstrap_backend='mpi'" in result["lines"][0] and "with_cublasmp=True" in result["lines"][1]
        assert result["kinds"] == [True, "CommOverlap"] and result["p2p"]
        require(result["unknown"], "ConfigError", ("'qvk_fprop'", "qkv_fprop"), "unknown name")
        require(result["fp8"], "ConfigError", ("qkv_fprop", "quantization_modes=['none', 'fp8']"), "FP8 buffer")
        require(result["shape"], "ActiveShapeError", ("[5, 16, 1]", "(T, H)"), "shape")


REFUSED = {
    "tp_size too large": ("ConfigError", ("2 ranks", "tp_size=3", "tp_group=")),
    "tp_size zero": ("ConfigError", ("tp_size", "at least 1", "0")),
    "tp_size negative": ("ConfigError", ("tp_size", "at least 1", "-2")),
    "tp_size text": ("ConfigError", ("tp_size", "'2'")),
    "tp_size of the group": ("ConfigError", ("tp_size=3", "2 ranks")),
    "unknown mode": ("ConfigError", ("'mxfp8'", "NONE, FP8")),
    "a configuration a mode": ("ConfigError", ("2 different configurations", "pass one")),
    "shape": ("ActiveShapeError", ("[24]", "(C, H)")),
    "shape is a number": ("ActiveShapeError", ("24", "(C, H)")),
    "zero": ("ActiveShapeError", ("[0, 16]", "at least 1")),
    "dtype": ("ConfigError", ("torch.int8", "torch.bfloat16")),
    "config": ("ConfigError", ("'pipeline' cannot all-gather",)),
}


@pytest.mark.parametrize("offender", [None, 1])
def test_refused(rank_pool: Pools, offender: int | None) -> None:
    for rank, outcomes in enumerate(rank_pool(2).run(te_ranks.refuse, offender, timeout_s=90.0)):
        assert set(outcomes) == set(REFUSED)
        for name, (error, says) in REFUSED.items():
            own = offender is None or rank == offender
            require(outcomes[name], error if own else "ConfigError", says, f"rank {rank}, {name}")


def test_different_tp_sizes(rank_pool: Pools) -> None:
    for rank, outcome in enumerate(rank_pool(2).run(te_ranks.different_tp_sizes, timeout_s=60.0)):
        require(outcome, "RankMismatchError", ("tp_size is 1 on rank 0 and 2 on rank 1",), f"rank {rank}")


def test_groups(rank_pool: Pools) -> None:
    rank_pool(3).run(te_ranks.groups, timeout_s=60.0)


def test_names() -> None:
    assert [mode.name for mode in te.UserBufferQuantizationMode] == ["NONE", "FP8"]
    assert [kind.name for kind in te.CommOverlapType] == ["AG", "RS"]
    assert issubclass(te.CommOverlapP2P, te.CommOverlap)
    assert te.__doc__ is not None and "keep using Transformer Engine's own buffers" in te.__doc__
