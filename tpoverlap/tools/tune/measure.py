"""What every rank runs for one bucket: correctness first, then the candidates in turn, round after round.

Traps this avoids: one method timed after the other (clocks drift), timing on zeros (bf16 products run faster), the mean
(one hiccup moves it), the fastest rank (the group is as fast as its slowest).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
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
_LEAD_CALLS: Final = 2
_FEWEST_ROUNDS: Final = 3
_LARGEST_DIFFERENCE: Final = 2e-2  # both round partial sums to bfloat16 once; this is several times what that gives

Run = Callable[[], torch.Tensor]


def describe(rank: int, world_size: int, device_type: str) -> dict[str, Any]:
    """`machine_of` this rank, by the memory backend that a manager picks here."""
    device = rank_device(rank, device_type)
    with tpo.UserBufferManager(None, (64, 64), dtype=torch.float32, device=device, tuning_cache=False) as manager:
        return machine_of(device, manager.backend_name)


class _OutOfTimeError(Exception):
    """Raised on every rank at the same place."""


@dataclass(frozen=True)
class _Gate:
    """Where the ranks meet before each measurement, and agree whether there is time for it."""

    end_s: float

    def pass_through(self, enough_s: float = math.inf) -> bool:
        """A barrier; raises on all ranks when one of them is past the end. Whether one is past ``enough_s``."""
        now_s = time.monotonic()
        late = torch.tensor([now_s >= self.end_s, now_s >= enough_s], dtype=torch.int32)
        dist.all_reduce(late, op=dist.ReduceOp.MAX)
        if late[0]:
            raise _OutOfTimeError
        return bool(late[1])


def measure(rank: int, world_size: int, ask: Ask) -> list[list[float]] | None:
    """Microseconds of one operation on this rank, the median over rounds: a list a candidate, a value a T.

    None, on every rank, when ``ask.limit_s`` is over before everything was measured.

    Raises:
        AssertionError: a candidate's result is not sequential's; wrong numbers are not timed.
    """
    begin_s = time.monotonic()
    gate = _Gate(begin_s + ask.limit_s)
    device, dtype = rank_device(rank, ask.device_type), getattr(torch, DTYPES[ask.dtype])
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
        operands = _Operands.of(manager, ask, dtype)
        try:
            for number, tokens in enumerate(ask.tokens, 1):
                names = [f"candidate{index}" for index in range(len(ask.candidates))]
                runs = [_run(manager, name, ask, tokens, operands) for name in names]
                _compare(runs, ask.candidates, gate)
                enough_s = begin_s + ask.share_s * number / len(ask.tokens)
                for index, found in enumerate(_time(runs, ask.rounds, device, gate, enough_s)):
                    times[index].append(found)
        except _OutOfTimeError:
            manager.check()
            return None
        manager.check()
    return times


def rank_device(rank: int, device_type: str) -> torch.device:
    """The CPU, or this rank's GPU, made the current one."""
    if device_type == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


@dataclass(frozen=True)
class _Operands:
    """Random operands for the largest T, made once: every candidate and every T multiplies (rows of) the same.

    ``sharded`` [T_r, width], ``whole`` [T, width], ``inner`` [T, features], ``weight`` [features, width] or, for a
    scatter, [width, features]; what a kind does not use is empty.
    """

    sharded: torch.Tensor
    whole: torch.Tensor
    inner: torch.Tensor
    weight: torch.Tensor

    @classmethod
    def of(cls, manager: tpo.UserBufferManager, ask: Ask, dtype: torch.dtype) -> _Operands:
        """Drawn in ``dtype`` at once, since a float32 copy of a large weight would be twice as large as the weight."""
        generator = torch.Generator(manager.device).manual_seed(1 + manager.rank)
        tokens, kind = max(ask.tokens), ask.kind
        own = tpo.TokenPartition.balanced(tokens, manager.tp_size).counts[manager.rank]

        def random(wanted: bool, rows: int, columns: int) -> torch.Tensor:
            shape = (rows, columns) if wanted else (0, 0)
            drawn = torch.randn(shape, device=manager.device, dtype=dtype, generator=generator)
            return drawn.div_(math.sqrt(columns))

        weight_shape = (ask.width, ask.features) if kind == "scatter" else (ask.features, ask.width)
        return cls(
            sharded=random(kind in ("gather", "beside-gather"), own, ask.width),
            whole=random(kind == "beside-scatter", tokens, ask.width),
            inner=random(kind != "gather", tokens, ask.features),
            weight=random(kind != "beside-scatter", *weight_shape),
        )


def _run(manager: tpo.UserBufferManager, name: str, ask: Ask, tokens: int, operands: _Operands) -> Run:
    """One operation on the first rows of the operands."""
    partition = tpo.TokenPartition.balanced(tokens, manager.tp_size)
    comm, weight, inner = manager.get(name), operands.weight, operands.inner[:tokens]
    x_shard_t = operands.sharded[: partition.counts[manager.rank]]
    if ask.kind == "gather":
        return lambda: _tensor(tpo.all_gather_gemm(x_shard_t, weight, comm, partition=partition))
    if ask.kind == "scatter":
        return lambda: tpo.gemm_reduce_scatter(inner, weight, comm, partition=partition)
    if ask.kind == "beside-gather":  # dgrad: dy [T, N] times W [N, H], the input of wgrad beside it
        return lambda: tpo.bulk_all_gather(x_shard_t, comm, (inner, weight.t()), partition=partition)[0]
    x = operands.whole[:tokens]  # wgrad: dy [T, N] and x [T, H]; dx, which is scattered, has the same shape as x
    return lambda: tpo.bulk_reduce_scatter(x, comm, (inner.t(), x.t()), partition=partition)[0]


def _tensor(result: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
    assert isinstance(result, torch.Tensor), "one weight gives one tensor"
    return result


def _compare(runs: list[Run], candidates: tuple[Candidate, ...], gate: _Gate) -> None:
    gate.pass_through()
    reference = runs[0]().float()
    for run, candidate in zip(runs[1:], candidates[1:], strict=True):
        gate.pass_through()  # the first call of a method compiles its kernels
        result = run().float()
        if result.numel() and not relative_error(result, reference) < _LARGEST_DIFFERENCE:
            raise AssertionError(
                f"{candidate} differs from {candidates[0]} by {relative_error(result, reference):.2e}: not timing "
                "wrong numbers; run tpoverlap doctor"
            )


def _time(runs: list[Run], rounds: int, device: torch.device, gate: _Gate, enough_s: float) -> list[float]:
    for run in runs:
        gate.pass_through()
        for _ in range(_WARM_UP):
            run()
    times: list[list[float]] = [[] for _ in runs]
    for number in range(rounds):
        if gate.pass_through(enough_s) and number >= _FEWEST_ROUNDS:
            break
        # Another order each round: what runs after a slow one would otherwise always start late.
        for index in range(len(runs)) if number % 2 else reversed(range(len(runs))):
            gate.pass_through()
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
    for _ in range(_LEAD_CALLS):  # where nothing runs before, the first call's launches count whole
        run()
    begin.record()
    for _ in range(OPERATIONS_A_ROUND):
        run()
    end.record()
    torch.cuda.synchronize(device)
    return 1e3 * float(begin.elapsed_time(end)) / OPERATIONS_A_ROUND
