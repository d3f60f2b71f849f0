"""The kernels that exchange few rows: in the interpreter against hand-made peers, and compiled for Hopper."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@pytest.mark.parametrize("case", ["gathers", "scatters", "gives_up", "gives_up_partly"])
def test_in_the_interpreter(run_module: Callable[..., str], case: str) -> None:
    assert f"{case}: right" in run_module("tests.gemm.trade_cases", case, interpret=True)


@pytest.mark.parametrize("kernel", ["trade_gather", "trade_scatter"])
def test_compiled_for_hopper(run_module: Callable[..., str], kernel: str) -> None:
    for ranks in (2, 8):
        printed = run_module("tests.gemm.test_trade_kernels", kernel, str(ranks), interpret=False)
        found: dict[str, Any] = json.loads(printed.splitlines()[-1])
        assert found["packed"] == found["parameters"], "the block of parameters is what the binary declares"
        assert found["contiguous"], "all of 64 bits: one store writes those that change"
        assert not found["spills"], found
        assert found["waits_for_the_kernel_ahead"] == 1, "it is launched before that one is done"
        assert found["wide_stores"] and found["wide_loads"], "16-byte vectors"
        assert found["acquires32"] and found["pairs"], found
        assert found["counted_after_barrier"], "one thread counts what all threads have stored"
        if kernel == "trade_scatter":
            assert found["first_flag_after"] == "bar.sync", "the same of a flag"
            assert found["counts"] == 1 and found["fences"] == 1, "parts have flags; all words of the end, one release"
        assert found["publishes"] == ranks, "record with release order, digest before it"


def main(name: str, ranks: int) -> None:
    """Compile and print one line of JSON."""
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tests.gemm.test_compiles import _stack_bytes
    from tpoverlap.gemm.triton import trade_launcher
    from tpoverlap.gemm.triton.compiled import packed_layout

    kernel = {one.name: one for one in (trade_launcher.TRADE_GATHER, trade_launcher.TRADE_SCATTER)}[name]
    constants: dict[str, Any] = {"NUM_RANKS": ranks, "INTERPRETED": False, "AHEAD": True, "HAS_BIAS": ranks == 8}
    constants |= {"UNIT": tl.int32, "DTYPE": tl.bfloat16, "MULTIPLE": 4 if name == "trade_gather" else 8}
    constants["UNITS"] = trade_launcher._UNITS if name == "trade_gather" else trade_launcher.summed_units(ranks, 2)
    function = kernel.load()
    names = list(function.arg_names)
    constants = {key: value for key, value in constants.items() if key in names}
    assert tuple(each for each in names if each not in constants) == kernel.arguments, "named as they are passed"
    signature = {each: "constexpr" if each in constants else "i64" for each in names}
    assert all(function.params[names.index(each)].annotation_type == "i64" for each in kernel.arguments)
    source = ASTSource(function, signature, constexprs=constants)
    options = {"num_warps": trade_launcher._WARPS, "num_stages": 1}
    binary = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    ptx: str = binary.asm["ptx"]
    layout = packed_layout(kernel, binary)
    order = re.findall(r"bar\.sync|st\.global|\.acq_rel\.add", ptx)
    flag = re.findall(r"bar\.sync|st\.global|release[\w.]*\.exch\.b32", ptx)
    before = flag[: next(index for index, what in enumerate(flag) if what.endswith("b32"))]
    counts = [index for index, what in enumerate(order) if what == ".acq_rel.add"]
    print(
        json.dumps(
            {
                "packed": len(layout.offsets),
                "parameters": ptx.count(".param .", 0, ptx.index("{")),
                "contiguous": set(layout.places.values()) == {(8 * n, "q") for n in range(len(kernel.arguments))},
                "spills": _stack_bytes(binary.asm["cubin"]),
                "wide_stores": ptx.count("st.global.v4.b32"),
                "wide_loads": ptx.count("ld.global.v4.b32"),
                "acquires32": ptx.count("ld.acquire.sys.global.b32"),
                "pairs": ptx.count("ld.relaxed.sys.global.v2.b64"),
                "publishes": ptx.count("release.exch.b64"),
                "first_flag_after": before[-1],
                "counts": len(counts),
                "fences": ptx.count("fence.acq_rel.sys"),
                "waits_for_the_kernel_ahead": ptx.count("griddepcontrol.wait"),
                "counted_after_barrier": bool(counts) and all(order[index - 1] == "bar.sync" for index in counts),
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
