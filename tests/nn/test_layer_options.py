"""Flags, frozen weights, delayed and accumulated gradients, returned extras, and every misuse of the layers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.nn import layer_ranks as ranks
from tpoverlap.errors import ActiveShapeError
from tpoverlap.nn.norm import NormOptions


@pytest.mark.parametrize("size", [2, 3])
def test_frozen_weights_gather_nothing(rank_pool, size: int) -> None:
    rank_pool(size).run(ranks.frozen, timeout_s=60)


def test_flags(rank_pool) -> None:
    rank_pool(2).run(ranks.flags, timeout_s=60)


@pytest.mark.parametrize("save_gathered", [False, True])
def test_nothing_saved_lies_in_the_buffer(rank_pool, save_gathered: bool) -> None:
    rank_pool(2).run(ranks.nothing_saved_lies_in_the_buffer, save_gathered, timeout_s=60)


def test_delayed_gradients(rank_pool) -> None:
    for message in rank_pool(2).run(ranks.delayed_first_in_first_out, timeout_s=60):
        assert "no backward pass waits for it" in message


@pytest.mark.parametrize("name", ["megatron_convention", "returned", "zero_centered", "registered_later"])
def test_option(rank_pool, name: str) -> None:
    rank_pool(2).run(getattr(ranks, name), timeout_s=60)


def test_unregistered(rank_pool) -> None:
    for lines in rank_pool(2).run(ranks.unregistered_says_so_once, timeout_s=60):
        assert len(lines) == 1 and "runs without overlap" in lines[0]


def test_one_sequence_is_said_once(rank_pool) -> None:
    for rank, (told, first, later) in enumerate(rank_pool(2).run(ranks.one_sequence_is_said, timeout_s=60)):
        assert not told and not later
        assert len(first) == (rank == 0)
        assert rank or ("T=6" in first[0] and "one sequence" in first[0])


def test_default_manager(rank_pool) -> None:
    for message in rank_pool(2).run(ranks.default_manager, timeout_s=60):
        assert "initialize_ub" in message and "manager=" in message


SAYS = {
    "dtype of a normed column": ("ActiveShapeError", "qkv: the input", "torch.bfloat16", "torch.float32", "cast"),
    "dtype of an MLP": ("ActiveShapeError", "fc1: the input", "torch.float64", "torch.float32", "cast"),
    "dtype of a layer": ("ActiveShapeError", "qkv: the input", "torch.float16", "torch.float32", "cast"),
    "width of a normed column": ("ActiveShapeError", "qkv: the input", "17 features", "normalises 16"),
    "width of an MLP": ("ActiveShapeError", "fc1: the input", "1 features", "normalises 16"),
    "width of a layer": ("ActiveShapeError", "qkv: the input", "15 features", "normalises 16"),
    "three dimensions": ("ActiveShapeError", "fc1: the input", "[1, 3, 16]", "flatten"),
    "device of a normed column": ("ActiveShapeError", "qkv: the input", "meta", "cpu", "move"),
    "no tensor": ("ActiveShapeError", "fc1: the input", "list"),
    "bulk dgrad and rs dgrad": ("ConfigError", "ub_bulk_dgrad", "ub_overlap_rs_dgrad"),
    "bulk wgrad and rs dgrad": ("ConfigError", "ub_bulk_wgrad", "ub_overlap_rs_dgrad"),
    "bulk wgrad and delay": ("ConfigError", "ub_bulk_wgrad", "delay_wgrad_compute"),
    "overlap off and a flag": ("ConfigError", "ub_tp_comm_overlap", "ub_overlap_ag"),
    "few names": ("ConfigError", "ub_names needs 4 names", "fc2", "('qkv', 'proj', 'fc1')"),
    "few names of an MLP": ("ConfigError", "ub_names needs 2 names", "fc1, fc2"),
    "a string of names": ("ConfigError", "ub_names needs 2 names", "'qk'"),
    "negative eps": ("ConfigError", "eps", "-1e-05"),
    "zero eps": ("ConfigError", "eps", "0.0"),
    "infinite eps": ("ConfigError", "eps", "inf"),
    "negative rotary base": ("ConfigError", "rotary_base", "-10000.0"),
    "rotary base is no number": ("ConfigError", "rotary_base", "nan"),
    "rotary table": ("ConfigError", "rotary", "0.0"),
    "ffn": ("ConfigError", "ffn_hidden_size=9", "tp_size=2"),
    "features": ("ConfigError", "out_features=9", "tp_size=2"),
    "heads": ("ConfigError", "num_attention_heads=5", "tp_size=2"),
    "no heads": ("ConfigError", "num_attention_heads", "at least 1, got 0"),
    "heads are text": ("ConfigError", "num_attention_heads", "whole number", "'4'"),
    "ffn is no whole number": ("ConfigError", "ffn_hidden_size", "whole number", "8.0"),
    "an MLP of width 0": ("ConfigError", "hidden_size", "got 0"),
    "an MLP of width -1": ("ConfigError", "hidden_size", "got -1"),
    "an MLP without features": ("ConfigError", "ffn_hidden_size", "got 0"),
    "a column without features": ("ConfigError", "out_features", "got 0"),
    "a column of width 0": ("ConfigError", "in_features", "got 0"),
    "a row of width -16": ("ConfigError", "out_features", "got -16"),
    "a normed column of width 0": ("ConfigError", "in_features", "got 0"),
    "attention of width 0": ("ConfigError", "hidden_size", "got 0"),
    "heads of width -4": ("ConfigError", "kv_channels", "got -4"),
    "heads of width 0": ("ConfigError", "kv_channels", "got 0"),
    "no groups": ("ConfigError", "num_gqa_groups", "got 0"),
    "a layer of width 0": ("ConfigError", "hidden_size", "got 0"),
    "a layer without an MLP": ("ConfigError", "ffn_hidden_size", "got 0"),
    "embeddings of width 0": ("ConfigError", "embedding_dim", "got 0"),
    "a vocabulary of -9": ("ConfigError", "vocab_size", "got -9"),
    "a head of width 0": ("ConfigError", "hidden_size", "got 0"),
    "rotary of no features": ("ConfigError", "head_dim", "got 0"),
    "rotary of odd features": ("ConfigError", "head_dim=3", "odd"),
    "a tensor of angles": ("ConfigError", "rotary_pos_emb", "RotaryTable.of", "Tensor"),
    "groups": ("ConfigError", "num_gqa_groups=3", "tp_size=2"),
    "heads by groups": ("ConfigError", "num_attention_heads=6", "num_gqa_groups=4"),
    "hidden by heads": ("ConfigError", "hidden_size=16", "num_attention_heads=6", "kv_channels"),
    "odd rotary": ("ConfigError", "kv_channels=3"),
    "dropout": ("ConfigError", "attention_dropout=0.1"),
    "mask": ("ConfigError", "'arbitrary'", "padding_causal"),
    "norm output without norm": ("ConfigError", "input_layernorm=True"),
    "normalization": ("ConfigError", "'rmsnorm'", "RMSNorm"),
    "activation": ("ConfigError", "'swiglue'", "swiglu"),
    "no name": ("ConfigError", "ub_name", "mgr.register"),
    "row norm": ("ConfigError", "parallel_mode='row'"),
    "wrong direction": ("ConfigError", "proj_fprop", "reduce-scatter"),
    "tp_size": ("ConfigError", "tp_size=7", "2 ranks"),
    "cu_seqlens too short": ("ActiveShapeError", "ends at 2", "T=6"),
    "cu_seqlens not increasing": ("ActiveShapeError", "entry 1 is 2, entry 2 2"),
    "width": ("ActiveShapeError", "17 features", "16 was registered"),
    "rows": ("ActiveShapeError", "4 rows", "owns 3"),
    "whole rows": ("ActiveShapeError", "4 rows", "T=6"),
    "vocabulary": ("ConfigError", "vocabulary of 1", "tp_size=2"),
    "tokens": ("ActiveShapeError", "3 tokens", "T=6"),
    "tied": ("ConfigError", "[1, 16]"),
    "targets": ("ActiveShapeError", "[2]", "[T, 2]"),
    "reduction": ("ConfigError", "'average'", "mean"),
}


@pytest.mark.parametrize("offender", [None, 1])
def test_misuses(rank_pool, offender: int | None) -> None:
    assert SAYS.keys() == ranks.MISUSES.keys()
    for rank, outcomes in enumerate(rank_pool(2).run(ranks.misuses, offender, timeout_s=60)):
        assert bool(outcomes) == (offender in (None, rank))
        for name, outcome in outcomes.items():
            assert outcome is not None, f"{name}: nothing was raised"
            (classes, message), (error, *fragments) = outcome, SAYS[name]
            assert classes[0] == error, f"{name}: {classes[0]}: {message}"
            assert all(fragment in message for fragment in fragments), f"{name}: {message}"


def test_autocast_does_not_hide_a_wrong_dtype(rank_pool) -> None:
    for outcome in rank_pool(2).run(ranks.float32_under_autocast, timeout_s=60):
        assert outcome is not None and outcome[0][0] == "ActiveShapeError", outcome
        assert "torch.float32" in outcome[1] and "torch.bfloat16" in outcome[1]


def test_a_float32_manager_leaves_autocasts_norm_to_the_gemm() -> None:
    """On GPUs it gives float32 of whatever it is given."""

    def refuse(*given: object) -> None:
        raise ActiveShapeError("refused")

    cpu = torch.device("cpu")
    manager: Any = SimpleNamespace(dtype=torch.float32, device=cpu, require_input=refuse)
    options = NormOptions(4, 1e-5, "RMSNorm", False, manager, "fc1")
    rows = torch.zeros(2, 4, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        options._require_input(rows)
    with pytest.raises(ActiveShapeError, match="refused"):
        options._require_input(rows)
