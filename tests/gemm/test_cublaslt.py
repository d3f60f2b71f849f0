"""Products by cublasLt: what its descriptors say against the plain product; on a GPU the library itself."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from tests.gemm.columns import Columns
from tpoverlap import explanation
from tpoverlap.errors import TpOverlapError
from tpoverlap.gemm import PartialGemm
from tpoverlap.gemm.cublaslt import LtProducts, lt_products, products
from tpoverlap.gemm.fp8 import scaled_mm
from tpoverlap.native import Recording
from tpoverlap.testing.numeric import relative_error

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ROWS = (1, 7, 64, 65, 200, 1000)


def products_by(library: Columns) -> LtProducts:
    made = LtProducts(library, 0)
    made._current_stream = lambda index: 7 + index
    return made


def matrix(seed: int, rows: int, columns: int, dtype: torch.dtype = torch.bfloat16, pitch: int = 0) -> torch.Tensor:
    """Small integers, so that every sum is exact; rows ``pitch`` elements further apart than they are long."""
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randint(-4, 5, (rows, columns + pitch), generator=generator).to(dtype)
    return whole[:, :columns]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("added", "biased", "pitch"), [(False, False, 0), (True, False, 8), (True, True, 0)])
def test_every_layout(rows: int, turned: bool, added: bool, biased: bool, pitch: int) -> None:
    lt, inner, features = products_by(Columns()), 48, 24
    left = matrix(1, rows, inner, pitch=pitch)
    right = matrix(2, features, inner).t() if turned else matrix(2, inner, features, pitch=pitch)
    addend = matrix(3, rows, features, pitch=pitch) if added else None
    bias = matrix(4, 1, features)[0] if biased else None
    whole = torch.full((rows, features + pitch), 77.0, dtype=torch.bfloat16)
    out = whole[:, :features]
    wanted = left.float() @ right.float()
    for summand in (addend, bias):
        if summand is not None:
            wanted = wanted + summand.float()
    for _ in range(2):  # the second time the family is there
        assert lt.multiply(left, right, out, addend, bias)
        assert torch.equal(out, wanted.bfloat16())
    assert (whole[:, features:] == 77.0).all(), "beside the rows nothing was written"


def test_rows_may_change_and_operands_move() -> None:
    library = Columns()
    lt, weight = products_by(library), matrix(2, 24, 48)
    x, received = matrix(1, 700, 48), matrix(3, 700, 24)
    for start, stop in ((0, 700), (600, 700), (3, 8), (8, 600), (0, 700)):
        out, left = torch.empty(stop - start, 24, dtype=torch.bfloat16), x[start:stop]
        assert lt.multiply(left, weight.t(), out, received[start:stop])
        assert torch.equal(out.float(), left.float() @ weight.t().float() + received[start:stop].float())
    assert library.asked == [768, 112, 8, 640] and len(library.products) == 1, "an algorithm for each step of rows"


def test_in_place_and_without_an_addend_are_two_families() -> None:
    library = Columns()
    lt, left, weight = products_by(library), matrix(1, 16, 48), matrix(2, 24, 48)
    out = torch.zeros(16, 24, dtype=torch.bfloat16)
    product = left.float() @ weight.t().float()
    for times in (0, 1, 2):
        wanted = (product + out.float() if times else product).bfloat16()
        assert lt.multiply(left, weight.t(), out, out if times else None)
        assert torch.equal(out, wanted)
    assert len(library.products) == 2


@pytest.mark.parametrize(("left_format", "right_format"), [(E4M3, E4M3), (E5M2, E4M3)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_scaled_operands(left_format: torch.dtype, right_format: torch.dtype, dtype: torch.dtype) -> None:
    lt = products_by(Columns())
    left, weight = matrix(1, 40, 48, left_format), matrix(2, 32, 48, right_format)
    addend = matrix(3, 40, 32, dtype)
    for scale in (0.5, 2.0):  # another one each time
        scales = torch.full((1, 1), scale), torch.full((1, 1), 2 * scale)
        out = torch.empty(40, 32, dtype=dtype)
        assert lt.multiply(left, weight.t(), out, addend, None, scales, fast=True)
        wanted = left.float() @ weight.float().t() * 2 * scale * scale + addend.float()
        assert torch.equal(out, wanted.to(dtype))


def _refused() -> list[Any]:
    bf16, left, weight = torch.bfloat16, matrix(1, 16, 48), matrix(2, 24, 48)
    out = torch.zeros(16, 24, dtype=bf16)
    scales = torch.ones(1, 1), torch.ones(1, 1)
    one_row, close = matrix(1, 1, 48).expand(16, 48), torch.zeros(600, dtype=bf16).as_strided((16, 48), (32, 1))
    eight = matrix(2, 32, 48, E4M3)
    return [
        pytest.param(left.float(), weight.float().t(), out.float(), None, None, id="float32"),
        pytest.param(left, weight.t(), out.float(), None, None, id="another result"),
        pytest.param(matrix(1, 16, 44), matrix(2, 24, 44).t(), out, None, None, id="rows not of 16 bytes"),
        pytest.param(matrix(1, 17, 48)[:, 1:], matrix(2, 24, 47).t(), out, None, None, id="starts not at 16 bytes"),
        pytest.param(left, weight.t(), out, matrix(3, 24, 16).t(), None, id="an addend of columns"),
        pytest.param(left, weight.t(), out, out.float(), None, id="an addend of another dtype"),
        pytest.param(matrix(1, 48, 16).t(), weight.t(), out, None, None, id="a left operand of columns"),
        pytest.param(one_row, weight.t(), out, None, None, id="one row, many times"),
        pytest.param(close, weight.t(), out, None, None, id="rows that overlap"),
        pytest.param(left, matrix(2, 1, 24).expand(48, 24), out, None, None, id="one row, many times, on the right"),
        pytest.param(left, weight.t(), out, matrix(3, 1, 24).expand(16, 24), None, id="an addend of one row"),
        pytest.param(matrix(1, 16, 48, E4M3), eight.t().contiguous(), out, None, scales, id="FP8 not along K"),
        pytest.param(left, weight.t(), out, None, scales, id="scales of no FP8"),
    ]


@pytest.mark.parametrize(("left", "right", "out", "addend", "scales"), _refused())
def test_what_torch_has_to_do(
    left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, addend: Any, scales: Any
) -> None:
    library, before = Columns(), out.clone()
    assert not products_by(library).multiply(left, right, out, addend, None, scales)
    assert not library.calls and torch.equal(out, before)


def test_a_bias_that_torch_has_to_add() -> None:
    """Not from 16 bytes on, as in a flat buffer of parameters; or, after one that fitted, of another dtype."""
    library = Columns()
    lt, left, weight = products_by(library), matrix(1, 16, 48), matrix(2, 24, 48)
    out, flat = torch.zeros(16, 24, dtype=torch.bfloat16), matrix(4, 1, 32)[0]
    assert lt.multiply(left, weight.t(), out, None, flat[:24])
    before = out.clone()
    for bias in (flat[1:25], flat[:24].float()):
        assert not lt.multiply(left, weight.t(), out, None, bias)
    assert len(library.calls) == 1 and torch.equal(out, before)


def test_another_device_is_current() -> None:
    """The library launches on the current one, so that has to be the operands'."""
    library, entered, current = Columns(), [], [0]

    @contextmanager
    def device(index: int) -> Iterator[None]:
        entered.append(index)
        before, current[0] = current[0], index
        yield
        current[0] = before

    lt = LtProducts(library, 3)
    lt._current_stream = lambda index: index
    left, weight, out = matrix(1, 16, 48), matrix(2, 24, 48), torch.empty(16, 24, dtype=torch.bfloat16)
    with (
        mock.patch.object(torch.Tensor, "is_cuda", True),
        mock.patch.object(torch.cuda, "device", device),
        mock.patch.object(products, "current_device", lambda: current[0]),
    ):
        assert lt.multiply(left, weight.t(), out) and entered == [3], "inside"
        current[0] = 3
        assert lt.multiply(left, weight.t(), out) and entered == [3], "it is current already"
    assert len(library.calls) == 2


