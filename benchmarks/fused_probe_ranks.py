"""What each rank of `benchmarks.fused_probe` does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import tpoverlap as tpo
from benchmarks import fused_wrong
from benchmarks.fused_watch import StallWatch
from tpoverlap.comm import OneSidedExchange
from tpoverlap.config import SUPPORTED
from tpoverlap.config.resolver import resolve
from tpoverlap.fused_form import FORMS
from tpoverlap.gemm import PartialGemm, RowGemm
from tpoverlap.gemm.triton import PieceRows, RowBlock
from tpoverlap.gemm.triton.gates import Slot
from tpoverlap.gemm.triton.launcher import GemmLauncher
from tpoverlap.gemm.triton.operation_rows import OperationRows
from tpoverlap.overlap import fused
from tpoverlap.testing import faults, relative_error

VARIANTS = ("all rows in first", "16 multiprocessors free", "no bulk copies")
"""What a form that hung is tried with."""
_GROWING = {
    "cuda": [(256, 256, 256), (256, 512, 1024), (1001, 1024, 512), (2048, 2048, 2048), (4096, 4096, 4096), (8192,) * 3],
    "cpu": [(7, 24, 20), (300, 24, 20)],
}
_ALONE = {"cuda": [(512, 8192, 4096), (8192, 8192, 4096), (8192, 8192, 8192)], "cpu": [(40, 24, 20)]}
_TOKENS = {"cuda": (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192), "cpu": (16, 40)}
_SHAPES = {
    "cuda": (("ag", 8192, 4096), ("ag", 4096, 3072), ("rs", 4096, 8192), ("rs", 8192, 8192)),
    "cpu": (("ag", 24, 20), ("rs", 24, 20)),
}
"""(direction, K, N)."""
_MOST_TOKENS_OF_ONE_LAUNCH = 2048
_CALLS = 8
_QUEUED_ROUNDS = 7
_DELAY_CYCLES = 8_000_000
_LATE_S = 0.02
_TOLERANCE = 1e-2


def _start(rank: int, device: str) -> tuple[torch.device, torch.dtype]:
    """This rank's device, and the dtype to use there; the configuration lets `fused` through from here on."""
    defaults = resolve.__kwdefaults__
    assert defaults is not None
    defaults["supported"] = SUPPORTED | {"fused", "atomic_gemm", "sm_copy"}
    if device == "cpu":
        return torch.device("cpu"), torch.float16
    index = rank % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return torch.device("cuda", index), torch.bfloat16


def _draw(device: torch.device, dtype: torch.dtype, rows: int, columns: int, *key: int) -> torch.Tensor:
    seed = hash((rows, columns, *key)) % (1 << 31)
    return torch.randn(rows, columns, device=device, generator=torch.Generator(device).manual_seed(seed)).to(dtype)


def _sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# -- each kernel alone -------------------------------------------------------------------------------------------


