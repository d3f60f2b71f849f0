"""32-bit epochs that are never reset and survive wrap-around."""

MASK = 0xFFFFFFFF
_HALF = 0x80000000


def wrap32(value: int) -> int:
    """``value`` as it is stored in a 32-bit flag."""
    return value & MASK


def reached(flag: int, epoch: int) -> bool:
    """Whether a stored ``flag`` is at ``epoch`` or later, by cyclic comparison.

    A plain ``>=`` would hang for ever once the epoch wraps past 2**32. This is also what the GPU's stream wait does
    (CU_STREAM_WAIT_VALUE_GEQ), so both devices agree.
    """
    return ((flag - epoch) & MASK) < _HALF
