"""Weights in and out: full parameters, DTensor state dicts, resuming, and a frozen base."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.manager.ranks import public_class, seeded
from tests.nn import weight_ranks
from tpoverlap import ConfigError
from tpoverlap.nn import ShardSpec
from tpoverlap.testing import RankPool


@pytest.mark.parametrize("size", [1, 2, 3])
def test_full_weights(rank_pool: Callable[[int], RankPool], size: int) -> None:
    rank_pool(size).run(weight_ranks.round_trip, timeout_s=60.0)


def test_wrong_calls(rank_pool: Callable[[int], RankPool]) -> None:
    expected = {
        "shard": ("[12, 16]", "[6, 16]", "pass the whole one"),
        "name": ("'fc1.weight'", "fc1_weight"),
        "foreign": ("1.weight", "no tensor-parallel layer"),
        "meta": ("to_empty",),
        "not llama": ("layer 0", "bias=False"),
        "missing": ("model.layers.1.mlp.up_proj.weight",),
        "head": ("lm_head.weight", "VocabParallelHead(weight=embedding.weight)"),
        "misfit": ("model.layers.1.self_attn.k_proj.weight", "[24, 16]", "[4, 16]"),
        "norm": ("model.norm.weight", "[4]", "[16]"),
    }
    for outcomes in rank_pool(2).run(weight_ranks.wrong_calls, timeout_s=60.0):
        assert set(outcomes) == set(expected)
        for what, words in expected.items():
            assert outcomes[what] is not None, f"{what}: nothing was raised"
            classes, message = outcomes[what]
            assert public_class(classes) == "ConfigError", f"{what}: {classes[0]}: {message}"
            for word in words:
                assert word in message, f"{what}: {word!r} is not in {message!r}"


@pytest.mark.parametrize(("saved", "loaded"), [(2, (1, 3)), (3, (2,))])
def test_distributed_checkpoint_reshards(
    rank_pool: Callable[[int], RankPool], tmp_path: Path, saved: int, loaded: tuple[int, ...]
) -> None:
    full = rank_pool(saved).run(weight_ranks.save_checkpoint, str(tmp_path), timeout_s=60.0)[0]
    for size in loaded:
        rank_pool(size).run(weight_ranks.load_checkpoint, str(tmp_path), full, timeout_s=60.0)


def test_histories_of_delayed_scaling(rank_pool: Callable[[int], RankPool], tmp_path: Path) -> None:
    rank_pool(2).run(weight_ranks.histories, str(tmp_path), True, timeout_s=60.0)
    rank_pool(1).run(weight_ranks.histories, str(tmp_path), False, timeout_s=60.0)


def test_resume(rank_pool: Callable[[int], RankPool]) -> None:
    rank_pool(2).run(weight_ranks.resume, timeout_s=60.0)


@pytest.mark.parametrize("size", [2, 3])
def test_lora_gathers_nothing_in_backward(rank_pool: Callable[[int], RankPool], size: int) -> None:
    rank_pool(size).run(weight_ranks.lora, timeout_s=60.0)


@given(tp_size=st.integers(1, 5), unit=st.integers(1, 4), extra=st.integers(0, 4), dim=st.integers(0, 1))
def test_shards_put_together_are_the_full_parameter(tp_size: int, unit: int, extra: int, dim: int) -> None:
    """Every kind of cut, at any R; every element is on one rank exactly."""
    size = unit * tp_size
    other = 3
    kinds: dict[str, tuple[int, tuple[tuple[str, int], ...], int | None]] = {
        "plain": (size, (), None),
        "uneven": (size + extra, (), None),
        "gated": (2 * size, (("gate", size), ("up", size)), None),
        "grouped": (7 * size, (("query", 5 * size), ("key", size), ("value", size)), size),
    }
    for kind, (cut, parts, groups) in kinds.items():
        shape = (cut, other) if dim == 0 else (other, cut)
        spec = ShardSpec(shape, dim, parts, groups)
        full = torch.arange(cut * other).view(shape)
        shards = [spec.shard(full, rank, tp_size) for rank in range(tp_size)]
        assert [tuple(shard.shape) for shard in shards] == [spec.local_shape(rank, tp_size) for rank in range(tp_size)]
        assert torch.equal(spec.unshard(shards), full), kind
        assert sorted(torch.cat([shard.flatten() for shard in shards]).tolist()) == list(range(full.numel())), kind
        if parts:
            assert {name: part.shape[dim] for name, part in spec.split(full).items()} == dict(parts)
            assert torch.equal(spec.join(spec.split(full)), full), kind


def test_groups_alternate() -> None:
    """Megatron's order, spelled out: two groups of two query heads, head size 1."""
    spec = ShardSpec((8, 1), 0, (("query", 4), ("key", 2), ("value", 2)), 2)
    parts = {"query": seeded(4, 1, seed=1), "key": seeded(2, 1, seed=2), "value": seeded(2, 1, seed=3)}
    q, k, v = parts.values()
    assert torch.equal(spec.join(parts), torch.stack([q[0], q[1], k[0], v[0], q[2], q[3], k[1], v[1]]))
    with pytest.raises(ConfigError, match=r"key part has to be \[2, 1\], got nothing"):
        spec.join({"query": parts["query"]})
