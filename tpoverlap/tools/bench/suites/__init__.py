"""The suites by name. A new one is a file with a `Suite` and a line here; it is imported only when it runs."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType

from tpoverlap.tools.bench.suite import Suite

__all__ = ["SUITE_NAMES", "Suite", "load_suite"]

_SUITES: Mapping[str, str] = MappingProxyType(
    {
        "gemm": "tpoverlap.tools.bench.suites.gemm:GemmSuite",
        "dynamic": "tpoverlap.tools.bench.suites.dynamic:DynamicSuite",
        "host": "tpoverlap.tools.bench.suites.host:HostSuite",
        "layers": "tpoverlap.tools.bench.suites.layers:LayersSuite",
    }
)
SUITE_NAMES = tuple(_SUITES)


def load_suite(name: str) -> Suite:
    """The suite ``name``, one of `SUITE_NAMES`."""
    module, _, attribute = _SUITES[name].partition(":")
    suite: object = getattr(importlib.import_module(module), attribute)()
    assert isinstance(suite, Suite), f"{name} is a {type(suite).__name__}"
    return suite
