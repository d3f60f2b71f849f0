"""Methods by T of a manager's names: made at a shape's first use from what all ranks agreed on, then looked up.

``agree_on_evidence`` is collective and runs once, at set-up. `MethodTables.find` is local and pure: the same name,
direction, use, features and numbers (FP8 or not) give the same decisions on every rank.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from tpoverlap.config import KNOWN_NAMES, OverlapConfig, ResolvedConfig, legal_methods
from tpoverlap.config.by_tokens import BY_TOKENS
from tpoverlap.config.defaults import method_defaults
from tpoverlap.dispatch import Decision, TokenDecisions, choose
from tpoverlap.memory.base import agree
from tpoverlap.overlap.context import possible_labels
from tpoverlap.overlap.fp8 import FP8_TAGS
from tpoverlap.overlap.fp8 import METHODS as FP8_METHODS
from tpoverlap.tuning import Candidate, Evidence, Kind, Problem, cache_folder, read_entries, recognise
from tpoverlap.tuning.cache import METHODS_VERSION

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from tpoverlap.communicator import CommOverlap

logger = logging.getLogger("tpoverlap")

CacheSource = str | os.PathLike[str] | bool | None
"""``tuning_cache``: a folder; True: the user's; None: the user's on CUDA devices, none on the CPU; False: nothing at
all, not even the cost model, so that every name keeps its default method.
"""


class MethodTables:
    """(name, direction, use, features, FP8) -> decisions by T, each made once."""

    def __init__(
        self,
        evidence: Evidence | None,
        config: ResolvedConfig,
        planned: Mapping[str, str],
        tp_size: int,
        dtype: torch.dtype,
    ) -> None:
        """``evidence``: a pinned plan's; None: `agree` looks for it, if it is called."""
        self.evidence = evidence or Evidence()
        self._is_pinned = evidence is not None
        self._has_kernels = False  # fused needs symmetric memory
        self._config = config
        self._planned = planned
        self._tp_size = tp_size
        self._itemsize_bytes = dtype.itemsize
        self._found: dict[tuple[str, bool, bool, int, bool], TokenDecisions | None] = {}

    def agree(self, group: ProcessGroup, device: torch.device, backend: str, tuning_cache: CacheSource) -> None:
        """Look for evidence, unless a plan brought its own. Collective."""
        self._has_kernels = backend == "cuda"
        if not self._is_pinned:
            section = self._config.extras.get(BY_TOKENS) or {}
            self.evidence = agree_on_evidence(group, device, backend, section, tuning_cache)

    def is_by_tokens(self, communicator: CommOverlap) -> bool:
        """Whether the method of ``communicator`` may depend on T: nobody wrote it, or ``by_tokens`` stands for it."""
        name = communicator.name
        if self.evidence.is_empty or not communicator.registered:
            return False
        if name in self._planned:
            return self._planned[name] == "auto"
        written = self._config.explicit.get(name, {}).get("method")
        if written in (None, "auto"):
            return not communicator.config.atomic_gemm
        entry = self.evidence.section.get(name)
        return entry is not None and entry.get("instead_of") == written

    def find(
        self, communicator: CommOverlap, *, scatter: bool, beside: bool, features: int | None, fp8: bool = False
    ) -> TokenDecisions | None:
        """The decisions for one use of a name; None where its method does not depend on T or nothing is known.

        Args:
            features: of the sharded side of the GEMM on this rank; None: unknown.
            fp8: under a recipe: other times and other bytes, so another table.
        """
        if features is None or self.evidence.is_empty or communicator.overrides:
            return None
        key = (communicator.name, scatter, beside, features, fp8)
        if key not in self._found:
            self._found[key] = self._make(communicator, scatter, beside, features, fp8)
        return self._found[key]

    def decide(
        self,
        communicator: CommOverlap,
        num_tokens: int | None,
        by_tokens: TokenDecisions | None = None,
        *,
        overflow: bool = False,
    ) -> Decision:
        """`choose` for one operation of ``communicator``; ``by_tokens`` is what `find` gave for its use."""
        if not communicator.registered:
            return Decision("sequential", "unregistered", f"{communicator.name} is not registered{communicator.hint}")
        return choose(
            communicator.config,
            name=communicator.name,
            config_source="layer" if communicator.overrides else self._config.source(communicator.name),
            tp_size=self._tp_size,
            num_tokens=num_tokens,
            max_tokens=communicator.max_tokens,
            overflow=overflow,
            planned_method=None if communicator.overrides else self._planned.get(communicator.name),
            by_tokens=by_tokens,
        )

    def planned(self, communicator: CommOverlap) -> str:
        """What a plan says about ``communicator``: its method, or "auto" where that depends on T."""
        return "auto" if self.is_by_tokens(communicator) else self.decide(communicator, None).method

    def forget(self) -> None:
        """Names have other options or capacities now."""
        self._found.clear()

    def explained(
        self, communicator: CommOverlap, features: int | None, *, fp8: bool = False
    ) -> tuple[TokenDecisions | None, str]:
        """For `explain`: the decisions of the likeliest use, and a remark on them. ``features`` None: as last run."""
        scatter, beside, used = self._likely_use(communicator)
        features = used if features is None else features
        by_tokens = self.find(communicator, scatter=scatter, beside=beside, features=features, fp8=fp8)
        return by_tokens, self._remark(communicator, by_tokens, features, fp8)

    def _likely_use(self, communicator: CommOverlap) -> tuple[bool, bool, int | None]:
        """(scatter, beside, features) as ``communicator`` last ran, else as its configuration has it and None.

        In FP8 or not: the same layer, so the same shape.
        """
        uses = [key[1:4] for key in self._found if key[0] == communicator.name]
        if uses:
            return uses[-1]
        known = KNOWN_NAMES.get(communicator.name)
        # qkv_dgrad and fc1_dgrad stand beside a GEMM unless they are configured to reduce-scatter their own output
        beside = known is not None and known.bulk_legal and known.is_reduce_scatter == communicator.is_reduce_scatter
        return communicator.is_reduce_scatter, beside or communicator.config.method == "bulk", None

    def _remark(
        self, communicator: CommOverlap, by_tokens: TokenDecisions | None, features: int | None, fp8: bool
    ) -> str:
        """Where the buckets end, or why there are none."""
        if by_tokens is not None:
            ends = ", ".join(
                f"{end}: {one.method}" for end, one in zip(by_tokens.ends, by_tokens.decisions, strict=True)
            )
            return f"features {features}, up to T {ends}"
        entry = self._config.extras.get(BY_TOKENS, {}).get(communicator.name)
        if entry is not None and not communicator.overrides:
            rows = f"by_tokens has rows for features {entry.get('features')} at width {entry.get('width')}"
            if features is None:
                return f"{rows}; those of this GEMM are known after its first operation: pass features="
            return f"{rows}, and none for features {features} at width {communicator.width}"
        written = self._config.explicit.get(communicator.name, {}).get("method")
        planned = self._planned.get(communicator.name)
        if not {written, planned} <= {None, "auto"} or not communicator.registered:
            return ""
        if self.evidence.is_empty:
            return self.evidence.why_no_device
        if features is None:
            return "the method depends on T and on the GEMM's features, which the first operation tells; pass features="
        in_fp8 = " in FP8" if fp8 else ""
        why = self.evidence.why_no_device
        if fp8 and self.evidence.device is not None:
            why = f"the cost model knows no FP8 on {self.evidence.device.name}"
        return f"nothing is known about features {features} at width {communicator.width}{in_fp8}; {why}"

    def possible_labels(self, communicators: Iterable[CommOverlap], *, fp8: bool = False) -> Iterator[str]:
        """Every label that operations of these names can have had so far: how a peer's operation gets its name."""
        for one in communicators:
            tags = FP8_TAGS if fp8 else ("",)
            yield from possible_labels(one.name, one.config, tags)
            for key, found in list(self._found.items()):
                if key[0] == one.name and found is not None:
                    for decision in found.decisions:
                        yield from possible_labels(one.name, decision.config or one.config, tags)

    def _make(
        self, communicator: CommOverlap, scatter: bool, beside: bool, features: int, fp8: bool
    ) -> TokenDecisions | None:
        if not self.is_by_tokens(communicator):
            return None
        problem = Problem(
            kind_of_use(scatter=scatter, beside=beside),
            1,
            communicator.width,
            features,
            self._tp_size,
            self._itemsize_bytes,
            fp8=fp8,
            # as `scatter_operation` reads it: of an all-gather name the key speaks of its gather
            fp8_buf=fp8 and communicator.config.is_reduce_scatter and communicator.config.fp8_buf,
        )
        legal = ("bulk",) if beside else legal_methods(communicator.name, scatter)
        if fp8:
            legal = tuple(method for method in legal if method in FP8_METHODS)
        if not self._has_kernels:
            legal = tuple(method for method in legal if method != "fused")
        written = self._config.explicit.get(communicator.name, {})
        fixed = {key: value for key, value in written.items() if key not in ("method", "is_reduce_scatter")}
        if scatter != communicator.config.is_reduce_scatter:
            fixed.pop("fp8_buf", None)  # said of the other direction's rows
        table = self.evidence.table(communicator.name, problem, communicator.max_tokens, legal, fixed)
        if table is None:
            return None
        decisions = tuple(
            Decision(
                row.candidate.method,
                table.source,
                table.reason(row),
                self._options(row.candidate, scatter, fixed),
                for_use=True,
            )
            for row in table.rows
        )
        return TokenDecisions(tuple(row.up_to for row in table.rows), decisions)

    def _options(self, candidate: Candidate, scatter: bool, fixed: Mapping[str, Any]) -> OverlapConfig:
        defaults = method_defaults(candidate.method, scatter, self._tp_size)
        return replace(defaults, **(dict(fixed) | candidate.options))


