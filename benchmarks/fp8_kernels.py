"""FP8 kernels on one GPU: their twins' bits first, then microseconds and GB/s beside plain torch, and FP8 GEMMs.

``python -m benchmarks.fp8_kernels --out FILE``; without a GPU ``TRITON_INTERPRET=1 python -m benchmarks.fp8_kernels
--device cpu`` at tiny sizes, which tests the script and measures nothing worth knowing.

GB/s count every operand and result once. ``host_us`` is what a call costs the processor. The section ``row_wise`` says
which modes of ``torch._scaled_mm`` this installation takes with row-wise scales: `gemm.fp8.scaled_mm` relies on it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch

from tpoverlap.gemm.fp8.kernels.launch import KernelOperations
from tpoverlap.gemm.fp8.plain import PlainOperations, padded
from tpoverlap.gemm.fp8.scale_rule import ScaleRule
from tpoverlap.gemm.fp8.scaled_mm import scaled_mm
from tpoverlap.tools.bench.environment import environment

SHAPES = [
    (8192, 4096),
    (8191, 4096),
    (4096, 4096),
    (8192, 7168),
    (8192, 14336),
    (4096, 8192),
    (8192, 8192),
    (1024, 4096),
]
GEMMS = [(8192, 4096, 6144), (8192, 4096, 14336), (8192, 7168, 4096), (8192, 8192, 28672), (8192, 14336, 8192)]
"""(M, K, N): tokens, input and output features of one rank's GEMMs."""
TINY_SHAPES, TINY_GEMMS = [(33, 48)], [(33, 48, 32)]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


class Bench:
    """Times calls on one device."""

    def __init__(self, device: torch.device, rounds: int) -> None:
        self.device, self.rounds, self.is_cuda = device, rounds, device.type == "cuda"
        self.calls = 20 if self.is_cuda else 1

    def time_us(self, call: Callable[[], object]) -> tuple[float, float]:
        """Microseconds a call: of the device with calls queued, and of the processor; medians over rounds."""
        for _ in range(3 if self.is_cuda else 1):
            call()
        on_device, on_host = [], []
        for _ in range(self.rounds):
            if not self.is_cuda:
                begin = time.perf_counter()
                call()
                on_device.append(1e6 * (time.perf_counter() - begin))
                on_host.append(on_device[-1])
                continue
            torch.cuda.synchronize()
            first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(2_000_000)  # so that the queue fills while nothing runs
            first.record()
            begin = time.perf_counter()
            for _ in range(self.calls):
                call()
            on_host.append(1e6 * (time.perf_counter() - begin) / self.calls)
            last.record()
            torch.cuda.synchronize()
            on_device.append(1e3 * first.elapsed_time(last) / self.calls)
        return round(median(on_device), 2), round(median(on_host), 2)


def operations(
    on: KernelOperations | PlainOperations, x: torch.Tensor, dtype: torch.dtype
) -> dict[str, tuple[Callable[[], Any], int]]:
    """By name: a call, and the bytes that it has to move."""
    rows, width = x.shape
    read, one, turned = x.numel() * x.element_size(), x.numel(), width * padded(rows)
    maxima, rule = PlainOperations().maxima(x), ScaleRule(dtype)
    data, scale = PlainOperations().quantize_rows(x, dtype)
    packed = torch.empty(rows, width + 4, dtype=torch.uint8, device=x.device)
    PlainOperations().pack_rows(x, dtype, packed)
    target = torch.empty_like(packed)
    return {
        "amax": (lambda: on.maxima(x), read),
        "quantize": (lambda: on.quantize_by_maxima(x, maxima, rule, False), read + one),
        "quantize and transpose": (lambda: on.quantize_by_maxima(x, maxima, rule, True), read + one + turned),
        "transpose": (lambda: on.transpose(data), one + turned),
        "quantize rows": (lambda: on.quantize_rows(x, dtype), read + one),
        "pack rows": (lambda: on.pack_rows(x, dtype, target) or target, read + packed.numel()),
        "unpack rows": (lambda: on.unpack_rows(packed, dtype), packed.numel() + 4 * one),
        "dequantize": (lambda: on.dequantize(data, scale, x.dtype), one + read),
    }


def differences(kernel: Any, twin: Any) -> int:
    """How many bytes differ. Magnitudes come in parts, of which the largest counts."""
    if isinstance(kernel, tuple):
        return sum(differences(*pair) for pair in zip(kernel, twin, strict=True))
    if kernel is None or twin is None:
        return 0 if kernel is twin else 1
    if kernel.shape != twin.shape and twin.numel() == 1:
        kernel = kernel.amax(0, keepdim=True)
    assert kernel.shape == twin.shape, (kernel.shape, twin.shape)
    return int((kernel.view(torch.uint8) != twin.view(torch.uint8)).sum())


