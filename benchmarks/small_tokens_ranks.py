"""What each rank of `benchmarks.small_tokens` does."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import tpoverlap as tpo
from benchmarks.fused_probe_ranks import _draw, _round, _start, _sync
from benchmarks.fused_watch import StallWatch
from tpoverlap.gemm import PartialGemm
from tpoverlap.gemm.triton.gates import Slot
from tpoverlap.gemm.triton.launcher import GemmLauncher
from tpoverlap.gemm.triton.tiles import INTERPRETED, TileShape
from tpoverlap.overlap import fused, kernel_trader
from tpoverlap.overlap.fused_blocks import Slots, gather_rows, scatter_rows
from tpoverlap.overlap.fused_launch import RESERVED_PROGRAMS
from tpoverlap.testing import relative_error

CANDIDATES = {
    "cuda": (
        TileShape(64, 32, 128, 6, 4),
        TileShape(64, 64, 128, 4, 4),
        TileShape(64, 64, 128, 6, 4),
        TileShape(64, 128, 64, 5, 4),
        TileShape(64, 128, 128, 4, 4),
        TileShape(128, 128, 64, 5, 8),
        TileShape(64, 256, 64, 4, 4),
        TileShape(128, 256, 64, 3, 8),
    ),
    "cpu": (INTERPRETED, TileShape(32, 32, 32, 1, 1, group=2)),
}
SHAPES = {"cuda": ((8192, 4096), (4096, 3072), (8192, 1280)), "cpu": ((24, 20),)}
"""(K, N) of this rank's GEMM."""
TOKENS = {"cuda": (128, 256, 512, 1024, 64, 16), "cpu": (16, 40)}
"""In the order of interest: a budget cuts off the end."""
_MOST_SUMMED = 128 * 128
"""Elements of a tile whose epilogue holds two sums."""
_TOLERANCE = 1e-2
_WARM_CALLS = 3

Runs = dict[str, Callable[[], torch.Tensor]]


def tile_name(tile: TileShape) -> str:
    """Such as "64x128x64/5"."""
    return f"{tile.rows}x{tile.columns}x{tile.depth}/{tile.num_stages}"


def measure(
    rank: int, size: int, device_type: str, progress: str, folder: str, tiles: Sequence[str], rounds: int, until: float
) -> list[dict[str, Any]]:
    """One row a direction, shape and T; rank 0 writes them to ``progress`` as they come. ``until``: monotonic time."""
    device, dtype = _start(rank, device_type)
    watch = StallWatch(rank, Path(folder) / f"rank{rank}.json", 45.0 if device_type == "cuda" else 90.0)
    rows: list[dict[str, Any]] = []
    candidates = [tile for tile in CANDIDATES[device_type] if not tiles or tile_name(tile) in tiles]
    started = time.monotonic()
    _compile(device, dtype, candidates, rank, watch)
    compile_s = round(time.monotonic() - started, 1)
    for depth, width in SHAPES[device_type]:
        for direction in ("gather", "scatter"):
            with _Managers(direction, depth, width, device, dtype, candidates, watch) as managers:
                for tokens in TOKENS[device_type]:
                    if not _go_on(until):
                        watch.stop()
                        return rows
                    row = managers.row(rank, size, tokens, rounds, watch)
                    rows.append({"direction": direction, "T": tokens, "K": depth, "N": width, **row})
                    if rank == 0:
                        Path(progress).write_text(json.dumps({"compile_s": compile_s, "rows": rows}, indent=1))
    watch.stop()
    return rows


def _go_on(until: float) -> bool:
    """Rank 0's clock decides for all."""
    answer = [time.monotonic() < until]
    dist.broadcast_object_list(answer, src=0)
    return answer[0]


