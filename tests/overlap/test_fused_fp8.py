"""FP8 under `fused` on the CPU: real ranks, real flags, kernels in Triton's interpreter, beside the FP8 ring."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable

import pytest
import torch

from tests.nn import fp8_layer_ranks
from tests.overlap import fused_fp8_ranks
from tests.overlap.test_fused import partitions
from tpoverlap import fused_form
from tpoverlap.testing import RankPool
from tpoverlap.testing.conformance import Setting, fp8, fp8_kernel_cases
from tpoverlap.tokens import TokenPartition

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
FORMS = list(fused_form.FORMS)


@pytest.fixture
def pool(interpreted_pool: Callable[[int], RankPool]) -> RankPool:
    return interpreted_pool(2)


def setting(dtype: torch.dtype = torch.float32, backend: str = "shared") -> Setting:
    return Setting(dtype=dtype, backend=backend, capacity=40, hidden=48, features=32)


# Recipe, role and dtype: e4m3 and (HYBRID's gradients) e5m2 rows, both scalings, a result that is rounded.
MIXTURES = [
    ("current", "grad", torch.float32),
    ("rowwise", "input", torch.float16),
    pytest.param("current-e4m3", "input", torch.float16, marks=pytest.mark.slow),
]
FEW = [TokenPartition.balanced(27, 2), TokenPartition.from_counts([0, 20]), TokenPartition.balanced(1, 2)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("recipe", "role", "dtype"), MIXTURES, ids=str)
@pytest.mark.parametrize("run", [fused_fp8_ranks.gather, fused_fp8_ranks.scatter], ids=lambda run: run.__name__)
def test_as_the_ring(
    pool: RankPool, run: Callable[..., int], recipe: str, role: str, dtype: torch.dtype, form: str
) -> None:
    assert pool.run(run, setting(dtype), FEW, recipe, role, 1, form) == [2 * len(FEW)] * 2


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("run", [fused_fp8_ranks.gather, fused_fp8_ranks.scatter], ids=lambda run: run.__name__)
def test_every_t(pool: RankPool, run: Callable[..., int], form: str) -> None:
    turns = partitions(2)
    for recipe in ("current", "rowwise"):
        ran = pool.run(run, setting(), turns, recipe, "grad", 1, form, timeout_s=120.0)
        assert ran == [2 * len(turns)] * 2


@pytest.mark.parametrize("form", ["engine", pytest.param("one_launch", marks=pytest.mark.slow)])
@pytest.mark.parametrize("recipe", ["current", pytest.param("rowwise", marks=pytest.mark.slow)])
def test_several_weights_and_terms_and_late_rows(pool: RankPool, recipe: str, form: str) -> None:
    turns, only = FEW[:1], ("fused",)
    ran = pool.run(fused_fp8_ranks.gather, setting(), turns, recipe, "grad", 2, form, only, True, 0.02)
    assert ran == [2] * 2
    ran = pool.run(fused_fp8_ranks.scatter, setting(), turns, recipe, "grad", 3, form, only, True, 0.02)
    assert ran == [1] * 2


@pytest.mark.slow
def test_copy_programs(pool: RankPool) -> None:
    turns = partitions(2)[:3]
    for run in (fused_fp8_ranks.gather, fused_fp8_ranks.scatter):
        ran = pool.run(run, setting(), turns, "current", "grad", 1, "", ("fused",), False)
        assert ran == [len(turns)] * 2


@pytest.mark.slow
def test_three_ranks(interpreted_pool: Callable[[int], RankPool]) -> None:
    turns, more = partitions(3)[2:6], interpreted_pool(3)
    for form in FORMS:
        for run in (fused_fp8_ranks.gather, fused_fp8_ranks.scatter):
            ran = more.run(run, setting(), turns, "current", "grad", 1, form, ("fused",), timeout_s=120.0)
            assert ran == [len(turns)] * 3


SMALL = Setting(backend="shared", capacity=9, hidden=32, features=16)
CASES = {case.id: case for case in fp8_kernel_cases(SMALL, 2) if "copies" not in case.id}  # interpreted one at a time
QUICK = ("fp8-row-fused-rowwise",)


@pytest.mark.parametrize("case", [pytest.param(i, marks=() if i in QUICK else pytest.mark.slow) for i in CASES])
def test_layers(pool: RankPool, case: str) -> None:
    """CONFORMANCE.md 1, 2 and 4: forward and backward of linear layers whose operations are all configured `fused`."""
    summaries = pool.run(CASES[case].check, *CASES[case].args, timeout_s=90.0)
    assert all(summary["comparisons"] > 0 for summary in summaries)


@pytest.mark.parametrize(("recipe", "kind"), [("current", "mlp"), ("rowwise", "transformer")])
def test_layer_classes(pool: RankPool, recipe: str, kind: str) -> None:
    for errors in pool.run(fused_fp8_ranks.layers, recipe, kind, timeout_s=120.0):
        assert len(errors) > 7, errors
        # The same sums in another order: now and then one is quantised to the neighbouring FP8 number afterwards.
        assert all(error < 0.01 for error in errors.values()), errors


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["current", "rowwise"])
def test_without_sequence_parallelism(pool: RankPool, recipe: str) -> None:
    pool.run(fp8_layer_ranks.without_sequence_parallelism, recipe, "fused", timeout_s=120.0)


def test_layers_meet_every_recipe() -> None:
    assert {case.args[1] for case in CASES.values()} == set(fp8.RECIPES)


def test_where_it_cannot_run_no_scale_is_sent(pool: RankPool) -> None:
    said, _ = pool.run(fused_fp8_ranks.alone_without_kernels, setting(backend="process_group"))
    assert len(said) == 2, said
    assert all(re.match(r"BackendUnavailableError: .*fused.*process_group.*ring_exchange", one) for one in said), said
