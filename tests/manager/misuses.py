"""The error catalogue: every misuse that a rank can see by itself, what it must raise and what the message must say.

Each runs on one rank alone and on all ranks at once, and the manager must work afterwards as if it had not happened.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import tpoverlap as tpo
from tests.manager.ranks import CAPACITY, FEATURES, WIDTH, seeded
from tpoverlap.tokens import TokenPartition


@dataclass(frozen=True)
class Misuse:
    """``call`` gets a manager of R ranks. ``says``: the values that disagree, and the remedy."""

    call: Callable[[tpo.UserBufferManager], object]
    error: str
    says: tuple[str, ...]


def _set(shape: Any, partition: Any = None) -> Callable[[tpo.UserBufferManager], object]:
    return lambda mgr: mgr.set_active_shape(shape, partition=partition)


def _gather(
    x: Callable[[tpo.UserBufferManager], torch.Tensor] | None = None,
    weight: Any = None,
    *,
    active: Any = None,
    comm: Callable[[tpo.UserBufferManager], Any] = lambda mgr: mgr.layer("qkv"),
    **options: Any,
) -> Callable[[tpo.UserBufferManager], object]:
    """all_gather_gemm with one thing wrong; inside a scope, so that the manager's own shape stays as it was."""

    def call(mgr: tpo.UserBufferManager) -> object:
        with mgr.microbatch(4 * mgr.tp_size if active is None else active):
            shard = seeded(4, WIDTH, seed=0) if x is None else x(mgr)
            w = seeded(FEATURES, WIDTH, seed=1) if weight is None else weight
            return tpo.all_gather_gemm(shard, w, comm(mgr), **options)

    return call


def _scatter(
    x: Callable[[tpo.UserBufferManager], torch.Tensor] | None = None,
    weight: Any = None,
    *,
    comm: Callable[[tpo.UserBufferManager], Any] = lambda mgr: mgr.layer("proj"),
    **options: Any,
) -> Callable[[tpo.UserBufferManager], object]:
    def call(mgr: tpo.UserBufferManager) -> object:
        with mgr.microbatch(4 * mgr.tp_size):
            whole = seeded(4 * mgr.tp_size, FEATURES, seed=0) if x is None else x(mgr)
            w = seeded(WIDTH, FEATURES, seed=1) if weight is None else weight
            return tpo.gemm_reduce_scatter(whole, w, comm(mgr), **options)

    return call


def _bulk_gather(comm: str, a: torch.Tensor, b: torch.Tensor) -> Callable[[tpo.UserBufferManager], object]:
    def call(mgr: tpo.UserBufferManager) -> object:
        with mgr.microbatch(4 * mgr.tp_size):
            return tpo.bulk_all_gather(seeded(4, WIDTH, seed=0), mgr.get(comm), gemm=(a, b))

    return call


def _bulk_scatter(comm: str, a: torch.Tensor, b: torch.Tensor) -> Callable[[tpo.UserBufferManager], object]:
    def call(mgr: tpo.UserBufferManager) -> object:
        with mgr.microbatch(4 * mgr.tp_size):
            return tpo.bulk_reduce_scatter(seeded(4 * mgr.tp_size, WIDTH, seed=0), mgr.get(comm), gemm=(a, b))

    return call


def _own_shape(shape: Any, partition: Any = None, name: str = "qkv_fprop") -> Callable[[tpo.UserBufferManager], object]:
    return lambda mgr: mgr.get(name).set_buffer_active_shape(shape, partition)


def _microbatch(shape: Any = None, partition: Any = None) -> Callable[[tpo.UserBufferManager], object]:
    def call(mgr: tpo.UserBufferManager) -> None:
        with mgr.microbatch(shape, partition):
            raise AssertionError("the scope must not be entered")

    return call


def _linear(**options: Any) -> Callable[[tpo.UserBufferManager], object]:
    arguments = {"in_features": WIDTH, "out_features": 12, "parallel_mode": "column", "ub_name": "qkv"} | options
    return lambda mgr: tpo.nn.Linear(manager=mgr, **arguments)


META = torch.device("meta")
W = torch.ones(FEATURES, WIDTH)
A, B = torch.ones(3, 5), torch.ones(2, 5)
TOO_MANY = f"T={CAPACITY + 1}"

