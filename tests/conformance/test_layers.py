"""CONFORMANCE.md 5, 6, 7 and 13 on the CPU: layers, vocabulary ends, stacked layers with microbatches in flight."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tpoverlap.testing.conformance import Case, Setting, layer_cases, layers

RunCases = Callable[[int, list[Case]], None]
PARTS = 5

# Every case on two ranks; elsewhere, where the arithmetic is the same and only the schedule grows, parts of them.
FULL = [(2, torch.float32, "shared"), (3, torch.bfloat16, "shared")]
PARTIAL = [(1, torch.float32, "shared", 1), (4, torch.float32, "shared", 2), (2, torch.float16, "process_group", 0)]


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize(("size", "dtype", "backend"), FULL, ids=str)
def test_layers(size: int, dtype: torch.dtype, backend: str, part: int, run_cases: RunCases) -> None:
    run_cases(size, list(layer_cases(Setting(dtype=dtype, backend=backend), size))[part::PARTS])


@pytest.mark.parametrize(("size", "dtype", "backend", "part"), PARTIAL, ids=str)
def test_some_layers(size: int, dtype: torch.dtype, backend: str, part: int, run_cases: RunCases) -> None:
    run_cases(size, list(layer_cases(Setting(dtype=dtype, backend=backend), size))[part :: 2 * PARTS])


def test_every_kind_in_both_modes_and_every_mode() -> None:
    checked = {case.args[1:] for case in layer_cases(Setting(), 2) if case.check is layers.check_layer}
    assert {(kind, mode, False) for kind in layers.KINDS for mode in ("bulk", "rs_dgrad")} <= checked
    assert {mode for _, mode, _ in checked} == set(layers.MODES)
