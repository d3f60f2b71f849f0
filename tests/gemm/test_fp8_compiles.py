"""FP8 kernels compiled for Hopper without a GPU: 16-byte accesses, the conversion instruction, no spilled registers."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.gemm.test_compiles import _stack_bytes

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

# What `KernelOperations` passes, by the kernel's name: (constants, warps). 16: all aligned.
_QUANTIZE = {"UNIT": 16, "ROWS": 128, "COLUMNS": 128, "MAXIMA": 512, "POWER_OF_2": False, "INTERPRETED": False}
_ROWS = {"UNIT": 16, "ROWS": 1, "INTERPRETED": False, "ONE_BLOCK": True}
POINTERS = {
    "maxima": "*fp32",
    "scale": "*fp32",
    "data": "*u8",
    "transposed": "*i32",
    "source": "*u8",
    "packed": "*i32",
}


Build = Callable[..., dict[str, Any]]


@pytest.fixture
def build(run_module: Callable[..., str]) -> Build:
    """``build(name, dtype, num_warps, **constants)``: what came out."""

    def build(name: str, dtype: str, num_warps: int, **constants: Any) -> dict[str, Any]:
        arguments = (name, dtype, str(num_warps), json.dumps(constants))
        printed = run_module("tests.gemm.test_fp8_compiles", *arguments, interpret=False)
        found: dict[str, Any] = json.loads(printed.splitlines()[-1])
        assert not found["spills"], found
        return found

    return build


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_amax(build: Build, dtype: str) -> None:
    found = build("tiles.amax_tiles", dtype, 8, UNIT=16, ROWS=8, COLUMNS=1024)
    assert found["wide_loads"] and not found["narrow_loads"], found


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("e5m2", [False, True])
@pytest.mark.parametrize("transposes", [False, True])
def test_quantize(build: Build, dtype: str, e5m2: bool, transposes: bool) -> None:
    found = build("tiles.quantize_tiles", dtype, 8, **_QUANTIZE, E5M2=e5m2, TRANSPOSES=transposes)
    assert found["wide_loads"] and not found["narrow_loads"], found
    assert found["wide_stores"], found
    assert found["to_e5m2" if e5m2 else "to_e4m3"] and not found["to_e4m3" if e5m2 else "to_e5m2"], found
    assert not found["narrow_stores"], found
    assert found["shared_bytes"] <= 64 * 1024, "three programs a multiprocessor"


def test_transpose(build: Build) -> None:
    found = build("tiles.transpose_tiles", "bf16", 8, UNIT=16, ROWS=128, COLUMNS=128)
    assert found["wide_loads"] and found["wide_stores"] and not found["narrow_loads"], found
    assert not found["narrow_stores"], found


@pytest.mark.parametrize("e5m2", [False, True])
def test_dequantize(build: Build, e5m2: bool) -> None:
    found = build("tiles.dequantize_tiles", "bf16", 8, UNIT=16, ROWS=8, COLUMNS=1024, E5M2=e5m2, INTERPRETED=False)
    assert found["wide_loads"] and found["wide_stores"] and not found["narrow_stores"], found


@pytest.mark.parametrize(("columns", "num_warps"), [(4096, 4), (8192, 8), (16384, 16)])
def test_rows(build: Build, columns: int, num_warps: int) -> None:
    found = build("rows.quantize_rows", "bf16", num_warps, **_ROWS, COLUMNS=columns, E5M2=False, PACKED=False)
    assert found["wide_loads"] and found["wide_stores"] and found["to_e4m3"] and not found["narrow_loads"], found


def test_packed_rows(build: Build) -> None:
    found = build("rows.quantize_rows", "bf16", 8, **_ROWS, COLUMNS=8192, E5M2=True, PACKED=True)
    assert found["wide_loads"] and found["to_e5m2"] and not found["narrow_loads"], found
    assert not found["narrow_stores"], "words, not bytes"
    found = build("rows.unpack_rows", "bf16", 8, ROWS=8, WORDS=256, E5M2=True, INTERPRETED=False)
    assert found["wide_stores"] and not found["narrow_loads"], found


def main(name: str, dtype: str, num_warps: int, constants: dict[str, Any]) -> None:
    """Compile and print one line of JSON."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tpoverlap.gemm.fp8.kernels.launch import load

    kernel = load(name)
    names = list(kernel.arg_names)
    assert set(constants) <= set(names), sorted(set(constants) - set(names))

    def type_of(argument: str) -> str:
        if argument in constants:
            return "constexpr"
        if argument in ("x", "out"):
            return "*fp32" if name == "rows.unpack_rows" else f"*{dtype}"
        if argument == "data" and constants.get("PACKED"):
            return "*i32"
        return POINTERS.get(argument, "fp32" if argument in ("factor", "epsilon") else "i32")

    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, argument in enumerate(names)
        if type_of(argument).startswith("*")
        and not (argument == "packed" or (constants.get("PACKED") and argument == "data"))
    }
    source = ASTSource(kernel, {argument: type_of(argument) for argument in names}, constexprs=constants, attrs=aligned)
    binary = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps})
    ptx: str = binary.asm["ptx"]
    if os.environ.get("SHOW_PTX"):
        Path(os.environ["SHOW_PTX"]).write_text(ptx)
    narrow = ("b8", "b16", "u8", "v2.b8", "v4.b8", "v2.b16")
    print(
        json.dumps(
            {
                "wide_loads": ptx.count("ld.global.v4.b32"),
                "wide_stores": ptx.count("st.global.v4.b32"),
                "narrow_loads": sum(ptx.count(f"ld.global.{kind} ") for kind in narrow),
                "narrow_stores": sum(ptx.count(f"st.global.{kind} ") for kind in narrow),
                "to_e4m3": ptx.count("cvt.rn.satfinite.e4m3x2.f32"),
                "to_e5m2": ptx.count("cvt.rn.satfinite.e5m2x2.f32"),
                "instructions": ptx.count(";"),
                "shared_bytes": binary.metadata.shared,
                "spills": _stack_bytes(binary.asm["cubin"]),
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4]))
