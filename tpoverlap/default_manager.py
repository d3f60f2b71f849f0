"""The default manager: what layers use that were given none, as Transformer Engine's layers do.

The only module-level state of the package. `tpoverlap.te` sets it; everything else takes a manager.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpoverlap.errors import ConfigError, NotInitializedError

if TYPE_CHECKING:
    from tpoverlap.manager import UserBufferManager

_default: list[UserBufferManager] = []


def has_default_manager() -> bool:
    """Whether there is one."""
    return bool(_default)


def default_manager() -> UserBufferManager:
    """The default manager. Raises NotInitializedError where there is none."""
    if not _default:
        raise NotInitializedError("call tpoverlap.te.initialize_ub(shape, tp_size, ...) first, or pass manager=")
    return _default[0]


def set_default_manager(manager: UserBufferManager) -> None:
    """Make ``manager`` the default. Raises ConfigError if there is one."""
    if _default:
        raise ConfigError("initialize_ub was called twice: call destroy_ub() first")
    _default.append(manager)


def close_default_manager() -> None:
    """Close and forget it. Collective; nothing happens when there is none."""
    while _default:
        _default.pop().close()
