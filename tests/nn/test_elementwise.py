"""Fused activations and rotary positions: kernels against twins, twins against autograd, and how they are launched."""

from __future__ import annotations

import importlib.util
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.costs.null_kernels import NullKernelDriver
from tpoverlap.errors import ActiveShapeError
from tpoverlap.gemm.triton.direct import DirectKernels
from tpoverlap.nn import RotaryTable, norm
from tpoverlap.nn.activation import activate
from tpoverlap.nn.elementwise import HeadLayout, NormKind, launch, merge_rotate, norm_twin, norms, split_rotate
from tpoverlap.nn.elementwise.launch import DirectKernel, runs_kernels, vector_unit
from tpoverlap.nn.split_qkv import require_table, split_qkv

RunModule = Callable[..., str]
CASES = ("gated", "norms", "rotary")
THINNED = tuple((case, "--thinned") for case in CASES)
NEEDS_TRITON = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
LAYOUT = HeadLayout(groups=2, per_group=3, head_dim=4)


@NEEDS_TRITON
@pytest.mark.parametrize("case", CASES)
def test_in_the_interpreter(run_cases: RunModule, case: str) -> None:
    printed = run_cases("tests.nn.elementwise_cases", THINNED, (case, "--thinned"))
    assert f"{case} passed" in printed, printed


@NEEDS_TRITON
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_all_in_the_interpreter(run_module: RunModule, case: str) -> None:
    assert f"{case} passed" in run_module("tests.nn.elementwise_cases", case, interpret=True)


@pytest.mark.gpu
def test_compiled(run_module: RunModule) -> None:
    printed = run_module("tests.nn.elementwise_cases", "--device", "cuda", interpret=False)
    assert printed.count("passed") == 3


@NEEDS_TRITON
def test_compiled_for_hopper_all_accesses_are_16_bytes_wide(run_module: RunModule) -> None:
    found: dict[str, dict[str, int]] = json.loads(
        run_module("tests.nn.elementwise_compiles", interpret=False).splitlines()[-1]
    )
    assert len(found) == 45
    for name, counts in found.items():
        if name.endswith("8"):
            a_row = 2 if name.startswith("norm") else 0  # its mean and rstd are scalars
            assert max(counts["narrow_loads"], counts["narrow_stores"]) <= a_row, (name, counts)
            assert counts["spills"] == 0, (name, counts)
            assert counts["wide_loads"] and counts["wide_stores"], (name, counts)
    assert found["gated_backward silu 8"]["wide_loads"] == 3, "dy, g and u are read once"
    assert found["gated_backward silu 8"]["wide_stores"] == 2, "dg and du are written once"


@pytest.mark.parametrize("name", ["swiglu", "geglu", "reglu"])
def test_gradients_of_gates(name: str) -> None:
    torch.manual_seed(0)
    h = torch.randn(4, 10, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda h: activate(name, h), (h,))


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("zero_centered", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_the_norm_node(monkeypatch: pytest.MonkeyPatch, centred: bool, zero_centered: bool, frozen: bool) -> None:
    """What the node saves and returns; the kernels are stood in for by formulas in float64."""

    def forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, kind: NormKind) -> Any:
        return norm_twin(x, weight, bias, kind), x.new_full((1,), 5.0), x.new_full((1,), 6.0)

    def backward(
        dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor,
        kind: NormKind, *, needs_weight: bool,
    ) -> Any:  # fmt: skip
        assert (mean.item(), rstd.item(), needs_weight) == (5.0, 6.0, not frozen)
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_(), weight.detach().requires_grad_()]
            inputs += [torch.zeros_like(weight).requires_grad_()] if kind.centred else []
            y = norm_twin(inputs[0], inputs[1], inputs[2] if kind.centred else None, kind)
            dx, *others = torch.autograd.grad(y, inputs, dy)
        return (dx, None, None) if frozen else (dx, *others, *([] if kind.centred else [None]))

    monkeypatch.setattr(norm, "norm_forward", forward)
    monkeypatch.setattr(norm, "norm_backward", backward)
    monkeypatch.setattr(norm, "pays", lambda x, weight, bias: True)
    torch.manual_seed(0)
    kind = NormKind(centred, zero_centered, 1e-5)
    x = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(8, dtype=torch.float64, requires_grad=not frozen)
    bias = torch.randn(8, dtype=torch.float64, requires_grad=not frozen) if centred else None
    wanted = [t for t in (x, weight, bias) if t is not None and t.requires_grad]
    dy = torch.randn(5, 8, dtype=torch.float64)
    y, twin = norm.normalise(x, weight, bias, kind), norm_twin(x, weight, bias, kind)
    assert type(y.grad_fn).__name__ == "_NormBackward"
    torch.testing.assert_close(y, twin)
    torch.testing.assert_close(*(torch.autograd.grad(one, wanted, dy) for one in (y, twin)))
    with torch.no_grad():
        assert torch.equal(norm.normalise(x, weight, bias, kind), twin)


