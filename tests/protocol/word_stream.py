"""What a rank enqueues on a device: its words lie on a stream of their own, ordered with the caller's by events.

`docs/protocol.md`, "Streams of one rank on a device", says what and why. An event needs no step of its own here: it
has happened once the other stream's program counter has passed it. Orders are those of `tpoverlap.comm`'s
`device_exchange`, `quick_ring` and `quick_trade`; an event that only one of them has is left out.
"""

from __future__ import annotations

from .config import Config
from .steps import Code, Op, State, Step, Thread
from .trade import TradeSteps
from .words import STOPPED


class WordStreamSteps(TradeSteps):
    """Appends to the streams in the order in which the host enqueues, which events depend on.

    Of a held reduce-scatter slot the word stream would give the credit after a kernel of two uses later has given its
    own, to a rank without rows: that kernel's stream does not follow. `get_buffer` hands out gathered slots only.
    """

    def __init__(self, config: Config, code: Code, rank: int) -> None:
        super().__init__(config, code, rank)
        self._words_behind = 0

    def _follow(self, op: Op, stream: Thread, leader: Thread) -> None:
        """An event: ``stream`` goes on once ``leader`` is through with what it has been given so far."""
        reached, pc = len(leader.steps), leader.pc

        def happened(state: State) -> bool:
            return reached <= state[pc] != STOPPED

        names = [thread.name.removeprefix(f"rank {self.rank} ") for thread in (stream, leader)]
        stream.steps.append(self._wait(self._label(op, f"{names[0]} follows {names[1]}"), happened))

    def _on_a_device(
        self, op: Op, ended: Op | None, order: str, comm: Thread, caller: Thread, words: Thread, publish: list[Step]
    ) -> None:
        """Append one operation's steps; ``ended`` is the held use whose hold it ends."""
        config = self.config
        early = "credit_before_read" in config.broken
        by_caller = order == "at_once" or (order == "traded" and op.kind == "R" and not op.held)
        if by_caller and (ended is not None or config.sends_nothing(op.seq)) and "late_credits" not in config.broken:
            self._follow(op, caller, words)
        if ended is not None:
            caller.steps += [s for peer in self._sources(ended) for s in self._reads(ended, peer, arrival=False)]
            if order != "at_once" and not early:
                self._follow(op, words, caller)
            (caller if order == "at_once" else words).steps += self._credits(ended)
        caller.steps += self._start(op, caller)
        if order == "traded":
            first, second = self._traded(op, caller, comm, publish)
            comm.steps += second
            caller.steps += first
        elif op.form == "launch":
            self._launched(op, caller, words, publish)
        else:
            sends = self._sends(op, caller, [])
            place = 2 if order == "behind" else 1
            sends[place:place] = publish
            if order == "at_once":
                caller.steps += [*sends, *self._receives(op, caller)]
            else:
                self._beside(op, caller, comm, words, sends)
        if by_caller:
            caller.steps += [] if op.held else self._credits(op)
            return
        if not early:
            self._follow(op, words, caller)
        self._words_behind = op.seq
        if not op.held:
            words.steps += self._credits(op)

    def _launched(self, op: Op, caller: Thread, words: Thread, publish: list[Step]) -> None:
        """One launch: descriptors and credits before its kernel, compares behind it."""
        config = self.config
        ahead = op.seq - self._words_behind
        if ahead > config.most_ahead and "descriptors_ahead" not in config.broken:
            self._follow(op, words, caller)
        words.steps += [*publish, *self._launch_credits(op)]
        self._follow(op, caller, words)
        caller.steps += self._launched_kernel(op)
        words.steps += [step for source in self._sources(op) for step in self._expect(op, words, source)]
        self._follow(op, caller, words)
        caller.steps.append(self._use(op))

    def _beside(self, op: Op, caller: Thread, comm: Thread, words: Thread, sends: list[Step]) -> None:
        """Transfers on the comm stream, and the waits for the peers'."""
        if op.form:
            comm.steps += sends
            words.steps += self._entered(op, words)
            if "no_entered" not in self.config.broken:
                self._follow(op, caller, words)
            caller.steps += [*self._waiting_kernel(op), self._join(op)]
            return
        # Waits for arrivals, each followed by its read.
        reads = {source: self._reads(op, source, arrival=True) for source in self._sources(op)}
        if self.config.comm_waits:
            waits = [s for source, steps in reads.items() for s in [*self._expect(op, comm, source), *steps[::2]]]
            comm.steps += [*sends[:-1], *waits, sends[-1]]
            caller.steps += [self._join(op), *[read for steps in reads.values() for read in steps[1::2]]]
            return
        comm.steps += sends
        for source, steps in reads.items():
            words.steps += self._expect(op, words, source)
            if not steps:
                self._follow(op, caller, words)
            for wait, read in zip(steps[::2], steps[1::2], strict=True):
                words.steps.append(wait)
                self._follow(op, caller, words)
                caller.steps.append(read)
        caller.steps.append(self._join(op))
