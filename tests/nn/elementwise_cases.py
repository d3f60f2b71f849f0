"""Run by test_elementwise.py in a process of its own, because TRITON_INTERPRET decides when Triton is imported.

``python -m tests.nn.elementwise_cases CASE ...``: the kernels against their twins and a float64 reference;
``--device cuda`` runs the same cases compiled.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from itertools import product
from unittest.mock import patch

import torch

from tpoverlap.nn.elementwise import (
    HeadLayout,
    NormKind,
    gated_backward,
    gated_backward_twin,
    gated_forward,
    gated_forward_twin,
    merge_rotate,
    merge_rotate_twin,
    norm_backward,
    norm_forward,
    norm_twin,
    qkv_heads,
    split_rotate,
    split_rotate_twin,
)
from tpoverlap.nn.elementwise import gated as gated_module
from tpoverlap.nn.elementwise import norms as norms_module
from tpoverlap.nn.elementwise.launch import runs_kernels
from tpoverlap.nn.rotary import RotaryTable
from tpoverlap.testing.numeric import assert_close_to_twin

ROWS = (1, 2, 0, 5)
WIDTHS = (8, 1, 33, 1024, 1032)
"""Features of an activation: within one block, uneven, a whole block, and one more vector than that."""
LAYOUTS = (HeadLayout(2, 3, 8), HeadLayout(1, 1, 2), HeadLayout(3, 1, 24), HeadLayout(8, 4, 128), HeadLayout(1, 4, 80))


GAPS = (0, 8, 3)
"""Between rows, in elements: none, whole vectors, and one that ends vectors."""


class Draws:
    """Random tensors on one device, in one dtype. ``thinned``: ``GAPS`` take turns instead of each with everything.

    Thinned, `rotary` and `norms` share their cases between float32 and float16 like the squares of a chessboard.
    """

    def __init__(self, device: str, dtype: torch.dtype, *, thinned: bool = False) -> None:
        self.device, self.dtype, self._thinned = torch.device(device), dtype, thinned
        self._generator = torch.Generator().manual_seed(3)

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator).to(self.device, dtype or self.dtype)

    def gaps(self, *indices: int) -> tuple[int, ...]:
        """Of the case at these places of its lists. Thinned, each gap still meets each entry of each list."""
        turn = sum(indices) % len(GAPS)
        return GAPS[turn : turn + 1] if self._thinned else GAPS

    def has(self, *indices: int) -> bool:
        """Whether this dtype takes the case at these places of its lists: thinned, every other one."""
        return not self._thinned or (sum(indices) + (self.dtype == torch.float16)) % 2 == 0

    def rows_of(self, rows: int, width: int, gap: int) -> torch.Tensor:
        """[rows, width] of rows that lie ``gap`` elements apart, between NaN that nobody may read."""
        wide = self(rows, width + gap)
        wide[:, width:] = float("nan")
        return wide[:, :width]


def _close(actual: torch.Tensor, twin: torch.Tensor, reference: torch.Tensor, what: str) -> None:
    # The twin rounds after each operation, the kernel once: the kernel may not be further away.
    assert_close_to_twin(actual, twin, reference, what=what)
    assert actual.is_contiguous(), what


def gated(draw: Draws) -> None:
    """Every gate forward and backward; contiguous and strided rows; extreme numbers."""
    for gate in ("silu", "gelu", "relu"):
        for (i, rows), (j, width) in product(enumerate(ROWS), enumerate(WIDTHS)):
            for gap in draw.gaps(i, j):
                h, dy = draw.rows_of(rows, 2 * width, gap), draw.rows_of(rows, width, gap)
                _check_gated(h, dy, gate, f"{gate} {rows}x{width} gap {gap} {draw.dtype}")
        extreme = draw(1, 16)
        extreme[0, :8] = torch.tensor([-60000.0, -90.0, -0.0, 0.0, 90.0, 6000.0, 1e-6, -3.0])
        _check_gated(extreme, draw(1, 8), gate, f"extreme {gate} {draw.dtype}")
        broken = draw(2, 16)
        broken[0, 3] = float("nan")
        assert torch.isnan(gated_module.gated_forward_kernel(broken, gate)[0, 3]), "a NaN stays visible"


def _check_gated(h: torch.Tensor, dy: torch.Tensor, gate: str, what: str) -> None:
    exact, exact_dy = h.double(), dy.double()
    y, dh = gated_module.gated_forward_kernel(h, gate), gated_module.gated_backward_kernel(dy, h, gate)
    _close(y, gated_forward_twin(h, gate), gated_forward_twin(exact, gate), f"forward {what}")
    _close(dh, gated_backward_twin(dy, h, gate), gated_backward_twin(exact_dy, exact, gate), f"backward {what}")
    if runs_kernels(h):
        assert torch.equal(gated_forward(h, gate), y) and torch.equal(gated_backward(dy, h, gate), dh)


def rotary(draw: Draws) -> None:
    """Split and merge, with and without a table, every layout; strided rows; the way back undoes the way."""
    for (i, rows), (j, layout) in product(enumerate(ROWS), enumerate(LAYOUTS)):
        table = RotaryTable.of(torch.arange(rows, device=draw.device) * 7, layout.head_dim, 100.0)
        for k, (cos, sin) in enumerate(((table.cos, table.sin), (None, None))):
            for gap in draw.gaps(i, j, k) if draw.has(i, j, k) else ():
                _check_rotary(draw, draw.rows_of(rows, layout.width, gap), cos, sin, layout)


def _check_rotary(
    draw: Draws, mixed: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None, layout: HeadLayout
) -> None:
    what = f"{layout} {mixed.shape[0]} rows of stride {mixed.stride(0)} {draw.dtype} turned={cos is not None}"
    dense = mixed.contiguous()
    parts = qkv_heads.split_rotate_kernel(mixed, cos, sin, layout)
    twins = split_rotate_twin(dense, cos, sin, layout)
    exact = split_rotate_twin(dense.double(), cos, sin, layout)
    for name, one, twin, reference in zip("qkv", parts, twins, exact, strict=True):
        _close(one, twin, reference, f"{name} {what}")
    assert torch.equal(parts[2], twins[2]), "values are copied"
    merged = qkv_heads.merge_rotate_kernel(*parts, cos, sin, layout)
    reference = merge_rotate_twin(*(part.double() for part in parts), cos, sin, layout)
    _close(merged, merge_rotate_twin(*parts, cos, sin, layout), reference, f"merged {what}")
    if cos is None:
        assert torch.equal(merged, dense), what
    strided = [part.repeat_interleave(2, dim=2)[:, :, ::2] for part in parts]
    assert torch.equal(qkv_heads.merge_rotate_kernel(*strided, cos, sin, layout), merged), f"strided {what}"
    if runs_kernels(mixed):
        for one, other in zip(split_rotate(mixed, cos, sin, layout), parts, strict=True):
            assert torch.equal(one, other), what
        assert torch.equal(merge_rotate(*parts, cos, sin, layout), merged), what


def norms(draw: Draws) -> None:
    """Both norms, forward and backward: few and many rows, any width, strided rows, frozen weights."""
    shapes = [(1, 8), (2, 33), (0, 16), (7, 3), (9, 256), (3, 1032)]
    if draw.device.type == "cuda":
        shapes += [(2000, 4096), (531, 8192), (700, 5000)]  # more rows than programs
    kinds = [NormKind(centred, zero_centered, 1e-5) for centred, zero_centered in product((True, False), repeat=2)]
    for (i, kind), (j, (rows, width)) in product(enumerate(kinds), enumerate(shapes)):
        for gap in draw.gaps(i, j) if draw.has(i, j) else ():
            _check_norm(draw, draw.rows_of(rows, width, gap), kind)
    with patch.object(norms_module, "_most_programs", lambda device: 70):  # so that their sums take several steps
        _check_norm(draw, draw(71, 40), NormKind(True, False, 1e-5))
    flat = draw(2, 16) * 0 + 3.0
    y, _, _ = norm_forward(flat, draw(16), draw(16), NormKind(True, False, 1e-5))
    assert torch.isfinite(y).all(), "no variance"


def _check_norm(draw: Draws, x: torch.Tensor, kind: NormKind) -> None:
    what = f"{kind} {list(x.shape)} of stride {x.stride(0)} {draw.dtype}"
    weight, bias = draw(x.shape[1]), draw(x.shape[1]) if kind.centred else None
    dy = draw.rows_of(x.shape[0], x.shape[1], 8 if x.shape[0] % 2 else 0)
    y, mean, rstd = norm_forward(x, weight, bias, kind)
    grads = norm_backward(dy, x, weight, mean, rstd, kind, needs_weight=True)
    again = norm_backward(dy, x, weight, mean, rstd, kind, needs_weight=True)
    results = []
    for dtype in (draw.dtype, torch.float64):
        inputs = [t.detach().to(dtype, copy=True).requires_grad_() for t in (x, weight, bias) if t is not None]
        twin = norm_twin(inputs[0], inputs[1], inputs[2] if kind.centred else None, kind)
        results.append((twin.detach(), *torch.autograd.grad(twin, inputs, dy.to(dtype))))
    names = ("y", "dx", "dweight", "dbias")[: len(results[0])]
    for name, one, twin, exact in zip(names, (y, *grads), *results, strict=False):
        assert one is not None
        assert_close_to_twin(one, twin, exact, what=f"{name} {what}")
    for one, other in zip(grads, again, strict=True):
        if one is None or other is None:
            assert one is other
        else:
            assert torch.equal(one, other), f"the order of sums changed: {what}"
    frozen = norm_backward(dy, x, weight, mean, rstd, kind, needs_weight=False)
    assert torch.equal(frozen[0], grads[0]) and frozen[1:] == (None, None), what


CASES: dict[str, Callable[[Draws], None]] = {"gated": gated, "rotary": rotary, "norms": norms}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="*", default=list(CASES))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--thinned", action="store_true")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    dtypes = [torch.float32, torch.float16] + ([torch.bfloat16] if arguments.device == "cuda" else [])
    for name in arguments.cases:
        for dtype in dtypes:
            CASES[name](Draws(arguments.device, dtype, thinned=arguments.thinned))
        print(f"{name} passed", flush=True)


if __name__ == "__main__":
    main()
