"""What an attacker found once: each of these gave wrong numbers, a deadlock or a crash."""

from __future__ import annotations

import copy
import pickle

import pytest

from tests.nn import attack_ranks as ranks
from tpoverlap.statistics import NameStatistics


@pytest.mark.parametrize("backend", ["shared", "process_group"])
def test_two_threads_take_turns(rank_pool, backend: str) -> None:
    rank_pool(2).run(ranks.two_threads, backend, timeout_s=60)


def test_gradient_of_a_gradient_is_refused(rank_pool) -> None:
    for message in rank_pool(2).run(ranks.double_backward, timeout_s=60):
        assert "once_differentiable" in message


def test_stale_view_of_the_buffer_is_refused(rank_pool) -> None:
    messages = rank_pool(3).run(ranks.stale_view, timeout_s=60)
    assert all("lies in the communication buffer" in message for message in messages[1:])


def test_a_fork_has_no_part_in_the_group(rank_pool) -> None:
    assert all("fork" in message for message in rank_pool(2).run(ranks.fork, timeout_s=60))


def test_bulk_under_autocast(rank_pool) -> None:
    rank_pool(2).run(ranks.autocast, timeout_s=60)


@pytest.mark.parametrize("option", ["num_splits", "num_max_streams"])
def test_more_splits_than_flags(rank_pool, option: str) -> None:
    """A million streams were a million threads, until none could be started."""
    assert all(f"{option}=65" in message for message in rank_pool(2).run(ranks.too_many, option, timeout_s=60))


def test_a_rank_dies_before_it_makes_its_manager(rank_pool) -> None:
    survivors = rank_pool(3).run(ranks.dies_before, timeout_s=60, expect_dead={1})
    for message in (survivors[0], survivors[2]):
        assert "(global ranks [0, 1, 2]) in a step of the set-up" in message


@pytest.mark.parametrize("option", [None, "delay_wgrad_compute", "fuse_wgrad_accumulation"])
def test_frozen_between_forward_and_backward(rank_pool, option: str | None) -> None:
    rank_pool(2).run(ranks.frozen_meanwhile, option, timeout_s=60)


def test_compiled_programs(rank_pool) -> None:
    """torch.compile stopped with an internal error at a look at an address."""
    for same in rank_pool(2).run(ranks.compiled, timeout_s=90):
        assert all(same.values()) and len(same) == 8, same


@pytest.mark.parametrize(("mode", "what"), [("column", "gradient"), ("row", "input")])
def test_written_before_the_delayed_gradient(rank_pool, mode: str, what: str) -> None:
    """Of the operand that is the caller's: the other one is a gathered copy."""
    for message in rank_pool(2).run(ranks.written_meanwhile, mode, what, timeout_s=60):
        assert "was written to in place since backward (it is at version" in message


def test_other_replicated_parameters(rank_pool) -> None:
    """Gloo ended a process, or the gradients of two parameters were added up."""
    for messages in rank_pool(2).run(ranks.other_replicated, timeout_s=60):
        assert "layer_norm_weight [16] torch.float32 on one of them only" in messages[0]
        assert "fc2_bias [16] torch.float32, layer_norm_weight [16] torch.float32 on one" in messages[1]


def test_names_are_text(rank_pool) -> None:
    for messages in rank_pool(2).run(ranks.bad_names, timeout_s=60):
        assert len(messages) == 3 and all("ub_name is needed" in message for message in messages)


@pytest.mark.parametrize("what", ["targets", "logits", "tokens"])
def test_vocabulary_entries_are_whole_numbers(rank_pool, what: str) -> None:
    for message in rank_pool(2).run(ranks.no_entries, what, timeout_s=60):
        assert "give logits as a floating-point tensor and targets as a tensor of integers" in message or (
            what == "tokens" and "tokens must be a 1-D tensor of integers, got list" in message
        )


@pytest.mark.parametrize("capacity", [1, 4, 5, 8, 100])
def test_histogram_counts_every_call(capacity: int) -> None:
    statistics = NameStatistics(capacity)
    for num_tokens in range(1, capacity + 1):
        statistics.record("ring_exchange", num_tokens, overflow=False)
    counts = [count for key, count in statistics.as_dict().items() if key.startswith("tokens_le_")]
    assert sum(counts) == capacity


def test_managers_are_shared_by_copies_and_refuse_pickling(rank_pool) -> None:
    rank_pool(1).run(copy_and_pickle, timeout_s=60)


def copy_and_pickle(rank: int, size: int) -> None:
    """A deep copy of a layer uses the same manager; pickling one says what to save instead."""
    import tpoverlap as tpo
    from tests.manager.ranks import FEATURES, WIDTH, make_manager

    with make_manager() as manager:
        layer = tpo.nn.Linear(WIDTH, FEATURES, parallel_mode="column", manager=manager, ub_name="qkv")
        other = copy.deepcopy(layer)
        assert other.manager is manager and other.weight is not layer.weight
        with pytest.raises(TypeError, match="state_dict"):
            pickle.dumps(layer)
