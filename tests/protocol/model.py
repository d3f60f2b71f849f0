"""The protocol as a transition system: streams are programs of atomic steps on shared words.

A rank has a comm stream, one or two caller's streams, maybe a word stream, and a watchdog. `program.py` writes the
streams' programs; this module runs them, adds the watchdog, a rank that stops, and the checks on final states.

Reduction (`Model.settle`), used for three ranks. Steps are classified by what they touch:

* *eager* steps only write or wait for monotone words (events, program counters of the same rank, arrivals, credits,
  descriptors in a ring that is not reused). Each word has one writer and only grows, so a wait that is enabled stays
  enabled, and a write enables waits but changes nothing about those that are enabled already: an eager step that is
  enabled commutes with every step of every other stream, and none disables it. Alone it is therefore a persistent set
  (Godefroid), and since programs are finite, exploring it alone keeps every deadlock and every violated check.
* data reads, data writes and everything a watchdog does are never eager, all their interleavings are explored.
* of the rank that may stop, an eager step and "stop here" form the persistent set together.
* time-outs fire only when nothing else can happen (or any time, for a rank in ``gives_up``, which is no alternative
  to an eager step either: it only adds enabled waits). A rank that has seen an abort stores its error in a step that
  only its own watchdog notices, which is therefore eager too. Poison is the one second writer of a word. That order is
  covered because a poisoned word passes every wait and the watchdog poisons again what a late peer has overwritten:
  the state in which the flag came first simulates the other. So what lies in a released rank's memory no longer
  matters: `_bury` sets it to poison, and steps that only touch such memory become eager (`Step.eager_when`).

`Config.reducible` refuses models that break these premises; a test compares full and reduced exploration.
"""

from __future__ import annotations

from .config import Config
from .program import build
from .steps import Step
from .words import MISMATCH, OK, POISON, STOPPED, TIMEOUT

Move = tuple[str, bytes, str | None]
"""(labels, state after it, violated check or None)."""


