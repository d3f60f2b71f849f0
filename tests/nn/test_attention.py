"""Packed attention, positions and activations against plainer ways to say the same; every malformed ``cu_seqlens``."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tpoverlap.errors import ActiveShapeError, ConfigError
from tpoverlap.nn import PackedSequences, RotaryTable
from tpoverlap.nn.activation import PLAIN_ACTIVATIONS, activate, require_activation
from tpoverlap.nn.attention import packed_attention
from tpoverlap.nn.sequences import packed_sequences

CPU = torch.device("cpu")
OFFSETS = (0, 5, 6, 13)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_against_a_block_diagonal_mask(groups: int, causal: bool) -> None:
    torch.manual_seed(0)
    q = torch.randn(13, 4, 6, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(13, groups, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    rows = torch.arange(13)
    sequence = torch.bucketize(rows, torch.tensor(OFFSETS[1:]), right=True)
    mask = sequence[:, None] == sequence[None, :]
    if causal:
        mask &= rows[:, None] >= rows[None, :]
    keys, values = (t.repeat_interleave(4 // groups, dim=1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, keys) / 6**0.5
    expected = torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, -torch.inf).softmax(-1), values)
    actual = packed_attention(q, k, v, PackedSequences(OFFSETS, 13, CPU), causal=causal)
    torch.testing.assert_close(actual, expected)
    weight = torch.randn_like(actual)
    for a, e in zip(
        torch.autograd.grad(actual, (q, k, v), weight), torch.autograd.grad(expected, (q, k, v), weight), strict=True
    ):
        torch.testing.assert_close(a, e)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_positions_restart(dtype: torch.dtype) -> None:
    packed = PackedSequences(torch.tensor(OFFSETS, dtype=dtype), 13, CPU)
    assert packed.positions.tolist() == [0, 1, 2, 3, 4, 0, 0, 1, 2, 3, 4, 5, 6]
    assert packed.max_seqlen == 7 and packed.host_offsets == OFFSETS and packed.offsets.dtype == torch.int32
    assert PackedSequences([0, 3], 3, CPU).positions.tolist() == [0, 1, 2]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_tensor_of_offsets_may_be_filled_again(dtype: torch.dtype) -> None:
    """By the next microbatch, before this one's backward reads the offsets."""
    offsets = torch.tensor(OFFSETS, dtype=dtype)
    packed = packed_sequences(offsets, 13, CPU)
    offsets.copy_(torch.tensor([0, 1, 2, 13]))
    assert tuple(packed.offsets.tolist()) == packed.host_offsets == OFFSETS
    assert packed.positions.tolist() == [0, 1, 2, 3, 4, 0, 0, 1, 2, 3, 4, 5, 6]
    assert packed_sequences(offsets, 13, CPU).host_offsets == (0, 1, 2, 13)


def test_rotation_is_by_distance_and_keeps_the_dtype() -> None:
    table = RotaryTable.of(torch.arange(9), 8, 100.0)
    a, b = (torch.randn(1, 1, 8).expand(9, 1, 8) for _ in range(2))
    scores = (table.rotate(a)[3:, 0] * table.rotate(b)[:6, 0]).sum(-1)
    torch.testing.assert_close(scores, scores[:1].expand(6))
    assert table.rotate(a.bfloat16()).dtype == torch.bfloat16
    assert table.rotate(a.double()).dtype == torch.float64


@pytest.mark.parametrize(
    ("cu_seqlens", "max_seqlen", "message"),
    [
        ([0, 5, 12], None, r"ends at 12, but this microbatch has T=13"),
        ([0, 5, 14], None, r"ends at 14, but this microbatch has T=13"),
        ([1, 5, 13], None, r"must start at 0.*\[1, 5, 13\]"),
        ([0], None, "at least two entries"),
        ([0, 5, 5, 13], None, r"must increase: entry 1 is 5, entry 2 5"),
        ([0, 7, 6, 13], None, r"must increase: entry 1 is 7, entry 2 6"),
        ([0, 5, 13], 7, r"max_seqlen=7, but the longest sequence of cu_seqlens has 8"),
        (torch.tensor([0.0, 13.0]), None, "float32"),
        (torch.tensor([[0, 13]]), None, r"\[1, 2\]"),
    ],
    ids=str,
)
def test_malformed_offsets(cu_seqlens: object, max_seqlen: int | None, message: str) -> None:
    with pytest.raises(ActiveShapeError, match=message):
        PackedSequences(cu_seqlens, 13, CPU, max_seqlen)  # type: ignore[arg-type]
    if isinstance(cu_seqlens, list):
        with pytest.raises(ActiveShapeError, match=message):
            packed_sequences(torch.tensor(cu_seqlens), 13, CPU, max_seqlen)


def test_a_tensor_is_looked_at_once_until_it_changes() -> None:
    cu_seqlens = torch.tensor(OFFSETS)
    first = packed_sequences(cu_seqlens, 13, CPU)
    assert packed_sequences(cu_seqlens, 13, CPU) is first
    cu_seqlens[1] = 4
    assert packed_sequences(cu_seqlens, 13, CPU).host_offsets == (0, 4, 6, 13)
    with pytest.raises(ActiveShapeError, match="ends at 13, but this microbatch has T=14"):
        packed_sequences(cu_seqlens, 14, CPU)
    cu_seqlens.numpy()[1] = 3  # no new version: numpy may own the memory
    assert packed_sequences(cu_seqlens, 13, CPU).host_offsets == (0, 3, 6, 13)
    cu_seqlens.data[2] = 8
    assert packed_sequences(cu_seqlens, 13, CPU).host_offsets == (0, 3, 8, 13)
    with pytest.raises(ActiveShapeError, match="packed for T=13, but this microbatch has T=14"):
        packed_sequences(first, 14, CPU)
    with torch.inference_mode():
        assert packed_sequences(torch.tensor(OFFSETS), 13, CPU).max_seqlen == 7


@pytest.mark.parametrize(("name", "gate"), [("swiglu", "silu"), ("geglu", "gelu"), ("reglu", "relu")])
def test_gated_activations(name: str, gate: str) -> None:
    torch.manual_seed(0)
    h = torch.randn(5, 12, dtype=torch.float64, requires_grad=True)
    g, u = h.chunk(2, dim=-1)
    expected = PLAIN_ACTIVATIONS[gate](g) * u
    actual = activate(name, h)
    torch.testing.assert_close(actual, expected)
    weight = torch.randn_like(actual)
    torch.testing.assert_close(torch.autograd.grad(actual, h, weight), torch.autograd.grad(expected, h, weight))
    assert activate(name, h[:0]).shape == (0, 6)


def test_activations_by_name() -> None:
    h = torch.randn(3, 4)
    torch.testing.assert_close(activate("gelu", h), F.gelu(h, approximate="tanh"))
    torch.testing.assert_close(activate("srelu", h), F.relu(h) ** 2)
    with pytest.raises(ConfigError, match="activation='swigl' is not known; use one of gelu"):
        require_activation("swigl")
