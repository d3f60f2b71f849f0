"""FP8 under `fused` on the CPU: real ranks, real flags, kernels in Triton's interpreter, beside the FP8 ring."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
import torch

from tests.overlap import fused_fp8_ranks
from tests.overlap.test_fused import partitions
from tpoverlap import fused_form
from tpoverlap.testing import RankFailure, RankPool
from tpoverlap.testing.conformance import Setting, fp8, fp8_kernel_cases
from tpoverlap.tokens import TokenPartition

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
FORMS = list(fused_form.FORMS)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, env={"TRITON_INTERPRET": "1"}) as started:
        yield started


def setting(dtype: torch.dtype = torch.float32, backend: str = "shared") -> Setting:
    return Setting(dtype=dtype, backend=backend, capacity=40, hidden=48, features=32)


# Recipe, role and dtype: e4m3 and (HYBRID's gradients) e5m2 rows, both scalings, a result that is rounded.
MIXTURES = [
    ("current", "grad", torch.float32),
    ("current-e4m3", "input", torch.float16),
    ("rowwise", "input", torch.float32),
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("recipe", "role", "dtype"), MIXTURES, ids=str)
def test_all_gather(pool: RankPool, recipe: str, role: str, dtype: torch.dtype, form: str) -> None:
    turns = partitions(2)
    ran = pool.run(fused_fp8_ranks.gather, setting(dtype), turns, recipe, role, 1, form)
    assert ran == [2 * len(turns)] * 2


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("recipe", "role", "dtype"), MIXTURES, ids=str)
def test_reduce_scatter(pool: RankPool, recipe: str, role: str, dtype: torch.dtype, form: str) -> None:
    turns = partitions(2)
    ran = pool.run(fused_fp8_ranks.scatter, setting(dtype), turns, recipe, role, 1, form)
    assert ran == [2 * len(turns)] * 2


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("recipe", ["current", "rowwise"])
def test_several_weights_and_terms_and_late_rows(pool: RankPool, recipe: str, form: str) -> None:
    turns, only = partitions(2)[::2], ("fused",)
    ran = pool.run(fused_fp8_ranks.gather, setting(), turns, recipe, "grad", 2, form, only, True, 0.02)
    assert ran == [2 * len(turns)] * 2
    ran = pool.run(fused_fp8_ranks.scatter, setting(), turns, recipe, "grad", 3, form, only, True, 0.02)
    assert ran == [len(turns)] * 2


def test_copy_programs(pool: RankPool) -> None:
    turns = partitions(2)[:3]
    for run in (fused_fp8_ranks.gather, fused_fp8_ranks.scatter):
        ran = pool.run(run, setting(), turns, "current", "grad", 1, "", ("fused",), False)
        assert ran == [len(turns)] * 2


def test_three_ranks() -> None:
    turns = partitions(3)[2:6]
    with RankPool(3, env={"TRITON_INTERPRET": "1"}) as more:
        for form in FORMS:
            for run in (fused_fp8_ranks.gather, fused_fp8_ranks.scatter):
                ran = more.run(run, setting(), turns, "current", "grad", 1, form, ("fused",), timeout_s=120.0)
                assert ran == [len(turns)] * 3


def test_layers_in_every_recipe(pool: RankPool) -> None:
    """CONFORMANCE.md 1, 2 and 4: forward and backward of linear layers whose operations are all configured `fused`."""
    small = Setting(backend="shared", capacity=36, hidden=48, features=32)
    cases = [case for case in fp8_kernel_cases(small, 2) if "copies" not in case.id]  # interpreted one at a time
    assert {case.args[1] for case in cases} == set(fp8.RECIPES)
    for case in cases:
        summaries = pool.run(case.check, *case.args, timeout_s=90.0)
        assert all(summary["comparisons"] > 0 for summary in summaries), case.id


@pytest.mark.parametrize("direction", ["gather", "scatter"])
def test_where_it_cannot_run_no_scale_is_sent(pool: RankPool, direction: str) -> None:
    turn = [TokenPartition.balanced(9, 2)]
    with pytest.raises(RankFailure, match=r"BackendUnavailableError.*process_group"):
        run = getattr(fused_fp8_ranks, direction)
        pool.run(run, setting(backend="process_group"), turn, "current", "input", 1, "", ("fused",))