SHAPE_MISUSES: dict[str, Misuse] = {
    "one dimension": Misuse(_set((5,)), "ActiveShapeError", ("(5,)", "(T, H)")),
    "three dimensions": Misuse(_set((5, WIDTH, 1)), "ActiveShapeError", ("(5, 16, 1)", "(T, H)")),
    "no dimension": Misuse(_set(()), "ActiveShapeError", ("()", "(T, H)")),
    "zero": Misuse(_set((0, WIDTH)), "ActiveShapeError", ("at least 1", "got 0")),
    "negative": Misuse(_set((-3, WIDTH)), "ActiveShapeError", ("at least 1", "got -3")),
    "zero as a number": Misuse(_set(0), "ActiveShapeError", ("at least 1", "got 0")),
    "fraction": Misuse(_set((5.0, WIDTH)), "ActiveShapeError", ("integers", "5.0")),
    "fraction as a number": Misuse(_set(5.5), "ActiveShapeError", ("integers", "5.5")),
    "a mask": Misuse(_set(True), "ActiveShapeError", ("True",)),
    "a mask in a shape": Misuse(_set((True, WIDTH)), "ActiveShapeError", ("True",)),
    "text": Misuse(_set("5"), "ActiveShapeError", ("integers", "'5'")),
    "hidden size changed": Misuse(_set((5, 17)), "ActiveShapeError", ("(5, 17)", "H=16", "mgr.register")),
    "above capacity": Misuse(
        _set((CAPACITY + 1, WIDTH)), "CapacityError", (TOO_MANY, "24 tokens", "on_overflow='sequential'")
    ),
    "even but not divisible": Misuse(
        lambda mgr: mgr.set_active_shape(None, TokenPartition.even(mgr.tp_size + 1, mgr.tp_size)),
        "ActiveShapeError",
        ("is not divisible by", "TokenPartition.balanced"),
    ),
    "counts do not sum to T": Misuse(
        lambda mgr: mgr.set_active_shape((9, WIDTH), TokenPartition.balanced(7, mgr.tp_size)),
        "ActiveShapeError",
        ("T=9", "sum to 7"),
    ),
    "counts do not sum to total": Misuse(
        lambda mgr: TokenPartition.from_counts([3, 4], total=9), "ActiveShapeError", ("[3, 4]", "sum to 7", "T=9")
    ),
    "negative count": Misuse(
        lambda mgr: mgr.set_active_shape(None, TokenPartition.from_counts([-1, 4])),
        "ActiveShapeError",
        ("-1", "rank 0"),
    ),
    "another number of ranks": Misuse(
        _set(None, TokenPartition((1, 2, 3, 4, 5))), "ActiveShapeError", ("5 counts [1, 2, 3, 4, 5]", "ranks")
    ),
    "a list for a partition": Misuse(
        _set(None, [3, 4]), "ActiveShapeError", ("must be a TokenPartition", "list", "TokenPartition.from_counts")
    ),
    "two partitions": Misuse(
        lambda mgr: mgr.set_active_shape(
            TokenPartition.balanced(4, mgr.tp_size), TokenPartition.balanced(5, mgr.tp_size)
        ),
        "ActiveShapeError",
        ("two different partitions",),
    ),
    "too many rows on a rank": Misuse(
        lambda mgr: mgr.set_active_shape(None, TokenPartition((CAPACITY,) + (0,) * (mgr.tp_size - 1))),
        "CapacityError",
        ("24 rows", "max_rows_per_rank=24"),
    ),
    "scope without a shape": Misuse(_microbatch(), "ActiveShapeError", ("give T, (T, H) or a TokenPartition",)),
    "scope above capacity": Misuse(_microbatch(CAPACITY + 1), "CapacityError", (TOO_MANY, "24 tokens")),
    "scope with another width": Misuse(_microbatch((5, 17)), "ActiveShapeError", ("(5, 17)", "H=16")),
    "name: above capacity": Misuse(_own_shape(CAPACITY + 1), "CapacityError", (TOO_MANY, "qkv_fprop", "24 tokens")),
    "name: hidden size changed": Misuse(_own_shape((5, 17)), "ActiveShapeError", ("(5, 17)", "H=16", "mgr.register")),
    "name: fraction": Misuse(_own_shape(2.5), "ActiveShapeError", ("integers", "2.5")),
    "name: nothing": Misuse(_own_shape(None), "ActiveShapeError", ("give T, (T, H) or a TokenPartition",)),
    "name: another number of ranks": Misuse(
        _own_shape(TokenPartition((1, 2, 3, 4, 5))), "ActiveShapeError", ("5 counts", "ranks")
    ),
}