def alone(rank: int, size: int, device_type: str, folder: str) -> list[dict[str, Any]]:
    """Every kernel by itself with all its flags set: right numbers, time to compile, time beside cuBLAS."""
    device, dtype = _start(rank, device_type)
    watch = StallWatch(rank, Path(folder) / f"rank{rank}.json", 45.0)
    launcher = GemmLauncher(device, 5.0)
    rows = []
    for tokens, depth, width in _ALONE[device_type]:
        x, weight = _draw(device, dtype, tokens, depth, 1), _draw(device, dtype, width, depth, 2) / depth**0.5
        twin = torch.mm(x, weight.t())
        half = tokens // 2
        flags = torch.full((256,), 3, dtype=torch.int32, device=device)
        pieces = (PieceRows(64, half, half + half // 2), PieceRows(65, half + half // 2, tokens))
        others = (RowBlock(half, tokens, pieces),)
        out = torch.full_like(twin, float("nan"))
        rows_of_all = OperationRows(RowBlock(0, half), others)
        slot = Slot(x.data_ptr(), flags.data_ptr())
        row: dict[str, Any] = {
            "T": tokens,
            "K": depth,
            "N": width,
            "gemm_us": _time(device, partial(torch.mm, x, weight.t())),
        }

        def gathered() -> None:
            launcher.gathered_rows(rows_of_all, x[:half], slot, lambda *_: x, weight.t(), None, out, 3)()  # noqa: B023

        row["gathered_rows"] = _judge(watch, device, gathered, out, twin)
        gemm = PartialGemm([x], [weight.t()])
        counters = torch.zeros(256, dtype=torch.int32, device=device)
        staging = torch.full_like(twin, float("nan"))

        def partial_rows() -> None:
            launcher.partial_rows(rows_of_all, gemm, staging, counters)()  # noqa: B023

        row["partial_rows"] = _judge(watch, device, partial_rows, staging[half:], twin[half:])
        counters.zero_()
        partial_rows()
        _sync(device)
        wanted = launcher.tiles_per_word(rows_of_all, gemm)
        row["counted"] = {str(word): (int(counters[word]), tiles) for word, tiles in wanted.items()}
        assert all(counted == tiles for counted, tiles in row["counted"].values()), row["counted"]
        received = _draw(device, dtype, tokens - half, width, 3)
        block = RowBlock(half, tokens, tuple(PieceRows(i, p.start, p.stop) for i, p in enumerate(pieces)))
        own_block = OperationRows(block)
        own_out = torch.full_like(twin[half:], float("nan"))
        arrived = Slot(received.data_ptr(), flags.data_ptr(), 0, 2, 64)

        def own_rows() -> None:
            launcher.own_rows(own_block, gemm, own_out, arrived, 3)()  # noqa: B023

        flags.fill_(3)
        total = (torch.mm(x[half:].float(), weight.t().float()) + received.float()).to(dtype)
        row["own_rows"] = _judge(watch, device, own_rows, own_out, total)
        rows.append(row)
    watch.stop()
    return rows


def _judge(
    watch: StallWatch, device: torch.device, launch: Callable[[], None], out: torch.Tensor, twin: torch.Tensor
) -> dict[str, float]:
    started = time.monotonic()
    launch()
    prepared_s = time.monotonic() - started
    _sync(device)
    watch.beat("a kernel alone")
    error = relative_error(out.float(), twin.float())
    assert error < _TOLERANCE, f"wrong by {error:.2e}"
    return {"compile_s": round(prepared_s, 2), "error": error, "us": _time(device, launch)}


def _time(device: torch.device, run: Callable[[], object], calls: int = 10) -> float:
    if device.type == "cpu":
        return 0.0
    times = []
    for _ in range(5):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(1_000_000)
        begin.record()
        for _ in range(calls):
            run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / calls)
    return median(times)


# -- growing sizes -----------------------------------------------------------------------------------------------


def grow(
    rank: int, size: int, device_type: str, folder: str, direction: str, form: str, variant: str, turns: int
) -> list[dict[str, Any]]:
    """One form of one direction at growing sizes, ``turns`` operations each; every number is compared.

    What is wrong is described and the rest still runs, so that one run shows how often and on which ranks.
    """
    device, dtype = _start(rank, device_type)
    watch = StallWatch(rank, Path(folder) / f"rank{rank}.json", 12.0 if device_type == "cuda" else 40.0)
    _vary(variant)
    done = []
    for tokens, depth, width in _GROWING[device_type]:
        started = time.monotonic()
        manager = tpo.UserBufferManager(
            None, (tokens, depth if direction == "gather" else width), dtype=dtype, device=device, timeout_s=60.0
        )
        if variant == VARIANTS[1]:
            assert manager.channel is not None
            manager.channel.shares_gpu = True
        watch.look_at(manager)
        run = _one_gather if direction == "gather" else _one_scatter
        errors, wrong, previous = [], [], None
        for turn in range(turns):
            watch.beat(f"{direction} {form} {tokens}x{depth}x{width} turn {turn}")
            # This turn's late rank, or none: what its kernel sends comes long after what its comm stream does.
            with _forced(form), faults.delay_gemms(manager, _LATE_S, only_rank=turn % (size + 1)):
                error, found, previous = run(rank, size, manager, (tokens, depth, width), turn, previous)
            errors.append(error)
            if found:
                wrong.append({"turn": turn, **found})
        manager.check()
        manager.close()
        seconds = round(time.monotonic() - started, 2)
        done.append({"TKN": (tokens, depth, width), "errors": errors, "wrong": wrong, "seconds": seconds})
    watch.stop()
    return done


def _vary(variant: str) -> None:
    if variant == VARIANTS[0]:  # kernels find every flag set

        def wait_for_all(exchange: OneSidedExchange, stream: Any) -> None:
            for step in exchange.steps:
                exchange.wait(step, stream)

        OneSidedExchange.wait_entered = OneSidedExchange.wait_computed = wait_for_all  # type: ignore[method-assign]
    elif variant == VARIANTS[2]:
        fused.GemmLauncher = partial(GemmLauncher, use_tma=False)  # type: ignore[assignment,misc]


def _context(manager: Any, partition: tpo.TokenPartition, scatter: bool) -> Any:
    made = manager.operation(manager.get("proj_fprop" if scatter else "qkv_fprop"), partition, scatter=scatter)
    return replace(made, method="fused", config=replace(made.config, method="fused", use_ce=True))


Judged = tuple[float, dict[str, Any], torch.Tensor]
"""The relative error, what is wrong (empty: nothing), and the result."""


def _one_gather(
    rank: int, size: int, manager: Any, shape: tuple[int, int, int], turn: int, previous: torch.Tensor | None
) -> Judged:
    tokens, depth, width = shape
    partition = tpo.TokenPartition.balanced(tokens - turn, size)
    device, dtype = manager.device, manager.dtype
    x = _draw(device, dtype, tokens - turn, depth, turn)
    weight = _draw(device, dtype, width, depth, turn, rank) / depth**0.5
    out = torch.full((tokens - turn, width), float("nan"), device=device, dtype=dtype)
    own = x[partition.rows(rank)].clone()
    fused.all_gather(_context(manager, partition, False), own, RowGemm([weight.t()], [None], [out]), None)
    _sync(device)
    reference = torch.mm(x, weight.t()).float()
    error = relative_error(out.float(), reference)
    if error < _TOLERANCE:
        return error, {}, out
    found = fused_wrong.describe(out, reference, {} if previous is None else {"previous": previous[: len(out)]})
    for tile in found["tiles"]:
        at = slice(*tile["rows"]), slice(*tile["columns"])
        tile["missing_depth"] = fused_wrong.missing_depth(out, x, weight.t(), *at)
    return error, {"rows_of": partition.offsets, **found}, out


def _one_scatter(
    rank: int, size: int, manager: Any, shape: tuple[int, int, int], turn: int, previous: torch.Tensor | None
) -> Judged:
    tokens, depth, width = shape
    partition = tpo.TokenPartition.balanced(tokens - turn, size)
    device, dtype = manager.device, manager.dtype
    own = partition.rows(rank)
    summands = []
    for q in range(size):
        x = _draw(device, dtype, tokens - turn, depth, turn, q)
        weight = _draw(device, dtype, width, depth, turn, q, 9) / depth**0.5
        summands.append(torch.mm(x[own], weight.t()).float())
        if q == rank:
            gemm = PartialGemm([x], [weight.t()])
    reference = sum(summands[1:], summands[0])
    out = torch.full(reference.shape, float("nan"), device=device, dtype=dtype)
    fused.reduce_scatter(_context(manager, partition, True), gemm, out)
    _sync(device)
    error = relative_error(out.float(), reference)
    if error < _TOLERANCE:
        return error, {}, out
    candidates = {f"summand of rank {q}{' (own)' if q == rank else ''}": one for q, one in enumerate(summands)}
    if previous is not None and len(previous) >= len(out):
        candidates["previous"] = previous[: len(out)]
    return error, fused_wrong.describe(out, reference, candidates), out


# -- times -------------------------------------------------------------------------------------------------------


def timed(rank: int, size: int, device_type: str, folder: str, hung: tuple[str, ...], rounds: int) -> list[Any]:
    """Every form beside ring_exchange, sequential and the GEMM alone; slowest rank."""
    device, dtype = _start(rank, device_type)
    watch = StallWatch(rank, Path(folder) / f"rank{rank}.json", 25.0 if device_type == "cuda" else 60.0)
    rows: list[dict[str, Any]] = []
    tokens_of = _TOKENS[device_type]
    progress = Path(folder) / f"rows{rank}.json"
    for direction, depth, width in _SHAPES[device_type]:
        communicated = depth if direction == "ag" else width
        names = ("qkv", "fc1") if direction == "ag" else ("proj", "fc2")
        configs: dict[str, Any] = {
            f"{names[0]}_fprop": {"method": "fused"},
            f"{names[1]}_fprop": {"method": "ring_exchange"},
        }
        plain = {f"{names[0]}_fprop": {"method": "sequential"}}
        shape = (max(tokens_of), communicated)
        manager = tpo.UserBufferManager(None, shape, dtype=dtype, device=device, ub_cfgs=configs, timeout_s=60.0)
        other = tpo.UserBufferManager(None, shape, dtype=dtype, device=device, ub_cfgs=plain, timeout_s=60.0)
        watch.look_at(manager)
        watch.look_at(other)
        call = tpo.all_gather_gemm if direction == "ag" else tpo.gemm_reduce_scatter
        weight = _draw(device, dtype, width, depth, 5, rank) / depth**0.5
        for tokens in tokens_of:
            own = tpo.TokenPartition.balanced(tokens, size).counts[rank]
            full = _draw(device, dtype, tokens, depth, 6)
            x = (
                _draw(device, dtype, own, depth, 7, rank)
                if direction == "ag"
                else _draw(device, dtype, tokens, depth, 8)
            )
            comms = {
                "ring": manager.get(f"{names[1]}_fprop"),
                "sequential": other.get(f"{names[0]}_fprop"),
            }
            runs: dict[str, Callable[[], torch.Tensor]] = {
                label: partial(call, x, weight, comm) for label, comm in comms.items()
            }
            runs["gemm"] = partial(torch.mm, full, weight.t())
            long_name = "gather" if direction == "ag" else "scatter"
            for form in FORMS:
                if f"{long_name} {form}" not in hung and (form == "engine" or tokens <= _MOST_TOKENS_OF_ONE_LAUNCH):
                    runs[form] = partial(call, x, weight, manager.get(f"{names[0]}_fprop"))
            if not any(entry.startswith(long_name) for entry in hung):
                runs["fused"] = partial(call, x, weight, manager.get(f"{names[0]}_fprop"))
            with torch.no_grad():
                row = _time_row(device, runs, rounds, watch)
            rows.append({"direction": direction, "T": tokens, "K": depth, "N": width, **row})
            progress.write_text(str(rows[-40:]))
        manager.check()
        manager.close()
        other.close()
    watch.stop()
    progress.unlink(missing_ok=True)
    return rows


@contextmanager
def _forced(label: str) -> Iterator[None]:
    """Within the block `fused` has that form, if it is one."""
    chosen = fused.choose_form
    if label in FORMS:
        fused.choose_form = lambda *given: label  # type: ignore[assignment]
    try:
        yield
    finally:
        fused.choose_form = chosen


def _time_row(
    device: torch.device, runs: dict[str, Callable[[], torch.Tensor]], rounds: int, watch: StallWatch
) -> dict[str, Any]:
    reference = runs["sequential"]().float()
    errors = {}
    for label, run in runs.items():
        with _forced(label):
            for _ in range(3):
                found = run()
        _sync(device)
        watch.beat(f"first runs of {label}")
        if label != "gemm":
            errors[label] = relative_error(found.float(), reference)
            assert errors[label] < _TOLERANCE, f"{label} differs from sequential by {errors[label]:.2e}"
    eager: dict[str, list[float]] = {label: [] for label in runs}
    host: dict[str, list[float]] = {label: [] for label in runs}
    queued: dict[str, list[float]] = {label: [] for label in runs}
    if device.type == "cpu":
        rounds = 1
    for turn in range(rounds):
        for label, run in runs.items():
            with _forced(label):
                times = _round(device, run, delayed=False)
                eager[label].append(times[0])
                host[label].append(times[1])
                if turn < _QUEUED_ROUNDS:
                    queued[label].append(_round(device, run, delayed=True)[0])
            watch.beat(f"round of {label}")
    mine = {
        label: {"eager_us": median(eager[label]), "queued_us": median(queued[label]), "host_us": median(host[label])}
        for label in runs
    }
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    slowest = {
        label: {key: round(max(one[label][key] for one in everyone), 1) for key in mine[label]} for label in runs
    }
    return {"times": slowest, "errors": {label: f"{error:.1e}" for label, error in errors.items()}}


def _round(device: torch.device, run: Callable[[], object], *, delayed: bool) -> tuple[float, float]:
    """(device time, host time) of one call, us, over `_CALLS` back to back; delayed: all queued before the first."""
    dist.barrier()
    if device.type == "cpu":
        started = time.perf_counter()
        run()
        return (time.perf_counter() - started) * 1e6, 0.0
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    if delayed:
        torch.cuda._sleep(_DELAY_CYCLES)
    begin.record()
    started = time.perf_counter()
    for _ in range(_CALLS):
        run()
    host_us = (time.perf_counter() - started) * 1e6 / _CALLS
    end.record()
    torch.cuda.synchronize(device)
    return begin.elapsed_time(end) * 1e3 / _CALLS, host_us
