"""Overlap options: names, option keys, defaults, legality, YAML in and out. Knows no device and no process group.

``resolve(ub_cfgs, tp_size)`` is the entry; ``docs/configuration.md`` explains every key.
"""

from tpoverlap.config.defaults import default_config, default_method
from tpoverlap.config.files import FileReport, check_file
from tpoverlap.config.legality import RULES, legal_methods
from tpoverlap.config.names import KNOWN_NAMES
from tpoverlap.config.notes import ConfigWarning, Note, Target
from tpoverlap.config.options import METHODS, OPTION_KEYS, OverlapConfig
from tpoverlap.config.reader import read_config
from tpoverlap.config.resolved import ResolvedConfig
from tpoverlap.config.resolver import ConfigSource, check, resolve
from tpoverlap.config.rules import SUPPORTED, Rule
from tpoverlap.config.writer import to_yaml

__all__ = [
    "KNOWN_NAMES",
    "METHODS",
    "OPTION_KEYS",
    "RULES",
    "SUPPORTED",
    "ConfigSource",
    "ConfigWarning",
    "FileReport",
    "Note",
    "OverlapConfig",
    "ResolvedConfig",
    "Rule",
    "Target",
    "check",
    "check_file",
    "default_config",
    "default_method",
    "legal_methods",
    "read_config",
    "resolve",
    "to_yaml",
]