def _compile(
    device: torch.device, dtype: torch.dtype, candidates: Sequence[TileShape], rank: int, watch: StallWatch
) -> None:
    """Every candidate in both directions, before anybody waits for anybody. The ranks begin at different ends, so that
    each finds the other's half on the disk.
    """
    x, weight, out = (torch.zeros(256, 256, device=device, dtype=dtype) for _ in range(3))
    words, peers = (
        torch.zeros(512, device=device, dtype=torch.int32),
        torch.zeros(2, 2, device=device, dtype=torch.int64),
    )
    slot = Slot(x.data_ptr(), words.data_ptr(), rank, 2, 64, peers)
    for tile in candidates if rank == 0 else candidates[::-1]:
        launcher = GemmLauncher(device, 20.0, RESERVED_PROGRAMS, tile, lends=True)
        gathered = gather_rows((128, 128), 256, rank, 128)
        launcher.gathered_rows(gathered, x[:128], slot, lambda *_: x, weight.t(), None, out, 1, pushes=True)
        if tile.rows * tile.columns <= _MOST_SUMMED:
            scattered = scatter_rows((128, 128), 256, rank, 128)
            launcher.scatter_rows(scattered, PartialGemm([x], [weight.t()]), out[:128], slot, 1)
        _sync(device)
        watch.beat(f"compiled {tile_name(tile)}")
    dist.barrier()


