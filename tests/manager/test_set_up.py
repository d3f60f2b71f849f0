"""Construction and registration: what is illegal on one rank, or differs between ranks, is an error on every rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.manager import set_up_ranks
from tests.manager.ranks import Outcome, public_class
from tests.manager.set_ups import BAD_SET_UPS, DIFFERENT
from tpoverlap import RankMismatchError, settings
from tpoverlap.testing import RankPool, run_ranks

Pools = Callable[[int], RankPool]
Outcomes = list[dict[str, Outcome]]


def require(outcome: Outcome, error: str, says: tuple[str, ...], where: str) -> None:
    assert outcome is not None, f"{where}: nothing was raised"
    classes, message = outcome
    assert public_class(classes) == error, f"{where}: {classes[0]}: {message}"
    for fragment in says:
        assert fragment in message, f"{where}: {fragment!r} is not in: {message}"


# offender (None: every rank), R
@pytest.fixture(scope="module", params=[(None, 2), (1, 2), (2, 3)], ids=["all ranks", "one rank", "one rank of three"])
def refused(request: pytest.FixtureRequest, rank_pool: Pools) -> tuple[int | None, Outcomes]:
    offender, size = request.param
    return offender, rank_pool(size).run(set_up_ranks.refuse, offender, timeout_s=100.0)


@pytest.mark.parametrize("name", BAD_SET_UPS)
def test_bad_set_up(name: str, refused: tuple[int | None, Outcomes]) -> None:
    offender, outcomes = refused
    case = BAD_SET_UPS[name]
    for rank, on_rank in enumerate(outcomes):
        if offender is None or rank == offender:
            require(on_rank[name], case.error, case.says, f"rank {rank}")
        else:  # it did nothing wrong, and is told who did what
            require(on_rank[name], "ConfigError", (f"rank {offender} ", *case.says), f"rank {rank}")


@pytest.fixture(scope="module", params=[2, 3])
def differing(request: pytest.FixtureRequest, rank_pool: Pools) -> Outcomes:
    return rank_pool(request.param).run(set_up_ranks.disagree, timeout_s=60.0)


@pytest.mark.parametrize("name", DIFFERENT)
def test_ranks_given_different_arguments(name: str, differing: Outcomes) -> None:
    others, last = {2: ("on rank 0", "on rank 1"), 3: ("on ranks 0-1", "on rank 2")}[len(differing)]
    messages = set()
    for rank, on_rank in enumerate(differing):
        says = (*DIFFERENT[name][2], others, last, "pass the same everywhere")
        require(on_rank[name], "RankMismatchError", says, f"rank {rank}")
        messages.add(on_rank[name][1])  # type: ignore[index]  # `require` saw that it is there
    assert len(messages) == 1, "every rank is told the same"
    assert len(messages.pop()) < 1000, "however much differs"


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_with_different_files(rank_pool: Pools, size: int, tmp_path: Path) -> None:
    others, last = {2: ("rank 0", "rank 1"), 3: ("ranks 0-1", "rank 2")}[size]
    for outcome in rank_pool(size).run(set_up_ranks.different_files, str(tmp_path), timeout_s=60.0):
        says = (
            f"/ranks.yaml on {others} and ",
            f"/rank_last.yaml on {last}; "
            f"tpoverlap.by_tokens.qkv_fprop.rows[0].up_to is 8 on {others} and 16 on {last}; "
            f"proj_fprop.num_sm is 1 by default on {others} and 1 on {last}; pass",  # what changes nothing comes last
        )
        require(outcome, "RankMismatchError", says, "different files")


def test_ranks_at_different_steps(rank_pool: Pools) -> None:
    for outcome in rank_pool(2).run(set_up_ranks.different_steps, timeout_s=60.0):
        says = (
            "different steps",
            "name, width, max_tokens",
            "on rank 0 and capacity_shape, ",
            "on rank 1; make managers",
        )
        require(outcome, "RankMismatchError", says, "one registers, one makes a manager")


def test_many_ranks_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """What 72 ranks have is said by ranges, and cut where every rank has something else."""
    sizes = [4] * 40 + [8] + [4] * 31
    monkeypatch.setattr(settings, "agree", lambda group, value: [(None, {"tp_size": size}) for size in sizes])
    with pytest.raises(RankMismatchError, match="tp_size is 4 on ranks 0-39, 41-71 and 8 on rank 40; pass"):
        settings.require_agreement(None, settings.TpSize(4))  # type: ignore[arg-type]  # `agree` has no use for it
    sizes[:] = [4, 8] * 36
    with pytest.raises(RankMismatchError, match=r"4 on ranks 0, 2, 4, 6, 8, 10, \.\.\. and 8 on ranks 1, 3, 5, 7"):
        settings.require_agreement(None, settings.TpSize(4))  # type: ignore[arg-type]
    sizes[:] = range(72)
    with pytest.raises(RankMismatchError, match="3 on rank 3 and 68 other values elsewhere; pass"):
        settings.require_agreement(None, settings.TpSize(4))  # type: ignore[arg-type]


@pytest.mark.parametrize("offender", [None, 1])
def test_cuda_backend_on_the_cpu(rank_pool: Pools, offender: int | None) -> None:
    outcomes = rank_pool(2).run(set_up_ranks.backend_that_does_not_work, offender, timeout_s=60.0)
    for rank, outcome in enumerate(outcomes):
        if offender is None:
            require(outcome, "BackendUnavailableError", ("'cuda'", "cpu"), f"rank {rank}")
        else:
            require(outcome, "RankMismatchError", ("backend", "'auto'", "'cuda'"), f"rank {rank}")


@pytest.mark.parametrize("offender", [None, 1])
def test_device_that_is_not_there(rank_pool: Pools, offender: int | None) -> None:
    outcomes = rank_pool(2).run(set_up_ranks.device_that_is_not_there, offender, timeout_s=60.0)
    for rank, outcome in enumerate(outcomes):
        own = offender is None or rank == offender
        error = "BackendUnavailableError" if own else "ConfigError"
        require(outcome, error, ("'cuda:7'", "CUDA devices"), f"rank {rank}")


def test_bad_groups(rank_pool: Pools) -> None:
    for outcomes in rank_pool(2).run(set_up_ranks.bad_groups, timeout_s=60.0):
        require(outcomes["text"], "ConfigError", ("ProcessGroup", "DeviceMesh", "str"), "a text")
        require(outcomes["two-dimensional mesh"], "ConfigError", ("1-D", "2 dimensions", "mesh['tp']"), "a mesh")


def test_good_groups(rank_pool: Pools) -> None:
    rank_pool(2).run(set_up_ranks.good_groups, timeout_s=60.0)


def test_a_warning_points_at_the_callers_line(rank_pool: Pools) -> None:
    for lines in rank_pool(2).run(set_up_ranks.warned_at, timeout_s=60.0):
        assert lines == dict.fromkeys(("manager", "te", "estimate", "resolve"), set_up_ranks.__file__)


REGISTRATIONS = {
    "no width": ("ActiveShapeError", ("(24, 0)",)),
    "width is a fraction": ("ActiveShapeError", ("2.5",)),
    "no tokens": ("ActiveShapeError", ("(0, 8)",)),
    "rows": ("ConfigError", ("max_rows_per_rank", "-1")),
    "no name": ("ConfigError", ("''",)),
    "blank in the name": ("ConfigError", ("'vision tower'", "without blanks")),
    "no text": ("ConfigError", ("7",)),
    "a standard layer": ("ConfigError", ("fc1_fprop", "width 16", "another name")),
    "a standard name": ("ConfigError", ("fc1_fprop", "another name")),
    "a standard name without communication": ("ConfigError", ("fc2_wgrad", "another name")),
    "taken": ("ConfigError", ("taken_fprop is registered already", "(24, 4)", "another name")),
    "partly taken": ("ConfigError", ("taken_dgrad is registered already", "another name")),
}


@pytest.mark.parametrize("offender", [None, 1])
def test_bad_registrations(rank_pool: Pools, offender: int | None) -> None:
    for rank, outcomes in enumerate(rank_pool(2).run(set_up_ranks.registrations, offender, timeout_s=60.0)):
        assert set(outcomes) == {*REGISTRATIONS, "different"}
        for name, (error, says) in REGISTRATIONS.items():
            own = offender is None or rank == offender
            require(outcomes[name], error if own else "ConfigError", says, f"rank {rank}, {name}")
        require(outcomes["different"], "RankMismatchError", ("width", "8", "9"), f"rank {rank}")


def test_without_process_group() -> None:
    outcomes = run_ranks(set_up_ranks.without_process_group, 1, timeout_s=60.0)[0]
    for name, outcome in outcomes.items():
        require(outcome, "NotInitializedError", ("init_process_group",), name)
