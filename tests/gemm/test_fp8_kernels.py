"""FP8 kernels give their twins' bits: in Triton's interpreter, and on a GPU at the sizes that layers have."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.gemm.fp8_twins import CASES
from tpoverlap.errors import BackendUnavailableError
from tpoverlap.gemm.fp8.kernels.launch import KernelOperations
from tpoverlap.gemm.fp8.quantize import operations_on

RunModule = Callable[..., str]
THINNED = tuple((case, "--thinned") for case in CASES)
NEEDS_TRITON = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@NEEDS_TRITON
@pytest.mark.parametrize("case", list(CASES))
def test_in_the_interpreter(run_cases: RunModule, case: str) -> None:
    printed = run_cases("tests.gemm.fp8_twins", THINNED, (case, "--thinned"))
    assert f"{case} passed" in printed, printed


@NEEDS_TRITON
@pytest.mark.slow
@pytest.mark.parametrize("case", list(CASES))
def test_all_in_the_interpreter(run_module: RunModule, case: str) -> None:
    assert f"{case} passed" in run_module("tests.gemm.fp8_twins", case, interpret=True)


@pytest.mark.gpu
@pytest.mark.parametrize("case", list(CASES))
def test_compiled(run_module: RunModule, case: str) -> None:
    printed = run_module("tests.gemm.fp8_twins", case, "--device", "cuda", interpret=False, timeout_s=300)
    assert f"{case} passed" in printed


@pytest.mark.gpu
def test_any_number_of_rows_runs_the_same_binary() -> None:
    operations = operations_on(torch.device("cuda", torch.cuda.current_device()))
    assert isinstance(operations, KernelOperations) and operations._kernels is not None
    seen = set()
    for num_rows in (0, 1, 16, 17, 4096, 1):
        x = torch.randn(num_rows, 256, device="cuda", dtype=torch.bfloat16)
        operations.quantize(x, torch.ones(1, 1, device="cuda"), torch.float8_e4m3fn, num_rows > 0)
        operations.transpose(x.to(torch.float8_e4m3fn))
        operations.quantize_rows(x, torch.float8_e4m3fn)
        seen.add(len(operations._kernels._found))
    assert len(seen) <= 3, "sizes are not specialised: only T = 0 leaves variants out"


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements() -> None:
    rows, width = (1 << 31) // 4096 + 300, 4096
    if torch.cuda.mem_get_info()[0] < 14 * rows * width:
        pytest.skip("too little memory")
    operations = operations_on(torch.device("cuda", torch.cuda.current_device()))
    x = torch.zeros(rows, width, device="cuda", dtype=torch.bfloat16)
    x[-1, -1], x[-1, 0], x[0, -1] = 448.0, -1.0, 2.0
    assert float(operations.maxima(x).amax()) == 448.0
    data, columns = operations.quantize(x, torch.ones(1, 1, device="cuda"), torch.float8_e4m3fn, True)
    assert columns is not None
    for row, column, value in ((rows - 1, width - 1, 448.0), (rows - 1, 0, -1.0), (0, width - 1, 2.0)):
        assert float(data[row, column].float()) == float(columns[column, row].float()) == value
    assert int((columns.view(torch.uint8) != 0).sum()) == 3
    del columns
    again = operations.transpose(data)
    assert float(again[width - 1, rows - 1].float()) == 448.0 and int((again.view(torch.uint8) != 0).sum()) == 3


def test_a_cpu_runs_the_twins_and_never_the_interpreter_unasked() -> None:
    assert not isinstance(operations_on(torch.device("cpu")), KernelOperations)
    if os.environ.get("TRITON_INTERPRET") != "1":
        with pytest.raises(BackendUnavailableError, match=r"FP8 on cpu needs Triton kernels: .*or run without fp8"):
            KernelOperations(torch.device("cpu"))


@NEEDS_TRITON
@pytest.mark.slow
def test_the_benchmark_of_fused_runs_in_the_interpreter(run_module: RunModule, tmp_path: Path) -> None:
    file = tmp_path / "fused.json"
    run_module("benchmarks.fused_fp8", "--device", "cpu", "--rounds", "1", "--out", str(file), interpret=True)
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == 16 and all(row["times"]["table"]["error"] < 0.01 for row in rows)


@NEEDS_TRITON
def test_the_benchmark_runs_in_the_interpreter(run_module: RunModule, tmp_path: Path) -> None:
    file = tmp_path / "kernels.json"
    run_module("benchmarks.fp8_kernels", "--device", "cpu", "--rounds", "1", "--out", str(file), interpret=True)
    found = json.loads(file.read_text())
    assert len(found["kernels"]) == 8 and all(row["us"] > 0 for row in found["kernels"])
    assert [row["gemm"] for row in found["gemms"] if "error" not in row] == [
        "per-tensor fast",
        "per-tensor",
        "row-wise",
        "bfloat16",
    ]
