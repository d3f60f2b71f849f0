"""The list of all checks: one source for ``tests/conformance`` on the CPU and for ``scripts/gpu_check``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from tpoverlap.testing.conformance import (
    gemms,
    groups,
    layers,
    lifetime,
    linear,
    microbatches,
    replicated,
    vocabulary,
)
from tpoverlap.testing.conformance.setting import Setting
from tpoverlap.testing.conformance.stack import RECOMPUTATIONS, SCHEMES
from tpoverlap.testing.specs import random_walk
from tpoverlap.tokens import TokenPartition

GATHER_METHODS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("sequential", {}),
    ("ring_exchange", {}),
    ("ring_exchange", {"aggregate": True}),
    ("auto", {}),
)
SCATTER_METHODS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("sequential", {}),
    ("ring_exchange", {}),
    ("pipeline", {"num_splits": 1}),
    ("pipeline", {"num_splits": 2}),
    ("pipeline", {"num_splits": 4, "num_max_streams": 1}),
    ("pipeline", {"num_splits": 7}),
    ("auto", {}),
)
BESIDE_METHODS = ("bulk", "sequential")
KERNEL_METHODS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("fused", {}),
    ("fused", {"use_ce": False, "num_sm": 4}),
    ("ring_exchange", {"use_ce": False, "num_sm": 4}),
)
"""What runs as Triton kernels: on GPUs; tests/overlap has them in the interpreter."""


@dataclass(frozen=True)
class Case:
    """``pool.run(case.check, *case.args)`` on ``size`` ranks.

    Attributes:
        id: unique in its list, readable.
        number: of the case in shared/CONFORMANCE.md.
    """

    id: str
    number: int
    check: Callable[..., dict[str, Any]]
    args: tuple[Any, ...]


def conformance_cases(setting: Setting, size: int) -> Iterator[Case]:
    """Cases 1 to 4: every method in every direction, at every T."""
    for method, options in GATHER_METHODS:
        yield Case(_id("ag", method, options), 1, gemms.check_all_gather_gemm, (setting, method, options))
    for method, options in SCATTER_METHODS:
        yield Case(_id("rs", method, options), 2, gemms.check_gemm_reduce_scatter, (setting, method, options))
    for method in BESIDE_METHODS:
        yield Case(f"beside-{method}", 3, gemms.check_bulk, (setting, method))
    for parallel_mode, modes in (("column", linear.COLUMN_MODES), ("row", linear.ROW_MODES)):
        for mode in (*modes, linear.UNREGISTERED):
            yield Case(f"linear-{parallel_mode}-{mode}", 4, linear.check_linear, (setting, parallel_mode, mode))
    for mode in linear.COLUMN_MODES:
        yield Case(f"shared-gather-{mode}", 4, linear.check_shared_gather, (setting, mode))


def kernel_cases(setting: Setting, size: int) -> Iterator[Case]:
    """Cases 1 and 2 for `KERNEL_METHODS`."""
    for method, options in KERNEL_METHODS:
        yield Case(_id("ag", method, options), 1, gemms.check_all_gather_gemm, (setting, method, options))
        yield Case(_id("rs", method, options), 2, gemms.check_gemm_reduce_scatter, (setting, method, options))


def microbatch_cases(setting: Setting, size: int) -> Iterator[Case]:
    """Case 7: three pipeline depths, three kinds of recomputation, three schemes, so that each pair occurs once."""
    for i, recomputation in enumerate(RECOMPUTATIONS):
        for j, scheme in enumerate(SCHEMES):
            num_warmup = (0, 1, 3)[(i + j) % 3]
            yield Case(
                f"1f1b-{num_warmup}-{recomputation}-{scheme}",
                7,
                microbatches.check_microbatches_1f1b,
                (setting, num_warmup, recomputation, scheme),
            )
    for recomputation in ("none", "full"):
        name = f"1f1b-2-{recomputation}-by-argument"
        yield Case(name, 7, microbatches.check_microbatches_1f1b, (setting, 2, recomputation, "default", True))


def layer_cases(setting: Setting, size: int) -> Iterator[Case]:
    """Cases 5, 6, 7 and 13: every layer in both backward modes, every other mode on two layers, unregistered names."""

    def case(kind: str, mode: str, unregistered: bool = False) -> Case:
        number = 13 if "main_grad" in mode else 5 if kind.startswith("linear") else 6
        name = f"layer-{kind}-{'unregistered' if unregistered else mode}"
        return Case(name, number, layers.check_layer, (setting, kind, mode, unregistered))

    kinds, modes = list(layers.KINDS), list(layers.MODES)
    for kind in kinds:
        yield from (case(kind, mode) for mode in modes[:2])
    for index, mode in enumerate(modes[2:]):
        yield from (case(kinds[(index + shift) % len(kinds)], mode) for shift in (0, 4))
    yield from (case(kind, "bulk", unregistered=True) for kind in ("linear-rmsnorm", "mlp-gelu", "transformer-gqa"))
    for index, mode in enumerate(("bulk", "main_grad", "delayed_main_grad", "save_gathered_rs_dgrad")):
        for kind, recomputed in (("transformer-gqa", index % 2 == 1), ("mlp-swiglu", index % 2 == 0)):
            args = (setting, kind, mode, index % 3, recomputed)
            name = f"layers-1f1b-{kind}-{mode}-{index % 3}{'-recomputed' * recomputed}"
            yield Case(name, 13 if "main_grad" in mode else 7, layers.check_layers_1f1b, args)
    for tied in (False, True):
        yield Case(f"vocabulary-{'tied' if tied else 'apart'}", 6, vocabulary.check_vocabulary, (setting, tied))


def other_cases(setting: Setting, size: int) -> Iterator[Case]:
    """Case 9, forgotten context_fn, results that stay, grad modes, the table of methods, replicated parameters."""
    yield Case("forgotten-context", 7, microbatches.check_forgotten_context, (setting,))
    yield Case("results-stay", 1, lifetime.check_results_stay, (setting,))
    yield Case("grad-modes", 4, lifetime.check_grad_modes, (setting,))
    yield Case("reinitialize", 9, lifetime.check_reinitialize, (setting,))
    yield Case("methods-table", 1, lifetime.check_methods_table, (setting,))
    # In 16 bits the updates of three steps are lost in the rounding of the parameters.
    single = replace(setting, dtype=torch.float32)
    yield Case("replicated-synced", 4, replicated.check_replicated_grads, (single, True))
    yield Case("replicated-unsynced", 4, replicated.check_replicated_grads, (single, False))


def group_cases(setting: Setting, size: int) -> Iterator[Case]:
    """Case 11; empty unless ``size`` is 4 or more and even."""
    if size < 2 * groups.TP_SIZE or size % groups.TP_SIZE:
        return
    for layout in groups.LAYOUTS:
        yield Case(f"data-parallel-{layout}", 11, groups.check_data_parallel, (setting, layout))
    yield Case("pipeline-parallel", 11, groups.check_pipeline_parallel, (setting,))


def walk_cases(setting: Setting, size: int, steps: int = 200) -> Iterator[Case]:
    """A random walk of T, once a method; small numbers, since it is about the order of T."""
    small = replace(setting, capacity=48, hidden=8, features=6)
    walk = [TokenPartition.balanced(num_tokens, size) for num_tokens in random_walk(small.capacity, steps)]
    for method, options in GATHER_METHODS[:-1]:
        yield Case(_id("ag", method, options), 1, gemms.check_all_gather_gemm, (small, method, options, walk))
    for method, options in (*SCATTER_METHODS[:3], SCATTER_METHODS[5]):
        yield Case(_id("rs", method, options), 2, gemms.check_gemm_reduce_scatter, (small, method, options, walk))
    for method in BESIDE_METHODS:
        yield Case(f"beside-{method}", 3, gemms.check_bulk, (small, method, walk))


def all_cases(setting: Setting, size: int, walk_steps: int = 200) -> list[Case]:
    """Everything that runs on ``size`` ranks, walks last; ids are unique."""
    lists = (conformance_cases, microbatch_cases, layer_cases, other_cases, group_cases)
    cases = [case for make in lists for case in make(setting, size)]
    walks = [replace(case, id=f"walk-{case.id}") for case in walk_cases(setting, size, walk_steps)]
    return cases + walks


def _id(direction: str, method: str, options: Mapping[str, Any]) -> str:
    return "-".join([direction, method, *(f"{key}={value}" for key, value in options.items())])
