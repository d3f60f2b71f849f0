"""The kernels in Triton's interpreter, in a process that has it switched on."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable

import pytest
import torch

from tpoverlap.errors import BackendUnavailableError
from tpoverlap.gemm.triton import kernels_missing, require_kernels

RunModule = Callable[..., str]
CASES = ("arrivals", "scatters", "copies", "counts", "adds", "adds_late", "pushes", "gives_up")
NEEDS_TRITON = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@NEEDS_TRITON
@pytest.mark.parametrize("case", CASES)
def test_in_the_interpreter(run_cases: RunModule, case: str) -> None:
    printed = run_cases("tests.gemm.interpreted", tuple((each,) for each in CASES), (case,))
    assert f"{case} passed" in printed, printed


@pytest.mark.gpu
def test_compiled(run_module: RunModule) -> None:
    cases = ("counts", "adds", "pushes", "scatters", "copies")
    printed = run_module("tests.gemm.interpreted", *cases, "--device", "cuda", interpret=False)
    assert printed.count("passed") == 5


@NEEDS_TRITON
def test_the_cpu_needs_the_interpreter(run_module: RunModule) -> None:
    answers = [run_module("tests.gemm.interpreted", "--missing", interpret=interpret) for interpret in (False, True)]
    assert "TRITON_INTERPRET=1" in answers[0]
    assert answers[1] == "works\n"


def test_without_triton_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)  # an import of it raises
    kernels_missing.cache_clear()
    try:
        with pytest.raises(BackendUnavailableError, match=r"method 'fused'.*Triton.*pip install triton"):
            require_kernels(torch.device("cpu"), "qkv_fprop: method 'fused'")
    finally:
        kernels_missing.cache_clear()
