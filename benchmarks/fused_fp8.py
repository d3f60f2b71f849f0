"""The kernels of `fused` on FP8 operands, on one GPU: right numbers first, then microseconds beside `torch._scaled_mm`.

``python -m benchmarks.fused_fp8 --out FILE``; without a GPU ``TRITON_INTERPRET=1 python -m benchmarks.fused_fp8
--device cpu`` at tiny sizes, which tests the script. Everything that a kernel waits for is there before it starts, so
the times are those of the GEMM, its scales and what its form adds: "gathered" multiplies all rows, half of them as own
ones; "partial" and "own" half of them each (the two kernels of a reduce-scatter); "scatter" all, into memory of this
GPU. With ``--tiles MODE`` each is timed with every tile of the table as well, which says whether the table picks the
best; compiling them takes a minute a mode, the rest another one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.fp8_kernels import E4M3, E5M2, Bench
from tpoverlap.gemm.fp8 import QuantizedTensor, ScaledPartialGemm, ScaledRowGemm, quantize, quantize_rows
from tpoverlap.gemm.fp8.scaled_mm import scaled_mm
from tpoverlap.gemm.triton import TileShape
from tpoverlap.gemm.triton import tiles as tile_table
from tpoverlap.gemm.triton.gates import Slot
from tpoverlap.gemm.triton.launcher import GemmLauncher
from tpoverlap.memory.layout import MAX_PIECES
from tpoverlap.overlap.fused_blocks import gather_rows, scatter_rows
from tpoverlap.testing import relative_error
from tpoverlap.tools.bench.environment import environment

SHAPES = [(512, 4096, 6144), (2048, 8192, 4096), (8192, 4096, 6144), (8192, 8192, 8192)]
"""(T, K, N) of one rank's GEMMs."""
TINY = [(40, 48, 32)]
MODES = {"fast": (E4M3, False, True), "float32": (E4M3, False, False), "e5m2": (E5M2, False, False),
         "row-wise": (E4M3, True, True)}  # fmt: skip
"""(format of the activation, row-wise scales, fast accumulation wanted)."""
EPOCH, TOLERANCE = 3, 1e-2