@pytest.mark.parametrize("turns", [True, False])
def test_gradients_of_the_split(turns: bool) -> None:
    torch.manual_seed(0)
    mixed = torch.randn(5, LAYOUT.width, dtype=torch.float64, requires_grad=True)
    table = RotaryTable.of(torch.arange(5), LAYOUT.head_dim, 100.0) if turns else None
    assert torch.autograd.gradcheck(lambda mixed: split_qkv(mixed, table, LAYOUT), (mixed,))


def test_the_split_is_the_layout_of_the_weight() -> None:
    rows = torch.arange(2 * LAYOUT.width, dtype=torch.float32).view(2, LAYOUT.width)
    q, k, v = split_rotate(rows, None, None, LAYOUT)
    heads = rows.view(2, 10, 4)
    assert torch.equal(q, heads[:, [0, 1, 2, 5, 6, 7]])
    assert torch.equal(k, heads[:, [3, 8]]) and torch.equal(v, heads[:, [4, 9]])
    assert torch.equal(merge_rotate(q, k, v, None, None, LAYOUT), rows)


def test_angles_that_train_get_a_gradient() -> None:
    table = RotaryTable.of(torch.arange(3), LAYOUT.head_dim, 100.0)
    learnt = RotaryTable(table.cos.clone().requires_grad_(), table.sin)
    q, _, _ = split_qkv(torch.randn(3, LAYOUT.width), learnt, LAYOUT)
    q.sum().backward()
    assert learnt.cos.grad is not None and learnt.cos.grad.abs().sum() > 0


def test_a_table_of_other_rows_is_refused() -> None:
    table = RotaryTable.of(torch.arange(3), 4, 100.0)
    require_table(table, 3, 4)
    with pytest.raises(ActiveShapeError, match=r"cos \[3, 1, 2\].*T=5 rows.*4 features need \[5, 1, 2\]"):
        require_table(table, 5, 4)
    with pytest.raises(ActiveShapeError, match=r"8 features need \[3, 1, 4\]"):
        require_table(table, 3, 8)


# -- launching --------------------------------------------------------------------------------------------------------


class FakeFunction:
    """Triton's function, and the binary it returns: both note what they are launched with."""

    def __init__(self) -> None:
        self.compiling: list[tuple[Any, ...]] = []
        self.direct: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*arguments: Any, **options: Any) -> FakeFunction | None:
            (self.compiling if options else self.direct).append((grid, *arguments))
            return self if options else None

        return run


