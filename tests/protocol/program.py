"""The streams' programs: what the engine enqueues for each operation, as lists of atomic steps.

One operation, with use ``u`` of slot ``u % depth`` of its region (compare `tpoverlap.comm.exchange`)::

    caller's stream                                   comm stream
    grant the credit that a held use u - depth kept   wait for "caller reached the operation"        (gated)
    "caller reached the operation"                    for each peer: digest, then record
    reduce-scatter: partial rows for each peer        for each peer d in ring order:
    for each peer s in ring order:                        reduce-scatter: wait for the partial rows
        wait for s's record, compare both words           wait for credit[region][slot][d] >= u - depth
        for each piece: wait for its arrival, read        for each piece: begin copy, end copy, arrival flag
    wait for "sends are queued and done"              "sends are done"
    credit u to every peer (not if the slot is held)

On a device the caller's words can have a stream of their own: `word_stream`.

Own rows never cross a rank boundary and are left out; so are the GEMMs, which only take time. Both regions follow the
same rules: an AG cell is the chunk of a source, an RS cell the partial rows that a source computed for this rank.
"""

from __future__ import annotations

from .config import Config
from .steps import Code, Op, Step, Thread
from .word_stream import WordStreamSteps
from .words import Words

FORMS = {"G": ("A", "engine"), "F": ("R", "engine"), "L": ("A", "launch"), "M": ("R", "launch")}
"""Letters of `fused`: region and form."""
ORDERS = {"T": ("A", "at_once"), "U": ("R", "at_once"), "B": ("R", "behind")}
"""Letters of operations whose `Outline.order` is not "beside": region and order."""
TRADES = {"K": "A", "N": "R"}
"""Letters of operations whose exchange is one kernel: region."""


def build(config: Config) -> Code:
    """Programs of all ranks."""
    names = _build(config, Words()).words  # a first pass, to learn which words there are
    return _build(config, names.sorted_by_owner())


def _build(config: Config, words: Words) -> Code:
    code = Code(words, [], [], [])
    for rank in range(config.tp_size):
        for kind in ("error", "watchdog", "released", "raised", "taint", "full", "tentative"):
            words.at(kind, rank)
        for source in range(config.tp_size):
            words.at("abort", rank, source)
        _RankBuilder(config, code, rank).build()
    return code


class _RankBuilder(WordStreamSteps):
    """Writes the programs of one rank."""

    def build(self) -> None:
        config = self.config
        comm, caller, host = self._thread("comm"), self._thread("caller"), self._thread("host")
        words = self._thread("words")
        other = self._thread("caller 2") if config.caller_streams == 2 else caller
        callers = {"A": caller, "R": other, "S": caller}
        uses = dict.fromkeys(callers, 0)
        held: dict[tuple[str, int], Op] = {}
        library = self._thread("library")
        if config.library:
            library.steps = self._library()
            if config.behind == self.rank:
                done = self.at("library ends", self.rank)
                caller.steps.append(self._wait_count(f"rank {self.rank} waits for the other library", done, 1))
        for number, (letter, variant) in enumerate(config.rank_ops(self.rank)):
            kind, form = FORMS.get(letter, (letter.upper(), ""))
            kind, order = ORDERS.get(letter.upper(), (kind, "beside"))
            if letter.upper() in TRADES:
                kind, order = TRADES[letter.upper()], "traded"
            uses[kind] += 1
            op = Op(self.rank, number + 1, kind, uses[kind], variant, letter.islower(), form)
            if op.held:
                held[kind, op.use] = op
            ended = held.pop((kind, op.use - config.depth), None)
            if config.word_stream and kind != "S":
                publish = [step for peer in self.peers for step in self._publish(op, peer)]
                self._on_a_device(op, ended, order, comm, callers[kind], words, publish)
            else:
                self._operation(op, ended, order, comm, callers[kind], host)
        for thread in (comm, caller, other, words, host, library):
            if thread.steps and thread not in self.code.threads:
                if config.gives_up and thread in (*callers.values(), words):
                    thread.steps.append(Step("end"))  # not eager: whether a rank can still give up depends on it
                self.code.threads.append(thread)
        self.code.waited.append(self.waited)
        self.code.differs.append(self.differs)

    def _operation(self, op: Op, ended: Op | None, order: str, comm: Thread, caller: Thread, host: Thread) -> None:
        """Append one operation's steps; ``ended`` is the held use whose hold it ends."""
        broken = self.config.broken
        publish = [step for peer in self.peers for step in self._publish(op, peer)]
        if op.kind == "S":
            expect = [step for source in self.peers for step in self._expect(op, caller, source)]
            caller.steps += self._start(op, caller) + publish + expect
            return
        grants: list[Step] = []
        if ended is not None:
            reads = [s for source in self._sources(ended) for s in self._reads(ended, source, arrival=False)]
            grants = reads + self._credits(ended)
        credits = [] if op.held else self._credits(op)
        head, receives, tail = self._start(op, caller), self._receives(op, caller), [self._join(op)]
        if "grant_after_send" in broken:
            tail = grants + tail
        else:
            head = grants + head
        if "credit_before_read" in broken:
            receives[-1:-1] = credits
        else:
            tail += credits
        if order == "traded":
            first, second = self._traded(op, caller, comm, publish)
            comm.steps += second
            caller.steps += [*head, *first, *([] if "first_credits" in broken else credits)]
            return
        if op.form == "launch":
            sends = self._launch_sends(op, caller, publish)
            if not self.config.one_queue:
                comm.steps += sends
                sends = []
            caller.steps += [*head, *self._one_launch(op, caller, sends), *credits]
            return
        if op.form:
            receives = self._fused_receives(op, caller)
        sends = self._sends(op, caller, publish if "late_descriptor" in broken else [])
        if "host_publishes" in broken:
            host.steps += publish
        elif "late_descriptor" not in broken:
            place = 2 if order == "behind" and self.config.gated else 1
            sends[place:place] = publish  # after the gate, or after the first rows were computed
        if self.config.one_queue or order == "at_once":
            first, second = (receives, sends) if "waiter_first" in broken else (sends, receives)
            caller.steps += head + first + second + tail
        else:
            comm.steps += sends
            caller.steps += head + receives + tail