class Model:
    """Successors and checks of the states of one `Config`."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.code = build(config)
        self.words = self.code.words
        size = config.tp_size
        self.peers = [[(rank + k) % size for k in range(1, size)] for rank in range(size)]
        at = self.words.at
        self.error = [at("error", rank) for rank in range(size)]
        self.dog = [at("watchdog", rank) for rank in range(size)]
        self.released = [at("released", rank) for rank in range(size)]
        self.raised = [at("raised", rank) for rank in range(size)]
        self.taint = [at("taint", rank) for rank in range(size)]
        self.abort = [[at("abort", rank, source) for source in range(size)] for rank in range(size)]
        self.initial = bytes(self.words.initial)
        self._memory = [self.words.memory_of(rank) for rank in range(size)]
        self._dead = [bytes([POISON]) * (stop - start) for start, stop in self._memory]
        self._threads_of = [[t for t in self.code.threads if t.rank == rank] for rank in range(size)]

    # -- streams -------------------------------------------------------------------------------------------------

    def _ready(self, state: bytes | bytearray, thread_index: int) -> Step | None:
        """The next step of a stream, if it can be taken now."""
        thread = self.code.threads[thread_index]
        pc = state[thread.pc]
        if pc >= len(thread.steps):
            return None
        if not self.config.device and state[self.released[thread.rank]]:
            return None  # the rest of its work is dropped
        step = thread.steps[pc]
        return step if step.guard is None or step.guard(state) else None

    def _take(self, state: bytearray, thread_index: int, step: Step) -> str | None:
        thread = self.code.threads[thread_index]
        state[thread.pc] += 1
        return step.effect(state) if step.effect is not None else None

    def settle(self, state: bytearray) -> tuple[list[str], str | None]:
        """Take eager steps until none is enabled. Returns their labels and a violated check."""
        labels: list[str] = []
        moved = True
        while moved:
            moved = False
            for index, thread in enumerate(self.code.threads):
                if thread.rank == self.config.dies:
                    continue
                while (step := self._ready(state, index)) is not None and self._eager(state, step):
                    moved = True
                    labels.append(step.label)
                    problem = self._take(state, index, step)
                    self._bury(state)
                    if problem is not None:
                        return labels, problem
        return labels, None

    def _eager(self, state: bytes | bytearray, step: Step) -> bool:
        return step.eager or (step.eager_when is not None and bool(state[step.eager_when]))

    def _bury(self, state: bytearray) -> None:
        """With the reduction on: what lies in the memory of a released rank is of no interest any more."""
        if self.config.device:
            for released, (start, stop), dead in zip(self.released, self._memory, self._dead, strict=True):
                if state[released]:
                    state[start:stop] = dead

    def moves(self, state: bytes, reduce: bool) -> list[Move]:
        """Everything that can happen next; with ``reduce`` a persistent subset of it."""
        config = self.config
        found: list[Move] = []
        running = False
        for index, thread in enumerate(self.code.threads):
            step = self._ready(state, index)
            mortal = thread.rank == config.dies
            own: list[Move] = []
            if step is not None:
                running = True
                own.append(self._after(state, index, step, reduce))
            if mortal and state[thread.pc] < len(thread.steps) and thread.steps[state[thread.pc]].shows:
                after = bytearray(state)
                after[thread.pc] = STOPPED
                own.append((f"{thread.name} stops for ever", bytes(after), None))
            if reduce and mortal and step is not None and self._eager(state, step):
                return own
            found += own
        if "no_watchdog" in config.broken:
            return found
        watch, alone = self._watch(state, idle=not running, reduce=reduce)
        return watch if alone else found + watch

    def _after(self, state: bytes, index: int, step: Step, reduce: bool) -> Move:
        after = bytearray(state)
        problem = self._take(after, index, step)
        label = step.label
        if reduce and problem is None:
            self._bury(after)
            more, problem = self.settle(after)
            label = "\n".join([label, *more])
        return label, bytes(after), problem

    # -- watchdogs -----------------------------------------------------------------------------------------------

    def _watch(self, state: bytes, idle: bool, reduce: bool) -> tuple[list[Move], bool]:
        """What the watchdogs can do, and whether that is a persistent set by itself."""
        moves: list[Move] = []
        for rank in range(self.config.tp_size):
            move, private = self._watchdog(state, rank, reduce)
            if move is not None:
                if reduce and private:
                    return [move], True
                moves.append(move)
        if idle and not moves:
            # A time-out is long: it fires when nothing else in the whole system can happen any more.
            for rank in range(self.config.tp_size):
                if not (state[self.dog[rank]] or self._done(state, rank) or self._stopped(state, rank)):
                    moves.append(self._fire(state, rank, self._diagnose(state, rank)))
        return moves, False

    def _watchdog(self, state: bytes, rank: int, reduce: bool) -> tuple[Move | None, bool]:
        """The next step of one watchdog, and whether nobody else can tell when it happens (it is eager, then)."""
        pc = state[self.dog[rank]]
        if self._stopped(state, rank):
            return None, False
        if pc == 0:
            code = max([state[self.raised[rank]], *(state[self.abort[rank][peer]] for peer in self.peers[rank])])
            deaf = "deaf_check" in self.config.broken and self._done(state, rank)
            if code != OK and not deaf:  # also after its last operation: mgr.check() has to raise
                return self._fire(state, rank, code), True
            if rank in self.config.gives_up and not self._done(state, rank):
                return self._fire(state, rank, self._diagnose(state, rank)), False
            return None, False
        if pc <= self.config.tp_size:
            peer = self._next_peer(rank, pc)
            return self._announce(state, rank, peer, reduce), peer is not None and bool(state[self.released[peer]])
        if self.config.device and "poison_once" not in self.config.broken:
            return self._poison_again(state, rank, reduce), False
        return None, False

    def _fire(self, state: bytes, rank: int, code: int) -> Move:
        after = bytearray(state)
        after[self.error[rank]] = code
        after[self.dog[rank]] = 1
        return f"watchdog {rank} stores {('', 'PeerTimeoutError', 'RankMismatchError')[code]}", bytes(after), None

    def _announce(self, state: bytes, rank: int, peer: int | None, reduce: bool) -> Move:
        """The abort word of one peer or, after the last (None), the release of the local waiters."""
        after = bytearray(state)
        after[self.dog[rank]] += 1
        if peer is not None:
            after[self.abort[peer][rank]] = after[self.error[rank]]
            return self._settled(f"watchdog {rank} writes abort[{rank}] of rank {peer}", after, reduce)
        after[self.released[rank]] = 1
        after[self.taint[rank]] = 1
        if self.config.device:
            for word in self.code.waited[rank]:
                after[word] = POISON
        return self._settled(f"watchdog {rank} releases its waiters", after, reduce)

    def _next_peer(self, rank: int, pc: int) -> int | None:
        """Whom a watchdog tells next; None when it is time to release."""
        number = pc - 2 if "poison_before_abort" in self.config.broken else pc - 1
        return self.peers[rank][number] if 0 <= number < len(self.peers[rank]) else None

    def _poison_again(self, state: bytes, rank: int, reduce: bool) -> Move | None:
        for thread in self._threads_of[rank]:
            pc = state[thread.pc]
            if pc < len(thread.steps):
                step = thread.steps[pc]
                if step.waits and step.guard is not None and not step.guard(state):
                    after = bytearray(state)
                    for word in step.waits:
                        after[word] = POISON
                    return self._settled(f"watchdog {rank} poisons again: {step.label}", after, reduce)
        return None

    def _settled(self, label: str, after: bytearray, reduce: bool) -> Move:
        if not reduce:
            return label, bytes(after), None
        self._bury(after)
        more, problem = self.settle(after)
        return "\n".join([label, *more]), bytes(after), problem

    def _diagnose(self, state: bytes, rank: int) -> int:
        """What a time-out is called: a mismatch, if a peer has published another descriptor for the current one."""
        return MISMATCH if any(differs(state) for differs in self.code.differs[rank]) else TIMEOUT

    # -- final states --------------------------------------------------------------------------------------------

    def final_problem(self, state: bytes) -> str | None:
        """Why a state without successors is not an acceptable end; None if it is."""
        config = self.config
        for rank in range(config.tp_size):
            error, done = state[self.error[rank]], self._done(state, rank)
            if self._stopped(state, rank):
                continue
            if not done:
                stuck = [t.steps[state[t.pc]].label for t in self._threads_of[rank] if state[t.pc] < len(t.steps)]
                if not error or not state[self.released[rank]]:
                    return f"hang: rank {rank} has no error and waits for ever: {'; '.join(stuck)}"
                if config.device:
                    return f"hang: rank {rank} has its error, but its streams never drain: {'; '.join(stuck)}"
            if state[self.taint[rank]] and not error:
                return f"silence: rank {rank} has consumed garbage and ends without an error"
            if error and config.dies is None and not config.gives_up and config.deviates is None:
                return f"false alarm: rank {rank} ends in an error although every rank behaves"
            if config.deviates is not None and config.deviates[2] != "skip" and error != MISMATCH:
                return f"rank {rank} ends without RankMismatchError although rank {config.deviates[0]} deviates"
        return None

    def summary(self, state: bytes) -> tuple[tuple[int, ...], ...]:
        """A final state without the words: program counters and errors, for comparing explorations."""
        counters = tuple(state[thread.pc] for thread in self.code.threads)
        return counters, tuple(state[word] for word in self.error)

    def _done(self, state: bytes, rank: int) -> bool:
        return all(state[t.pc] == len(t.steps) for t in self._threads_of[rank])

    def _stopped(self, state: bytes, rank: int) -> bool:
        return rank == self.config.dies and any(state[t.pc] == STOPPED for t in self._threads_of[rank])
