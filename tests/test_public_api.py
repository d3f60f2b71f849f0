"""Pins the public names: the design is a contract with users. Additions of ours come after what it lists."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tpoverlap as tpo
from tpoverlap import errors, te

NAMES = {
    "ActiveShapeError",
    "BackendUnavailableError",
    "CapacityError",
    "CommOverlap",
    "CommOverlapP2P",
    "ConfigError",
    "DelayedScaling",
    "Float8CurrentScaling",
    "Float8RowwiseScaling",
    "Format",
    "Fp8State",
    "LayerCommunicators",
    "NotInitializedError",
    "OverlapConfig",
    "PeerTimeoutError",
    "RankMismatchError",
    "TokenPartition",
    "TpOverlapError",
    "UserBufferManager",
    "__version__",
    "all_gather_gemm",
    "bulk_all_gather",
    "bulk_reduce_scatter",
    "checkpoint_context_fn",
    "fp8_autocast",
    "gemm_reduce_scatter",
    "memory_estimate",
    "nn",
    "profile",
    "sync_replicated_grads",
}

NN_NAMES = {
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MultiheadAttention",
    "PackedSequences",
    "RotaryTable",
    "ShardSpec",
    "TransformerLayer",
    "VocabParallelEmbedding",
    "VocabParallelHead",
    "all_gather_gemm",
    "bulk_all_gather",
    "bulk_reduce_scatter",
    "checkpoint_context_fn",
    "dtensor_state_dict",
    "fp8_autocast",
    "full_weight",
    "gemm_reduce_scatter",
    "load_full_weight",
    "sync_replicated_grads",
    "vocab_parallel_cross_entropy",
}

MANDATORY = inspect.Parameter.empty
Expected = list[tuple[str, Any]]
"""Parameter names, in order, and their defaults."""

SIGNATURES: dict[str, tuple[Callable[..., Any], Expected]] = {
    "UserBufferManager": (
        tpo.UserBufferManager,
        [
            ("group", MANDATORY),
            ("capacity_shape", MANDATORY),
            ("dtype", torch.bfloat16),
            ("device", None),
            ("ub_cfgs", None),
            ("quantization_modes", None),
            ("backend", "auto"),
            ("timeout_s", None),
            ("on_overflow", "error"),
            ("plan", None),
        ],
    ),
    "set_active_shape": (tpo.UserBufferManager.set_active_shape, [("shape", None), ("partition", None)]),
    "microbatch": (tpo.UserBufferManager.microbatch, [("shape", None), ("partition", None)]),
    "register": (
        tpo.UserBufferManager.register,
        [("name", MANDATORY), ("width", MANDATORY), ("max_tokens", None)],
    ),
    "layer": (tpo.UserBufferManager.layer, [("name", MANDATORY)]),
    "get": (tpo.UserBufferManager.get, [("name", MANDATORY)]),
    "explain": (tpo.UserBufferManager.explain, [("name", MANDATORY), ("num_tokens", None)]),
    "stats": (tpo.UserBufferManager.stats, []),
    "plan": (tpo.UserBufferManager.plan, []),
    "check": (tpo.UserBufferManager.check, []),
    "memory_report": (tpo.UserBufferManager.memory_report, []),
    "close": (tpo.UserBufferManager.close, []),
    "abort": (tpo.UserBufferManager.abort, []),
    "set_buffer_active_shape": (tpo.CommOverlap.set_buffer_active_shape, [("shape", MANDATORY)]),
    "get_buffer_active_shape": (tpo.CommOverlap.get_buffer_active_shape, []),
    "get_buffer_capacity_shape": (tpo.CommOverlap.get_buffer_capacity_shape, []),
    "get_buffer": (tpo.CommOverlap.get_buffer, [("local_chunk", False)]),
    "copy_into_buffer": (tpo.CommOverlap.copy_into_buffer, [("x", MANDATORY), ("local_chunk", False)]),
    "TokenPartition.even": (tpo.TokenPartition.even, [("num_tokens", MANDATORY), ("tp_size", MANDATORY)]),
    "TokenPartition.balanced": (tpo.TokenPartition.balanced, [("num_tokens", MANDATORY), ("tp_size", MANDATORY)]),
    "TokenPartition.from_counts": (tpo.TokenPartition.from_counts, [("counts", MANDATORY)]),
    "all_gather_gemm": (
        tpo.all_gather_gemm,
        [
            ("x_shard_t", MANDATORY),
            ("weight", MANDATORY),
            ("comm", MANDATORY),
            ("bias", None),
            ("partition", None),
            ("return_gathered", False),
        ],
    ),
    "gemm_reduce_scatter": (
        tpo.gemm_reduce_scatter,
        [("x", MANDATORY), ("weight", MANDATORY), ("comm", MANDATORY), ("bias", None), ("partition", None)],
    ),
    "bulk_all_gather": (
        tpo.bulk_all_gather,
        [("x_shard_t", MANDATORY), ("comm", MANDATORY), ("gemm", MANDATORY)],
    ),
    "bulk_reduce_scatter": (tpo.bulk_reduce_scatter, [("y", MANDATORY), ("comm", MANDATORY), ("gemm", MANDATORY)]),
    "sync_replicated_grads": (tpo.sync_replicated_grads, [("model", MANDATORY), ("group", MANDATORY)]),
    "memory_estimate": (
        tpo.memory_estimate,
        [("capacity_shape", MANDATORY), ("tp_size", MANDATORY), ("ub_cfgs", None)],
    ),
    "profile": (tpo.profile, [("out_dir", MANDATORY), ("manager", None)]),
    "te.initialize_ub": (
        te.initialize_ub,
        [
            ("shape", MANDATORY),
            ("tp_size", MANDATORY),
            ("use_fp8", False),
            ("quantization_modes", None),
            ("dtype", torch.bfloat16),
            ("ub_cfgs", None),
            ("bootstrap_backend", None),
            ("with_cublasmp", False),
        ],
    ),
    "te.set_ub_active_shape": (te.set_ub_active_shape, [("shape", MANDATORY)]),
    "te.get_ub": (te.get_ub, [("name", MANDATORY), ("use_fp8", False)]),
    "te.is_ub_initialized": (te.is_ub_initialized, []),
    "te.destroy_ub": (te.destroy_ub, []),
}


def test_names() -> None:
    assert set(tpo.__all__) == NAMES
    assert list(tpo.__all__) == sorted(tpo.__all__)
    for name in NAMES:
        assert hasattr(tpo, name), name
    assert set(tpo.nn.__all__) == NN_NAMES


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name: str) -> None:
    function, expected = SIGNATURES[name]
    parameters = list(inspect.signature(function).parameters.values())
    if parameters and parameters[0].name == "self":
        parameters = parameters[1:]
    found = [(parameter.name, parameter.default) for parameter in parameters]
    assert found[: len(expected)] == expected
    for addition in parameters[len(expected) :]:
        variadic = addition.kind in (addition.VAR_KEYWORD, addition.VAR_POSITIONAL)
        assert variadic or addition.default is not MANDATORY, f"{addition} would break calls that the contract allows"


@pytest.mark.parametrize("name", ["active_shape", "partition", "num_tokens"])
def test_manager_properties(name: str) -> None:
    assert isinstance(inspect.getattr_static(tpo.UserBufferManager, name), property)


def test_partition_attributes() -> None:
    partition = tpo.TokenPartition.balanced(7, 3)
    assert (partition.counts, partition.offsets, partition.total) == ((3, 2, 2), (0, 3, 5), 7)


def test_te_names() -> None:
    contract = {
        "initialize_ub",
        "set_ub_active_shape",
        "get_ub",
        "is_ub_initialized",
        "destroy_ub",
        "UserBufferQuantizationMode",
        "CommOverlap",
        "CommOverlapP2P",
        "CommOverlapType",
    }
    assert contract <= set(te.__all__)
    assert te.CommOverlap is tpo.CommOverlap and te.CommOverlapP2P is tpo.CommOverlapP2P


TE_ARGUMENTS = {
    "sequence_parallel", "tp_group", "tp_size", "ub_overlap_ag", "ub_overlap_rs_dgrad", "ub_bulk_dgrad",
    "ub_bulk_wgrad", "fuse_wgrad_accumulation", "delay_wgrad_compute", "init_method", "params_dtype", "device",
}  # fmt: skip
NORM = {"normalization", "zero_centered_gamma", "bias"}


@pytest.mark.parametrize(
    ("layer", "more"),
    [
        ("Linear", {"in_features", "out_features", "bias", "parallel_mode", "ub_name", "ub_overlap_rs", "return_bias"}),
        ("LayerNormLinear", NORM | {"eps", "parallel_mode", "ub_name", "return_layernorm_output"}),
        (
            "LayerNormMLP",
            NORM | {"hidden_size", "ffn_hidden_size", "eps", "activation", "ub_overlap_rs", "return_bias"},
        ),
        ("TransformerLayer", NORM | {"num_attention_heads", "num_gqa_groups", "layernorm_epsilon", "kv_channels"}),
    ],
)
def test_layers_have_transformer_engines_arguments(layer: str, more: set[str]) -> None:
    parameters = inspect.signature(getattr(tpo.nn, layer)).parameters
    assert TE_ARGUMENTS | more <= set(parameters)


BASES: dict[type[Exception], tuple[type[Exception], ...]] = {
    tpo.TpOverlapError: (Exception,),
    tpo.ConfigError: (tpo.TpOverlapError, ValueError),
    tpo.ActiveShapeError: (tpo.TpOverlapError, ValueError),
    tpo.CapacityError: (tpo.ActiveShapeError,),
    tpo.RankMismatchError: (tpo.TpOverlapError,),
    tpo.PeerTimeoutError: (tpo.TpOverlapError, TimeoutError),
    tpo.BackendUnavailableError: (tpo.TpOverlapError, RuntimeError),
    tpo.NotInitializedError: (tpo.TpOverlapError, RuntimeError),
}


@pytest.mark.parametrize("error", BASES, ids=lambda error: error.__name__)
def test_exception_tree(error: type[Exception]) -> None:
    assert error.__bases__ == BASES[error]
    assert error.__module__ == errors.__name__
    assert issubclass(error, ValueError) == (error in (tpo.ConfigError, tpo.ActiveShapeError, tpo.CapacityError))


def test_no_other_exceptions() -> None:
    defined = {value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)}
    assert defined == set(BASES)
