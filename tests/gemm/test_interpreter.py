"""The kernels in Triton's interpreter, each group of cases in a process that has it switched on."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tpoverlap.errors import BackendUnavailableError
from tpoverlap.gemm.triton import kernels_missing, require_kernels

ROOT = Path(__file__).parents[2]
NEEDS_TRITON = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def run_cases(*arguments: str, interpret: bool = True) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    done = subprocess.run(
        [sys.executable, "-m", "tests.gemm.interpreted", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return done.stdout


@NEEDS_TRITON
@pytest.mark.parametrize(
    "case", ["arrivals", "gives_up", "counts", "adds", "adds_late", "pushes", "scatters", "copies"]
)
def test_in_the_interpreter(case: str) -> None:
    assert f"{case} passed" in run_cases(case)


@pytest.mark.gpu
def test_compiled() -> None:
    printed = run_cases("counts", "adds", "pushes", "scatters", "copies", "--device", "cuda", interpret=False)
    assert printed.count("passed") == 5


@NEEDS_TRITON
def test_the_cpu_needs_the_interpreter() -> None:
    probe = (
        "import torch; from tpoverlap.gemm.triton import kernels_missing as k; print(k(torch.device('cpu')) or 'works')"
    )
    answers = {}
    for interpret in ("0", "1"):
        environment = {**os.environ, "TRITON_INTERPRET": interpret}
        done = subprocess.run(
            [sys.executable, "-c", probe], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
        )
        answers[interpret] = done.stdout.strip()
    assert "TRITON_INTERPRET=1" in answers["0"]
    assert answers["1"] == "works"


def test_without_triton_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)  # an import of it raises
    kernels_missing.cache_clear()
    try:
        with pytest.raises(BackendUnavailableError, match=r"method 'fused'.*Triton.*pip install triton"):
            require_kernels(torch.device("cpu"), "qkv_fprop: method 'fused'")
    finally:
        kernels_missing.cache_clear()
