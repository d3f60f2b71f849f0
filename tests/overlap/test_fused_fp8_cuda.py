"""FP8 under `fused` on GPUs; ranks share one where there are not enough. In bfloat16, as all FP8 cases are there."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.overlap import fused_fp8_ranks
from tpoverlap import fused_form
from tpoverlap.testing import RankPool
from tpoverlap.testing.conformance import Setting, fp8_kernel_cases

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
SETTING = Setting(device="cuda", dtype=torch.bfloat16, capacity=1030, hidden=256, features=320)
SIZES: list[Any] = [
    pytest.param({"capacity": 260, "hidden": 48, "features": 16}, id="less than a tile"),
    pytest.param({}, id="tiles"),
]


@pytest.fixture(scope="module", params=[2, 4])
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    with RankPool(request.param, device="cuda") as started:
        yield started


@pytest.mark.parametrize("form", fused_form.FORMS)
@pytest.mark.parametrize(("recipe", "role"), [("current", "input"), ("current", "grad"), ("rowwise", "input")])
@pytest.mark.parametrize("sizes", SIZES)
def test_every_t(pool: RankPool, sizes: dict[str, Any], recipe: str, role: str, form: str) -> None:
    setting = replace(SETTING, **sizes)
    turns = setting.partitions(pool.world_size)
    for run in (fused_fp8_ranks.gather, fused_fp8_ranks.scatter):
        ran = pool.run(run, setting, turns, recipe, role, 1, form, timeout_s=120)
        assert ran == [2 * len(turns)] * pool.world_size


@pytest.mark.parametrize("form", fused_form.FORMS)
@pytest.mark.parametrize("recipe", ["current", "rowwise"])
def test_several_weights_and_late_rows(pool: RankPool, recipe: str, form: str) -> None:
    turns, only = SETTING.partitions(pool.world_size)[::2], ("fused",)
    pool.run(fused_fp8_ranks.gather, SETTING, turns, recipe, "grad", 2, form, only, True, 0.002, timeout_s=120)
    pool.run(fused_fp8_ranks.scatter, SETTING, turns, recipe, "grad", 3, form, only, True, 0.002, timeout_s=120)


@pytest.mark.parametrize("form", fused_form.FORMS)
def test_more_tiles_than_programs(pool: RankPool, form: str) -> None:
    """Each program has several tiles, of several pieces; K of 4096 and 512, and both ways to accumulate."""
    setting = replace(SETTING, capacity=4100, hidden=4096, features=512)
    turns = setting.partitions(pool.world_size)[:4]
    for run in (fused_fp8_ranks.gather, fused_fp8_ranks.scatter):
        pool.run(run, setting, turns, "current", "input", 1, form, timeout_s=120)


def test_copy_programs(pool: RankPool) -> None:
    turns, only = SETTING.partitions(pool.world_size)[::2], ("fused",)
    for run in (fused_fp8_ranks.gather, fused_fp8_ranks.scatter):
        pool.run(run, SETTING, turns, "current", "grad", 1, "", only, False, timeout_s=120)


def test_layers_in_every_recipe(pool: RankPool) -> None:
    """CONFORMANCE.md 1, 2 and 4."""
    if pool.world_size != 2:
        pytest.skip("R = 4 has the operations")
    for case in fp8_kernel_cases(replace(SETTING, capacity=1030, hidden=512, features=256), 2):
        pool.run(case.check, *case.args, timeout_s=120)


def test_the_kernels_are_right_and_timed(run_module: Callable[..., str], tmp_path: Path) -> None:
    file = tmp_path / "fused_fp8.json"
    arguments = ("--rounds", "1", "--out", str(file))
    run_module("benchmarks.fused_fp8", *arguments, interpret=False, timeout_s=280.0)
    assert all(not isinstance(row["times"]["table"], str) for row in json.loads(file.read_text())["rows"])
