"""`benchmarks.fused_wrong` names what stands in a wrong result."""

from __future__ import annotations

import torch

from benchmarks import fused_wrong


def test_rows_that_came_late() -> None:
    torch.manual_seed(0)
    x, matrix = torch.randn(300, 256), torch.randn(256, 200) / 16
    reference = x @ matrix
    seen = x.clone()
    seen[140:180, :128] = 0
    out = reference.clone()
    out[140:180, 128:200] = seen[140:180] @ matrix[:, 128:200]
    found = fused_wrong.describe(out, reference, {"other": reference + 1})
    assert found["rows"][0][0] >= 140 and found["rows"][-1][1] <= 180 and found["number_of_tiles"] == 1
    (tile,) = found["tiles"]
    assert tile["rows"] == (140, 180) and tile["columns"] == (128, 200)
    assert fused_wrong.missing_depth(out, x, matrix, slice(140, 180), slice(128, 200)) == 128
    assert fused_wrong.missing_depth(out + 1, x, matrix, slice(140, 180), slice(128, 200)) is None


def test_a_summand_that_is_missing() -> None:
    torch.manual_seed(1)
    own, peers = torch.randn(200, 130), torch.randn(200, 130)
    out = own + peers
    out[:128, :128] = own[:128, :128]
    out[199, 129] = float("nan")
    found = fused_wrong.describe(out, own + peers, {"own": own, "peer": peers})
    assert found["is"]["own"] > 0.99 and found["is"]["peer"] < 0.2 and 0 < found["is"]["nan"] < 0.01
    assert found["tile_error"]["own"] == 0.0 and found["tile_error"]["reference"] > 0.5
    assert found["number_of_tiles"] == 2


def test_a_right_result() -> None:
    assert fused_wrong.describe(torch.ones(3, 3), torch.ones(3, 3), {}) == {"elements": 0}