class _Managers:
    """Of one direction and shape: the communicators and kernels to compare."""

    def __init__(
        self,
        direction: str,
        depth: int,
        width: int,
        device: torch.device,
        dtype: torch.dtype,
        candidates: Sequence[TileShape],
        watch: StallWatch,
    ) -> None:
        self.direction, self.depth, self.width, self.device, self.dtype = direction, depth, width, device, dtype
        names = ("qkv_fprop", "fc1_fprop") if direction == "gather" else ("proj_fprop", "fc2_fprop")
        configs: dict[str, Any] = {names[0]: {"method": "fused"}, names[1]: {"method": "ring_exchange"}}
        shape = (max(TOKENS[device.type]), depth if direction == "gather" else width)
        self.manager = tpo.UserBufferManager(None, shape, dtype=dtype, device=device, ub_cfgs=configs, timeout_s=60.0)
        plain = {names[0]: {"method": "sequential"}}
        self.other = tpo.UserBufferManager(None, shape, dtype=dtype, device=device, ub_cfgs=plain, timeout_s=60.0)
        # Another one, because an operation remembers its form.
        self.third = tpo.UserBufferManager(None, shape, dtype=dtype, device=device, ub_cfgs=plain, timeout_s=60.0)
        watch.look_at(self.manager)
        self.fused, self.ring = self.manager.get(names[0]), self.manager.get(names[1])
        self.sequential, self.by_kernel = self.other.get(names[0]), self.third.get(names[0])
        channel = self.manager.channel
        assert channel is not None, "two ranks"
        self.kernels: dict[str, Any] = {}
        for tile in candidates:
            if direction == "gather" or tile.rows * tile.columns <= _MOST_SUMMED:
                launcher = GemmLauncher(device, 130.0, RESERVED_PROGRAMS, tile, lends=not channel.shares_gpu)
                counters = fused.PieceCounters(device, channel.tp_size)
                self.kernels[tile_name(tile)] = fused._Kernels(launcher, counters, Slots(channel))

    def __enter__(self) -> _Managers:
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            self.manager.check()
            self.manager.close()
            self.other.close()
            self.third.close()
        else:
            self.manager.abort()
            self.other.abort()
            self.third.abort()

    def row(self, rank: int, size: int, tokens: int, rounds: int, watch: StallWatch) -> dict[str, Any]:
        """Correctness first, then interleaved rounds; medians, of the slowest rank."""
        device, depth, width = self.device, self.depth, self.width
        own = tokens // size
        weight = _draw(device, self.dtype, width, depth, 5, rank) / depth**0.5
        full = _draw(device, self.dtype, tokens, depth, 6)
        gathers = self.direction == "gather"
        x = (
            _draw(device, self.dtype, own, depth, 7, rank)
            if gathers
            else _draw(device, self.dtype, tokens, depth, 8, rank)
        )
        call = tpo.all_gather_gemm if gathers else tpo.gemm_reduce_scatter
        runs: Runs = {
            "gemm": partial(torch.mm, full, weight.t()),
            "plain": _plain(gathers, x, weight, size),
            "sequential": partial(call, x, weight, self.sequential),
            "kernel": partial(call, x, weight, self.by_kernel),
            "ring": partial(call, x, weight, self.ring),
            "engine": partial(call, x, weight, self.fused),
            "one_launch": partial(call, x, weight, self.fused),
        }
        runs |= dict.fromkeys(self.kernels, runs["one_launch"])
        with torch.no_grad():
            reference = runs["plain"]().float()
            errors, wrong = {}, []
            for label, run in list(runs.items()):
                with self._forced(label):
                    for _ in range(_WARM_CALLS):
                        found = run()
                _sync(device)
                watch.beat(f"{self.direction} {tokens}x{depth}x{width}: first runs of {label}")
                if label not in ("gemm", "plain"):
                    errors[label] = relative_error(found.float(), reference)
                    if not errors[label] < _TOLERANCE:
                        wrong.append(label)
            answers: list[Any] = [None] * size
            dist.all_gather_object(answers, wrong)
            for label in {label for one in answers for label in one}:
                del runs[label]  # a wrong result has no time
            times = self._times(runs, 1 if device.type == "cpu" else rounds, watch)
        return {"times": times, "errors": {k: f"{v:.1e}" for k, v in errors.items()}, "wrong": answers}

    def _times(self, runs: Runs, rounds: int, watch: StallWatch) -> dict[str, Any]:
        found: dict[str, dict[str, list[float]]] = {
            label: {"eager_us": [], "host_us": [], "queued_us": []} for label in runs
        }
        for _ in range(rounds):
            for label, run in runs.items():
                with self._forced(label):
                    eager_us, host_us = _round(self.device, run, delayed=False)
                    queued_us = _round(self.device, run, delayed=True)[0]
                for key, value in (("eager_us", eager_us), ("host_us", host_us), ("queued_us", queued_us)):
                    found[label][key].append(value)
            watch.beat("a round")
        mine = {label: {key: median(values) for key, values in one.items()} for label, one in found.items()}
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        return {
            label: {key: round(max(one[label][key] for one in everyone), 1) for key in mine[label]} for label in runs
        }

    @contextmanager
    def _forced(self, label: str) -> Iterator[None]:
        """Within the block `fused` has the form or the tile of that name; "sequential" and "kernel" are those of that
        method: by copy engine, and by one small kernel.
        """
        chosen, kernels = fused.choose_form, fused._kernels
        of_sequential = kernel_trader.choose_sequential_form
        if label in ("sequential", "kernel"):
            by: Any = "kernel" if label == "kernel" else "engine"
            kernel_trader.choose_sequential_form = lambda *given: by
        form = "one_launch" if label in self.kernels else label
        if form in ("engine", "one_launch"):
            fused.choose_form = lambda *given: form  # type: ignore[assignment,return-value]
        if label in self.kernels:
            fused._kernels = lambda *given: self.kernels[label]
        try:
            yield
        finally:
            fused.choose_form, fused._kernels = chosen, kernels
            kernel_trader.choose_sequential_form = of_sequential


def _plain(gathers: bool, x: torch.Tensor, weight: torch.Tensor, size: int) -> Callable[[], torch.Tensor]:
    """The collective and torch's GEMM, one after the other."""
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

    def gather() -> torch.Tensor:
        gathered = x.new_empty(x.shape[0] * size, x.shape[1])
        all_gather(gathered, x)
        return torch.mm(gathered, weight.t())

    def scatter() -> torch.Tensor:
        partial_sum = torch.mm(x, weight.t())
        out = x.new_empty(x.shape[0] // size, weight.shape[0])
        reduce_scatter(out, partial_sum)
        return out

    return gather if gathers else scatter
