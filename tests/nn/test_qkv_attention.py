"""The one node from QKV to attention against split and packed attention; torch's operators against plain formulas."""

from __future__ import annotations

import pytest
import torch

from tpoverlap.nn import PackedSequences, RotaryTable, qkv_attention
from tpoverlap.nn.attention import packed_attention
from tpoverlap.nn.elementwise import HeadLayout
from tpoverlap.nn.split_qkv import split_qkv
from tpoverlap.testing.numeric import assert_close_to_twin

CPU = torch.device("cpu")
OFFSETS = (0, 5, 6, 13)
LAYOUT = HeadLayout(groups=2, per_group=2, head_dim=8)


def plain(
    mixed: torch.Tensor, table: RotaryTable | None, sequences: PackedSequences, causal: bool, layout: HeadLayout
) -> torch.Tensor:
    q, k, v = split_qkv(mixed, table, layout)
    return packed_attention(q, k, v, sequences, causal=causal).flatten(1)


def _reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: PackedSequences, causal: bool
) -> torch.Tensor:
    return packed_attention(q, k, v, sequences, causal=causal)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("turns", [True, False])
def test_one_node_is_split_and_attention(monkeypatch: pytest.MonkeyPatch, causal: bool, turns: bool) -> None:
    """Torch's operators are stood in for: what is saved and put together is checked here, their numbers on a GPU."""
    nothing = torch.empty(0)

    def forward(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: PackedSequences, causal: bool
    ) -> tuple[torch.Tensor, ...]:
        return _reference(q, k, v, sequences, causal).contiguous(), nothing + 1, nothing + 2, nothing + 3

    def backward(
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        found: tuple[torch.Tensor, ...],
        sequences: PackedSequences,
        causal: bool,
    ) -> tuple[torch.Tensor, ...]:
        assert len(found) == 4 and torch.equal(found[0], _reference(q, k, v, sequences, causal))
        with torch.enable_grad():
            inputs = [t.detach().requires_grad_() for t in (q, k, v)]
            return torch.autograd.grad(_reference(*inputs, sequences, causal), inputs, dout)

    monkeypatch.setattr(qkv_attention, "flash_forward", forward)
    monkeypatch.setattr(qkv_attention, "flash_backward", backward)
    monkeypatch.setattr(qkv_attention, "_takes_flash", lambda mixed, layout: True)
    torch.manual_seed(0)
    sequences = PackedSequences(OFFSETS, 13, CPU)
    table = sequences.rotary(8, 100.0) if turns else None
    mixed = torch.randn(13, LAYOUT.width, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(16 * 2, 13, dtype=torch.float64).t()  # not contiguous
    expected = plain(mixed, table, sequences, causal, LAYOUT)
    actual = qkv_attention.qkv_attention(mixed, table, LAYOUT, sequences, causal=causal)
    assert type(actual.grad_fn).__name__ == "_QkvAttentionBackward", "one node"
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(*(torch.autograd.grad(y, mixed, weight) for y in (actual, expected)))
    with torch.no_grad():
        unrecorded = qkv_attention.qkv_attention(mixed, table, LAYOUT, sequences, causal=causal)
    assert torch.equal(unrecorded, actual) and unrecorded.grad_fn is None


def test_the_operators_of_this_torch_are_as_expected() -> None:
    assert qkv_attention.operators_fit()


def test_the_table_is_made_once() -> None:
    sequences = PackedSequences(OFFSETS, 13, CPU)
    with torch.inference_mode():
        first = sequences.rotary(8, 100.0)
    assert sequences.rotary(8, 100.0) is first and not first.cos.is_inference()
    assert sequences.rotary(8, 200.0) is not first and sequences.rotary(4, 100.0).cos.shape == (13, 1, 2)
    expected = RotaryTable.of(sequences.positions, 8, 100.0)
    assert torch.equal(first.cos, expected.cos) and torch.equal(first.sin, expected.sin)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layout", [HeadLayout(2, 4, 64), HeadLayout(4, 1, 128), HeadLayout(1, 8, 80)], ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_on_a_gpu(dtype: torch.dtype, layout: HeadLayout, causal: bool) -> None:
    device = torch.device("cuda", 0)
    offsets = (0, 5, 6, 130, 389)
    torch.manual_seed(0)
    whole = torch.randn(389, layout.width, dtype=torch.float64)
    weight = torch.randn(389, layout.groups * layout.per_group * layout.head_dim, dtype=torch.float64)
    given = whole.to(dtype)
    exact = given.double().requires_grad_()
    on_host = PackedSequences(offsets, 389, CPU)
    on_device = PackedSequences(offsets, 389, device)
    reference = plain(exact, on_host.rotary(layout.head_dim, 1e4), on_host, causal, layout)
    (reference_grad,) = torch.autograd.grad(reference, exact, weight.to(dtype).double())
    results = []
    for one_node in (True, False):
        mixed = given.to(device).requires_grad_()
        table = on_device.rotary(layout.head_dim, 1e4)
        if one_node:
            y = qkv_attention.qkv_attention(mixed, table, layout, on_device, causal=causal)
            assert type(y.grad_fn).__name__ == "_QkvAttentionBackward"
        else:
            y = plain(mixed, table, on_device, causal, layout)
        (grad,) = torch.autograd.grad(y, mixed, weight.to(device, dtype))
        results.append((y.detach().cpu(), grad.cpu()))
    for index, exact_one in enumerate((reference.detach(), reference_grad)):
        assert_close_to_twin(results[0][index], results[1][index], exact_one, what=f"{layout} {index}")
