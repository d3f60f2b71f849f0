"""Every rule about a configuration, stated once: ``RULES``. ``resolve`` and ``check`` only apply the table.

Here are the rules of this library; ``te_rules`` has what concerns Transformer Engine alone, ``surrounding_rules`` what
a file says beside its options. ``target`` tells whose question a rule answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Final

from tpoverlap.config.by_tokens import BY_TOKENS
from tpoverlap.config.by_tokens import faults as faults_by_tokens
from tpoverlap.config.defaults import REDUCE_SCATTER_DGRAD_METHODS, fill_defaults
from tpoverlap.config.honoured import is_honoured
from tpoverlap.config.names import (
    COLUMN_WGRADS,
    KNOWN_NAMES,
    RESERVED_SECTION,
    ROW_WGRADS,
    nearest_name,
    sibling,
)
from tpoverlap.config.notes import Note, Target
from tpoverlap.config.options import METHODS, OPTION_KINDS, OptionKind, has_right_type
from tpoverlap.config.rules import SUPPORTED, Case, Rule, Stage, te_differences, whole
from tpoverlap.config.surrounding_rules import SURROUNDING_RULES
from tpoverlap.config.te_rules import TE_RULES, ignored_by_te, te_launches_copy_blocks


def findings(stage: Stage, case: Case) -> list[Note]:
    """Every finding of the rules of ``stage`` about ``case``, in the order of the table."""
    return [note for rule in RULES if rule.stage == stage for note in rule.findings(case)]


def is_entry(name: Any, value: Any) -> bool:
    """Whether a top-level key holds the options of a GEMM: one of the twelve, or a mapping with an option key."""
    if not isinstance(name, str) or name == RESERVED_SECTION or not isinstance(value, Mapping):
        return False
    return name in KNOWN_NAMES or any(key in OPTION_KINDS for key in value)


def legal_methods(
    name: str, is_reduce_scatter: bool, tp_size: int = 2, supported: frozenset[str] = SUPPORTED
) -> tuple[str, ...]:
    """The methods that may run ``name`` in this direction: what a dispatcher or a tuner may choose from."""
    legal = []
    for method in METHODS:
        given = {"method": method, "is_reduce_scatter": is_reduce_scatter}
        case = Case(name, given, tp_size, fill_defaults(name, given, tp_size), supported=supported)
        if method not in ("auto", "external") and all(note.level != "error" for note in findings("config", case)):
            legal.append(method)
    return tuple(legal)


def _is_bad_name(name: Any) -> bool:
    return not name or not name.isprintable() or any(character.isspace() for character in name)


def _badly_typed(case: Case) -> Iterator[str]:
    return (k for k, v in case.given.items() if k in OPTION_KINDS and not has_right_type(OPTION_KINDS[k], v))


def _too_small(case: Case) -> Iterator[str]:
    for key, value in case.given.items():
        kind = OPTION_KINDS.get(key)
        if kind is OptionKind.COUNT and has_right_type(kind, value) and value < 1:
            yield key


def _unknown_method(case: Case) -> bool:
    method = case.given.get("method", METHODS[0])
    return isinstance(method, str) and method not in METHODS


def _contradicts_direction(case: Case) -> bool:
    given = case.given.get("is_reduce_scatter")
    return case.name in KNOWN_NAMES and given is not None and bool(given) != case.resolved.is_reduce_scatter


def _scatters_dgrad_and_names_wgrad(case: Case) -> bool:
    dgrad = case.entries.get(sibling(case.name, "dgrad")) if case.name in COLUMN_WGRADS else None
    return dgrad is not None and dgrad.is_reduce_scatter


def _assumes_direction(case: Case) -> bool:
    return case.name not in KNOWN_NAMES and case.method != "pipeline" and "is_reduce_scatter" not in case.given


def _who_ignores(case: Case, key: Any) -> Target:
    return "both" if key in ignored_by_te(case) else "tpoverlap"


def _ignored(case: Case) -> list[str]:
    if case.method == "external":  # there the whole entry is ignored, which is one finding
        return []
    return [key for key in case.given if not is_honoured(case.resolved, key, case.fp8)]


def _section(case: Case) -> Mapping[Any, Any]:
    """What stands under our own top-level key; empty for every other key."""
    return case.given if case.name == RESERVED_SECTION and isinstance(case.given, Mapping) else {}


def _faults_by_tokens(case: Case) -> dict[str, str]:
    """Dotted key -> what is wrong with it."""
    section = _section(case).get(BY_TOKENS)
    if section is None:
        return {}
    legal = partial(legal_methods, tp_size=case.tp_size, supported=case.supported)
    return {f"{BY_TOKENS}.{path}".rstrip("."): fault for path, fault in faults_by_tokens(section, legal)}


# fmt: off
_OWN_RULES: Final[tuple[Rule, ...]] = (
    # -- any top-level key ------------------------------------------------------------------------------------------
    Rule("name-without-options", "top", "error",
         whole(lambda c: c.name in KNOWN_NAMES and not isinstance(c.given, Mapping)),
         "{name} must hold a mapping of options, got {given}",
         "write options below it, or remove it to take the defaults",
         "DESIGN, methods"),
    Rule("bad-name", "top", "error",
         whole(lambda c: is_entry(c.name, c.given) and _is_bad_name(c.name)),
         "{name!r} cannot be the name of a GEMM",
         "use printable characters without blanks",
         "ours: names appear in logs, NVTX ranges and files",
         target="tpoverlap"),
    Rule("section-not-mapping", "top", "error",
         whole(lambda c: c.name == RESERVED_SECTION and not isinstance(c.given, Mapping)),
         "the section {name!r} must be a mapping, got {given}",
         "write keys below it, or remove it",
         "DESIGN, methods",
         target="tpoverlap"),
    Rule("section-key-unread", "top", "warning",
         lambda c: [key for key in _section(c) if key != BY_TOKENS],
         "{name}.{key} is kept, but this version reads nothing from it",
         "remove it, or use the version of tpoverlap that it was written for",
         "ours: nothing is dropped silently",
         target="tpoverlap"),
    Rule("by-tokens-illegal", "top", "error",
         lambda c: _faults_by_tokens(c),
         "{name}.{key} {fault}",
         "correct it, or let tpoverlap tune write the section",
         "ours: methods by T",
         target="tpoverlap",
         words=lambda c, key: {"fault": _faults_by_tokens(c)[key]}),
    Rule("foreign-key", "top", "warning",
         whole(lambda c: c.name != RESERVED_SECTION and c.name not in KNOWN_NAMES and not is_entry(c.name, c.given)),
         "top-level key {name!r} holds no overlap options and is ignored",
         "{did_you_mean_name}a mapping with at least one option key registers a GEMM: {legal_keys}",
         "DESIGN, methods; Megatron-LM's own test file has MODEL_ARGS"),
    # -- the options of one name, as written --------------------------------------------------------------------------
    Rule("unknown-option", "options", "error",
         lambda c: [key for key in c.given if key not in OPTION_KINDS],
         "{name}.{key} is no option",
         "{did_you_mean_key}legal keys: {legal_keys}",
         "DESIGN, methods (TE: TypeError of a constructor)"),
    Rule("value-type", "options", "error",
         _badly_typed,
         "{name}.{key} must be {kind}, got {value}",
         "write a value of that type, without quotes",
         "DESIGN, methods; files in the wild write flags as 0 and 1"),
    Rule("count-below-one", "options", "error",
         _too_small,
         "{name}.{key} must be {kind}, got {value}",
         "set 1 or more, or remove the key to take the default",
         "TE: not checked"),
    Rule("unknown-method", "options", "error",
         whole(_unknown_method, "method"),
         "{name}.method {value} is unknown",
         "{did_you_mean_method}methods: {legal_methods}",
         "DESIGN, methods (TE: not checked)"),
    # -- what this release can run --------------------------------------------------------------------------------
    Rule("method-unsupported", "config", "error",
         whole(lambda c: c.method not in c.supported and c.method != "external", "method"),
         "{name}.method {method!r} is not supported by this version",
         "supported now: {supported_methods}",
         "issue 2, item 6",
         target="tpoverlap"),
    Rule("atomic-gemm-unsupported", "config", "error",
         whole(lambda c: c.resolved.atomic_gemm and "atomic_gemm" not in c.supported, "atomic_gemm"),
         "{name}.atomic_gemm is true, which this version does not support",
         "supported now: atomic_gemm: false, with method {supported_methods}",
         "issue 2, item 6 (TE: FP8 only, and both GEMMs of a block together)",
         target="tpoverlap"),
    Rule("sm-copy-unsupported", "config", "error",
         whole(lambda c: not c.resolved.use_ce and c.method in ("ring_exchange", "bulk", "auto", "fused")
               and "sm_copy" not in c.supported, "use_ce"),
         "{name}.use_ce is false under method {method!r}, which this version does not support",
         "supported now: use_ce: true (copies by the copy engine)",
         "issue 2, item 6",
         target="tpoverlap"),
    Rule("fp8-gather-in-original-dtype", "config", "error",
         whole(lambda c: c.fp8 and not c.resolved.is_reduce_scatter and not c.resolved.fp8_buf, "fp8_buf"),
         "{name}.fp8_buf is false and FP8 was asked for, but an FP8 layer gathers FP8 rows",
         "remove fp8_buf, or run this layer without fp8",
         "ours: gathering twice the bytes to quantise them afterwards has no use",
         target="tpoverlap"),
    Rule("fp8-buffer-unsupported", "config", "error",
         whole(lambda c: c.fp8 and bool(c.given.get("fp8_buf")) and "fp8" not in c.supported, "fp8_buf"),
         "{name}.fp8_buf is true and FP8 buffers were asked for, which this version does not support",
         "supported now: quantization mode NONE (there fp8_buf does nothing)",
         "issue 2, item 6",
         target="tpoverlap"),
    # -- which method may do what -----------------------------------------------------------------------------------
    Rule("pipeline-all-gather", "config", "error",
         whole(lambda c: c.method == "pipeline" and not c.resolved.is_reduce_scatter, "method"),
         "{name}.method 'pipeline' cannot all-gather",
         "use ring_exchange, or is_reduce_scatter: true where the GEMM's output is what travels",
         "TE: ValueError"),
    Rule("bulk-without-independent-gemm", "config", "error",
         whole(lambda c: c.method == "bulk" and c.name in KNOWN_NAMES and not KNOWN_NAMES[c.name].bulk_legal
               and c.name not in ROW_WGRADS, "method"),
         "{name}.method 'bulk' needs a GEMM that does not depend on the {direction}, and {name} has none",
         "use ring_exchange; bulk is for {bulk_names} and for your own names with bulk_all_gather, bulk_reduce_scatter",
         "DESIGN, methods (TE: not checked)"),
    Rule("wgrad-output-stays", "config", "error",
         whole(lambda c: c.name in COLUMN_WGRADS and c.method in REDUCE_SCATTER_DGRAD_METHODS, "method"),
         "{name}.method {method!r} would reduce-scatter the weight gradient, which stays on its rank",
         "use bulk, or remove {name} and set {dgrad}.method: {method}",
         "DESIGN, methods: here dgrad's output travels beside the wgrad GEMM (TE: not checked)"),
    Rule("row-wgrad-has-nothing-to-do", "config", "error",
         whole(lambda c: c.name in ROW_WGRADS and c.method != "external", "method"),
         "{name}.method {method!r}: {name} has nothing to communicate, it reuses what {dgrad} gathered",
         "remove {name}",
         "TE: asserts that its method is 'external'"),
    Rule("external-elsewhere", "config", "error",
         whole(lambda c: c.method == "external" and c.name not in ROW_WGRADS, "method"),
         "{name}.method 'external' exists for proj_wgrad and fc2_wgrad only (MXFP8 in Transformer Engine)",
         "supported now: {supported_methods}",
         "TE: tied to these two names"),
    Rule("direction-contradicts-name", "config", "error",
         whole(_contradicts_direction, "is_reduce_scatter"),
         "{name}.is_reduce_scatter is {value}, but {name} under method {method!r} is a {direction}",
         "remove is_reduce_scatter (in qkv_dgrad and fc1_dgrad the method sets it), or use a name of your own",
         "TE: not checked"),
    Rule("dgrad-excludes-wgrad", "config", "error",
         whole(_scatters_dgrad_and_names_wgrad),
         "{name} is set, but {dgrad} with method {dgrad_method!r} reduce-scatters in dgrad already",
         "remove {name}, or set {dgrad}.method: bulk",
         "TE: AssertionError without a message"),
    # -- accepted, but probably not what was meant ------------------------------------------------------------------
    Rule("near-known-name", "config", "warning",
         whole(lambda c: nearest_name(c.name) is not None),
         "{name!r} registers a GEMM of that name, which is close to a known one",
         "{did_you_mean_name}",
         "DESIGN, methods",
         target="tpoverlap"),
    Rule("direction-assumed", "config", "warning",
         whole(_assumes_direction, "is_reduce_scatter"),
         "{name} does not say is_reduce_scatter and is taken as an all-gather",
         "set is_reduce_scatter: true where the GEMM's output is what travels, else false",
         "TE: has no other names",
         target="tpoverlap"),
    Rule("cga-exceeds-num-sm", "config", "note",
         whole(lambda c: "cga_size" in c.given and c.resolved.cga_size > c.resolved.num_sm
               and not te_launches_copy_blocks(c), "cga_size"),
         "{name}.cga_size {value} is larger than num_sm, so no cluster fits in the blocks",
         "harmless: the copy engine moves the rows and no block is launched; remove it",
         "seen in published files"),
    Rule("ring-num-splits", "config", "note",
         whole(lambda c: c.method in ("ring_exchange", "fused") and "num_splits" in c.given
               and c.given["num_splits"] != c.resolved.num_splits and c.tp_known, "num_splits"),
         "{name}.num_splits {value} is replaced by {used}: {method} always cuts one chunk a rank",
         "remove it",
         "TE: the same, silently"),
    Rule("option-ignored", "config", "note",
         _ignored,
         "{name}.{key} {value} is ignored by method {method!r} ({direction}): {because}",
         "keep it for other tools, or remove it",
         "DESIGN, methods",
         target=_who_ignores),
    Rule("external-ignored", "config", "note",
         whole(lambda c: c.method == "external" and c.name in ROW_WGRADS),
         "{name} is ignored: 'external' overlaps an MXFP8 gather beside another GEMM; here {name} reuses the rows "
         "that {dgrad} gathered",
         "remove it, or keep it for Transformer Engine",
         "TE: default of these two names",
         target="tpoverlap"),
    Rule("te-default-method", "config", "note",
         whole(lambda c: c.name in KNOWN_NAMES and "method" not in c.given
               and KNOWN_NAMES[c.name].te_method != c.method, "method"),
         "{name} does not say its method: it is {method!r} here and {te_method!r} in Transformer Engine",
         "say which one you mean",
         "FACTS: TE's pipeline reduce-scatter was measured slower than no overlap",
         target="te"),
    Rule("te-defaults-differ", "config", "warning",
         whole(lambda c: bool(te_differences(c)), "method"),
         "{name}: defaults follow the configured method {method!r} here and the name's own method {te_method!r} in "
         "Transformer Engine, which would take {te_differences}",
         "write these keys where the file must mean the same in both",
         "FACTS, what TE's configuration really does",
         target="te"),
    # -- the whole configuration --------------------------------------------------------------------------------------
    Rule("nothing-to-overlap", "file", "note",
         whole(lambda c: c.tp_size == 1 and bool(c.entries) and "overlap" not in c.surroundings.stated),
         "tp_size is 1: there is no peer, so nothing is communicated and no option has an effect",
         "none needed",
         "seen in published files"),
)
# fmt: on

RULES: Final[tuple[Rule, ...]] = (*_OWN_RULES, *TE_RULES, *SURROUNDING_RULES)