def kind_of_use(*, scatter: bool, beside: bool) -> Kind:
    """How the GEMM of an operation and what travels depend on each other."""
    if beside:
        return "beside-scatter" if scatter else "beside-gather"
    return "scatter" if scatter else "gather"


def machine_of(device: torch.device, backend: str) -> dict[str, Any]:
    """What a measurement holds for: device, link and versions. Plain data, the cache's key."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        hardware: dict[str, Any] = {
            "device": properties.name,
            "capability": [properties.major, properties.minor],
            "multiprocessors": properties.multi_processor_count,
            "memory_gib": round(properties.total_memory / 2**30),
        }
    else:
        hardware = {"device": "cpu", "cores": os.cpu_count()}
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "methods": METHODS_VERSION}
    return hardware | {"link": backend} | versions


def agree_on_evidence(
    group: ProcessGroup, device: torch.device, backend: str, section: Mapping[str, Any], tuning_cache: CacheSource
) -> Evidence:
    """The evidence that all ranks use: rank 0's cache and device. Collective; the section was compared before.

    A cache that cannot be read is logged, named by `explain` and not used: measurements are an optimisation.
    """
    machine = machine_of(device, backend)
    cache = _rank_zeros_cache(group, device, machine, tuning_cache)
    answers = agree(group, (machine, _place(device), cache, tuning_cache is False))
    (cached, cache_basis), is_off = answers[0][2:]
    if is_off:
        return Evidence(section, {}, None, "", "tuning_cache=False: names keep their default methods")
    if any(answer[0] != machine for answer in answers):
        why = "the ranks have different devices or versions: " + str([answer[0]["device"] for answer in answers])
        return Evidence(section, {}, None, "", why)
    if device.type != "cuda" or backend != "cuda":
        return Evidence(section, cached, None, cache_basis, f"no cost model for {backend} memory on {device.type}")
    if len({answer[1] for answer in answers}) < len(answers):
        return Evidence(section, cached, None, cache_basis, "ranks share a GPU, which the cost model does not know")
    properties = torch.cuda.get_device_properties(device)
    capability = (properties.major, properties.minor)
    known = recognise(capability, properties.multi_processor_count, properties.total_memory)
    why = "" if known else f"the cost model does not know {properties.name}; tpoverlap tune measures it"
    return Evidence(section, cached, known, cache_basis, why)


def _place(device: torch.device) -> tuple[str, str]:
    """This host and this device, to see whether ranks share one."""
    unit = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
    return socket.gethostname(), unit


def _rank_zeros_cache(
    group: ProcessGroup, device: torch.device, machine: Mapping[str, Any], tuning_cache: CacheSource
) -> tuple[dict[str, Any], str]:
    """(entries, where they come from); nothing on other ranks."""
    wanted = device.type == "cuda" if tuning_cache is None else tuning_cache is not False
    if group.rank() != 0 or not wanted:
        return {}, ""
    try:
        folder = cache_folder(None if isinstance(tuning_cache, bool) or tuning_cache is None else tuning_cache)
        entries = read_entries(folder, machine)
    except Exception as error:  # of any kind (no home, say): the other ranks are about to wait for this one
        logger.warning("the tuned cache is not used: %s", error)
        return {}, f"the tuned cache is not used: {error}"
    return dict(entries), f"measured by tpoverlap tune, {folder}"
