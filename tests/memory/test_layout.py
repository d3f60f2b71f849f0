"""Byte arithmetic of an arena: nothing overlaps, everything is aligned and inside, and 2 GiB is no border."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tpoverlap import CapacityError, memory_estimate
from tpoverlap.memory.layout import (
    ALIGNMENT_BYTES,
    DESCRIPTOR_BYTES,
    DESCRIPTOR_RING,
    MAX_PIECES,
    SLOT_DEPTH,
    WORD_BYTES,
    ArenaLayout,
    RegionSpec,
    align_up,
    gather_slot_bytes,
    require_fits,
    scatter_slot_bytes,
)

MIB = 1 << 20
slot_bytes = st.one_of(st.integers(0, 5000), st.integers(1 << 31, 1 << 40))
layouts = st.builds(
    lambda tp_size, sizes: ArenaLayout(tp_size, tuple(RegionSpec(f"r{i}", size) for i, size in enumerate(sizes))),
    st.integers(1, 8),
    st.lists(slot_bytes, max_size=4),
)


def _control_words(layout: ArenaLayout) -> list[tuple[int, int, str]]:
    """(first byte, size, name) of every control word."""
    ranks = range(layout.tp_size)
    words = [
        (layout.descriptor_offset(source, sequence), DESCRIPTOR_BYTES, f"descriptor {source} {sequence}")
        for source in ranks
        for sequence in range(DESCRIPTOR_RING)
    ]
    words += [(layout.abort_offset(source), WORD_BYTES, f"abort {source}") for source in ranks]
    for region, spec in enumerate(layout.regions):
        for slot in range(spec.depth):
            for rank in ranks:
                words.append((layout.credit_offset(region, slot, rank), WORD_BYTES, f"credit {region} {slot} {rank}"))
                words += [
                    (layout.arrival_offset(region, slot, rank, piece), WORD_BYTES, f"arrival {rank} {piece}")
                    for piece in range(MAX_PIECES)
                ]
    return words


@settings(max_examples=30)
@given(layouts)
def test_nothing_overlaps_and_everything_is_inside(layout: ArenaLayout) -> None:
    words = _control_words(layout)
    slots = [
        (layout.slot_offset(region, slot), spec.slot_bytes, f"slot {region} {slot}")
        for region, spec in enumerate(layout.regions)
        for slot in range(spec.depth)
    ]
    assert all(offset % size == 0 for offset, size, _ in words), "a word is written in one piece only where aligned"
    assert all(offset % ALIGNMENT_BYTES == 0 for offset, _, _ in slots)
    assert all(offset >= layout.control_bytes for offset, _, _ in slots)
    assert all(offset + size <= layout.control_bytes for offset, size, _ in words)
    for before, after in zip(sorted(words + slots), sorted(words + slots)[1:], strict=False):
        assert before[0] + before[1] <= after[0], f"{before} and {after} overlap"
    assert max((offset + size for offset, size, _ in words + slots), default=0) <= layout.total_bytes
    assert layout.total_bytes % ALIGNMENT_BYTES == 0 and layout.control_bytes % ALIGNMENT_BYTES == 0


@given(layouts, st.integers(0, 1 << 40))
def test_a_descriptor_entry_is_used_again_after_a_whole_ring(layout: ArenaLayout, sequence: int) -> None:
    entries = {layout.descriptor_offset(0, sequence + later) for later in range(DESCRIPTOR_RING)}
    assert len(entries) == DESCRIPTOR_RING
    assert layout.descriptor_offset(0, sequence + DESCRIPTOR_RING) == layout.descriptor_offset(0, sequence)


@given(st.integers(0, 1 << 45), st.sampled_from([1, 16, 256, 4096]))
def test_align_up(size_bytes: int, alignment_bytes: int) -> None:
    aligned = align_up(size_bytes, alignment_bytes)
    assert aligned % alignment_bytes == 0 and 0 <= aligned - size_bytes < alignment_bytes


def test_large_buffers() -> None:
    """Issue item 14: more than 2**31 elements and more than 2 GiB a slot, by arithmetic alone."""
    capacity, width, tp_size = 400_000, 16384, 8
    gather = gather_slot_bytes(capacity, width, 2)
    scatter = scatter_slot_bytes(capacity // tp_size, width, 2, tp_size)
    assert capacity * width > 1 << 32 and gather == 13_107_200_000 and scatter == gather * 7 // 8
    layout = ArenaLayout(tp_size, (RegionSpec("ag", gather), RegionSpec("rs", scatter)))
    assert layout.slot_offset(0, 1) - layout.slot_offset(0, 0) == gather
    assert layout.slot_offset(1, 0) - layout.slot_offset(0, 0) == SLOT_DEPTH * gather > 1 << 34
    assert layout.total_bytes == layout.slot_offset(1, 1) + scatter
    assert layout.total_bytes == memory_estimate((capacity, width), tp_size)["symmetric_bytes"]


def test_indices_outside_are_refused() -> None:
    layout = ArenaLayout(2, (RegionSpec("ag", 100),))
    with pytest.raises(AssertionError, match=r"slots 0\.\.1"):
        layout.slot_offset(0, SLOT_DEPTH)
    with pytest.raises(AssertionError, match="has no flag"):
        layout.arrival_offset(0, 0, 0, MAX_PIECES)
    require_fits(100, 100, "x")
    with pytest.raises(CapacityError, match="x needs 101 bytes but its slot holds 100"):
        require_fits(101, 100, "x")


@pytest.mark.parametrize("tp_size", range(2, 9))
@pytest.mark.parametrize(
    ("capacity", "width"), [(8192, 8192), (8192, 4096), (16384, 4096), (2048, 256), (8191, 5120), (1000, 7)]
)
def test_memory_for_all_names(capacity: int, width: int, tp_size: int) -> None:
    """The issue's bound: all twelve names at bf16 in 8 C H bytes + 1 MiB; Transformer Engine takes 24 C H."""
    estimate = memory_estimate((capacity, width), tp_size)
    assert estimate["symmetric_bytes"] <= 8 * capacity * width + MIB
    assert estimate["symmetric_bytes"] > 4 * capacity * width, "two slots of [C, H] for the all-gather alone"
    assert estimate["transformer_engine_bytes"] == 24 * capacity * width
    assert estimate["regions"].keys() == {"ag", "rs"}
    assert estimate["regions"]["ag"] == SLOT_DEPTH * 2 * capacity * width
    assert estimate["control_bytes"] + sum(estimate["regions"].values()) <= estimate["symmetric_bytes"]


def test_estimate_follows_dtype_and_rows() -> None:
    bf16, fp32 = (memory_estimate((4096, 1024), 4, dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
    assert fp32["regions"]["ag"] == 2 * bf16["regions"]["ag"] and fp32["control_bytes"] == bf16["control_bytes"]
    lopsided = memory_estimate((4096, 1024), 4, max_rows_per_rank=4096)
    assert lopsided["regions"]["rs"] == 4 * bf16["regions"]["rs"]
    alone = memory_estimate((4096, 1024), 1)
    assert alone["symmetric_bytes"] == 0 and alone["regions"] == {}
