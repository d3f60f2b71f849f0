"""Writing a configuration as a YAML file that ``resolve``, and Transformer Engine's users, can read."""

from __future__ import annotations

from tpoverlap.config.resolved import ResolvedConfig
from tpoverlap.errors import ConfigError


def to_yaml(config: ResolvedConfig, defaults: bool = False) -> str:
    """``config`` as YAML text, names at the top level; read back with the same tp_size it is equal to ``config``.

    Args:
        config: what to write.
        defaults: write every value of every name, instead of only what was written by the user.

    Raises:
        ConfigError: PyYAML is not installed.
    """
    try:
        import yaml
    except ImportError as error:
        raise ConfigError("writing YAML needs PyYAML; install it: pip install pyyaml") from error
    content = config.to_dict(defaults)
    header = f"# tpoverlap overlap options, tp_size {config.tp_size}, digest {config.digest}\n"
    if not content:
        return header + "# every name takes its defaults\n"
    return header + str(yaml.safe_dump(content, sort_keys=False, default_flow_style=False))
