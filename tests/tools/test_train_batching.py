"""The steps' documents and partitions: the rule, its consequences, and the default run pinned."""

from __future__ import annotations

from collections import Counter
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpoverlap.errors import ConfigError
from tpoverlap.tools.train.batching import ALIGNED_EVERY, plan_steps, usable_documents
from tpoverlap.tools.train.corpus import Corpus

documents_strategy = st.lists(st.integers(2, 40), min_size=1, max_size=30).map(
    lambda lengths: [bytes([i]) * length for i, length in enumerate(lengths)]
)


@given(documents_strategy, st.integers(40, 90), st.integers(1, 6), st.integers(1, 6), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_every_step_obeys_the_rule(documents: list[bytes], capacity: int, tp: int, most: int, seed: int) -> None:
    steps = plan_steps(
        documents, capacity_tokens=capacity, num_steps=11, tp_size=tp, sequences_per_step=most, seed=seed
    )
    assert len(steps) == 11
    for index, step in enumerate(steps):
        assert 1 <= len(step.documents) <= most
        assert step.num_tokens == sum(map(len, step.documents)) == step.cu_seqlens[-1] <= capacity
        assert all(document in documents for document in step.documents)
        assert step.aligned == ((index + 1) % ALIGNED_EVERY == 0)
        counts = step.partition.counts
        if step.aligned:
            assert [count for count in counts if count] == [len(document) for document in step.documents]
            assert tp == 1 or 0 in counts
        else:
            assert max(counts) - min(counts) <= 1


def test_all_documents_are_used_before_any_comes_again() -> None:
    documents = [bytes([i]) * 10 for i in range(20)]
    steps = plan_steps(documents, capacity_tokens=40, num_steps=4, tp_size=2, seed=3)
    assert len({document for step in steps for document in step.documents}) == 16
    again = plan_steps(documents, capacity_tokens=40, num_steps=9, tp_size=1, seed=3)
    counts = Counter(document for step in again for document in step.documents)
    assert set(counts.values()) <= {1, 2} and len(counts) == 20


def test_the_rank_without_a_row_moves() -> None:
    documents = [b"ab", b"abc"]
    steps = plan_steps(documents, capacity_tokens=8, num_steps=20, tp_size=2)
    assert [step.partition.counts.index(0) for step in steps if step.aligned] == [0, 1, 0, 1]


def test_same_seed_same_steps_other_seed_other_steps() -> None:
    documents = [bytes([i]) * (i + 2) for i in range(50)]
    runs = [plan_steps(documents, capacity_tokens=64, num_steps=5, tp_size=2, seed=seed) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_documents_that_do_not_fit_are_skipped_never_cut() -> None:
    assert usable_documents([b"a", b"ab", b"a" * 9, b"a" * 8], 8) == [b"ab", b"a" * 8]
    with pytest.raises(ConfigError, match=r"none of the 2 documents has 2 to 8 bytes .*9 to 11.*raise --capacity"):
        usable_documents([b"a" * 11, b"a" * 9], 8)


@pytest.mark.parametrize("seed", range(4))
def test_default_corpus_gives_the_promised_spread_of_t(seed: int, default_corpus: Corpus) -> None:
    steps = plan_steps(default_corpus.documents, capacity_tokens=2048, num_steps=400, tp_size=2, seed=seed)
    shares = sorted(step.num_tokens / 2048 for step in steps)
    assert 0.64 < fmean(shares) < 0.78
    assert shares[len(shares) // 20] > 0.2 and shares[-1] > 0.97  # 95 % of the steps lie in 0.2 to 1.0


def test_default_run_has_uneven_t_and_ranks_without_a_row(default_corpus: Corpus) -> None:
    steps = plan_steps(default_corpus.documents, capacity_tokens=2048, num_steps=20, tp_size=2, seed=1)
    assert sum(step.num_tokens % 2 for step in steps) >= 4
    assert sum(0 in step.partition.counts for step in steps) == 4
    assert len({step.num_tokens for step in steps}) >= 15
    assert 0.55 < fmean(step.num_tokens / 2048 for step in steps) < 0.85
