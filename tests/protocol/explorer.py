"""Breadth-first exploration of every interleaving, with a visited set; the first violation has a shortest trace."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from .config import Config
from .model import Model


@dataclass
class Result:
    """What an exploration found.

    Attributes:
        states, moves: visited states and transitions (with ``reduce``: after eager steps have settled).
        violation: the violated check, or None.
        trace: the steps that lead to it, one line each.
        finals: distinct final states (program counters and errors).
    """

    config: Config
    reduced: bool
    states: int = 0
    moves: int = 0
    violation: str | None = None
    trace: list[str] = field(default_factory=list)
    finals: set[tuple[tuple[int, ...], ...]] = field(default_factory=set)

    def report(self) -> str:
        """The counterexample, numbered, or the counts."""
        if self.violation is None:
            how = "reduced" if self.reduced else "full"
            return f"holds: {self.states} states, {self.moves} moves, {len(self.finals)} final states ({how})"
        lines = [f"{number:3d}  {line}" for number, line in enumerate(self.trace, 1)]
        return "\n".join([*lines, f"  => {self.violation}  (after {self.states} states)"])


def explore(config: Config, reduce: bool = False, limit: int = 2_000_000) -> Result:
    """Visit every reachable state of ``config`` or stop at the first violation.

    Raises:
        ValueError: ``reduce`` is not sound for this model.
        RuntimeError: more than ``limit`` states.
    """
    if reduce and not config.reducible:
        raise ValueError(f"the reduction is not sound for {config}; explore it in full")
    model = Model(config)
    result = Result(config, reduce)
    first, labels, problem = bytearray(model.initial), list[str](), None
    if reduce:
        labels, problem = model.settle(first)
    start = bytes(first)
    came_from: dict[bytes, tuple[bytes | None, str]] = {start: (None, "\n".join(labels))}
    if problem is not None:
        return _failed(result, came_from, start, problem)
    queue = deque([start])
    while queue:
        state = queue.popleft()
        moves = model.moves(state, reduce)
        if not moves:
            result.finals.add(model.summary(state))
            problem = model.final_problem(state)
            if problem is not None:
                return _failed(result, came_from, state, problem)
        for label, after, problem in moves:
            result.moves += 1
            if after not in came_from:
                came_from[after] = (state, label)
                queue.append(after)
            if problem is not None:
                came_from[after] = (state, label)
                return _failed(result, came_from, after, problem)
        if len(came_from) > limit:
            raise RuntimeError(f"more than {limit} states for {config}")
    result.states = len(came_from)
    return result


def _failed(result: Result, came_from: dict[bytes, tuple[bytes | None, str]], state: bytes, problem: str) -> Result:
    lines: list[str] = []
    at: bytes | None = state
    while at is not None:
        at, label = came_from[at]
        lines[:0] = [line for line in label.split("\n") if line]
    result.states, result.violation, result.trace = len(came_from), problem, lines
    return result
