"""Rank functions of `test_te`."""

from __future__ import annotations

from typing import Any

import torch

import tpoverlap as tpo
from tests.manager.ranks import CAPACITY, WIDTH, LogLines, Outcome, assert_right, outcome_of, seeded
from tpoverlap import te
from tpoverlap.tokens import TokenPartition

SHAPE = [CAPACITY, WIDTH]
FLOAT32 = {"dtype": torch.float32, "timeout_s": 20.0}


def before_initialisation(rank: int, size: int) -> dict[str, Outcome]:
    assert not te.is_ub_initialized()
    te.destroy_ub()  # nothing to do
    return {
        "get_ub": outcome_of(lambda: te.get_ub("qkv_fprop")),
        "set_ub_active_shape": outcome_of(lambda: te.set_ub_active_shape([5, WIDTH])),
        "get_manager": outcome_of(te.get_manager),
    }


def life(rank: int, size: int) -> dict[str, Any]:
    """initialise, use, destroy; twice, with other shapes."""
    for capacity in (CAPACITY, 2 * CAPACITY):
        manager = te.initialize_ub([capacity, WIDTH], size, **FLOAT32)
        assert te.is_ub_initialized() and te.get_manager() is manager
        te.set_ub_active_shape([7, WIDTH])
        for name in ("qkv_fprop", "proj_fprop", "fc2_dgrad"):
            ub = te.get_ub(name)
            assert ub is manager.get(name)
            assert ub.get_buffer_active_shape() == (7, WIDTH)
            assert ub.get_buffer_capacity_shape() == (capacity, WIDTH)
        partition = TokenPartition.balanced(7, size)
        assert_right(manager, partition, te.get_ub("qkv_fprop"), te.get_ub("proj_fprop"), backward=True)
        again = outcome_of(lambda: te.initialize_ub(SHAPE, size, **FLOAT32))
        assert te.get_manager() is manager
        assert_right(manager, partition)  # untouched by the second call
        te.destroy_ub()
        assert not te.is_ub_initialized()
    return {"again": again, "after": outcome_of(lambda: te.get_ub("qkv_fprop"))}


def defaults(rank: int, size: int) -> dict[str, Any]:
    """bf16 as in Transformer Engine; arguments that only it needs are accepted and reported."""
    with LogLines() as log:
        manager = te.initialize_ub(
            SHAPE,
            size,
            False,
            [te.UserBufferQuantizationMode.NONE],
            torch.bfloat16,
            [{"proj_fprop": {"method": "pipeline", "num_splits": 2}}],
            "mpi",
            True,
        )
    result = {
        "lines": log.having("ignored"),
        "dtype": str(manager.dtype),
        "kinds": [isinstance(te.get_ub("proj_fprop"), te.CommOverlap), type(te.get_ub("proj_fprop")).__name__],
        "p2p": isinstance(te.get_ub("qkv_fprop"), te.CommOverlapP2P),
        "unknown": outcome_of(lambda: te.get_ub("qvk_fprop")),
        "fp8": outcome_of(lambda: te.get_ub("qkv_fprop", use_fp8=True)),
        "shape": outcome_of(lambda: te.set_ub_active_shape([5, WIDTH, 1])),
    }
    te.set_ub_active_shape(SHAPE)
    x = seeded(CAPACITY, WIDTH, seed=0, dtype=torch.bfloat16)
    own = TokenPartition.balanced(CAPACITY, size).rows(rank)
    y = tpo.all_gather_gemm(x[own], torch.eye(WIDTH, dtype=torch.bfloat16), te.get_ub("qkv_fprop"))
    torch.testing.assert_close(y, x, rtol=0, atol=0)
    te.destroy_ub()
    return result


def refuse(rank: int, size: int, offender: int | None) -> dict[str, Outcome]:
    """Illegal arguments on one rank (the others are right) or on all; nothing is initialised anywhere."""
    modes = te.UserBufferQuantizationMode
    cases: dict[str, dict[str, Any]] = {
        "tp_size too large": {"tp_size": size + 1},
        "tp_size zero": {"tp_size": 0},
        "tp_size negative": {"tp_size": -2},
        "tp_size text": {"tp_size": "2"},
        "tp_size of the group": {"tp_size": size + 1, "tp_group": torch.distributed.group.WORLD},
        "unknown mode": {"quantization_modes": [modes.NONE, "mxfp8"]},
        "a configuration a mode": {"ub_cfgs": [{}, {"proj_fprop": {"method": "pipeline"}}]},
        "shape": {"shape": [CAPACITY]},
        "shape is a number": {"shape": CAPACITY},
        "zero": {"shape": [0, WIDTH]},
        "dtype": {"dtype": torch.int8},
        "config": {"ub_cfgs": [{"qkv_fprop": {"method": "pipeline"}}]},
    }
    outcomes = {}
    for name, wrong in cases.items():
        arguments = {"shape": SHAPE, "tp_size": size} | FLOAT32
        if offender is None or rank == offender:
            arguments |= wrong
        elif "tp_group" in wrong:
            arguments["tp_group"] = wrong["tp_group"]
        outcomes[name] = outcome_of(lambda a=arguments: te.initialize_ub(**a))  # type: ignore[misc]
        assert not te.is_ub_initialized(), name
    manager = te.initialize_ub(SHAPE, size, **FLOAT32)
    te.set_ub_active_shape([7, WIDTH])
    assert_right(manager, TokenPartition.balanced(7, size))
    te.destroy_ub()
    return outcomes


def different_tp_sizes(rank: int, size: int) -> Outcome:
    """Both divide the world, so neither is wrong by itself."""
    return outcome_of(lambda: te.initialize_ub(SHAPE, 1 if rank == 0 else size, **FLOAT32))


def groups(rank: int, size: int) -> None:
    """The default group cut into blocks, and an explicit group whose ranks are not neighbours."""
    manager = te.initialize_ub(SHAPE, 1, **FLOAT32)
    assert (manager.tp_size, manager.rank) == (1, 0)
    te.set_ub_active_shape([7, WIDTH])
    assert_right(manager, TokenPartition.balanced(7, 1))
    te.destroy_ub()
    outer = [0, size - 1]
    group = torch.distributed.new_group(outer)
    if rank in outer:
        manager = te.initialize_ub(SHAPE, 2, tp_group=group, **FLOAT32)
        assert (manager.tp_size, manager.rank) == (2, outer.index(rank))
        te.set_ub_active_shape([7, WIDTH])
        assert_right(manager, TokenPartition.balanced(7, 2))
        te.destroy_ub()
    torch.distributed.barrier()
