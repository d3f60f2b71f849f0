"""CONFORMANCE.md 1 to 4, 7, 9, 11 and 13 on the CPU: every case of the catalogue, for R = 1 to 4."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby

import pytest
import torch

from tpoverlap.testing.conformance import (
    Case,
    Setting,
    conformance_cases,
    group_cases,
    microbatch_cases,
    other_cases,
    walk_cases,
)

RunCases = Callable[[int, list[Case]], None]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# 16 bits change no schedule: all of them on one and two ranks, where memory is shared, and elsewhere with --slow.
SETTINGS = [
    *[(size, Setting(dtype=dtype, backend="shared")) for size in (1, 2) for dtype in DTYPES],
    (3, Setting(dtype=torch.float32, backend="shared")),
    pytest.param(3, Setting(dtype=torch.float16, backend="shared"), marks=pytest.mark.slow),
    (4, Setting(dtype=torch.float32, backend="shared")),
    pytest.param(4, Setting(dtype=torch.bfloat16, backend="shared"), marks=pytest.mark.slow),
    (2, Setting(dtype=torch.float32, backend="process_group")),
    *[
        pytest.param(2, Setting(dtype=dtype, backend="process_group"), marks=pytest.mark.slow)
        for dtype in (torch.bfloat16, torch.float16)
    ],
]


def _name(parameter: object) -> str | None:
    if isinstance(parameter, Setting):
        return f"{parameter.backend}-{str(parameter.dtype).removeprefix('torch.')}"
    return f"R{parameter}" if isinstance(parameter, int) else None


on_all = pytest.mark.parametrize(("size", "setting"), SETTINGS, ids=_name)


def _kind(case: Case) -> str:
    return case.check.__name__


def _kinds(cases: list[Case]) -> dict[str, list[Case]]:
    return {kind: list(same) for kind, same in groupby(sorted(cases, key=_kind), key=_kind)}


KINDS = sorted(_kinds(list(conformance_cases(Setting(), 2))))


@on_all
@pytest.mark.parametrize("kind", KINDS)
def test_operations(size: int, setting: Setting, kind: str, run_cases: RunCases) -> None:
    run_cases(size, _kinds(list(conformance_cases(setting, size)))[kind])


@on_all
def test_microbatches(size: int, setting: Setting, run_cases: RunCases) -> None:
    run_cases(size, list(microbatch_cases(setting, size)))


@on_all
def test_others(size: int, setting: Setting, run_cases: RunCases) -> None:
    run_cases(size, list(other_cases(setting, size)))


@pytest.mark.parametrize(("dtype", "backend"), [(torch.bfloat16, "shared"), (torch.float32, "process_group")], ids=str)
def test_groups_inside_a_larger_world(dtype: torch.dtype, backend: str, run_cases: RunCases) -> None:
    cases = list(group_cases(Setting(dtype=dtype, backend=backend), 4))
    assert len(cases) == 5
    run_cases(4, cases)


@pytest.mark.parametrize("case", list(walk_cases(Setting(backend="shared"), 3)), ids=lambda case: case.id)
def test_random_walk(case: Case, run_cases: RunCases) -> None:
    assert len(case.args[-1]) == 200
    run_cases(3, [case])