def measure_kernels(bench: Bench, shapes: list[tuple[int, int]]) -> list[dict[str, Any]]:
    """One row a shape and operation."""
    kernels, plain, found = KernelOperations(bench.device), PlainOperations(), []
    for index, (rows, width) in enumerate(shapes):
        half = torch.bfloat16 if bench.is_cuda else torch.float16
        x, dtype = torch.randn(rows, width, device=bench.device).to(half), (E4M3, E5M2)[index % 2]
        twins = operations(plain, x, dtype)
        for name, (call, size_bytes) in operations(kernels, x, dtype).items():
            wrong = differences(call(), twins[name][0]())
            if wrong:
                raise click.ClickException(f"{name} {rows}x{width} {dtype}: {wrong} bytes are not the twin's")
            kernel_us, host_us = bench.time_us(call)
            plain_us, plain_host_us = bench.time_us(twins[name][0])
            found.append(
                {
                    "operation": name,
                    "shape": [rows, width],
                    "format": str(dtype).removeprefix("torch."),
                    "us": kernel_us,
                    "gb_per_s": round(size_bytes / kernel_us / 1e3, 1),
                    "host_us": host_us,
                    "plain_us": plain_us,
                    "plain_host_us": plain_host_us,
                }
            )
            click.echo(json.dumps(found[-1]))
    return found


def measure_gemms(bench: Bench, sizes: list[tuple[int, int, int]]) -> list[dict[str, Any]]:
    """TFLOP/s of the GEMMs as layers call them: accumulating fast and in float32, row-wise, and in bfloat16."""
    plain, found = PlainOperations(), []
    for m, k, n in sizes:
        x, weight = torch.randn(m, k, device=bench.device), torch.randn(n, k, device=bench.device)
        (x8, x_scale), (w8, w_scale) = plain.quantize_rows(x, E4M3), plain.quantize_rows(weight, E4M3)
        one, wide, out = torch.ones(1, 1, device=bench.device), torch.bfloat16, torch.empty(m, n, device=bench.device)
        out, x, weight = out.to(wide), x.to(wide), weight.to(wide)
        calls: dict[str, Callable[[], object]] = {
            "per-tensor fast": lambda: scaled_mm(x8, w8.t(), one, one, out, fast_accumulation=True),  # noqa: B023
            "per-tensor": lambda: scaled_mm(x8, w8.t(), one, one, out),  # noqa: B023
            "row-wise": lambda: scaled_mm(x8, w8.t(), x_scale, w_scale, out),  # noqa: B023
            "bfloat16": lambda: torch.mm(x, weight.t(), out=out),  # noqa: B023
        }
        for name, call in calls.items():
            try:
                us, host_us = bench.time_us(call)
            except RuntimeError as error:  # row-wise scales that this installation refuses
                found.append({"gemm": name, "shape": [m, k, n], "error": str(error)[:200]})
            else:
                tflops = round(2e-6 * m * k * n / us, 1)
                found.append({"gemm": name, "shape": [m, k, n], "us": us, "tflop_per_s": tflops, "host_us": host_us})
            click.echo(json.dumps(found[-1]))
    return found


def probe_row_wise(device: torch.device) -> list[dict[str, Any]]:
    """Which combinations ``torch._scaled_mm`` takes, and how far the result is from float64."""
    m, k, n, found = 515, 512, 256, []
    plain = PlainOperations()
    x, weight = torch.randn(m, k, device=device), torch.randn(n, k, device=device)
    (x8, x_scale), (w8, w_scale) = plain.quantize_rows(x, E4M3), plain.quantize_rows(weight, E4M3)
    exact = (x8.double() * x_scale.double()) @ (w8.double() * w_scale.double()).t()
    for wide in (torch.bfloat16, torch.float16, torch.float32):
        for fast in (True, False):
            for bias in (None, torch.zeros(n, device=device, dtype=wide)):
                for start in (0, 1, 3, 4):
                    row: dict[str, Any] = {"out": str(wide), "fast": fast, "bias": bias is not None, "start": start}
                    try:
                        out = torch._scaled_mm(
                            x8[start : start + 509],
                            w8.t(),
                            scale_a=x_scale[start : start + 509],
                            scale_b=w_scale.t(),
                            bias=bias,
                            out_dtype=wide,
                            use_fast_accum=fast,
                        )
                        torch.cuda.synchronize()
                        wanted = exact[start : start + 509]
                        row["relative_error"] = float((out.double() - wanted).norm() / wanted.norm())
                    except (RuntimeError, ValueError) as error:
                        row["error"] = str(error)[:160]
                    found.append(row)
                    click.echo(json.dumps(row))
    return found


@click.command()
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", help="cpu: the interpreter, tiny sizes.")
@click.option("--rounds", default=5, help="Medians are over so many.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="A JSON file.")
def main(device: str, rounds: int, out: Path | None) -> None:
    """Check, then measure."""
    place = torch.device("cpu") if device == "cpu" else torch.device("cuda", torch.cuda.current_device())
    bench, is_cuda = Bench(place, rounds), device == "cuda"
    torch.manual_seed(0)
    result = {
        "environment": environment(),
        "kernels": measure_kernels(bench, SHAPES if is_cuda else TINY_SHAPES),
        "gemms": measure_gemms(bench, GEMMS if is_cuda else TINY_GEMMS),
        "row_wise": probe_row_wise(place) if is_cuda else [],
    }
    if out is not None:
        out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
