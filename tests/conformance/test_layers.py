"""CONFORMANCE.md 5, 6, 7 and 13 on the CPU: layers, vocabulary ends, stacked layers with microbatches in flight."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tpoverlap.testing.conformance import Case, Setting, layer_cases, layers

RunCases = Callable[[int, list[Case]], None]
PARTS = 5

# Every case on two ranks; elsewhere, where the arithmetic is the same and only the schedule grows, parts of them.
FULL = [(2, torch.float32, "shared"), pytest.param(3, torch.bfloat16, "shared", marks=pytest.mark.slow)]
PARTIAL = [(1, torch.float32, "shared", 1), (2, torch.float16, "process_group", 0)]


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize(("size", "dtype", "backend"), FULL, ids=str)
def test_layers(size: int, dtype: torch.dtype, backend: str, part: int, run_cases: RunCases) -> None:
    run_cases(size, list(layer_cases(Setting(dtype=dtype, backend=backend), size))[part::PARTS])


@pytest.mark.parametrize(("size", "dtype", "backend", "part"), PARTIAL, ids=str)
def test_some_layers(size: int, dtype: torch.dtype, backend: str, part: int, run_cases: RunCases) -> None:
    run_cases(size, list(layer_cases(Setting(dtype=dtype, backend=backend), size))[part :: 2 * PARTS])


def one_of_each(size: int, setting: Setting) -> list[Case]:
    """One case of every number and layer; modes take turns."""
    groups: dict[tuple[object, ...], list[Case]] = {}
    for case in layer_cases(setting, size):
        kind = case.args[1] if isinstance(case.args[1], str) else ""
        groups.setdefault((case.number, case.check, kind), []).append(case)
    return [cases[index % len(cases)] for index, cases in enumerate(groups.values())]


@pytest.mark.parametrize("part", range(3))
@pytest.mark.parametrize(("size", "dtype"), [(3, torch.bfloat16), (4, torch.float32)], ids=str)
def test_every_layer_on_more_ranks(size: int, dtype: torch.dtype, part: int, run_cases: RunCases) -> None:
    run_cases(size, one_of_each(size, Setting(dtype=dtype, backend="shared"))[part::3])


@pytest.mark.parametrize("size", [3, 4])
def test_more_ranks_have_every_case_and_layer(size: int) -> None:
    chosen = one_of_each(size, Setting())
    assert {case.number for case in chosen} == {5, 6, 7, 13} == {case.number for case in layer_cases(Setting(), size)}
    assert {case.args[1] for case in chosen if case.check is layers.check_layer} == set(layers.KINDS)
    assert len({case.args[2] for case in chosen if case.check is layers.check_layer}) > 4, "modes do not take turns"


def test_every_kind_in_both_modes_and_every_mode() -> None:
    checked = {case.args[1:] for case in layer_cases(Setting(), 2) if case.check is layers.check_layer}
    assert {(kind, mode, False) for kind in layers.KINDS for mode in ("bulk", "rs_dgrad")} <= checked
    assert {mode for _, mode, _ in checked} == set(layers.MODES)
