"""`benchmarks.layer_kernels` runs, in the interpreter, and checks before it measures."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks import layer_kernels


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_on_the_cpu(run_module: Callable[..., str], tmp_path: Path) -> None:
    out = tmp_path / "kernels.json"
    printed = run_module("benchmarks.layer_kernels", "--out", str(out), "--device", "cpu", interpret=True)
    found = json.loads(out.read_text())
    assert "no speeds" in found["device"] and found["environment"]["torch"] == torch.__version__
    rows = found["rows"]
    ours = {name for name, numbers in rows.items() if "ours_us" in numbers}
    assert {
        "swiglu forward",
        "geglu backward",
        "split and rotate",
        "merge and rotate back",
        "rms_norm backward",
    } <= ours
    for name, numbers in rows.items():
        assert numbers["torch_us"] > 0 and numbers["torch_host_us"] > 0, name
        assert numbers["torch_gb_per_s"] == pytest.approx(numbers["size_bytes"] / numbers["torch_us"] / 1e3), name
        assert name in printed


def test_a_wrong_kernel_stops_it() -> None:
    right = torch.ones(3)
    row = layer_kernels.Row(lambda: right + 1, lambda: right, lambda: right.double(), 1)
    with pytest.raises(AssertionError, match="swiglu: relative error"):
        layer_kernels.check("swiglu", row)
    layer_kernels.check("swiglu", layer_kernels.Row(lambda: right, lambda: right, lambda: right.double(), 1))