def test_no_algorithm_is_asked_for_once() -> None:
    library = Columns(has_algorithms=False)
    lt, left, weight = products_by(library), matrix(1, 16, 48), matrix(2, 24, 48)
    out = torch.empty(16, 24, dtype=torch.bfloat16)
    assert not lt.multiply(left, weight.t(), out) and not lt.multiply(left, weight.t(), out)
    assert library.asked == [16] and not library.calls


def test_a_refusal_is_an_error() -> None:
    lt = products_by(Columns(status=13))
    with pytest.raises(TpOverlapError, match=r"13 \(execution failed\)"):
        lt.multiply(matrix(1, 16, 48), matrix(2, 24, 48).t(), torch.empty(16, 24, dtype=torch.bfloat16))


def test_no_bias_under_scales_in_float32() -> None:
    """The library has no such epilogue: torch adds it."""
    lt, scales = products_by(Columns()), (torch.tensor([[2.0]]), torch.tensor([[0.5]]))
    left, right, bias = matrix(1, 16, 48).to(E4M3), matrix(2, 24, 48).to(E4M3).t(), torch.ones(24)
    out = torch.empty(16, 24)
    assert lt.multiply(left, right, out, scales=scales)
    assert not lt.multiply(left, right, out, bias=bias, scales=scales)
    assert lt.multiply(left, right, out.bfloat16(), bias=bias.bfloat16(), scales=scales)


