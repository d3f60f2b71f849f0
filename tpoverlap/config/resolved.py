"""ResolvedConfig: what ``resolve`` returns. Immutable, picklable, equal and hashed alike on every rank."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal

from tpoverlap.config.defaults import fill_defaults
from tpoverlap.config.names import RESERVED_SECTION
from tpoverlap.config.notes import Note
from tpoverlap.config.options import METHODS, OptionValue, OverlapConfig
from tpoverlap.errors import ConfigError


@dataclass(frozen=True)
class ResolvedConfig:
    """The options of every name that communicates, for one tp_size. Built by ``resolve``.

    Two are equal when they say the same, whatever file said it: ``notes`` and ``origin`` do not count.
    """

    tp_size: int
    configs: dict[str, OverlapConfig] = field(repr=False)
    explicit: dict[str, dict[str, OptionValue]]
    extras: dict[str, Any] = field(default_factory=dict)
    notes: tuple[Note, ...] = field(default=(), compare=False, repr=False)
    origin: str = field(default="", compare=False)

    @property
    def names(self) -> Mapping[str, OverlapConfig]:
        """Name -> options, read-only: those of the twelve that communicate, then the user's in the order written."""
        return MappingProxyType(self.configs)

    def get(self, name: str) -> OverlapConfig | None:
        """The options of ``name``; None where it communicates nothing or was never named."""
        return self.configs.get(name)

    def explicit_keys(self, name: str) -> tuple[str, ...]:
        """The option keys that were written for ``name``: what a tuner may not change."""
        return tuple(self.explicit.get(name, ()))

    def source(self, name: str) -> Literal["explicit", "default"]:
        """Whether anything was written for ``name``."""
        return "explicit" if name in self.explicit else "default"

    def with_method(self, name: str, method: str) -> OverlapConfig:
        """The options of ``name`` as if ``method`` had been configured: other defaults, the same explicit keys.

        For a dispatcher that chooses under ``auto``. The direction stays; ``legal_methods`` says what may be chosen.

        Raises:
            ConfigError: ``name`` communicates nothing or was never named, or ``method`` does not exist.
        """
        config = self.configs.get(name)
        if config is None or method not in METHODS:
            raise ConfigError(
                f"no options for name {name!r} under method {method!r}; names: {', '.join(self.configs)}; "
                f"methods: {', '.join(METHODS)}"
            )
        options = self.explicit.get(name, {}) | {"method": method, "is_reduce_scatter": config.is_reduce_scatter}
        filled = fill_defaults(name, options, self.tp_size)
        if filled.is_reduce_scatter != config.is_reduce_scatter:
            raise ConfigError(
                f"{name} is configured for {config.direction}, but method {method!r} makes it a {filled.direction}; "
                "configure that method"
            )
        return filled

    def to_dict(self, defaults: bool = False) -> dict[str, Any]:
        """A mapping that ``resolve`` reads back: what was written, or with ``defaults`` every value of every name.

        Without ``defaults`` it reads back equal. With it the ``names`` read back equal, but every key then counts as
        written.
        """
        written: dict[str, Any] = {name: dict(options) for name, options in self.explicit.items()}
        if defaults:
            written |= {name: config.to_dict() for name, config in self.configs.items()}
        return written | ({RESERVED_SECTION: self.extras} if self.extras else {})

    def __hash__(self) -> int:
        return hash(self.digest)

    @cached_property
    def digest(self) -> str:
        """16 hex digits over everything that changes behaviour; ranks compare it."""
        content = {
            "tp_size": self.tp_size,
            "names": {name: config.to_dict() for name, config in self.configs.items()},
            "explicit": {name: sorted(options) for name, options in self.explicit.items()},
            "extras": self.extras,
        }
        return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=8).hexdigest()
