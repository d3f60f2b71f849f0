"""What every rank runs for one bucket: correctness first, then the candidates in turn, round after round.

Traps this avoids: one method timed after the other (clocks drift), timing on zeros (bf16 products run faster), the mean
(one hiccup moves it), the fastest rank (the group is as fast as its slowest).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from statistics import median
from typing import Any, Final

import torch
import torch.distributed as dist

import tpoverlap as tpo
from tpoverlap.method_tables import machine_of
from tpoverlap.testing.numeric import relative_error
from tpoverlap.tools.tune.job import DTYPES, Ask
from tpoverlap.tuning import Candidate

OPERATIONS_A_ROUND: Final = 4
_WARM_UP: Final = 3
_LARGEST_DIFFERENCE: Final = 2e-2  # both round partial sums to bfloat16 once; this is several times what that gives

Run = Callable[[], torch.Tensor]


def describe(rank: int, world_size: int, device_type: str) -> dict[str, Any]:
    """`machine_of` this rank, by the memory backend that a manager picks here."""
    device = _device(rank, device_type)
    with tpo.UserBufferManager(None, (64, 64), dtype=torch.float32, device=device, tuning_cache=False) as manager:
        return machine_of(device, manager.backend_name)


def measure(rank: int, world_size: int, ask: Ask) -> list[list[float]]:
    """Microseconds of one operation on this rank, the median over rounds: a list a candidate, a value a T.

    Raises:
        AssertionError: a candidate's result is not sequential's; wrong numbers are not timed.
    """
    device, dtype = _device(rank, ask.device_type), getattr(torch, DTYPES[ask.dtype])
    is_scatter = ask.kind in ("scatter", "beside-scatter")
    configs = {
        f"candidate{index}": {"method": one.method, "is_reduce_scatter": is_scatter, **one.options}
        for index, one in enumerate(ask.candidates)
    }
    manager = tpo.UserBufferManager(
        None,
        (max(ask.tokens), ask.width),
        dtype=dtype,
        device=device,
        ub_cfgs=configs,
        timeout_s=ask.timeout_s,
        tuning_cache=False,
    )
    times: list[list[float]] = [[] for _ in ask.candidates]
    with manager, torch.no_grad():
        for tokens in ask.tokens:
            runs = [_run(manager, f"candidate{index}", ask, tokens, dtype) for index in range(len(ask.candidates))]
            _compare(runs, ask.candidates)
            for index, found in enumerate(_time(runs, ask.rounds, device)):
                times[index].append(found)
        manager.check()
    return times


def _device(rank: int, device_type: str) -> torch.device:
    if device_type == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _run(manager: tpo.UserBufferManager, name: str, ask: Ask, tokens: int, dtype: torch.dtype) -> Run:
    """One operation on random operands, the same for every candidate."""
    generator = torch.Generator(manager.device).manual_seed(1 + manager.rank)

    def random(rows: int, columns: int) -> torch.Tensor:
        drawn = torch.randn(rows, columns, device=manager.device, dtype=torch.float32, generator=generator)
        return drawn.div_(math.sqrt(columns)).to(dtype)

    partition = tpo.TokenPartition.balanced(tokens, manager.tp_size)
    own, comm = partition.counts[manager.rank], manager.get(name)
    if ask.kind == "gather":
        x_shard_t, weight = random(own, ask.width), random(ask.features, ask.width)
        return lambda: _tensor(tpo.all_gather_gemm(x_shard_t, weight, comm, partition=partition))
    if ask.kind == "scatter":
        x, weight = random(tokens, ask.features), random(ask.width, ask.features)
        return lambda: tpo.gemm_reduce_scatter(x, weight, comm, partition=partition)
    if ask.kind == "beside-gather":  # dgrad: dy [T, N] times W [N, H], the input of wgrad beside it
        x_shard_t, dy, weight = random(own, ask.width), random(tokens, ask.features), random(ask.features, ask.width)
        return lambda: tpo.bulk_all_gather(x_shard_t, comm, (dy, weight.t()), partition=partition)[0]
    y, dy, x = random(tokens, ask.width), random(tokens, ask.features), random(tokens, ask.width)
    return lambda: tpo.bulk_reduce_scatter(y, comm, (dy.t(), x.t()), partition=partition)[0]


def _tensor(result: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
    assert isinstance(result, torch.Tensor), "one weight gives one tensor"
    return result


def _compare(runs: list[Run], candidates: tuple[Candidate, ...]) -> None:
    reference = runs[0]().float()
    for run, candidate in zip(runs[1:], candidates[1:], strict=True):
        result = run().float()
        if result.numel() and not relative_error(result, reference) < _LARGEST_DIFFERENCE:
            raise AssertionError(
                f"{candidate} differs from {candidates[0]} by {relative_error(result, reference):.2e}: not timing "
                "wrong numbers; run tpoverlap doctor"
            )


def _time(runs: list[Run], rounds: int, device: torch.device) -> list[float]:
    for run in runs:
        for _ in range(_WARM_UP):
            run()
    times: list[list[float]] = [[] for _ in runs]
    for number in range(rounds):
        # Another order each round: what runs after a slow one would otherwise always start late.
        for index in range(len(runs)) if number % 2 else reversed(range(len(runs))):
            dist.barrier()
            times[index].append(_once(runs[index], device))
    return [median(values) for values in times]


def _once(run: Run, device: torch.device) -> float:
    if device.type == "cpu":
        begin_s = time.perf_counter()
        for _ in range(OPERATIONS_A_ROUND):
            run()
        return 1e6 * (time.perf_counter() - begin_s) / OPERATIONS_A_ROUND
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    begin.record()
    for _ in range(OPERATIONS_A_ROUND):
        run()
    end.record()
    torch.cuda.synchronize(device)
    return 1e3 * float(begin.elapsed_time(end)) / OPERATIONS_A_ROUND
