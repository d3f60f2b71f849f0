"""Rules about what Transformer Engine makes of a configuration, where this library makes something else of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from tpoverlap.config.honoured import is_honoured, is_idle_in_te
from tpoverlap.config.names import COLUMN_DGRADS, KNOWN_NAMES, sibling
from tpoverlap.config.rules import Case, Rule, whole

METHODS_OF_TE: Final = ("ring_exchange", "pipeline", "bulk", "external")

# The two GEMMs of a block: atomic ring_exchange shuffles the rows in one and sorts them again in the other.
_PARTNERS: Final[Mapping[str, str]] = {
    "qkv_fprop": "proj_fprop",
    "proj_fprop": "qkv_fprop",
    "fc1_fprop": "fc2_fprop",
    "fc2_fprop": "fc1_fprop",
}


def ignored_by_te(case: Case) -> tuple[str, ...]:
    """Written keys which do nothing in Transformer Engine under the method that it would take."""
    config = case.te
    return () if config is None else tuple(key for key in case.given if is_idle_in_te(config, key))


def te_launches_copy_blocks(case: Case) -> bool:
    """Whether multiprocessors move the rows there: always under pipeline and bulk, in a ring without copy engine."""
    config = case.te
    return config is not None and (config.method in ("pipeline", "bulk") or not config.use_ce)


def _ignored_there_alone(case: Case) -> Iterator[str]:
    yield from (key for key in ignored_by_te(case) if is_honoured(case.resolved, key, case.fp8))


def _is_atomic_ring(options: Mapping[str, Any], name: str) -> bool:
    return bool(options.get("atomic_gemm")) and options.get("method", KNOWN_NAMES[name].te_method) == "ring_exchange"


def _is_unpaired(case: Case) -> bool:
    partner = _PARTNERS.get(case.name)
    if partner is None or not _is_atomic_ring(case.given, case.name):
        return False
    return not _is_atomic_ring(case.written.get(partner, {}), partner)


def _precision(case: Case) -> str | None:
    found = case.surroundings.find("precision")
    return "fp8" if case.fp8 else None if found is None else str(found.value)


def _precision_words(case: Case, key: Any) -> dict[str, Any]:
    found = case.surroundings.find("precision")
    return {"says": "nothing" if found is None else f"{found.where} says {found.value}"}


def _cga(case: Case) -> tuple[int, int]:
    config = case.te
    written = "cga_size" in case.given or "num_sm" in case.given
    return (config.cga_size, config.num_sm) if config and written and te_launches_copy_blocks(case) else (1, 1)


def _te_words(case: Case, key: Any) -> dict[str, Any]:
    config = case.te
    partner = _PARTNERS.get(case.name, "") if isinstance(case.name, str) else ""
    if config is None:
        return {}
    return {"te_num_sm": config.num_sm, "te_cga_size": config.cga_size, "te_now": config.method, "partner": partner}


def _has_margin_for_nothing(case: Case) -> bool:
    config = case.te
    given = bool(case.given.get("set_sm_margin"))
    return given and config is not None and config.method == "ring_exchange" and config.use_ce


def _lacks_wgrad(case: Case) -> bool:
    bulk = case.name in COLUMN_DGRADS and case.method == "bulk"
    return bulk and sibling(case.name, "wgrad") not in case.entries


# fmt: off
TE_RULES: Final[tuple[Rule, ...]] = (
    Rule("te-refuses-option", "config", "error",
         whole(lambda c: "num_max_streams" in c.given and c.name in KNOWN_NAMES, "num_max_streams"),
         "Transformer Engine ends with a TypeError at {name}.num_max_streams, though it is documented there",
         "remove it for Transformer Engine (tpoverlap config convert --to te keeps it aside)",
         "FACTS, legality", target="te"),
    Rule("te-has-no-method", "config", "warning",
         whole(lambda c: c.name in KNOWN_NAMES and c.given.get("method", "bulk") not in METHODS_OF_TE, "method"),
         "Transformer Engine has no method {value} and does not check: {name} would run as a collective overlap",
         "convert the file for Transformer Engine (tpoverlap config convert --to te)",
         "TE: every method but ring_exchange builds a CommOverlap", target="te"),
    Rule("te-atomic-needs-fp8", "config", "error",
         whole(lambda c: c.resolved.atomic_gemm and c.name in KNOWN_NAMES and _precision(c) == "bf16", "atomic_gemm"),
         "{name}.atomic_gemm is true, but {says}: Transformer Engine asserts FP8 there",
         "set atomic_gemm: false",
         "FACTS, legality", target="te", words=_precision_words),
    Rule("te-atomic-precision-unknown", "config", "note",
         whole(lambda c: c.resolved.atomic_gemm and c.name in KNOWN_NAMES and _precision(c) is None, "atomic_gemm"),
         "{name}.atomic_gemm is true: Transformer Engine accepts it with FP8 only, and the file does not say",
         "pass --dtype, or set atomic_gemm: false",
         "FACTS, legality", target="te"),
    Rule("te-atomic-unpaired", "config", "error",
         whole(_is_unpaired, "atomic_gemm"),
         "{name} is an atomic ring_exchange, but {partner} is not: Transformer Engine asserts that both GEMMs of a "
         "block are, or neither",
         "set atomic_gemm and method alike in {name} and {partner}",
         "FACTS, legality", target="te", words=_te_words),
    Rule("te-atomic-bulk", "config", "note",
         whole(lambda c: c.te is not None and c.te.atomic_gemm and c.te.method in ("bulk", "external"), "atomic_gemm"),
         "{name}.atomic_gemm is switched off by Transformer Engine under method {te_now!r}",
         "remove it",
         "TE: warns and continues", target="te", words=_te_words),
    Rule("te-cga-exceeds-num-sm", "config", "warning",
         whole(lambda c: _cga(c)[0] > _cga(c)[1], "cga_size"),
         "{name}: cga_size {te_cga_size} is larger than num_sm {te_num_sm}, so Transformer Engine launches its copy "
         "blocks without clusters",
         "set cga_size: 1, or num_sm to a multiple of cga_size",
         "TE: clusters of cga_size where it divides num_sm, else of 1", target="te", words=_te_words),
    Rule("te-cga-no-divisor", "config", "note",
         whole(lambda c: _cga(c)[0] <= _cga(c)[1] and _cga(c)[1] % _cga(c)[0] != 0, "cga_size"),
         "{name}: cga_size {te_cga_size} does not divide num_sm {te_num_sm}, so Transformer Engine launches its copy "
         "blocks without clusters",
         "set num_sm to a multiple of cga_size",
         "TE: clusters of cga_size where it divides num_sm, else of 1", target="te", words=_te_words),
    Rule("te-margin-with-copy-engine", "config", "warning",
         whole(_has_margin_for_nothing, "set_sm_margin"),
         "{name}: the copy engine moves the rows, but set_sm_margin keeps {te_num_sm} multiprocessor(s) of Transformer "
         "Engine's GEMM idle",
         "set set_sm_margin: 0",
         "TE: the margin is taken off whatever moves the rows", target="te", words=_te_words),
    Rule("te-option-ignored", "config", "note",
         _ignored_there_alone,
         "{name}.{key} {value} does nothing in Transformer Engine under method {te_now!r}",
         "keep it for tpoverlap, or remove it",
         "TE: read by other methods only", target="te", words=_te_words),
    Rule("te-missing-wgrad", "config", "note",
         whole(_lacks_wgrad),
         "{name} is bulk, but {wgrad} is not set: Transformer Engine runs it all the same, with its defaults (bulk, "
         "num_sm 16, cga_size 2, set_sm_margin true)",
         "write {wgrad} with the num_sm that suits it; where the weights are frozen (LoRA) it never runs",
         "TE: names that are not written take defaults", target="te"),
    Rule("aggregate-at-two", "config", "warning",
         whole(lambda c: c.tp_size == 2 and c.tp_known and c.resolved.aggregate and c.method == "ring_exchange"
               and not c.resolved.is_reduce_scatter, "aggregate"),
         "{name}.aggregate joins the chunks of two ranks, and there are only two: nothing is left to overlap",
         "set aggregate: 0",
         "docs/configuration.md, aggregate"),
    Rule("fp8-buffer-in-bf16", "config", "warning",
         whole(lambda c: bool(c.given.get("fp8_buf")) and (
             _precision(c) == "bf16" or _named_bf16(c)), "fp8_buf"),
         "{name}.fp8_buf is true, but {says}: without FP8 it does nothing, and with FP8 it halves the bytes that the "
         "other values were chosen for",
         "remove fp8_buf, or use a preset made for FP8",
         "FACTS: a bf16 preset under FP8", target="te", words=lambda c, k: _bf16_words(c, k)),
)
# fmt: on


def _named_bf16(case: Case) -> bool:
    named = case.surroundings.named.get("precision")
    return named is not None and named.value == "bf16"


def _bf16_words(case: Case, key: Any) -> dict[str, Any]:
    if _named_bf16(case):
        return {"says": f"{case.surroundings.named['precision'].where} says bf16"}
    return _precision_words(case, key)
