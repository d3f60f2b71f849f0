"""32-bit epochs, descriptors and abort words: what is stored in a few bits must come out as it went in."""

from __future__ import annotations

import os
import subprocess
import sys

import torch
from hypothesis import given
from hypothesis import strategies as st

from tpoverlap.comm.descriptor import Descriptor, describe, digest64, operation_id, sequence_matches, text_hash
from tpoverlap.comm.diagnosis import AbortReason, Diagnosis
from tpoverlap.comm.epochs import reached, wrap32
from tpoverlap.comm.outline import Outline
from tpoverlap.errors import PeerTimeoutError, RankMismatchError
from tpoverlap.tokens import TokenPartition

epochs = st.one_of(st.integers(0, 1 << 40), st.integers(-5, 5).map(lambda d: (1 << 32) + d))
LABELS = ["qkv_fprop all-gather ring_exchange", "proj_fprop reduce-scatter pipeline/4", "close", ""]
descriptors = st.builds(
    Descriptor,
    st.integers(1, 1 << 20),
    st.sampled_from(LABELS),
    st.integers(0, (1 << 32) - 1),
    st.integers(0, (1 << 64) - 1),
)


@given(epochs, st.integers(0, (1 << 31) - 1))
def test_a_flag_that_is_ahead_has_reached(epoch: int, ahead: int) -> None:
    assert reached(wrap32(epoch + ahead), wrap32(epoch))
    assert reached(wrap32(epoch + ahead), epoch), "an epoch need not be wrapped by the waiter"


@given(epochs, st.integers(1, 1 << 31))
def test_a_flag_that_is_behind_has_not(epoch: int, behind: int) -> None:
    assert not reached(wrap32(epoch - behind), epoch)


def test_across_the_wrap() -> None:
    last = (1 << 32) - 1
    assert wrap32(last + 1) == 0
    assert not reached(last, last + 1) and reached(0, last) and reached(1, last) and not reached(last, 1)


@given(descriptors)
def test_a_record_says_what_it_was_made_of(descriptor: Descriptor) -> None:
    record = descriptor.record
    assert 0 < record < 1 << 64 and sequence_matches(record, descriptor.sequence)
    said = describe(record, {operation_id(descriptor.label): descriptor.label})
    closes = descriptor.label == "close"
    assert said == ("closes its manager" if closes else f"{descriptor.label} with T={descriptor.num_tokens}")
    assert "unknown" in describe(record, {})


@given(descriptors, st.integers(1, 64))
def test_another_operation_has_another_record(descriptor: Descriptor, later: int) -> None:
    """What a ring entry still holds from 64 operations before must not pass for the present one."""
    for sequence in (descriptor.sequence - later, descriptor.sequence + later):
        assert not sequence_matches(descriptor.record, sequence)
    assert not sequence_matches(0, descriptor.sequence), "an entry that nobody wrote"


@given(st.lists(st.integers(0, (1 << 64) - 1), min_size=1, max_size=6), st.integers(0, 5), st.integers(1, 1 << 40))
def test_a_digest_depends_on_every_part(parts: list[int], which: int, change: int) -> None:
    changed = list(parts)
    changed[which % len(parts)] ^= change
    digest = digest64(*parts)
    assert 0 <= digest < 1 << 64 and digest != digest64(*changed)


def test_ids_and_digests_are_the_same_in_every_process() -> None:
    code = (
        "from tpoverlap.comm.descriptor import *; from tpoverlap.tokens import TokenPartition as P;"
        "print(operation_id('qkv'), digest64(1, P((3, 4)).hash64, 1 << 63))"
    )
    other_seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    child = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONHASHSEED": other_seed, "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    here = operation_id("qkv"), digest64(1, TokenPartition((3, 4)).hash64, 1 << 63)
    assert tuple(map(int, child.stdout.split())) == here


@given(st.sampled_from(list(AbortReason)), st.integers(0, 1 << 40), st.one_of(st.none(), st.integers(0, 254)))
def test_abort_words(reason: AbortReason, sequence: int, culprit: int | None) -> None:
    word = reason.word(sequence, culprit)
    assert 0 < word < 1 << 32, "it has to fit a 32-bit flag, and 0 means that nobody gave up"
    assert AbortReason.decode(word) == (reason, sequence % (1 << 16), culprit)
    assert AbortReason.decode(reason.word(sequence, 255)) == (reason, sequence % (1 << 16), None)


