"""Compiled for Hopper without a GPU: tensor cores and bulk copies are used, registers do not spill where it counts."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


Build = Callable[..., dict[str, Any]]


@pytest.fixture
def build(run_module: Callable[..., str]) -> Build:
    """``build(tile_index, **constants)``: what came out of one variant in bfloat16."""

    def build(tile_index: int, **constants: Any) -> dict[str, Any]:
        printed = run_module("tests.gemm.test_compiles", str(tile_index), json.dumps(constants), interpret=False)
        found: dict[str, Any] = json.loads(printed.splitlines()[-1])
        return found

    return build


@pytest.mark.parametrize("tile_index", [0, 1, 4])
def test_all_gather(build: Build, tile_index: int) -> None:
    found = build(tile_index, HAS_OWN=True, GATED=True)
    assert found["wgmma"] and found["bulk_loads"] and found["bulk_stores"], found
    assert found["acquires"] >= 2, "the flag is read before the spin and in it"
    assert found["shared_bytes"] <= 227 * 1024, found
    assert not found["spills"], found
    assert found["packed"] == found["parameters"], "the block of parameters is what the binary declares"


@pytest.mark.parametrize("tile_index", [0, 1])
def test_reduce_scatter(build: Build, tile_index: int) -> None:
    partial = build(tile_index, SIGNALS=True)
    assert partial["carried"] == 5, "each tile bumps its own words: Triton 3.6 dropped two of a place's five numbers"
    assert partial["wgmma"] and not partial["spills"], partial
    assert partial["releases"] == 1, "one counter is bumped a tile, with release order"
    assert partial["bulk_waits"], "a bulk store must have written before it is counted"
    own = build(tile_index, NUM_RANKS=2, RANK=1, SUM_GATED=True)
    assert own["wgmma"] and own["spills"] <= 64, own  # a few, once a tile


@pytest.mark.parametrize("tile_index", [0, 1, 4])
def test_all_gather_in_one_launch(build: Build, tile_index: int) -> None:
    found = build(tile_index, HAS_OWN=True, GATED=True, PUSHES=True)
    assert found["wgmma"] and found["bulk_loads"] and not found["spills"], found
    assert found["wide_stores"] and found["wide_loads"], "rows are pushed in 16-byte vectors"
    assert found["flags"] == 1, "one place sets flags at peers, with release order at system scope"
    assert found["counted_after_barrier"], "one thread counts what all threads have stored"
    assert found["packed"] == found["parameters"], "the block of parameters is what the binary declares"


@pytest.mark.parametrize("tile_index", [1, 3, 4])
def test_reduce_scatter_in_one_launch(build: Build, tile_index: int) -> None:
    found = build(tile_index, kernel="scatter_gemm", NUM_RANKS=2, RANK=1)
    assert found["wgmma"] and found["bulk_loads"] and found["spills"] <= 64, found
    assert found["wide_stores"] and found["flags"] == 1 and found["acquires"] >= 2, found
    assert found["counted_after_barrier"], "one thread counts what all threads have stored"
    assert found["packed"] == found["parameters"], "the block of parameters is what the binary declares"


MIXED = ("fp8e5", "fp8e4nv")


@pytest.mark.parametrize(
    ("tile_index", "fast"), [(0, True), *(pytest.param(index, False, marks=pytest.mark.slow) for index in (1, 4))]
)
def test_fp8_all_gather(build: Build, tile_index: int, fast: bool) -> None:
    found = build(tile_index, formats=MIXED, FAST=fast, HAS_OWN=True, GATED=True, PUSHES=not fast)
    assert found["mixed_fp8"] and found["bulk_loads"] and found["bulk_stores"] and not found["spills"], found
    # One a 128 columns of K and element of the tile, in either loop: none is left to the tensor cores.
    assert (found["float32_adds"] == 0) == fast, found
    assert fast or (found["wide_stores"] and found["wide_loads"]), "rows are pushed in 16-byte vectors"
    assert found["shared_bytes"] <= 227 * 1024, found
    assert found["packed"] == found["parameters"], "the block of parameters is what the binary declares"


def test_fp8_reduce_scatter_in_one_launch(build: Build) -> None:
    found = build(1, kernel="scatter_gemm", formats=MIXED, FAST=False, SCALES=2, NUM_RANKS=2, RANK=1)
    assert found["mixed_fp8"] and found["float32_adds"] and found["spills"] <= 64, found
    assert found["packed"] == found["parameters"], "the block of parameters is what the binary declares"


@pytest.mark.slow
def test_fp8_reduce_scatter(build: Build) -> None:
    partial = build(0, formats=MIXED, SIGNALS=True)
    assert partial["mixed_fp8"] and partial["carried"] == 5 and not partial["spills"], partial
    terms = build(1, formats=MIXED, FAST=False, NUM_TERMS=3, result="fp32", SIGNALS=True)
    assert terms["mixed_fp8"] and terms["shared_bytes"] <= 227 * 1024 and not terms["spills"], terms


def main(tile_index: int, given: dict[str, Any]) -> None:
    """Compile and print one line of JSON."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tpoverlap.gemm.triton import scatter_gemm, tile_gemm, tiles
    from tpoverlap.gemm.triton.compiled import SCATTER_GEMM, TILE_GEMM, packed_layout

    module = scatter_gemm if given.pop("kernel", "") == "scatter_gemm" else tile_gemm
    kernel = getattr(module, module.__name__.rsplit(".")[-1])
    ours = SCATTER_GEMM if module is scatter_gemm else TILE_GEMM
    formats, result = given.pop("formats", ()), given.pop("result", "bf16")
    left_type, right_type = formats or ("bf16", "bf16")
    tile = (tiles._BYTES if formats else tiles._HALF)[tile_index][0]
    constants = {
        **dict.fromkeys(("HAS_OWN", "HAS_BIAS", "HAS_ADDEND", "GATED", "SIGNALS", "SUM_GATED", "ADDRESSED"), False),
        **{"ROWS": tile.rows, "COLUMNS": tile.columns, "DEPTH": tile.depth, "GROUP": tile.group, "PARTS": tile.parts},
        **{"NUM_TERMS": 1, "TMA": True, "TMA_STORE": True, "N_MAJOR": True, "PRECISION": "tf32"},
        **{"NUM_RANKS": 1, "RANK": 0, "INTERPRETED": False, "PUSHES": False, "SCALES": int(bool(formats))},
        "FAST": True,
        **given,
    }
    names = list(kernel.arg_names)
    constants = {name: value for name, value in constants.items() if name in names}
    left, right = (tile.rows, tile.depth), (tile.columns, tile.depth)
    described = {name: left for name in ("own", "a0", "a1", "a2")} | {name: right for name in ("b0", "b1", "b2")}
    described["out_descriptor"] = (tile.rows, tile.columns // tile.parts)
    wide = ("received", "flags", "limit", "error")

    def type_of(name: str) -> str:
        if name in constants:
            return "constexpr"
        if name in described:
            kind = result if name == "out_descriptor" else right_type if name.startswith("b") else left_type
            return f"tensordesc<{kind}[{described[name][0]},{described[name][1]}]>"
        if name in ("table", "counters", "pushes", "done", "places", "parts", "ticket"):
            return "*i32"
        if name in ("out", "bias", "addend"):
            return f"*{result}"
        if name == "source":
            return f"*{left_type}"
        if name.endswith("_scale"):
            return "*fp32" if formats else "i32"
        if name == "peers":
            return "*i64"
        return "i64" if name in wide else "i32"

    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if name not in constants and name not in module._CHANGING and name not in described
    }
    source = ASTSource(kernel, {name: type_of(name) for name in names}, constexprs=constants, attrs=aligned)
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    binary = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    ptx: str = binary.asm["ptx"]
    print(
        json.dumps(
            {
                "wgmma": ptx.count("wgmma.mma_async"),
                "mixed_fp8": ptx.count(".f32.e5m2.e4m3"),
                "float32_adds": len(re.findall(r"\badd\.(?:rn\.)?f32", ptx)),
                "bulk_loads": ptx.count("cp.async.bulk.tensor.2d.shared"),
                "bulk_stores": ptx.count("cp.async.bulk.tensor.2d.global"),
                "bulk_waits": ptx.count("cp.async.bulk.wait_group 0;"),
                "acquires": ptx.count("ld.acquire.sys.global.b32"),
                "releases": ptx.count("sys.release.add") + ptx.count("release.sys.global.add"),
                "flags": ptx.count("sys.release.exch") + ptx.count("release.sys.global.exch"),
                "counted_after_barrier": _counted_after_barrier(ptx),
                "wide_stores": ptx.count("st.global.v4.b32"),
                "wide_loads": ptx.count("ld.global.v4.b32"),
                "carried": _carried(binary.asm["ttgir"]),
                "packed": len(packed_layout(ours, binary).offsets),
                "parameters": ptx.count(".param .", 0, ptx.index("{")),
                "shared_bytes": binary.metadata.shared,
                "spills": _stack_bytes(binary.asm["cubin"]),
            }
        )
    )


def _counted_after_barrier(ptx: str) -> bool:
    """Whether every counter that a flag follows is bumped with a barrier between it and the last store before it."""
    order = re.findall(r"bar\.sync|st\.global|\.acq_rel\.add", ptx)
    counts = [index for index, what in enumerate(order) if what == ".acq_rel.add"]
    return bool(counts) and all(order[index - 1] == "bar.sync" for index in counts)


def _carried(ttgir: str) -> int:
    """How many numbers the loop over tiles hands to its next turn."""
    found = re.search(r"scf\.for .*? to %num\w+ step %programs .*-> \(([^)]*)\)", ttgir)
    return 0 if found is None else len(found[1].split(","))


def _stack_bytes(binary: bytes) -> int:
    """Bytes of stack a thread, by the disassembler that Triton ships."""
    import tempfile

    import triton.backends.nvidia

    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        shown = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return sum(int(size) for size in re.findall(r"STACK:(\d+)", shown))


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
