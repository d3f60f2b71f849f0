"""What an operation tells its peers before its first flag: two 64-bit words, so that one compare settles each.

::

    record  | sequence number (16 bit) | operation id (16 bit) | T (32 bit) |
    digest  | 64-bit hash of row counts, dtype, region, epoch and method options |

`record` says what to print when ranks disagree; `digest` catches what it has no room for. A waiter compares both
before it consumes anything (a stream wait for equality on the GPU, a Python compare on the CPU).
"""

from __future__ import annotations

import zlib
from functools import lru_cache

MASK16 = 0xFFFF
_MASK32 = 0xFFFFFFFF
MASK64 = 0xFFFFFFFFFFFFFFFF
CLOSE = "close"
"""Label of a rank's last operation, which has no T."""
CLOSES = "closes its manager"


@lru_cache(maxsize=1024)
def operation_id(label: str) -> int:
    """A 16-bit id of an operation's label that is the same in every process (``hash(str)`` is not) and never 0."""
    return (zlib.crc32(label.encode()) % MASK16) + 1


class Descriptor:
    """One rank's operation: position in its order of operations, label, T, and the digest of the rest.

    Attributes:
        record: the first word; never 0, because an operation id is not.
        digest: the second one.
    """

    __slots__ = ("digest", "label", "num_tokens", "record", "sequence")

    def __init__(self, sequence: int, label: str, num_tokens: int, digest: int) -> None:
        self.sequence = sequence
        self.label = label
        self.num_tokens = num_tokens
        self.digest = digest
        self.record = ((sequence & MASK16) << 48) | (operation_id(label) << 32) | (num_tokens & _MASK32)


@lru_cache(maxsize=1024)
def text_hash(text: str) -> int:
    """The same in every process."""
    return zlib.crc32(text.encode())


def digest64(*parts: int) -> int:
    """Hash of integers. Python's hash of a tuple of integers does not depend on the process or on PYTHONHASHSEED."""
    return hash(parts) & MASK64


def sequence_matches(record: int, sequence: int) -> bool:
    """Whether ``record`` was written for operation number ``sequence`` (and is not the one 64 operations before)."""
    return record != 0 and (record >> 48) == (sequence & MASK16)


def describe(record: int, labels: dict[int, str]) -> str:
    """A peer's record in words; ``labels`` maps operation ids to the labels known here."""
    identifier = (record >> 32) & MASK16
    label = labels.get(identifier, f"an operation unknown here (id {identifier:#06x})")
    return CLOSES if label == CLOSE else f"{label} with T={record & _MASK32}"