class Problem:
    """Operands of one shape and mode, and all that kernels of rank 0 of 2 find there.

    Args:
        tile: instead of the table's choice.
    """

    def __init__(self, device: torch.device, shape: tuple[int, int, int], mode: str, tile: TileShape | None) -> None:
        (tokens, depth, width), (x_format, rowwise, self.fast) = shape, MODES[mode]
        generator = torch.Generator(device).manual_seed(tokens + depth)
        half = torch.bfloat16 if device.type == "cuda" else torch.float16
        x = torch.randn(tokens, depth, device=device, generator=generator).to(half)
        weight = (torch.randn(width, depth, device=device, generator=generator) / depth**0.5).to(half)
        self.x, self.weight = self._quantised(x, x_format, rowwise), self._quantised(weight, E4M3, rowwise)
        self.launcher = GemmLauncher(device, 5.0, tile=tile)
        self.twin = torch.empty(tokens, width, dtype=half, device=device)
        self.own = tokens // 2
        self.received = torch.randn(self.own, width, device=device, generator=generator).to(half)
        self.out, self.staging, self.landed = (torch.full_like(self.twin, float("nan")) for _ in range(3))
        self.summed = torch.full_like(self.received, float("nan"))
        self.words = torch.full((2 * MAX_PIECES,), EPOCH, dtype=torch.int32, device=device)
        self.sent_words, self.counters = torch.zeros_like(self.words), torch.zeros_like(self.words)
        here, there = self.twin.data_ptr(), self.landed.data_ptr()
        peers = [[here, self.words.data_ptr()], [there, self.sent_words.data_ptr()]]
        self.peers = torch.tensor(peers, dtype=torch.int64, device=device)
        counts = self.own, tokens - self.own
        self.gathered_rows, self.scattered_rows = (
            gather_rows(counts, depth, 0, 128),
            scatter_rows(counts, width, 0, 128),
        )
        self.gather_slot = Slot(self.x.bytes.data_ptr(), self.words.data_ptr())
        self.scatter_slot = Slot(self.received.data_ptr(), self.words.data_ptr(), 0, 2, MAX_PIECES, self.peers)
        self.row_task = ScaledRowGemm(
            weights=[self.weight], biases=[None], outs=[self.out], x_scale=self.x.scale, x_format=self.x.data.dtype,
            fast_accumulation=self.fast,
        )  # fmt: skip
        self.task = ScaledPartialGemm(terms=[(self.x, self.weight)], fast_accumulation=self.fast)

    @staticmethod
    def _quantised(x: torch.Tensor, dtype: torch.dtype, rowwise: bool) -> QuantizedTensor:
        if rowwise:
            return quantize_rows(x, dtype)
        return quantize(x, torch.full((1, 1), 8.0 / torch.finfo(dtype).max, device=x.device), dtype)

    def scaled_mm(self) -> None:
        """What the ring and the collectives multiply with."""
        x, w = self.x, self.weight
        scaled_mm(x.data, w.data.t(), x.scale, w.scale, self.twin, fast_accumulation=self.fast)

    def gathered(self) -> None:
        """All rows, the second half behind flags."""
        whole, task = self.x.bytes, self.row_task
        assert task.scalings is not None
        self.launcher.gathered_rows(
            self.gathered_rows, whole[: self.own], self.gather_slot, lambda *_: whole, task.matrices[0], None, self.out,
            EPOCH, scaling=task.scalings[0],
        )()  # fmt: skip

    def partial(self) -> None:
        """The peer's half."""
        self.launcher.partial_rows(self.scattered_rows, self.task, self.staging, self.counters)()

    def own_rows(self) -> None:
        """Own half, with what the peer sent."""
        self.launcher.own_rows(self.scattered_rows, self.task, self.summed, self.scatter_slot, EPOCH)()

    def scatter(self) -> None:
        """Both in one launch."""
        self.launcher.scatter_rows(self.scattered_rows, self.task, self.summed, self.scatter_slot, EPOCH)()

    def whole(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What `scatter` wrote, and should have."""
        theirs, summed = self.twin[self.own :].float(), self.twin[: self.own].float() + self.received.float()
        return torch.cat([self.landed[: theirs.shape[0]], self.summed]), torch.cat([theirs, summed])

    def calls(self) -> Iterator[tuple[str, Callable[[], None], Callable[[], tuple[torch.Tensor, torch.Tensor]]]]:
        """(name, call, what it wrote beside what it should have)."""
        own, theirs = slice(0, self.own), slice(self.own, None)
        yield "gathered", self.gathered, lambda: (self.out, self.twin)
        yield "partial", self.partial, lambda: (self.staging[theirs], self.twin[theirs])
        yield "own", self.own_rows, lambda: (self.summed, self.twin[own].float() + self.received.float())
        yield "scatter", self.scatter, self.whole


def measure(bench: Bench, shape: tuple[int, int, int], mode: str, every_tile: bool) -> Iterator[dict[str, Any]]:
    """One row a kernel: its error, its time, the time of `torch._scaled_mm`, and of each tile that fits."""
    alone = Problem(bench.device, shape, mode, None)
    alone.scaled_mm()
    mm_us, mm_host_us = bench.time_us(alone.scaled_mm)
    choices: dict[str, Problem] = {"table": alone}
    if every_tile:
        for tile, _ in tile_table._BYTES:
            choices[f"{tile.rows}x{tile.columns}x{tile.depth}"] = Problem(bench.device, shape, mode, tile)
    for number, (name, _, _) in enumerate(list(alone.calls())):
        row: dict[str, Any] = {"kernel": name, "mode": mode, "shape": list(shape), "scaled_mm_us": mm_us}
        row |= {"scaled_mm_host_us": mm_host_us, "times": {}}
        for label, problem in choices.items():
            problem.twin.copy_(alone.twin)
            _, call, pair = list(problem.calls())[number]
            try:
                call()
                found, wanted = pair()
                error = relative_error(found.float(), wanted.float())
                us, host_us = bench.time_us(call)
            except Exception as failure:  # a tile that does not fit
                row["times"][label] = f"{type(failure).__name__}: {str(failure)[:200]}"
                continue
            row["times"][label] = {"us": us, "host_us": host_us, "error": round(error, 6)}
            if not error < TOLERANCE:
                row["wrong"] = f"{label}: relative error {error:.3g}"
        yield row


@click.command()
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", help="cpu: the interpreter, tiny sizes.")
@click.option("--rounds", default=5, help="Medians are over so many.")
@click.option("--tiles", type=click.Choice(list(MODES)), multiple=True, help="Time every tile in this mode, too.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="A JSON file.")
def main(device: str, rounds: int, tiles: tuple[str, ...], out: Path | None) -> None:
    """Check and measure."""
    place = torch.device("cpu") if device == "cpu" else torch.device("cuda", torch.cuda.current_device())
    bench, rows = Bench(place, rounds), []
    for mode in MODES:
        for shape in SHAPES if device == "cuda" else TINY:
            for row in measure(bench, shape, mode, mode in tiles):
                rows.append(row)
                click.echo(json.dumps(row))
                if out is not None:
                    out.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n")
    wrong = [row for row in rows if "wrong" in row]
    if wrong:
        raise click.ClickException(f"{len(wrong)} of {len(rows)} kernels gave wrong numbers")


if __name__ == "__main__":
    main()
