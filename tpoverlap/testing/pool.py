"""RankPool: spawned ranks that stay, so that a test pays for a call and not for importing torch R times."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Collection, Mapping
from multiprocessing.connection import wait
from types import TracebackType
from typing import Any, Self

from tpoverlap.testing.failure import RankError, RankFailure, describe_exit
from tpoverlap.testing.processes import RankProcesses
from tpoverlap.testing.wire import dumps, loads


class RankPool:
    """``world_size`` spawned processes with one default process group, running one function after another.

    The processes start with `start` or the first ``run``, die with this process, and are replaced by fresh ones after a
    ``run`` that failed or killed a rank: the group of such a run may hold half-finished collectives. One thread at a
    time.

    Args:
        world_size: number of ranks.
        backend: of the process group; None takes ``gloo`` on the CPU and where ranks share a GPU,
            else ``cpu:gloo,cuda:nccl``.
        device: ``cpu`` or ``cuda``; with ``cuda`` rank r gets GPU ``r % device_count`` as its current device.
        env: environment variables of the ranks; None as a value removes one.
        num_threads: intra-operation threads of torch, a rank.
        group_timeout_s: time-out of the process group.
        start_timeout_s: for importing torch and joining the group.
        grace_s: how long the other ranks may go on after one failed unexpectedly; then they count as hung.
    """

    def __init__(
        self,
        world_size: int,
        *,
        backend: str | None = None,
        device: str = "cpu",
        env: Mapping[str, str | None] | None = None,
        num_threads: int = 1,
        group_timeout_s: float = 60.0,
        start_timeout_s: float = 180.0,
        grace_s: float = 15.0,
    ) -> None:
        if world_size < 1:
            raise ValueError(f"world_size must be at least 1, got {world_size}")
        if device not in ("cpu", "cuda"):
            raise ValueError(f"device must be 'cpu' or 'cuda', got {device!r}")
        self.world_size = world_size
        self._backend, self._device, self._env, self._num_threads = backend, device, dict(env or {}), num_threads
        self._group_timeout_s, self._start_timeout_s, self._grace_s = group_timeout_s, start_timeout_s, grace_s
        self._processes: RankProcesses | None = None
        self._ready = False
        self._closed = False

    def start(self) -> None:
        """Start the processes, if there are none, and do not wait for them: several pools start side by side.

        `run` waits. Not from several threads at once: what ``env`` says stands in this process for a moment.
        """
        if self._closed:
            raise RuntimeError("this RankPool is closed; make a new one")
        if self._processes is None:
            self._ready = False
            self._processes = RankProcesses(
                self.world_size,
                backend=self._backend,
                device=self._device,
                env=self._env,
                num_threads=self._num_threads,
                group_timeout_s=self._group_timeout_s,
            )

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the ranks; empty before the first run and after a failure."""
        return self._processes.pids if self._processes else ()

    def run(
        self, fn: Callable[..., Any], *args: Any, timeout_s: float = 60.0, expect_dead: Collection[int] = ()
    ) -> list[Any]:
        """Call ``fn(rank, world_size, *args)`` on every rank; returns the results in rank order.

        ``fn`` is sent by reference, so it lives at the top level of an importable module; ``args`` and results are
        pickled, tensors by value onto the CPU. Ranks in ``expect_dead`` must end their process; their result is None.

        Raises:
            RankFailure: a rank raised, died, hung (``timeout_s``, or ``grace_s`` after the first failure) or survived.
            TypeError: ``fn`` or ``args`` cannot be pickled.
        """
        if self._closed:
            raise RuntimeError("this RankPool is closed; make a new one")
        if unknown := sorted(set(expect_dead) - set(range(self.world_size))):
            raise ValueError(f"expect_dead names ranks {unknown}, but the pool has ranks 0..{self.world_size - 1}")
        name = getattr(fn, "__qualname__", repr(fn))
        try:
            message = dumps((list(sys.path), dumps((fn, args))))
        except Exception as error:
            raise TypeError(f"{name} must be a module-level function with picklable arguments: {error}") from error
        try:
            processes = self._started()
            processes.send(message)
            outcome = _Outcome(f"run of {name} on {self.world_size} ranks", processes, frozenset(expect_dead))
            outcome.collect(time.monotonic() + timeout_s, self._grace_s)
            outcome.check(f"no answer within {timeout_s:g} s")
        except BaseException:  # KeyboardInterrupt and pytest's time-out too: nobody reads these answers any more
            self._discard()
            raise
        if expect_dead:
            self._discard()
        return [outcome.results.get(rank) for rank in range(self.world_size)]

    def close(self) -> None:
        """End the ranks; idempotent."""
        self._closed = True
        if self._processes is not None:
            processes, self._processes = self._processes, None
            processes.stop(timeout_s=10.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _started(self) -> RankProcesses:
        if self._processes is not None and self._ready and (dead := self._processes.dead()):
            warnings.warn(f"ranks {dead} died after they had answered; starting new ones", RuntimeWarning, stacklevel=3)
            self._discard()
        self.start()
        assert self._processes is not None, "just started"
        if not self._ready:
            outcome = _Outcome(f"start of {self.world_size} ranks", self._processes, frozenset())
            outcome.collect(time.monotonic() + self._start_timeout_s, self._grace_s)
            outcome.check(f"not ready within {self._start_timeout_s:g} s")
            self._ready = True
        return self._processes

    def _discard(self) -> None:
        if self._processes is not None:
            processes, self._processes = self._processes, None
            processes.kill()


class _Outcome:
    """The answers to one message, as they come in."""

    def __init__(self, what: str, processes: RankProcesses, expect_dead: frozenset[int]) -> None:
        self.what = what
        self.results: dict[int, Any] = {}
        self._processes = processes
        self._expect_dead = expect_dead
        self._errors: dict[int, RankError] = {}
        self._exit_codes: dict[int, int | None] = {}
        self._pending = set(range(processes.world_size))
        self._since_failure_s: float | None = None

    def collect(self, deadline: float, grace_s: float) -> None:
        """Read answers until every rank answered or died, or the deadline (``time.monotonic()``) passed."""
        first_failure: float | None = None
        while self._pending:
            if first_failure is None and self._errors:
                first_failure = time.monotonic()
            limit = deadline if first_failure is None else min(deadline, first_failure + grace_s)
            sources = [source for rank in self._pending for source in self._processes.sources(rank)]
            if not wait(sources, max(0.0, limit - time.monotonic())):
                if limit < deadline:
                    self._since_failure_s = grace_s
                return
            for rank in sorted(self._pending):
                self._read(rank)

    def _read(self, rank: int) -> None:
        try:
            answer = self._processes.answer(rank)
        except (EOFError, OSError):
            self._pending.discard(rank)
            self._note_death(rank)
            return
        if answer is None:
            return
        self._pending.discard(rank)
        kind, value = loads(answer)
        if rank in self._expect_dead:
            came = f"raised {value.type_name}: {value.message}" if kind == "error" else f"returned {value!r}"
            self._errors[rank] = RankError("RankSurvived", f"expected to die, but {came}", "")
        elif kind == "error":
            self._errors[rank] = value
        else:
            self.results[rank] = value

    def _note_death(self, rank: int) -> None:
        exit_code = self._processes.exit_code(rank)
        self._exit_codes[rank] = exit_code
        if rank not in self._expect_dead:
            log = self._processes.log(rank)
            self._errors[rank] = RankError("RankDied", f"the process ended: {describe_exit(exit_code)}", log)

    def check(self, why_hung: str) -> None:
        """Raise RankFailure unless every rank did what was expected of it."""
        if self._pending:
            if self._since_failure_s is not None:
                why_hung = f"still running {self._since_failure_s:g} s after another rank had failed"
            for rank, stacks in self._processes.stacks(sorted(self._pending)).items():
                self._errors[rank] = RankError("RankHung", why_hung, stacks)
        if self._errors:
            raise RankFailure(self.what, self._errors, self.results, self._exit_codes)
