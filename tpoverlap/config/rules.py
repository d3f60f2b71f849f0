"""The machinery of the legality table: what a rule looks at, what it is, and the words its message may use."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, Literal

from tpoverlap.config.defaults import transformer_engine_config
from tpoverlap.config.honoured import is_honoured, is_idle_in_te, why_ignored
from tpoverlap.config.names import KNOWN_NAMES, nearest, nearest_name, sibling
from tpoverlap.config.notes import Level, Note, Target
from tpoverlap.config.options import METHODS, OPTION_KEYS, OPTION_KINDS, OverlapConfig
from tpoverlap.config.surroundings import Surroundings

SUPPORTED: Final = frozenset(
    {"ring_exchange", "pipeline", "bulk", "fused", "sequential", "auto", "atomic_gemm", "sm_copy", "fp8"}
)
"""What this release can run; "sm_copy" is ``use_ce: false``."""

Stage = Literal["top", "options", "config", "file"]
"""top: any top-level key · options: one entry's raw keys · config: its filled-in config · file: all entries."""


@dataclass(frozen=True)
class Case:
    """What one rule looks at: a top-level key and what stands under it, or (name "") the whole configuration.

    ``given`` is as written; ``config`` has the defaults filled in (stage "config" only); ``entries`` are the configs
    of all written names, ``written`` what was written for them. ``surroundings``: what else the file says, its name
    included; empty where no file is looked at.
    """

    name: Any
    given: Any
    tp_size: int
    config: OverlapConfig | None = None
    entries: Mapping[str, OverlapConfig] = field(default_factory=dict)
    supported: frozenset[str] = SUPPORTED
    fp8: bool = False
    written: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    surroundings: Surroundings = field(default_factory=Surroundings)

    @property
    def resolved(self) -> OverlapConfig:
        """The filled-in config; only rules of stage "config" may ask for it."""
        assert self.config is not None, f"a rule looked at the config of {self.name!r} before it was filled in"
        return self.config

    @property
    def method(self) -> str:
        """The configured method; only for rules of stage "config"."""
        return self.resolved.method

    @cached_property
    def te(self) -> OverlapConfig | None:
        """What Transformer Engine makes of the same options; None for a name that it does not have."""
        return transformer_engine_config(self.name, self.given, self.tp_size) if self.name in KNOWN_NAMES else None

    @property
    def tp_known(self) -> bool:
        """Whether ``tp_size`` was said by anybody, or only assumed to be able to check a file at all."""
        return not self.surroundings.tp_assumed


@dataclass(frozen=True)
class Rule:
    """One row of the table. ``keys`` yields the offending keys of a case, "" for the entry as a whole.

    ``target`` may depend on the case. ``words`` and ``line`` are for findings about what stands outside an entry.
    """

    id: str
    stage: Stage
    level: Level
    keys: Callable[[Case], Iterable[Any]]
    message: str
    remedy: str
    source: str
    target: Target | Callable[[Case, Any], Target] = "both"
    words: Callable[[Case, Any], Mapping[str, Any]] = lambda case, key: {}
    line: Callable[[Case, Any], int] = lambda case, key: 0

    def findings(self, case: Case) -> list[Note]:
        """What this rule says about ``case``; empty where it is content."""
        notes = []
        for key in self.keys(case):
            words = _Words(_words(case, key), **self.words(case, key))
            texts = self.message.format_map(words), self.remedy.format_map(words).strip()
            target = self.target(case, key) if callable(self.target) else self.target
            name, line = _plain_text(case.name), self.line(case, key)
            notes.append(Note(self.level, self.id, name, _plain_text(key), *texts, target=target, line=line))
        return notes


def show(value: Any) -> str:
    """``value`` for a message, shortened. A number of 5,000 digits has no repr in Python, so it is described."""
    try:
        return reprlib.repr(value)
    except ValueError:
        return f"a {type(value).__name__} too long to print"


def _plain_text(value: Any) -> str:
    return value if isinstance(value, str) else show(value)


def whole(predicate: Callable[[Case], bool], key: str = "") -> Callable[[Case], Iterable[str]]:
    """For a rule that has one finding or none, about ``key`` or about the entry as a whole."""
    return lambda case: (key,) if predicate(case) else ()


def te_differences(case: Case) -> list[str]:
    """Keys left to their defaults which Transformer Engine would fill differently, and read, as text."""
    if case.name not in KNOWN_NAMES or case.given.get("method") not in ("ring_exchange", "pipeline", "bulk"):
        return []
    ours, theirs = case.resolved, transformer_engine_config(case.name, case.given, case.tp_size)
    unsaid = (key for key in OPTION_KEYS if key not in case.given and not is_idle_in_te(theirs, key))
    keys = (key for key in unsaid if getattr(ours, key) != getattr(theirs, key))
    return [f"{key} {getattr(theirs, key)} (here {getattr(ours, key)})" for key in keys]


class _Words(dict[str, Any]):
    """Words of a template; the nearest legal ones, which take long to find, are looked for only where one is named."""

    def __missing__(self, word: str) -> str:
        wrong = self["wrong"]
        if word == "did_you_mean_key":
            return _did_you_mean(nearest(wrong["key"], OPTION_KEYS))
        if word == "did_you_mean_method":
            return _did_you_mean(nearest(wrong["value"], METHODS))
        if word == "did_you_mean_name":
            return _did_you_mean(nearest_name(wrong["name"]))
        raise KeyError(word)


def _words(case: Case, key: Any) -> dict[str, Any]:
    """Everything that a template may name."""
    given = case.given if isinstance(case.given, Mapping) else {}
    value = given.get(key)
    words: dict[str, Any] = {
        "name": case.name[:80] if isinstance(case.name, str) else show(case.name),
        "key": key[:80] if isinstance(key, str) else show(key),
        "value": show(value),
        "given": show(case.given),
        "tp_size": case.tp_size,
        "kind": OPTION_KINDS[key].value if key in OPTION_KINDS else "",
        "wrong": {text: _plain_text(it) for text, it in (("name", case.name), ("key", key), ("value", value))},
        "legal_keys": ", ".join(OPTION_KEYS),
        "legal_methods": ", ".join(METHODS),
        "supported_methods": ", ".join(method for method in METHODS if method in case.supported),
        "bulk_names": ", ".join(name for name, known in KNOWN_NAMES.items() if known.bulk_legal),
    }
    if case.config is None:
        return words
    words |= {"method": case.config.method, "direction": case.config.direction}
    if case.name in KNOWN_NAMES:
        dgrad = sibling(case.name, "dgrad")
        words |= {
            "dgrad": dgrad,
            "wgrad": sibling(case.name, "wgrad"),
            "dgrad_method": case.entries[dgrad].method if dgrad in case.entries else "",
            "te_method": KNOWN_NAMES[case.name].te_method,
            "te_differences": ", ".join(te_differences(case)),
        }
    if key in OPTION_KINDS:
        words["used"] = show(getattr(case.config, key))
        words["because"] = "" if is_honoured(case.config, key, case.fp8) else why_ignored(case.config, key)
    return words


def _did_you_mean(candidate: str | None) -> str:
    return f"did you mean {candidate!r}? " if candidate else ""