def test_streams_have_workspaces_of_their_own() -> None:
    library = Columns()
    lt, left, weight = products_by(library), matrix(1, 16, 48), matrix(2, 24, 48)
    out = torch.empty(16, 24, dtype=torch.bfloat16)
    for stream in (1, 2, 1, *range(3, 20)):
        lt._current_stream = lambda index, stream=stream: stream
        assert lt.multiply(left, weight.t(), out)
    by_stream = dict(library.calls[:3])
    assert library.calls[0] == library.calls[2] and len(set(by_stream.values())) == 2
    assert len(lt._workspaces) <= 8


def test_what_a_tape_holds_is_used_again() -> None:
    """Else every tape of a program with many streams would end up with a workspace of its own."""
    library = Columns()
    lt, recording = products_by(library), Recording(5)
    left, right = matrix(1, 16, 32), matrix(2, 32, 24)
    out = torch.empty(16, 24, dtype=torch.bfloat16)
    operands = (right.data_ptr(), left.data_ptr(), out.data_ptr(), out.data_ptr())
    assert lt.record(recording, 40, left, right, out, None, None, operands)
    held = lt._workspaces[40].address
    for stream in range(20):  # more than are kept
        lt._current_stream = lambda index, stream=stream: stream
        assert lt.multiply(left, right, out)
    assert 40 not in lt._workspaces and len(lt._held) <= 9, "the last ones, and the tape's"
    assert lt.record(recording, 40, left, right, out, None, None, operands) and lt._workspaces[40].address == held


