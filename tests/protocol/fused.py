"""What `fused` enqueues: kernels that spin for flags, beside another library's kernel that wants a multiprocessor."""

from __future__ import annotations

from collections.abc import Callable

from .rank_steps import COMPUTED, RankSteps
from .steps import Op, Step, Thread


class FusedSteps(RankSteps):
    """The orders of `tpoverlap.overlap.fused` and `tpoverlap.overlap.fused_launch`."""

    def _library(self) -> list[Step]:
        """A collective of another library: it needs a multiprocessor, holds it, and waits for its like on all ranks."""
        full, mine = self.at("full", self.rank), self.at("library starts", self.rank)
        all_ranks = [self.at("library starts", rank) for rank in range(self.config.tp_size)]
        ends = self.at("library ends", self.rank)

        def begin(state: bytearray) -> None:
            state[mine] = 1

        def end(state: bytearray) -> None:
            state[ends] = 1

        name = f"rank {self.rank}: the other library's kernel"
        return [
            Step(f"{name} starts", lambda state: not state[full], begin, shows=True),
            Step(f"{name} ends", lambda state: all(state[word] for word in all_ranks), end, shows=True),
        ]

    def _kernel(self, op: Op, inside: list[Step], *, fills: bool) -> list[Step]:
        """A spinning kernel; ``fills``: it takes every multiprocessor, and cannot end while somebody holds some."""
        full = self.at("full", self.rank)

        def set_full(value: int) -> Callable[[bytearray], None]:
            def effect(state: bytearray) -> None:
                state[full] = value

            return effect

        if not (fills and self.config.library):
            return inside
        guard = self._library_is_gone()
        begin = Step(self._label(op, "the kernel fills the GPU"), None, set_full(1))
        return [begin, *inside, Step(self._label(op, "the kernel ends"), guard, set_full(0))]

    def _fused_receives(self, op: Op, caller: Thread) -> list[Step]:
        """By copy engine: the kernel starts when it only waits for copies."""
        before, kernel = self._entered(op, caller), self._waiting_kernel(op)
        return [*kernel, *before] if "no_entered" in self.config.broken else [*before, *kernel]

    def _entered(self, op: Op, stream: Thread) -> list[Step]:
        """Every peer is at this operation and has computed what it sends."""
        before: list[Step] = []
        for source in self._sources(op):
            before += self._expect(op, stream, source)
            pieces = self.config.num_pieces(op.seq, op.kind, source, self.rank)
            if op.kind == "R" and pieces and "no_computed" not in self.config.broken:
                word = self._arrival_word(self.rank, op, source, COMPUTED)
                label = self._label(op, f"rank {source} has computed what it sends")
                before.append(self._wait_epoch(label, word, self._stored(op.use)))
        return before

    def _waiting_kernel(self, op: Op) -> list[Step]:
        """Its tiles wait for the pieces."""
        inside = [step for source in self._sources(op) for step in self._reads(op, source, arrival=True)]
        return self._kernel(op, inside, fills=True)

    def _launch_sends(self, op: Op, caller: Thread, publish: list[Step]) -> list[Step]:
        """What the comm stream does for a kernel that pushes by itself: descriptors; on the CPU the credits, too."""
        started = self.at("started", self.rank, caller.name)
        steps = [self._wait_count(self._label(op, "the comm stream may start"), started, op.seq), *publish]
        if not self.config.device:
            steps += self._launch_credits(op)
        steps.append(self._set(self._label(op, "the descriptors are out"), self.at("sent", self.rank), op.seq))
        if "early_refresh" in self.config.broken:  # as it should be, `_one_launch` ends with these flags
            pieces = range(max(self.config.pieces))
            steps += [self._arrival(op, peer, piece) for peer in self._destinations(op) for piece in pieces]
        return steps

    def _launch_credits(self, op: Op) -> list[Step]:
        if "no_credit_wait" in self.config.broken:
            return []
        number = self.config.num_pieces
        return [self._wait_credit(op, p) for p in self._destinations(op) if number(op.seq, op.kind, self.rank, p)]

    def _one_launch(self, op: Op, caller: Thread, behind: list[Step]) -> list[Step]:
        """What the kernel made of the rows that arrived is used after the compare.

        On a device the caller's stream waits for the credits itself, and joins the comm stream after the kernel.
        ``behind``: what one hardware queue hands out after the kernel, at worst when it has ended.
        """
        kernel = self._launched_kernel(op)
        compares = [step for source in self._sources(op) for step in self._expect(op, caller, source)]
        if self.config.device:
            return [*self._launch_credits(op), *kernel, *behind, *compares, self._use(op), self._join(op)]
        # On the CPU, where a kernel cannot be stopped, the compare comes first.
        return [self._join(op), *compares, *kernel, self._use(op)]

    def _launched_kernel(self, op: Op) -> list[Step]:
        """It pushes, then reads what arrived."""
        pushes, reads = [], []
        for peer in self._destinations(op):
            pieces = self.config.num_pieces(op.seq, op.kind, self.rank, peer)
            for piece in range(pieces):
                copy, flag = self._copy(op, peer, piece), self._arrival(op, peer, piece)
                pushes += [flag, *copy] if "flag_before_data" in self.config.broken else [*copy, flag]
            for piece in range(pieces, max(self.config.pieces)):
                pushes.append(self._arrival(op, peer, piece))
        for source in self._sources(op):
            reads += self._reads(op, source, arrival=True)
        inside = [*reads, *pushes] if "waits_before_pushing" in self.config.broken else [*pushes, *reads]
        return self._kernel(op, inside, fills="no_reserve" in self.config.broken)

    def _use(self, op: Op) -> Step:
        tentative, released = self.at("tentative", self.rank), self.released
        aborts = [self.at("abort", self.rank, peer) for peer in self.peers]

        def effect(state: bytearray) -> str | None:
            wrong, state[tentative] = state[tentative], 0
            if not wrong:
                return None
            if self.config.device and (state[released] or any(state[word] for word in aborts)):
                state[self.taint] = 1
                return None
            return f"rank {self.rank} uses what it read of another operation"

        return Step(self._label(op, "its result is used"), None, effect, eager_when=released)