def test_a_binary_is_made_once_and_takes_addresses() -> None:
    function = FakeFunction()
    kernel = DirectKernel(function, num_warps=4, kernels=DirectKernels(NullKernelDriver()))
    x, y = torch.zeros(64), torch.zeros(64)
    for programs in (1, 7, 16):
        kernel.launch(programs, (x, y), (programs, 3), ("silu", 8))
    assert len(function.compiling) == 1, "another T compiles nothing"
    assert function.direct[1] == ((16, 1, 1), x.data_ptr(), y.data_ptr(), 16, 3, "silu", 8)
    kernel.launch(2, (x, y), (1, 3), ("gelu", 8))
    kernel.launch(2, (x.half(), y.half()), (1, 3), ("gelu", 8))
    assert len(function.compiling) == 3, "other constants and another dtype have binaries of their own"
    kernel.launch(2, (x, y[1:]), (1, 3), ("silu", 8))
    assert function.compiling[-1][2].data_ptr() == y.data_ptr() + 4, "a pointer off 16 bytes goes Triton's way"
    kernel.launch(2, (x, y), (1 << 31, 3), ("silu", 8))
    assert len(function.compiling) == 5, "and so does an integer that a binary for 32 bits cannot take"
    kernel.launch(0, (x[:0], y[:0]), (1, 3), ("silu", 8))
    assert (len(function.compiling), len(function.direct)) == (5, 2), "no rows, no launch"
    with pytest.raises(OverflowError, match="cut the rows"):
        DirectKernel(lambda: None, 4).launch(1 << 31, (x,), (1,), ())


class OnSecondGpu(torch.Tensor):
    """Lies on a GPU, if one asks."""

    def get_device(self) -> int:
        return 1


def test_another_device_is_made_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    current, seen = [0], []

    @contextmanager
    def device(index: int) -> Iterator[None]:
        current.append(index)
        yield
        current.pop()

    def kernels_of(index: int) -> DirectKernels:
        seen.append((index, current[-1]))
        return DirectKernels(NullKernelDriver())

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(launch, "current_device", lambda: current[-1])
    monkeypatch.setattr(launch, "direct_kernels", kernels_of)
    function = FakeFunction()
    kernel, x = DirectKernel(function, num_warps=4), torch.zeros(64).as_subclass(OnSecondGpu)
    for rows in (3, 5):
        kernel.launch(rows, (x, x), (rows,), ("silu",))
    assert seen == [(1, 1)] and current == [0], "that GPU's kernels, asked for once"
    assert (len(function.compiling), len(function.direct)) == (1, 1)
    kernel.launch(3, (torch.zeros(64),), (3,), ("silu",))
    assert len(function.compiling) == 2, "a binary of one GPU is not another device's"


def test_units() -> None:
    assert vector_unit(16, 4096) == 8 and vector_unit(16, 4100) == 1 and vector_unit(8, 3) == 1


def test_a_gpu_without_triton_says_so_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(launch, "kernels_missing", lambda device: "Triton cannot be imported; pip install triton")
    launch._kernels_run.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, logger="tpoverlap"):
            for _ in range(3):
                assert not launch._kernels_run(torch.device("cuda", 0))
    finally:
        launch._kernels_run.cache_clear()
    assert [record.getMessage() for record in caplog.records] == [
        "cuda:0: activations and rotary positions run as several torch operations instead of one kernel each: "
        "Triton cannot be imported; pip install triton"
    ]


def test_the_cpu_takes_the_twins() -> None:
    assert not runs_kernels(torch.zeros(2, 2))


def test_norms_stay_with_torch_unless_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "runs_kernels", lambda x: True)
    large, weight = torch.zeros(1024, 4096), torch.zeros(4096)
    assert norms.pays(large, weight, None) and norms.pays(large, weight, weight)
    assert not norms.pays(large[1:], weight, None), "a small one's launch would take longer than its kernel"
    assert not norms.pays(torch.zeros(512, 8208), torch.zeros(8208), None), "a row has to fit into registers"
    assert not norms.pays(large, weight.double(), None) and not norms.pays(large.t(), torch.zeros(1024), None)
    strided = torch.zeros(2 * 4096)[::2]  # the kernels read parameters by address, in the input's dtype
    assert not norms.pays(large, strided, None) and not norms.pays(large, weight, strided)
    assert not norms.pays(large, weight, weight.half())
    with torch.autocast("cpu"):
        assert not norms.pays(large, weight, None), "torch decides the result's dtype"