def test_without_memory_for_a_workspace_torch_multiplies(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    library = Columns()
    lt, left, weight = products_by(library), matrix(1, 16, 48), matrix(2, 24, 48)
    out = torch.empty(16, 24, dtype=torch.bfloat16)

    def no_memory(*sizes: int, **options: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("none is left")

    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", no_memory)
        assert not lt.multiply(left, weight.t(), out) and not library.calls
    assert "no 33554432 bytes of workspace" in caplog.text
    assert lt.multiply(left, weight.t(), out), "there is some later"


def test_threads_take_turns() -> None:
    """Descriptors are shared: two threads whose rows differ must not see each other's."""
    lt, wrong = products_by(Columns()), []
    weight, x = matrix(2, 24, 48), matrix(1, 90, 48)

    def many(rows: int) -> None:
        out = torch.empty(rows, 24, dtype=torch.bfloat16)
        for _ in range(60):
            lt.multiply(x[:rows], weight.t(), out)
            if not torch.equal(out.float(), x[:rows].float() @ weight.t().float()):
                wrong.append(rows)

    threads = [threading.Thread(target=many, args=(rows,)) for rows in (90, 33, 8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong


def test_rows_added_on_the_cpu() -> None:
    """Without a GPU torch adds; with a bias, too."""
    left, weight, received, bias = matrix(1, 90, 48), matrix(2, 24, 48), matrix(3, 30, 24), matrix(4, 1, 24)[0]
    out = torch.empty(30, 24, dtype=torch.bfloat16)
    for one in (None, bias):
        PartialGemm([left], [weight.t()], bias=one).rows_added(60, 90, received, out)
        wanted = left[60:].float() @ weight.t().float() + received.float()
        assert torch.equal(out.float(), wanted if one is None else wanted + one.float())


@pytest.mark.parametrize(("found", "lines"), [(None, 1), (products_by(Columns()), 0)])
def test_explain_says_that_torch_adds(monkeypatch: pytest.MonkeyPatch, found: LtProducts | None, lines: int) -> None:
    def communicator(device: str, *, scatter: bool) -> Any:
        config = SimpleNamespace(is_reduce_scatter=scatter)
        return SimpleNamespace(manager=SimpleNamespace(device=torch.device(device)), config=config)

    monkeypatch.setattr(explanation, "lt_products", lambda index: found)
    ring: Any = SimpleNamespace(method="ring_exchange")
    said = explanation.sums_by_torch(communicator("cuda:1", scatter=True), ring)
    assert len(said) == lines and all("no cublasLt" in line for line in said)
    assert not explanation.sums_by_torch(communicator("cpu", scatter=True), ring), "torch adds there anyway"
    assert not explanation.sums_by_torch(communicator("cuda", scatter=False), ring)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 5, 16, 200, 1000, 4100])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_gpu(rows: int, dtype: torch.dtype) -> None:
    """Random numbers, sums over 4096 terms: a result is off by at most the half spacing that it is rounded by."""
    lt = lt_products(torch.cuda.current_device())
    assert lt is not None
    left, weight, received = (
        torch.randn(*s, device="cuda").to(dtype) for s in ((rows, 4096), (512, 4096), (rows, 512))
    )
    bias, out = torch.randn(512, device="cuda").to(dtype), torch.empty(rows, 512, device="cuda", dtype=dtype)
    exact = left.double() @ weight.double().t()
    for right in (weight.t(), weight.t().contiguous()):
        for addend in (None, received):
            for one in (None, bias):
                assert lt.multiply(left, right, out, addend, one)
                wanted = exact + (0 if addend is None else addend.double()) + (0 if one is None else one.double())
                assert relative_error(out, wanted.float()) <= torch.finfo(dtype).eps
    out.copy_(received)
    assert lt.multiply(left, weight.t(), out, out)
    assert relative_error(out, (exact + received.double()).float()) <= torch.finfo(dtype).eps


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 5, 200, 4100])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("left_format", [E4M3, E5M2])
@pytest.mark.parametrize("fast", [False, True])
def test_scaled_on_a_gpu(rows: int, dtype: torch.dtype, left_format: torch.dtype, fast: bool) -> None:
    """The fast mode keeps some 14 bits of a partial sum, the other one a few more between its additions."""
    left, weight = (
        torch.randn(rows, 2048, device="cuda").to(left_format),
        torch.randn(512, 2048, device="cuda").to(E4M3),
    )
    scales = torch.full((1, 1), 0.25, device="cuda"), torch.full((1, 1), 3.0, device="cuda")
    received, bias = torch.randn(rows, 512, device="cuda").to(dtype), torch.randn(512, device="cuda").to(dtype)
    exact, out = 0.75 * (left.double() @ weight.double().t()), torch.empty(rows, 512, device="cuda", dtype=dtype)
    for addend in (None, received):
        for one in (None, bias):
            scaled_mm(left, weight.t(), *scales, out, one, addend=addend, fast_accumulation=fast)
            wanted = exact + (0 if addend is None else addend.double()) + (0 if one is None else one.double())
            assert relative_error(out, wanted.float()) <= (0.01 if fast else max(torch.finfo(dtype).eps, 1e-3))
