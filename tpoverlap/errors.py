"""The exceptions of tpoverlap.

::

    TpOverlapError(Exception)
    ├── ConfigError(ValueError)                an option or a combination of options is illegal
    ├── ActiveShapeError(ValueError)           an active shape, partition or input tensor is wrong
    │   └── CapacityError                      ... because it does not fit the registered capacity
    ├── RankMismatchError                      ranks disagree on T, on the operation or on its order
    ├── PeerTimeoutError(TimeoutError)         a peer died, raised or did not answer in time
    ├── BackendUnavailableError(RuntimeError)  this machine, device or build cannot do it
    └── NotInitializedError(RuntimeError)      used before initialisation or after close

Every message states the values that disagree and what to do about it. `ConfigError`, `ActiveShapeError` and
`CapacityError` are raised before any rank waits for another and leave the manager usable. `RankMismatchError` and
`PeerTimeoutError` end the manager: its later calls raise the same error again, and only ``close()`` is of use. (Set-up
compares arguments: a `RankMismatchError` from the constructor leaves no manager, one from ``register()`` changes none.)
"""


class TpOverlapError(Exception):
    """Base of every exception that tpoverlap raises on purpose."""


class ConfigError(TpOverlapError, ValueError):
    """An overlap option, or a combination of options, is not legal."""


class ActiveShapeError(TpOverlapError, ValueError):
    """An active shape, a token partition or an input tensor contradicts the others."""


class CapacityError(ActiveShapeError):
    """More rows or bytes than were registered."""


class RankMismatchError(TpOverlapError):
    """The ranks of the group disagree on T, on the operation or on the order of operations."""


class PeerTimeoutError(TpOverlapError, TimeoutError):
    """A peer died, raised inside an operation, or did not answer within ``timeout_s``.

    ``peer`` is the rank it started with, where that is known: not one that only gave up waiting for another.
    """

    peer: int | None = None


class BackendUnavailableError(TpOverlapError, RuntimeError):
    """What was asked for does not work on this machine, device or build of torch."""


class NotInitializedError(TpOverlapError, RuntimeError):
    """Used before it was initialised, or after it was closed."""
