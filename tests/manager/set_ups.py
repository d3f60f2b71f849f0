"""Arguments that a manager must refuse: what each rank is given, and what every rank must then be told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import tpoverlap as tpo
from tests.manager.ranks import WIDTH
from tpoverlap import te
from tpoverlap.plan import make_plan, plan_hash

Options = dict[str, Any]


@dataclass(frozen=True)
class BadSetUp:
    """``options`` of the offender, from tp_size; ``says``: the value, and the remedy."""

    options: Callable[[int], Options]
    error: str
    says: tuple[str, ...]


def _bad(error: str, says: tuple[str, ...], **options: Any) -> BadSetUp:
    return BadSetUp(lambda size: options, error, says)


def _config(says: tuple[str, ...], **names: Any) -> BadSetUp:
    return _bad("ConfigError", says, ub_cfgs=names)


def _nested(depth: int) -> Any:
    found: Any = 1
    for _ in range(depth):
        found = {"a": found}
    return found


def a_plan(size: int, **methods: tuple[str, bool]) -> dict[str, Any]:
    """What ``mgr.plan()`` gives for ``methods``: name -> (method, is_reduce_scatter)."""
    return make_plan(methods, size, (24, WIDTH))


def _edited_plan(size: int) -> dict[str, Any]:
    plan = a_plan(size, proj_fprop=("ring_exchange", True))
    plan["methods"]["proj_fprop"]["method"] = "pipeline"
    return plan


def _plan_of_another_version(size: int) -> dict[str, Any]:
    plan = a_plan(size) | {"version": 99}
    return plan | {"hash": plan_hash(plan)}


NONE = te.UserBufferQuantizationMode.NONE

BAD_SET_UPS: dict[str, BadSetUp] = {
    "capacity: one dimension": _bad("ActiveShapeError", ("(C, H)", "(24,)"), capacity_shape=(24,)),
    "capacity: three dimensions": _bad("ActiveShapeError", ("(C, H)", "(24, 16, 1)"), capacity_shape=(24, WIDTH, 1)),
    "capacity: zero": _bad("ActiveShapeError", ("at least 1", "(0, 16)"), capacity_shape=(0, WIDTH)),
    "capacity: negative width": _bad("ActiveShapeError", ("at least 1", "(24, -1)"), capacity_shape=(24, -1)),
    "capacity: fraction": _bad("ActiveShapeError", ("integers", "(24.0, 16)"), capacity_shape=(24.0, WIDTH)),
    "capacity: a number": _bad("ActiveShapeError", ("(C, H)", "24"), capacity_shape=24),
    "capacity: a mask": _bad("ActiveShapeError", ("integers", "True"), capacity_shape=(True, WIDTH)),
    "dtype": _bad(
        "ConfigError", ("torch.float64", "torch.bfloat16, torch.float16, torch.float32"), dtype=torch.float64
    ),
    "dtype: its name": _bad("ConfigError", ("'float32'", "torch.float32"), dtype="float32"),
    "device: meta": _bad("ConfigError", ("meta", "cpu or cuda"), device="meta"),
    "device: no such": _bad("ConfigError", ("'abacus'", "cpu or cuda"), device="abacus"),
    "backend: unknown": _bad("ConfigError", ("'nccl'", "auto, shared, cuda, process_group"), backend="nccl"),
    "time-out: zero": _bad("ConfigError", ("timeout_s", "positive", "0"), timeout_s=0),
    "time-out: negative": _bad("ConfigError", ("timeout_s", "positive", "-1.5"), timeout_s=-1.5),
    "time-out: not a number": _bad("ConfigError", ("timeout_s", "nan"), timeout_s=float("nan")),
    "time-out: infinite": _bad("ConfigError", ("timeout_s", "inf"), timeout_s=float("inf")),
    "time-out: text": _bad("ConfigError", ("timeout_s", "'1 h'"), timeout_s="1 h"),
    "on_overflow": _bad("ConfigError", ("on_overflow='truncate'", "error, sequential"), on_overflow="truncate"),
    "max_rows_per_rank: zero": _bad("ConfigError", ("max_rows_per_rank", "positive", "0"), max_rows_per_rank=0),
    "max_rows_per_rank: fraction": _bad("ConfigError", ("max_rows_per_rank", "2.5"), max_rows_per_rank=2.5),
    "quantization: beside NONE": _bad("ConfigError", ("'mxfp8'", "NONE, FP8"), quantization_modes=[NONE, "mxfp8"]),
    "quantization: by name": _bad("ConfigError", ("'mxfp8'", "NONE"), quantization_modes="mxfp8"),
    "config: unknown option": _config(("qkv_fprop.metod", "did you mean 'method'"), qkv_fprop={"metod": "bulk"}),
    "config: unknown method": _config(("'ring'", "did you mean 'ring_exchange'"), qkv_fprop={"method": "ring"}),
    "config: wrong type": _config(("num_splits", "'4'"), proj_fprop={"method": "pipeline", "num_splits": "4"}),
    "config: zero": _config(("num_splits", "at least 1", "0"), proj_fprop={"method": "pipeline", "num_splits": 0}),
    "config: pipeline all-gather": _config(
        ("qkv_fprop", "'pipeline' cannot all-gather", "ring_exchange"), qkv_fprop={"method": "pipeline"}
    ),
    "config: bulk without a GEMM": _config(
        ("proj_fprop", "'bulk' needs a GEMM", "ring_exchange"), proj_fprop={"method": "bulk"}
    ),
    "config: weight gradient travels": _config(
        ("qkv_wgrad", "stays on its rank", "qkv_dgrad.method"), qkv_wgrad={"method": "ring_exchange"}
    ),
    "config: row weight gradient": _config(
        ("fc2_wgrad has nothing to communicate", "remove"), fc2_wgrad={"method": "bulk"}
    ),
    "config: both gradients": _config(
        ("qkv_wgrad is set", "qkv_dgrad"), qkv_dgrad={"method": "ring_exchange"}, qkv_wgrad={"method": "bulk"}
    ),
    "config: direction": _config(("qkv_fprop.is_reduce_scatter", "all-gather"), qkv_fprop={"is_reduce_scatter": True}),
    "config: nested too deep": _config(
        ("tpoverlap.remark.a.a", "32 deep", "flatten"), tpoverlap={"remark": _nested(2000)}
    ),
    "config: a number without end": _config(("tpoverlap.remark", "bits", "quote"), tpoverlap={"remark": 10**5000}),
    "config: no file": _bad("ConfigError", ("/no/such/file.yaml",), ub_cfgs="/no/such/file.yaml"),
    "config: a list": _bad("ConfigError", ("list", "te.initialize_ub"), ub_cfgs=[{}]),
    "plan: not one": _bad("ConfigError", ("mgr.plan()", "list"), plan=[]),
    "plan: another version": BadSetUp(
        lambda size: {"plan": _plan_of_another_version(size)}, "ConfigError", ("mgr.plan()", "version 99")
    ),
    "plan: another tp_size": BadSetUp(
        lambda size: {"plan": a_plan(size + 1)}, "ConfigError", ("tp_size=", "this group has", "take one made for it")
    ),
    "plan: edited": BadSetUp(lambda size: {"plan": _edited_plan(size)}, "ConfigError", ("hash", "edited", "ub_cfgs")),
    "plan: illegal method": BadSetUp(
        lambda size: {"plan": a_plan(size, proj_fprop=("bulk", True))},
        "ConfigError",
        ("pins proj_fprop to 'bulk'", "legal here: ring_exchange, pipeline, fused, sequential"),
    ),
    "plan: another direction": BadSetUp(
        lambda size: {"plan": a_plan(size, qkv_dgrad=("ring_exchange", True))},
        "ConfigError",
        ("qkv_dgrad for reduce-scatter", "configured for all-gather", "same ub_cfgs"),
    ),
}


def _section(up_to: int) -> Options:
    rows = [{"up_to": up_to, "method": "sequential"}, {"up_to": 24, "method": "ring_exchange"}]
    return {"tpoverlap": {"by_tokens": {"qkv_fprop": {"features": 6, "width": WIDTH, "rows": rows}}}}


MaybeSized = Options | Callable[[int], Options]
DIFFERENT: dict[str, tuple[MaybeSized, MaybeSized, tuple[str, ...]]] = {
    "capacity": ({}, {"capacity_shape": (32, WIDTH)}, ("capacity_shape", "(24, 16)", "(32, 16)")),
    "width": ({}, {"capacity_shape": (24, 8)}, ("capacity_shape", "(24, 16)", "(24, 8)")),
    "dtype": ({}, {"dtype": torch.bfloat16}, ("dtype", "torch.float32", "torch.bfloat16")),
    "time-out": ({}, {"timeout_s": 21.0}, ("timeout_s", "20.0", "21.0")),
    "config: a method": (
        {"ub_cfgs": {"proj_fprop": {"method": "pipeline", "num_splits": 2}}},
        {"ub_cfgs": {"proj_fprop": {"method": "sequential"}}},
        ("ub_cfgs", "proj_fprop.method is 'pipeline' on", "and 'sequential' on", "proj_fprop.num_splits is 2 on"),
    ),
    "config: written by one": (
        {},
        {"ub_cfgs": {"proj_fprop": {"method": "pipeline"}}},
        ("ub_cfgs: the source is none on", "proj_fprop.method is 'ring_exchange' by default on", "and 'pipeline' on"),
    ),
    "config: another default written": (
        {},
        {"ub_cfgs": {"proj_fprop": {"method": "ring_exchange"}}},
        ("proj_fprop.method is 'ring_exchange' by default on", "and 'ring_exchange' on"),
    ),
    "config: a name": (
        {},
        {"ub_cfgs": {"mtp_fprop": {"aggregate": True}}},
        ("mtp_fprop.aggregate is not there on", "and True on"),
    ),
    "config: a bucket": (
        {"ub_cfgs": _section(8)},
        {"ub_cfgs": _section(12)},
        ("tpoverlap.by_tokens.qkv_fprop.rows[0].up_to is 8 on", "and 12 on"),
    ),
    "config: a section": ({}, {"ub_cfgs": _section(8)}, ("by_tokens.qkv_fprop.features is not there on", "and 6 on")),
    "config: everything": (
        {"ub_cfgs": {f"a_{name}_fprop": {"num_sm": 1} for name in range(100)}},
        {"ub_cfgs": {f"b_{name}_fprop": {"num_sm": 1} for name in range(100)}},
        ("a_0_fprop.num_sm is 1 on", "and not there on", "; and 194 more"),
    ),
    "config: a long text": (
        {"ub_cfgs": {"tpoverlap": {"remark": "x" * 10_000}}},
        {"ub_cfgs": {"tpoverlap": {"remark": "y" * 10_000}}},
        ("tpoverlap.remark is 'xxxx", "...xxx", "and 'yyy"),
    ),
    "config: a long name": (
        {},
        {"ub_cfgs": {f"{'q' * 10_000}_fprop": {"num_sm": 1}}},
        ("qqq...qqq", "qqq_fprop.num_sm is not there on", "and 1 on"),
    ),
    "config: a dot in a key": (
        {"ub_cfgs": {"tpoverlap": {"remark": {"a.b": 1}}}},
        {"ub_cfgs": {"tpoverlap": {"remark": {"a": {"b": 1}}}}},
        ("tpoverlap.remark.'a.b' is 1 on", "tpoverlap.remark.a.b is not there on"),
    ),
    "quantization": (
        {},
        {"quantization_modes": ["none", "fp8"]},
        ("quantization_modes is ('none',) on", "and ('none', 'fp8') on"),
    ),
    "plan": (
        {},
        lambda size: {"plan": a_plan(size, proj_fprop=("pipeline", True))},
        ("plan.methods.proj_fprop.method is without a plan on", "and 'pipeline' on"),
    ),
    "plan: a method": (
        lambda size: {"plan": a_plan(size, proj_fprop=("ring_exchange", True))},
        lambda size: {"plan": a_plan(size, proj_fprop=("pipeline", True))},
        ("different plan: plan.methods.proj_fprop.method is 'ring_exchange' on", "and 'pipeline' on"),
    ),
    "two of them": (
        {},
        {"dtype": torch.float16, "on_overflow": "sequential"},
        ("different dtype, on_overflow:", "on_overflow is 'error' on", "'torch.float16'"),
    ),
    "on_overflow": ({}, {"on_overflow": "sequential"}, ("on_overflow", "'error'", "'sequential'")),
    "max_rows_per_rank": ({}, {"max_rows_per_rank": 20}, ("max_rows_per_rank", "20")),
    "backend": ({"backend": "shared"}, {"backend": "process_group"}, ("backend", "'shared'", "'process_group'")),
}
"""Options of the other ranks and of the last rank (some from tp_size), and what the message must name."""


def construct(options: Options) -> tpo.UserBufferManager:
    """A manager by these options over the small defaults."""
    from tests.manager.ranks import make_manager

    return make_manager(**options)
