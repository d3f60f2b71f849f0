"""The parameters of a binary as the driver takes them: one block of bytes, and where in it each argument lies.

Triton's own launch parses every argument and makes every tensor map again at every call. A block that is written once
needs a few stores and one call of the driver instead. What the block must look like follows from the signature, and is
compared with what the binary's PTX declares: a Triton that passes arguments otherwise is noticed, not guessed at.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

MAP_BYTES: Final = 128
"""A CUtensorMap."""
_CODES: Final = {"i1": "b", "i8": "b", "u8": "B", "i32": "i", "u32": "I", "i64": "q", "u64": "Q", "fp32": "f"}
_PTX_BYTES: Final = {"8": 1, "16": 2, "32": 4, "64": 8}
_DECLARED: Final = re.compile(
    r"\.param\s+(?:\.align\s+\d+\s+)?\.[busf](\d+)[^,\[]*?\w+_param_\d+(?:\[(\d+)\])?\s*(?=[,\n)])"
)


class LayoutError(ValueError):
    """A binary takes its parameters in another way than this module knows."""


@dataclass(frozen=True)
class ParameterLayout:
    """Where parameters lie.

    Attributes:
        places: of each argument that is passed: (offset, struct code); "" is a tensor map, which its shape and strides
            follow (offsets +128, 4 bytes each, then 8 bytes each).
        offsets: of every parameter, in the driver's order.
        size_bytes: of the block.
    """

    places: Mapping[str, tuple[int, str]]
    offsets: tuple[int, ...]
    size_bytes: int

    @classmethod
    def of(cls, signature: Mapping[str, Any], ptx: str) -> ParameterLayout:
        """From a binary's signature, checked against its PTX.

        Raises:
            LayoutError: they disagree.
        """
        places: dict[str, tuple[int, str]] = {}
        offsets: list[int] = []
        sizes: list[int] = []
        end = 0

        def add(size: int, alignment: int) -> int:
            nonlocal end
            offset = -(-end // alignment) * alignment
            offsets.append(offset)
            sizes.append(size)
            end = offset + size
            return offset

        for name, kind in signature.items():
            if not isinstance(kind, str):
                raise LayoutError(f"argument {name} has type {kind!r}")
            if kind == "constexpr":
                continue
            if kind.startswith("tensordesc"):
                places[name] = add(MAP_BYTES, 64), ""
                for size in (4, 4, 8, 8):  # two lengths, two strides
                    add(size, size)
                continue
            code = "Q" if kind.startswith("*") else _CODES.get(kind)
            if code is None:
                raise LayoutError(f"argument {name} has type {kind!r}")
            size = struct.calcsize(code)
            places[name] = add(size, size), code
        declared = declared_sizes(ptx)
        scratch = declared[len(sizes) :]
        if declared[: len(sizes)] != sizes or len(scratch) > 2 or any(size != 8 for size in scratch):
            raise LayoutError(f"the binary declares parameters of {declared} bytes, its signature means {sizes}")
        for _ in scratch:  # pointers to memory that no kernel of ours asks for
            add(8, 8)
        return cls(places, tuple(offsets), end)


def declared_sizes(ptx: str) -> list[int]:
    """Bytes of each parameter of the (one) entry of ``ptx``.

    Raises:
        LayoutError: it has none.
    """
    start = ptx.find(".entry")
    if start < 0:
        raise LayoutError("the binary's PTX has no entry")
    text = ptx[start : ptx.index("\n)", start) + 2]
    return [_PTX_BYTES[bits] * int(count or 1) for bits, count in _DECLARED.findall(text)]
