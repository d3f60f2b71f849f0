"""What `sequential` of few rows enqueues: one kernel that does the whole exchange, as two programs that run at once.

The first program is the caller's stream, the second one a thread beside it (the comm stream's, which has nothing to do
here): it starts with the kernel, and the next step of the caller's stream follows it.
"""

from __future__ import annotations

from .fused import FusedSteps
from .steps import Op, Step, Thread

FIRST, SECOND = slice(0, 1), slice(1, None)
"""The pieces that each program copies and reads."""


class TradeSteps(FusedSteps):
    """The order of `tpoverlap.gemm.triton.trade_gather` and `trade_scatter`."""

    def _traded(self, op: Op, caller: Thread, comm: Thread, publish: list[Step]) -> tuple[list[Step], list[Step]]:
        """Steps of the two programs; whoever counts last is the first one, which waits for the second."""
        return (
            self._traded_gather(op, caller, publish) if op.kind == "A" else self._traded_sum(op, caller, comm, publish)
        )

    def _traded_gather(self, op: Op, caller: Thread, publish: list[Step]) -> tuple[list[Step], list[Step]]:
        """The second program only copies."""
        copied = self._set(self._label(op, "the second program has copied"), self.at("sent", self.rank), op.seq)
        flags = [
            self._arrival(op, peer, piece)
            for peer in self._destinations(op)
            for piece in range(max(self.config.pieces))
        ]
        first = [*publish, *self._pushes(op, FIRST)]
        first += [*flags, self._join(op)] if "first_flags" in self.config.broken else [self._join(op), *flags]
        for source in self._sources(op):
            first += [*self._expect(op, caller, source), *self._reads(op, source, arrival=True)]
        return first, [self._kernel_starts(op, caller), *self._pushes(op, SECOND), copied]

    def _traded_sum(self, op: Op, caller: Thread, comm: Thread, publish: list[Step]) -> tuple[list[Step], list[Step]]:
        """Each program sets the flags of its own pieces and adds what arrived of them; the second one publishes.

        In the end come the flags that the pieces at hand do not have, as that of the whole.
        """
        broken, through = self.config.broken, self.at("through", self.rank)
        first, second = self._pushes(op, FIRST, flags=True), [self._kernel_starts(op, caller)]
        second += [*self._pushes(op, SECOND, flags=True), *publish]
        for source in self._sources(op):
            first += [*self._expect(op, caller, source), *self._reads(op, source, True, FIRST)]
            second += [*self._expect(op, comm, source), *self._reads(op, source, True, SECOND)]
        second.append(self._set(self._label(op, "the second program is through"), through, op.seq))
        both = self._wait_count(self._label(op, "both programs are through"), through, op.seq)
        rest = [
            self._arrival(op, peer, piece)
            for peer in self._destinations(op)
            for piece in range(self.config.num_pieces(op.seq, op.kind, self.rank, peer), max(self.config.pieces))
        ]
        return [*first, *(self._credits(op) if "first_credits" in broken else []), both, *rest], second

    def _kernel_starts(self, op: Op, caller: Thread) -> Step:
        if op.kind == "R":  # after the GEMM, whose last rows these are
            made = self.at("made", self.rank, caller.name)
            return self._wait_count(
                self._label(op, "the kernel starts"), made, op.use * (self.config.tp_size - 1)
            )  # fmt: skip
        started = self.at("started", self.rank, caller.name)
        return self._wait_count(self._label(op, "the kernel starts"), started, op.seq)

    def _pushes(self, op: Op, part: slice, *, flags: bool = False) -> list[Step]:
        """Credits and copies of one program; ``flags``: each copy's, too."""
        steps = []
        for peer in self._destinations(op):
            pieces = range(self.config.num_pieces(op.seq, op.kind, self.rank, peer))[part]
            if pieces and "no_credit_wait" not in self.config.broken:
                steps.append(self._wait_credit(op, peer))
            for piece in pieces:
                copy, flag = self._copy(op, peer, piece), [self._arrival(op, peer, piece)] if flags else []
                steps += [*flag, *copy] if "part_flag_first" in self.config.broken else [*copy, *flag]
        return steps
