"""FP8 kernels against their twins, bit for bit: in Triton's interpreter, or with ``--device cuda`` on a GPU.

Run by test_fp8_kernels.py in a process of its own, because TRITON_INTERPRET decides when Triton is imported:
``python -m tests.gemm.fp8_twins CASE ...``. The interpreter rounds to FP8 in integers (its own conversion is wrong), so
only a GPU tests the conversion instruction.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator

import torch

from tpoverlap.gemm.fp8.kernels.launch import KernelOperations
from tpoverlap.gemm.fp8.plain import PlainOperations
from tpoverlap.gemm.fp8.scale_rule import ScaleRule

FORMATS = (torch.float8_e4m3fn, torch.float8_e5m2)
SIZES = [(1, 16), (0, 32), (7, 48), (16, 1), (37, 112), (130, 200), (129, 144), (5, 1040), (300, 130)]
SEVERAL_BLOCKS = ((130, 200), (129, 144), (5, 1040), (300, 130))
"""Of the sizes those that take a second or more in the interpreter: thinned, each in one dtype."""
LARGE = [(2048, 4096), (300, 28672), (111, 40016), (8191, 512)]
"""On a GPU as well."""


class Case:
    """The kernels of one device, and tensors for them. ``thinned``: a part of these, see ``inputs``."""

    def __init__(self, device: str, *, thinned: bool = False) -> None:
        self.device, self.thinned = torch.device(device), thinned
        self.plain = PlainOperations()
        self.kernels = KernelOperations(self.device)
        self.generator = torch.Generator().manual_seed(7)

    def inputs(self) -> Iterator[torch.Tensor]:
        """Tensors on the CPU: every dtype and size, whole and row-sliced, with and without what is not finite.

        Thinned, dtype, size and slicing still meet in pairs, but for the dtypes of `SEVERAL_BLOCKS`.
        """
        for turn, dtype in enumerate((torch.float32, torch.float16, torch.bfloat16)):
            for number, (rows, columns) in enumerate(SIZES + (LARGE if self.device.type == "cuda" else [])):
                if self.thinned and (rows, columns) in SEVERAL_BLOCKS and number % 3 != turn:
                    continue
                whole = torch.randn(rows + 3, columns + 16, generator=self.generator) * 3
                # magnitudes over many binades, so that subnormal FP8 numbers and ties are met
                whole *= torch.exp2(torch.randint(-18, 3, whole.shape, generator=self.generator).float())
                whole = whole.to(dtype)
                sliced = (whole[2 : rows + 2, :columns], whole[1 : rows + 1, 3 : columns + 3])
                views = (whole[:rows, :columns].contiguous(), *sliced)
                yield from [views[(turn + number) % 3]] if self.thinned else views
        for bad in (math.nan, math.inf, -math.inf):
            odd = torch.randn(6, 32, generator=self.generator)
            odd[1, 5], odd[4, 0] = bad, 0.0
            yield odd
        yield torch.zeros(20, 16)
        yield torch.full((3, 16), 1e-42)
        yield torch.full((3, 16), 3e38)
        yield torch.tensor([[0.0, -0.0, 448.0, -464.0, 465.0, 1e30, -1e38, 2.0**-10, 2.0**-9, 3 * 2.0**-10]])

    def put(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` on the device, with the same strides."""
        if x.device == self.device or x.numel() == 0:
            return x.to(self.device)
        moved = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=self.device)
        return moved.copy_(x)

    def same(self, actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
        """Equal bits; a NaN is any NaN."""
        actual = actual.cpu()
        assert actual.shape == expected.shape and actual.dtype == expected.dtype, (what, actual.shape, expected.shape)
        if actual.dtype.is_floating_point and actual.dtype.itemsize > 1:
            equal = (actual == expected) | (actual.isnan() & expected.isnan())
        else:
            equal = actual.view(torch.uint8) == expected.view(torch.uint8)
        assert bool(equal.all()), f"{what}: {int((~equal).sum())} of {equal.numel()} differ"

    def same_fp8(self, actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
        """Equal bytes of float8 tensors; a NaN is any NaN."""
        actual = actual.cpu()
        assert actual.shape == expected.shape and actual.dtype == expected.dtype and actual.is_contiguous(), what
        equal = actual.view(torch.uint8) == expected.view(torch.uint8)
        equal |= actual.float().isnan() & expected.float().isnan()
        assert bool(equal.all()), f"{what}: {int((~equal).sum())} of {equal.numel()} differ"


def maxima(case: Case) -> None:
    """The largest of the parts is the tensor's; NaN wins over infinity."""
    for x in case.inputs():
        found = case.kernels.maxima(case.put(x))
        assert found.shape[0] >= 1 and found.shape[1:] == (1,)
        case.same(found.amax(0, keepdim=True), case.plain.maxima(x), f"{x.dtype} {tuple(x.shape)} {x.stride()}")


def quantised(case: Case) -> None:
    """Current scaling in one launch, with and without the transposed copy, and a scale that is given."""
    for number, x in enumerate(case.inputs()):
        dtype, transposes = FORMATS[number % 2], number % 3 != 0
        rule = ScaleRule(dtype, 0, number % 4 == 1, 0.5 if number % 5 == 4 else 0.0)
        what = f"{x.dtype} {tuple(x.shape)} {x.stride()} {rule}"
        shown = case.put(x)
        data, columns, scale = case.kernels.quantize_by_maxima(shown, case.kernels.maxima(shown), rule, transposes)
        twin, twin_columns, twin_scale = case.plain.quantize_by_maxima(x, case.plain.maxima(x), rule, transposes)
        case.same(scale, twin_scale, what)
        case.same_fp8(data, twin, what)
        assert (columns is None) == (twin_columns is None) == (not transposes)
        if columns is not None and twin_columns is not None:
            case.same_fp8(columns, twin_columns, f"{what} transposed")
        for one, other in zip(
            case.kernels.quantize_local(shown, rule, transposes), (data, columns, scale), strict=True
        ):
            assert one is None is other or (one is not None and other is not None), what
            if one is not None and other is not None:
                (case.same_fp8 if one.dtype.itemsize == 1 else case.same)(one, other.cpu(), f"{what} in one")
        given = torch.full((1, 1), 0.37)
        data, _ = case.kernels.quantize(shown, case.put(given), dtype, False)
        case.same_fp8(data, case.plain.quantize(x, given, dtype, False)[0], f"{what} given scale")


def of_all_ranks(case: Case) -> None:
    """Any number of magnitudes, also more than a program reads at once; one that is not finite gives scale 1."""
    for x in (
        torch.randn(3, 48, generator=case.generator),
        torch.randn(17, 200, generator=case.generator),
        torch.zeros(0, 32),
    ):
        shared = case.kernels.maxima(case.put(x), shared=True)
        assert shared.shape == (case.kernels.shared_parts, 1), f"{x.shape}: every tensor has as many"
        case.same(shared.amax(0, keepdim=True), case.plain.maxima(x, shared=True), f"magnitudes of {x.shape}")
    x = torch.randn(5, 32, generator=case.generator)
    for number, count in enumerate((1, 3, 512, 513, 1500)):
        found = torch.rand(count, 1, generator=case.generator)
        every = (None, math.inf, math.nan)
        for bad in every[number % 3 :][:1] if case.thinned else every:
            if bad is not None:
                found[count // 2] = bad
            rule = ScaleRule(torch.float8_e4m3fn)
            result = case.kernels.quantize_by_maxima(case.put(x), case.put(found), rule, False)
            twin = case.plain.quantize_by_maxima(x, found, rule, False)
            case.same(result[2], twin[2], f"{count} {bad}")
            case.same_fp8(result[0], twin[0], f"{count} {bad}")


def transposed(case: Case) -> None:
    """Bytes of any pitch; the padding is zeros, whatever lay there."""
    for x in case.inputs():
        data = x.to(torch.float8_e4m3fn) if x.is_contiguous() else _with_pitch(x)
        case.same_fp8(case.kernels.transpose(case.put(data)), case.plain.transpose(data), str(x.shape))


def _with_pitch(x: torch.Tensor) -> torch.Tensor:
    made = torch.full((x.shape[0], x.shape[1] + 16), 0x11, dtype=torch.uint8)[:, : x.shape[1]]
    made.copy_(x.contiguous().to(torch.float8_e4m3fn).view(torch.uint8))
    return made.view(torch.float8_e4m3fn)


def rows(case: Case) -> None:
    """One scale a row; the packed rows, and what they say, in both formats."""
    for number, x in enumerate(case.inputs()):
        dtype, what = FORMATS[number % 2], f"{x.dtype} {tuple(x.shape)} {x.stride()}"
        shown = case.put(x)
        data, scale = case.kernels.quantize_rows(shown, dtype)
        twin, twin_scale = case.plain.quantize_rows(x, dtype)
        case.same(scale, twin_scale, what)
        case.same_fp8(data, twin, what)
        wide = torch.float16 if case.device.type == "cpu" else x.dtype  # the interpreter truncates to bfloat16
        numbers = case.kernels.dequantize(data, scale, wide)
        case.same(numbers, case.plain.dequantize(twin, twin_scale, wide), f"{what} back")
        if x.shape[1] % 4:
            continue
        packed = torch.full((x.shape[0], x.shape[1] + 4), 7, dtype=torch.uint8)
        target = case.put(packed)
        case.kernels.pack_rows(shown, dtype, target)
        case.plain.pack_rows(x, dtype, packed)
        case.same_fp8(
            target[:, :-4].contiguous().view(dtype), packed[:, :-4].contiguous().view(dtype), f"{what} packed"
        )
        case.same(target[:, -4:].contiguous(), packed[:, -4:].contiguous(), f"{what} packed scales")
        case.same(case.kernels.unpack_rows(target, dtype), case.plain.unpack_rows(packed, dtype), f"{what} unpacked")


def every_byte(case: Case) -> None:
    """All 256 numbers of both formats, back to float32."""
    for dtype in FORMATS:
        data, scale = torch.arange(256, dtype=torch.uint8).view(1, 256), torch.full((1, 1), 1.5)
        found = case.kernels.dequantize(case.put(data).view(dtype), case.put(scale), torch.float32)
        case.same(found, case.plain.dequantize(data.view(dtype), scale, torch.float32), str(dtype))


CASES: dict[str, Callable[[Case], None]] = {
    function.__name__: function for function in (maxima, quantised, of_all_ranks, transposed, rows, every_byte)
}


def main() -> None:
    """Run cases by name; all of them by default."""
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="*", default=list(CASES))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--thinned", action="store_true")
    arguments = parser.parse_args()
    if arguments.device == "cpu":
        torch.set_num_threads(1)
    for name in arguments.cases:
        CASES[name](Case(arguments.device, thinned=arguments.thinned))
        print(f"{name} passed", flush=True)


if __name__ == "__main__":
    main()