@given(st.integers(1, 1 << 40), st.integers(-30_000, 30_000))
def test_an_abort_word_is_about_the_nearest_operation(latest: int, distance: int) -> None:
    diagnosis = _diagnosis({})
    diagnosis.remember(Descriptor(latest, "qkv ag", 12, 1))
    assert diagnosis.abort_sequence(AbortReason.ERROR.word(max(0, latest + distance))) == max(0, latest + distance)


def _diagnosis(words: dict[tuple[int, int], tuple[int, int]]) -> Diagnosis:
    return Diagnosis(0, 3, 7.0, lambda peer, sequence: words.get((peer, sequence), (0, 0)))


def test_diagnosis_names_every_rank() -> None:
    own, other = Descriptor(5, "qkv ag", 12, 1), Descriptor(5, "proj rs", 13, 2)
    words = {(1, 5): (own.record, own.digest), (2, 5): (other.record, other.digest)}
    diagnosis = _diagnosis(words)
    diagnosis.remember(own)
    assert diagnosis.differs(own) and diagnosis.missing_peers(5) == []
    text = str(diagnosis.mismatch(5))
    assert "rank 0: qkv ag with T=12; rank 1: qkv ag with T=12; rank 2: an operation unknown here" in text
    diagnosis.know("proj rs")
    assert "rank 2: proj rs with T=13" in str(diagnosis.mismatch(5))
    del words[2, 5]
    assert not diagnosis.differs(own) and diagnosis.missing_peers(5) == [2]
    assert "rank 2: not started" in str(diagnosis.mismatch(5))


def test_diagnosis_of_an_operation_that_is_not_reached_here() -> None:
    own, other = Descriptor(5, "qkv ag", 12, 1), Descriptor(5 + 64, "proj rs", 13, 2)
    diagnosis = _diagnosis({(1, 69): (other.record, other.digest)})
    diagnosis.remember(own)
    assert diagnosis.own_words(5) == (own.record, own.digest)
    assert diagnosis.own_words(69) == (0, 0), "the same entry of the ring, another operation"
    assert "rank 0: not started; rank 1: " in str(diagnosis.mismatch(69))


def test_diagnosis_of_equal_records_shows_the_digests() -> None:
    own, other = Descriptor(5, "qkv ag", 12, 0xABC), Descriptor(5, "qkv ag", 12, 0xDEF)
    diagnosis = _diagnosis({(1, 5): (other.record, other.digest), (2, 5): (own.record, own.digest)})
    diagnosis.remember(own)
    text = str(diagnosis.mismatch(5))
    assert "row counts" in text and "000abc" in text and "000def" in text


def test_diagnosis_of_a_peer_that_gave_up() -> None:
    diagnosis = _diagnosis({})
    gave_up = diagnosis.gave_up(2, AbortReason.ERROR.word(5), "qkv ag")
    assert isinstance(gave_up, PeerTimeoutError) and gave_up.peer == 2
    assert "rank 2 raised an error" in str(gave_up) and "qkv ag" in str(gave_up)
    because = diagnosis.gave_up(2, AbortReason.ERROR.word(5, culprit=1), "qkv ag")
    assert isinstance(because, PeerTimeoutError) and because.peer == 1, "who it started with, not who gave up"
    assert "rank 2 gave up because of rank 1" in str(because)
    this_rank = diagnosis.gave_up(2, AbortReason.ERROR.word(5, culprit=0), "qkv ag")
    assert "rank 2 gave up waiting for this rank, 0" in str(this_rank)
    assert "rank 2 closed its manager" in str(diagnosis.gave_up(2, AbortReason.CLOSED.word(5), "qkv ag"))
    assert isinstance(diagnosis.gave_up(2, AbortReason.MISMATCH.word(5), "qkv ag"), RankMismatchError)
    late = diagnosis.late(1, 7.25, "qkv ag, step 1")
    assert "waited 7.2 s for rank 1: qkv ag, step 1" in str(late) and "timeout_s=7" in str(late)


@given(st.integers(1, 1 << 40), st.integers(0, 9), st.integers(0, 1 << 33))
def test_an_outlines_descriptor(sequence: int, region: int, epoch: int) -> None:
    """Made without `Descriptor`'s own work, and the same."""
    partition, label = TokenPartition.from_counts([5, 0, 7]), "fc1_fprop all-gather ring_exchange"
    made = Outline(label, partition, torch.bfloat16, 11).descriptor(sequence, region, epoch)
    parts = (partition.hash64, text_hash("torch.bfloat16"), text_hash(label), 11, region, epoch)
    wanted = Descriptor(sequence, label, 12, digest64(*parts))
    for name in Descriptor.__slots__:
        assert getattr(made, name) == getattr(wanted, name), name
