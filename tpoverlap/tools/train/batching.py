"""Which documents a step trains on, and which rank owns which of their rows. Pure data: no torch, no randomness left.

The rule, in full (deterministic for a corpus, capacity, seed and tp_size):

1. Documents longer than C are skipped, never cut (a document is a whole top-level block); so are those of one byte,
   which have nothing to predict. The others are shuffled once by ``seed``, and again whenever all were used.
2. An ordinary step takes the next documents while they fit in C, at most ``sequences_per_step`` of them. T is their
   sum: nothing is padded. Its rows are cut evenly (``TokenPartition.balanced``), through the middle of documents.
3. Every fifth step (5, 10, ...) is *aligned*: a rank owns one whole document, as when ranks read their own files. It
   takes at least one document and at most R - 1, the first being the longest of the next eight; so with R > 1 one rank
   or more own **no row**, and which ones moves on from aligned step to aligned step. A rank may then own all T rows:
   the manager needs ``max_rows_per_rank=C``.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from tpoverlap.errors import ConfigError
from tpoverlap.tokens import TokenPartition

ALIGNED_EVERY = 5
_LOOK_AHEAD = 8


@dataclass(frozen=True)
class StepPlan:
    """One step: whole documents (one token a byte) and the owner of every row.

    ``partition.total`` is T = sum of the documents' lengths.
    """

    documents: tuple[bytes, ...]
    partition: TokenPartition
    aligned: bool

    @property
    def num_tokens(self) -> int:
        """T, tokens of the step over all ranks."""
        return self.partition.total

    @property
    def cu_seqlens(self) -> tuple[int, ...]:
        """Row at which each document starts, and T: ``len(documents) + 1`` entries."""
        return (0, *accumulate(len(document) for document in self.documents))


def usable_documents(documents: Sequence[bytes], capacity_tokens: int) -> list[bytes]:
    """Documents of 2..C bytes. Raises ConfigError when there is none."""
    usable = [document for document in documents if 2 <= len(document) <= capacity_tokens]
    if not usable:
        lengths = sorted(len(document) for document in documents)
        raise ConfigError(
            f"none of the {len(documents)} documents has 2 to {capacity_tokens} bytes (their lengths: {lengths[0]} to "
            f"{lengths[-1]}); documents are never cut: raise --capacity or give another --corpus"
        )
    return usable


def plan_steps(
    documents: Sequence[bytes],
    *,
    capacity_tokens: int,
    num_steps: int,
    tp_size: int,
    sequences_per_step: int = 4,
    seed: int = 0,
) -> tuple[StepPlan, ...]:
    """The steps of a run, by the rule at the top of this file. Raises ConfigError when no document fits in C."""
    queue = _Queue(usable_documents(documents, capacity_tokens), seed)
    steps: list[StepPlan] = []
    for index in range(num_steps):
        aligned = index % ALIGNED_EVERY == ALIGNED_EVERY - 1
        if not aligned:
            taken = queue.take(capacity_tokens, sequences_per_step)
            partition = TokenPartition.balanced(sum(map(len, taken)), tp_size)
        else:
            queue.bring_longest_forward(_LOOK_AHEAD)
            taken = queue.take(capacity_tokens, min(sequences_per_step, max(1, tp_size - 1)))
            partition = _one_document_a_rank(taken, tp_size, first_empty=index // ALIGNED_EVERY)
        steps.append(StepPlan(tuple(taken), partition, aligned))
    return tuple(steps)


def _one_document_a_rank(documents: Sequence[bytes], tp_size: int, first_empty: int) -> TokenPartition:
    """Whole documents to ranks in order, leaving those from ``first_empty`` (mod R) on without a row."""
    num_empty = tp_size - len(documents)
    empty = {(first_empty + i) % tp_size for i in range(num_empty)}
    lengths = iter([len(document) for document in documents])
    return TokenPartition.from_counts([0 if rank in empty else next(lengths) for rank in range(tp_size)])


class _Queue:
    """Documents in shuffled order, without end."""

    def __init__(self, documents: Sequence[bytes], seed: int) -> None:
        self._documents = list(documents)
        self._random = random.Random(seed)
        self._pending: list[bytes] = []  # reversed: the next document is the last entry
        self._refill(1)

    def _refill(self, num_wanted: int) -> None:
        while len(self._pending) < num_wanted:
            order = list(self._documents)
            self._random.shuffle(order)
            self._pending = order + self._pending

    def bring_longest_forward(self, look_ahead: int) -> None:
        """Make the longest of the next ``look_ahead`` documents the next one."""
        self._refill(look_ahead)
        window = range(len(self._pending) - look_ahead, len(self._pending))
        self._pending.append(self._pending.pop(max(window, key=lambda i: (len(self._pending[i]), i))))

    def take(self, capacity_tokens: int, max_documents: int) -> list[bytes]:
        """The next documents while they fit; at least one, since each alone fits in C."""
        self._refill(max_documents)
        taken: list[bytes] = []
        num_tokens = 0
        while len(taken) < max_documents and num_tokens + len(self._pending[-1]) <= capacity_tokens:
            taken.append(self._pending.pop())
            num_tokens += len(taken[-1])
            self._refill(1)
        return taken