INPUT_MISUSES: dict[str, Misuse] = {
    "shard contradicts the active shape": Misuse(
        _gather(lambda mgr: seeded(3, WIDTH, seed=0)),
        "ActiveShapeError",
        ("qkv_fprop", "3 rows", "owns 4", "set the active shape"),
    ),
    "whole input contradicts the active shape": Misuse(
        _scatter(lambda mgr: seeded(3, FEATURES, seed=0)),
        "ActiveShapeError",
        ("proj_fprop", "3 rows", "T=", "set the active shape"),
    ),
    "wrong dtype": Misuse(
        _gather(lambda mgr: torch.ones(4, WIDTH, dtype=torch.bfloat16)),
        "ActiveShapeError",
        ("torch.bfloat16", "torch.float32", "cast it"),
    ),
    "wrong dtype into a scatter": Misuse(
        _scatter(lambda mgr: torch.ones(4 * mgr.tp_size, FEATURES, dtype=torch.float64)),
        "ActiveShapeError",
        ("torch.float64", "torch.float32", "cast it"),
    ),
    "wrong device": Misuse(
        _gather(lambda mgr: torch.ones(4, WIDTH, device=META)), "ActiveShapeError", ("on meta", "on cpu", "move it")
    ),
    "one-dimensional input": Misuse(
        _gather(lambda mgr: torch.ones(WIDTH)), "ActiveShapeError", ("[16]", "2-D", "flatten")
    ),
    "three-dimensional input": Misuse(
        _scatter(lambda mgr: torch.ones(4, 2, FEATURES)), "ActiveShapeError", ("[4, 2, 6]", "2-D", "flatten")
    ),
    "input of another width": Misuse(
        _gather(lambda mgr: torch.ones(4, 17)), "ActiveShapeError", ("17 features", "width 16", "mgr.register")
    ),
    "no tensor": Misuse(
        _gather(lambda mgr: [[0.0] * WIDTH] * 4),  # type: ignore[arg-type,return-value]
        "ActiveShapeError",
        ("x_shard_t", "list", "tensor"),
    ),
    "weight of another width": Misuse(
        _gather(weight=torch.ones(FEATURES, 15)), "ActiveShapeError", ("16 features", "[6, 15]", "15")
    ),
    "weight of another output width": Misuse(
        _scatter(weight=torch.ones(15, FEATURES)), "ActiveShapeError", ("15 features", "width 16", "mgr.register")
    ),
    "one-dimensional weight": Misuse(_gather(weight=torch.ones(WIDTH)), "ActiveShapeError", ("weight", "[16]", "2-D")),
    "weight of another dtype": Misuse(
        _gather(weight=W.double()), "ActiveShapeError", ("weight", "torch.float64", "torch.float32")
    ),
    "weight on another device": Misuse(
        _scatter(weight=torch.ones(WIDTH, FEATURES, device=META)), "ActiveShapeError", ("weight", "meta", "cpu")
    ),
    "one of two weights of another width": Misuse(
        _gather(weight=[W, torch.ones(2, 15)]), "ActiveShapeError", ("16 features", "[2, 15]")
    ),
    "no weight": Misuse(_gather(weight=[]), "ActiveShapeError", ("0 weights",)),
    "bias of another length": Misuse(_gather(bias=torch.ones(5)), "ActiveShapeError", ("[5]", "needs [6]")),
    "two-dimensional bias": Misuse(_scatter(bias=torch.ones(1, WIDTH)), "ActiveShapeError", ("[1, 16]", "needs [16]")),
    "bias of another dtype": Misuse(
        _gather(bias=torch.ones(FEATURES).double()), "ActiveShapeError", ("bias", "float64", "float32")
    ),
    "bias on another device": Misuse(
        _scatter(bias=torch.ones(WIDTH, device=META)), "ActiveShapeError", ("bias", "meta", "cpu")
    ),
    "one bias for two weights": Misuse(
        _gather(weight=[W, W], bias=[torch.ones(FEATURES)]), "ActiveShapeError", ("2 weights", "1 biases")
    ),
    "empty shard without a shape": Misuse(
        lambda mgr: tpo.all_gather_gemm(torch.empty(0, WIDTH), W, mgr.layer("qkv")),
        "ActiveShapeError",
        ("cannot be inferred", "set the active shape"),
    ),
    "empty input without a shape": Misuse(
        lambda mgr: tpo.gemm_reduce_scatter(torch.empty(0, FEATURES), W.t(), mgr.layer("proj")),
        "ActiveShapeError",
        ("no row", "set the active shape"),
    ),
    "inferred T above capacity": Misuse(
        lambda mgr: tpo.all_gather_gemm(torch.ones(CAPACITY, WIDTH), W, mgr.layer("qkv")),
        "CapacityError",
        ("qkv_fprop", "24 tokens", "on_overflow='sequential'"),
    ),
    "partition of the call above capacity": Misuse(
        lambda mgr: tpo.gemm_reduce_scatter(
            torch.ones(CAPACITY + 1, FEATURES),
            torch.ones(WIDTH, FEATURES),
            mgr.layer("proj"),
            partition=TokenPartition.balanced(CAPACITY + 1, mgr.tp_size),
        ),
        "CapacityError",
        ("proj_fprop", TOO_MANY, "24 tokens"),
    ),
    "partition of the call for other ranks": Misuse(
        _gather(partition=TokenPartition((1, 2, 3, 4, 5))), "ActiveShapeError", ("5 counts", "ranks")
    ),
    "partition of the call is a number": Misuse(
        _gather(partition=8), "ActiveShapeError", ("must be a TokenPartition", "int")
    ),
    "independent GEMM does not fit": Misuse(
        _bulk_gather("qkv_dgrad", A, torch.ones(2, 4)), "ActiveShapeError", ("a @ b.T", "[3, 5]", "[2, 4]")
    ),
    "independent GEMM on another device": Misuse(
        _bulk_scatter("qkv_wgrad", A, B.to(META)), "ActiveShapeError", ("gemm", "meta", "cpu")
    ),
    "independent GEMM of one dimension": Misuse(
        _bulk_gather("qkv_dgrad", A[0], B), "ActiveShapeError", ("gemm operand a", "[5]", "2-D")
    ),
    "copy into the buffer": Misuse(
        lambda mgr: mgr.get("proj_fprop").copy_into_buffer(torch.ones(3, WIDTH)),
        "ActiveShapeError",
        ("proj_fprop", "[3, 16]", "[24, 16]"),
    ),
}

