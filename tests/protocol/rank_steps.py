"""The steps that every operation is made of: events, sends, descriptors and receives of one rank.

`program` puts them in the order of an operation, `fused` in the order of those that run as kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from .config import Config
from .steps import Code, Guard, Op, State, Step, Thread
from .words import (
    FREE,
    MISMATCH,
    POISON,
    READ,
    STOPPED,
    WRITING,
    WRITTEN,
    datum,
    describe,
    digest,
    record,
    seq_of,
)

COMPUTED = "computed"
"""In place of a piece's number: the arrival word of piece 63, which says that all rows for the owner are computed."""


class RankSteps:
    """Of one rank; every word is named from the point of view of its owner."""

    def __init__(self, config: Config, code: Code, rank: int) -> None:
        self.config, self.code, self.rank = config, code, rank
        self.at = code.words.at
        self.released = self.at("released", rank)
        self.raised = self.at("raised", rank)
        self.taint = self.at("taint", rank)
        self.waited: set[int] = set()
        self.differs: list[Callable[[State], bool]] = []
        size = config.tp_size
        self.peers = [(rank + k) % size for k in range(1, size)]

    def _thread(self, name: str) -> Thread:
        return Thread(self.rank, f"rank {self.rank} {name}", self.at("pc", self.rank, name))

    def _label(self, op: Op, text: str) -> str:
        return f"rank {self.rank}, {op}: {text}"

    def _sources(self, op: Op) -> list[int]:
        """Whom it receives from, in the order of `tpoverlap.comm.schedule`: the ring runs the other way round in RS."""
        return self.peers if op.kind == "A" else self.peers[::-1]

    def _destinations(self, op: Op) -> list[int]:
        return self.peers[::-1] if op.kind == "A" else self.peers

    def _stored(self, use: int) -> int:
        return (self.config.first_epoch + use) % self.config.modulus

    def _slot(self, op: Op) -> int:
        return op.use % self.config.depth

    # -- events inside the rank ----------------------------------------------------------------------------------

    def _start(self, op: Op, caller: Thread) -> list[Step]:
        started = self.at("started", self.rank, caller.name)
        self._remember(op, started)
        steps = [self._set(self._label(op, "the caller's stream reaches it"), started, op.seq)]
        if op.kind == "R":
            made = self.at("made", self.rank, caller.name)
            count = self.config.tp_size - 1
            for number, peer in enumerate(self._destinations(op)):
                label = self._label(op, f"partial rows for rank {peer} are computed")
                made_one = self._set(label, made, (op.use - 1) * count + number + 1)
                if op.form and self.config.library:  # a persistent kernel: its last programs need the whole GPU
                    made_one = replace(made_one, guard=self._library_is_gone(), eager=False)
                steps.append(made_one)
        return steps

    def _join(self, op: Op) -> Step:
        sent = self.at("sent", self.rank)
        return self._wait_count(self._label(op, "the caller's stream joins the sends"), sent, op.seq)

    @staticmethod
    def _set(label: str, word: int, value: int) -> Step:
        def effect(state: bytearray) -> None:
            state[word] = value

        return Step(label, None, effect, eager=True, shows=True)

    def _wait_count(self, label: str, word: int, count: int) -> Step:
        """Waits for an event of the same rank: a local counter, which no watchdog poisons."""
        return self._wait(label, lambda state: state[word] >= count)

    @staticmethod
    def _wait(label: str, guard: Guard, waits: tuple[int, ...] = ()) -> Step:
        return Step(label, guard, None, eager=True, waits=waits)

    def _wait_epoch(self, label: str, word: int, epoch: int) -> Step:
        self.waited.add(word)
        half, modulus, plain = self.config.modulus // 2, self.config.modulus, "plain_comparison" in self.config.broken

        def reached(state: State) -> bool:
            flag = state[word]
            return flag == POISON or (flag >= epoch if plain else (flag - epoch) % modulus < half)

        return self._wait(label, reached, (word,))

    def _library_is_gone(self) -> Guard:
        starts, ends = self.at("library starts", self.rank), self.at("library ends", self.rank)
        return lambda state: not state[starts] or bool(state[ends])

    # -- sends ---------------------------------------------------------------------------------------------------

    def _sends(self, op: Op, caller: Thread, late_publish: list[Step]) -> list[Step]:
        started = self.at("started", self.rank, caller.name)
        made = self.at("made", self.rank, caller.name)
        gated, count = self.config.gated, self.config.tp_size - 1
        steps = [self._wait_count(self._label(op, "the comm stream may start"), started, op.seq if gated else 0)]
        for number, peer in enumerate(self._destinations(op)):
            if op.kind == "R" and gated:
                chunk = (op.use - 1) * count + number + 1
                label = self._label(op, f"the comm stream sees the partial rows for rank {peer}")
                steps.append(self._wait_count(label, made, chunk))
            pieces = self.config.num_pieces(op.seq, op.kind, self.rank, peer)
            if pieces and "no_credit_wait" not in self.config.broken:
                steps.append(self._wait_credit(op, peer))
            for piece in range(pieces):
                if op.kind == "R" and op.form and piece == pieces - 1:
                    steps.append(self._computed(op, peer))
                copy, flag = self._copy(op, peer, piece), self._arrival(op, peer, piece)
                steps += [flag, *copy] if "flag_before_data" in self.config.broken else [*copy, flag]
            if "stale_flags" not in self.config.broken:
                steps += [self._arrival(op, peer, piece) for piece in range(pieces, max(self.config.pieces))]
                if op.kind == "R" and "F" in self.config.ops and not (op.form and pieces):
                    steps.append(self._computed(op, peer))
            steps += late_publish
            late_publish = []
        return [*steps, self._set(self._label(op, "sends are done"), self.at("sent", self.rank), op.seq)]

    def _wait_credit(self, op: Op, peer: int) -> Step:
        lag = self.config.depth if self.config.credit_lag is None else self.config.credit_lag
        word = self.at("credit", self.rank, op.kind, self._slot(op), peer, initial=self.config.first_epoch)
        label = self._label(op, f"has the credit of rank {peer} for use {op.use - lag}")
        return self._wait_epoch(label, word, self._stored(op.use - lag))

    def _copy(self, op: Op, peer: int, piece: int) -> list[Step]:
        cell = self.at("data", peer, op.kind, self._slot(op), self.rank, piece)
        mine, taint = self.at("abort", peer, self.rank), self.taint
        peer_released, device = self.at("released", peer), self.config.device

        def begin(state: bytearray) -> str | None:
            old = state[cell]
            state[cell] = datum(op.use - 1, op.variant, state[taint], WRITING)
            if old & 3 == FREE or (device and (state[mine] or state[peer_released])):
                return None
            return f"rank {self.rank} overwrites data that rank {peer} still has to read: {describe(old)}"

        def end(state: bytearray) -> None:
            state[cell] = datum(op.use - 1, op.variant, state[taint], WRITTEN)

        name = f"piece {piece} to rank {peer}"
        return [
            Step(self._label(op, f"begins to copy {name}"), None, begin, eager_when=peer_released, shows=True),
            Step(self._label(op, f"has copied {name}"), None, end, eager_when=peer_released, shows=True),
        ]

    def _arrival(self, op: Op, peer: int, piece: int) -> Step:
        word = self._arrival_word(peer, op, self.rank, piece)
        return self._set(self._label(op, f"arrival flag of piece {piece} at rank {peer}"), word, self._stored(op.use))

    def _computed(self, op: Op, peer: int) -> Step:
        word = self._arrival_word(peer, op, self.rank, COMPUTED)
        return self._set(self._label(op, f"rank {peer} is told that its rows are computed"), word, self._stored(op.use))

    def _arrival_word(self, owner: int, op: Op, source: int, piece: int | str) -> int:
        return self.at("arrival", owner, op.kind, self._slot(op), source, piece, initial=self.config.first_epoch)

    # -- descriptors ---------------------------------------------------------------------------------------------

    def _descriptor_words(self, owner: int, source: int, op: Op) -> tuple[int, int]:
        entry = op.seq % self.config.ring
        return self.at("record", owner, source, entry), self.at("digest", owner, source, entry)

    def _publish(self, op: Op, peer: int) -> list[Step]:
        record_word, digest_word = self._descriptor_words(peer, self.rank, op)
        new_record, new_digest = record(op.seq, op.kind, op.variant), digest(op.kind, op.use, op.variant)
        mine, peer_released = self.at("abort", peer, self.rank), self.at("released", peer)
        device = self.config.device

        def lost(state: bytearray) -> str | None:
            old = state[record_word]
            if old in (0, POISON) or old & READ or (device and (state[mine] or state[peer_released])):
                return None
            seq = seq_of(old)
            if seq == op.seq:
                return None
            return f"rank {self.rank} overwrites its descriptor of op {seq}, which rank {peer} has not compared yet"

        def write_digest(state: bytearray) -> str | None:
            state[digest_word] = new_digest
            return lost(state)

        def write_record(state: bytearray) -> str | None:
            problem = lost(state)
            state[record_word] = new_record
            return problem

        steps = [
            Step(self._label(op, f"digest to rank {peer}"), None, write_digest, eager=True, shows=True),
            Step(self._label(op, f"record to rank {peer}"), None, write_record, eager=True, shows=True),
        ]
        return steps[::-1] if "record_before_digest" in self.config.broken else steps

    def _expect(self, op: Op, caller: Thread, source: int) -> list[Step]:
        """Wait for the record of ``source``, then compare. On the GPU the compare is a wait for equality."""
        record_word, digest_word = self._descriptor_words(self.rank, source, op)
        self.waited |= {record_word, digest_word}
        own_record, own_digest = record(op.seq, op.kind, op.variant), digest(op.kind, op.use, op.variant)
        compares = "no_compare" not in self.config.broken
        raised, pc = self.raised, caller.pc

        def published(state: State) -> bool:
            return state[record_word] == POISON or seq_of(state[record_word]) == op.seq

        def equal(state: State) -> bool:
            if not compares:
                return published(state)
            has = state[record_word]
            return (has == POISON or has & ~READ == own_record) and state[digest_word] in (POISON, own_digest)

        def compare(state: bytearray) -> None:
            if not equal(state):
                state[raised] = MISMATCH
                state[pc] = STOPPED
            elif state[record_word] != POISON:
                state[record_word] |= READ

        label = self._label(op, f"the descriptor of rank {source}")
        if self.config.device:
            return [Step(f"{label} is there and equal", equal, compare, eager=True, waits=(record_word, digest_word))]
        steps = [self._wait(f"{label} is there", published)] if self.config.descriptor_wait else []
        return [*steps, Step(f"{label} is compared", None, compare, eager=True, shows=True)]

    def _remember(self, op: Op, started: int) -> None:
        """For the watchdog: does some peer's record of this operation, while it is the current one, differ?"""
        own = record(op.seq, op.kind, op.variant), digest(op.kind, op.use, op.variant)
        for source in self.peers:
            words = self._descriptor_words(self.rank, source, op)

            def differs(state: State, words: tuple[int, int] = words) -> bool:
                has = state[words[0]] & ~READ
                return state[started] == op.seq and seq_of(has) == op.seq and (has, state[words[1]]) != own

            self.differs.append(differs)

    # -- receives ------------------------------------------------------------------------------------------------

    def _receives(self, op: Op, caller: Thread) -> list[Step]:
        steps: list[Step] = []
        for source in self._sources(op):
            expect = self._expect(op, caller, source)
            reads = self._reads(op, source, arrival=True)
            steps += [*expect, *reads] if self.config.descriptor_wait else [reads[0], *expect, *reads[1:]]
        return steps

    def _reads(self, op: Op, source: int, arrival: bool, part: slice = slice(None)) -> list[Step]:
        """Wait for (unless it is a held slot's late reader) and read what ``source`` sent, or a part of its pieces."""
        steps: list[Step] = []
        for piece in range(self.config.num_pieces(op.seq, op.kind, source, self.rank))[part]:
            word = self._arrival_word(self.rank, op, source, piece)
            if arrival:
                label = self._label(op, f"piece {piece} of rank {source} has arrived")
                steps.append(self._wait_epoch(label, word, self._stored(op.use)))
            steps.append(self._read(op, source, piece, last=not (arrival and op.held)))
        return steps

    def _read(self, op: Op, source: int, piece: int, last: bool) -> Step:
        # One step is enough: a write that could fall into a longer read could as well come just before it.
        cell = self.at("data", self.rank, op.kind, self._slot(op), source, piece)
        expected = datum(op.use - 1, op.variant, 0, WRITTEN)
        aborts = [self.at("abort", self.rank, peer) for peer in self.peers]
        released, taint, device = self.released, self.taint, self.config.device
        tentative = self.at("tentative", self.rank) if op.form == "launch" else None

        def effect(state: bytearray) -> str | None:
            found = state[cell]
            if last and found & 3 == WRITTEN:
                state[cell] = found & ~3 | FREE
            if found == expected:
                return None
            if device and (state[released] or any(state[word] for word in aborts)):
                state[taint] = 1  # garbage, but mgr.check() already has something to raise
                return None
            if tentative is not None:
                state[tentative] = 1  # harmless, if nobody uses it: see `_use`
                return None
            return f"rank {self.rank} reads {describe(found)} from rank {source}, not {describe(expected)}"

        late = "" if last and not op.held else " (the last reader of a held slot)" if last else " (first reader)"
        label = self._label(op, f"reads piece {piece} of rank {source}{late}")
        return Step(label, None, effect, eager_when=released)

    def _credits(self, op: Op) -> list[Step]:
        steps = []
        for peer in self.peers:
            word = self.at("credit", peer, op.kind, self._slot(op), self.rank, initial=self.config.first_epoch)
            steps.append(self._set(self._label(op, f"credit to rank {peer}"), word, self._stored(op.use)))
        return steps
