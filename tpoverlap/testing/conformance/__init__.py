"""CONFORMANCE.md as code: checks that run on ranks, on any device, dtype and backend, and the list of all of them.

``check(rank, size, setting, ...)`` builds a manager on the default group, runs every T, compares whole tensors with the
twin and the reference on each rank (AssertionError), and returns how many comparisons were made and the worst errors::

    with RankPool(size, device="cuda") as pool:
        for case in all_cases(Setting("cuda", torch.bfloat16, capacity=2048, hidden=512, features=256), size):
            summaries = pool.run(case.check, *case.args)
"""

from tpoverlap.testing.conformance.catalogue import (
    Case,
    all_cases,
    conformance_cases,
    group_cases,
    kernel_cases,
    layer_cases,
    microbatch_cases,
    other_cases,
    walk_cases,
)
from tpoverlap.testing.conformance.catalogue_fp8 import fp8_cases, fp8_kernel_cases
from tpoverlap.testing.conformance.setting import Setting

__all__ = [
    "Case",
    "Setting",
    "all_cases",
    "conformance_cases",
    "fp8_cases",
    "fp8_kernel_cases",
    "group_cases",
    "kernel_cases",
    "layer_cases",
    "microbatch_cases",
    "other_cases",
    "walk_cases",
]