USE_MISUSES: dict[str, Misuse] = {
    "gather with a scatter layer": Misuse(
        _gather(comm=lambda mgr: mgr.layer("proj")), "ConfigError", ("proj_fprop", "reduce-scatter", "all-gather")
    ),
    "scatter with a gather layer": Misuse(
        _scatter(comm=lambda mgr: mgr.layer("qkv")), "ConfigError", ("qkv_fprop", "all-gather", "reduce-scatter")
    ),
    "gather with a scatter communicator": Misuse(
        _gather(comm=lambda mgr: mgr.get("qkv_wgrad")), "ConfigError", ("qkv_wgrad", "reduce-scatter", "all-gather")
    ),
    "scatter with a gather communicator": Misuse(
        _scatter(comm=lambda mgr: mgr.get("proj_dgrad")), "ConfigError", ("proj_dgrad", "all-gather", "reduce-scatter")
    ),
    "bulk gather with a scatter communicator": Misuse(
        _bulk_gather("qkv_wgrad", A, B), "ConfigError", ("qkv_wgrad", "reduce-scatter", "all-gather")
    ),
    "bulk scatter with a gather communicator": Misuse(
        _bulk_scatter("qkv_dgrad", A, B), "ConfigError", ("qkv_dgrad", "all-gather", "reduce-scatter")
    ),
    "gather and its GEMM by bulk": Misuse(
        _gather(comm=lambda mgr: mgr.get("qkv_dgrad")), "ConfigError", ("qkv_dgrad", "bulk", "bulk_all_gather")
    ),
    "GEMM and its scatter by bulk": Misuse(
        _scatter(comm=lambda mgr: mgr.get("qkv_wgrad")), "ConfigError", ("qkv_wgrad", "bulk", "bulk_reduce_scatter")
    ),
    "no communicator": Misuse(
        _gather(comm=lambda mgr: "qkv"), "ConfigError", ("communicator", "mgr.layer(...)", "str")
    ),
    "no communicator for bulk": Misuse(
        lambda mgr: tpo.bulk_all_gather(torch.ones(4, WIDTH), mgr.layer("qkv"), gemm=(A, B)),  # type: ignore[arg-type]
        "ConfigError",
        ("communicator", "mgr.get(", "LayerCommunicators"),
    ),
    "unknown name": Misuse(
        lambda mgr: mgr.get("qvk_fprop"), "ConfigError", ("'qvk_fprop'", "qkv_fprop", "mgr.register")
    ),
    "name without communication": Misuse(
        lambda mgr: mgr.get("fc2_wgrad"), "ConfigError", ("'fc2_wgrad'", "nothing to communicate", "fc2_dgrad")
    ),
    "explain an unknown name": Misuse(lambda mgr: mgr.explain("qvk_fprop", 4), "ConfigError", ("'qvk_fprop'",)),
    "explain no row": Misuse(lambda mgr: mgr.explain("qkv_fprop", 0), "ActiveShapeError", ("positive", "0")),
    "linear: mode": Misuse(_linear(parallel_mode="diagonal"), "ConfigError", ("'column' or 'row'", "'diagonal'")),
    "linear: not divisible": Misuse(_linear(out_features=11), "ConfigError", ("out_features=11", "tp_size=")),
    "linear: mode contradicts the name": Misuse(
        _linear(ub_name="proj", out_features=12), "ConfigError", ("proj_fprop", "reduce-scatter", "all-gather")
    ),
    "linear: row mode on a column name": Misuse(
        _linear(parallel_mode="row", in_features=12), "ConfigError", ("qkv_fprop", "all-gather", "reduce-scatter")
    ),
}

MISUSES = SHAPE_MISUSES | INPUT_MISUSES | USE_MISUSES
