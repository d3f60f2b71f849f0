"""Run by test_elementwise.py in a process of its own: compiles the kernels for Hopper without a GPU, prints JSON."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tpoverlap.nn.elementwise import HeadLayout, gated_kernels, norm_kernels, norms, qkv_heads, qkv_heads_kernels

FLOAT32 = ("cos", "sin", "mean", "rstd", "partial")


def build(kernel: Any, constants: dict[str, Any], num_warps: int) -> dict[str, Any]:
    """As a launch with aligned pointers specialises it: bfloat16 pointers divisible by 16, integers left open."""
    names = list(kernel.arg_names)
    types = {
        name: "constexpr"
        if name in constants
        else "i32"
        if name.endswith(("units", "blocks", "rows", "count")) or name == "width"
        else "*fp32"
        if name in FLOAT32
        else "*bf16"
        for name in names
    }
    aligned = {(index,): [["tt.divisibility", 16]] for index, name in enumerate(names) if types[name].startswith("*")}
    source = ASTSource(kernel, types, constexprs=constants, attrs=aligned)
    binary = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps})
    ptx: str = binary.asm["ptx"]
    return {
        "wide_loads": ptx.count("ld.global.v4.b32"),
        "narrow_loads": len(re.findall(r"ld\.global\.(?!v4)", ptx)),
        "wide_stores": ptx.count("st.global.v4.b32"),
        "narrow_stores": len(re.findall(r"st\.global\.(?!v4)", ptx)),
        "spills": stack_bytes(binary.asm["cubin"]),
    }


def stack_bytes(binary: bytes) -> int:
    """Bytes of stack a thread, by the disassembler that Triton ships."""
    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        shown = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return sum(int(size) for size in re.findall(r"STACK:(\d+)", shown))


def main() -> None:
    found = {}
    for unit in (8, 1):
        for gate in ("silu", "gelu", "relu"):
            constants = {"GATE": gate, "UNIT": unit, "BLOCK": 1024}
            for kernel in (gated_kernels.gated_forward, gated_kernels.gated_backward):
                found[f"{kernel.__name__} {gate} {unit}"] = build(kernel, constants, 4)
        for turns in (True, False):
            _, values = qkv_heads._plan(HeadLayout(4, 4, 128), unit, turns)
            for kernel in (qkv_heads_kernels.split_rotate, qkv_heads_kernels.merge_rotate):
                names = [name for name in kernel.arg_names if name.isupper()]
                found[f"{kernel.__name__} {turns} {unit}"] = build(kernel, dict(zip(names, values, strict=True)), 4)
        for centred in (True, False):
            for width in (1024, 4096, 5000, 8192)[:: 1 if unit == 8 else 3]:
                block, num_warps = norms._block(width)
                common = {"CENTRED": centred, "ZERO_CENTERED": centred, "UNIT": unit, "BLOCK": block}
                for kernel, more in (
                    (norm_kernels.norm_forward, {"EPS": 1e-5}),
                    (norm_kernels.norm_backward, {"NEEDS_WEIGHT": True}),
                ):
                    found[f"{kernel.__name__} {centred} {width} {unit}"] = build(kernel, {**common, **more}, num_warps)
    found["add_partials 1"] = build(norm_kernels.add_partials, {"ROWS": norms._ROWS, "COLUMNS": norms._COLUMNS}, 4)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
