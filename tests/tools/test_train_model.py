"""Packing, weights, attention and the reference model against plainer ways to say the same."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tpoverlap.errors import ConfigError
from tpoverlap.tokens import TokenPartition
from tpoverlap.tools.train.attention import packed_causal_attention, rotary_table
from tpoverlap.tools.train.batching import StepPlan
from tpoverlap.tools.train.packing import IGNORED_TARGET, pack
from tpoverlap.tools.train.reference import ReferenceDecoder, run_reference, token_loss_sum
from tpoverlap.tools.train.weights import ModelConfig, full_weights, is_replicated, shard, unshard

SMALL = ModelConfig(hidden=32, layers=2, heads=4, ffn=24)


def test_pack_gives_next_bytes_within_each_document() -> None:
    batch = pack([b"abc", b"xy"])
    assert bytes(batch.tokens.tolist()) == b"abcxy"
    assert batch.targets.tolist() == [ord("b"), ord("c"), IGNORED_TARGET, ord("y"), IGNORED_TARGET]
    assert batch.positions.tolist() == [0, 1, 2, 0, 1]
    assert (batch.cu_seqlens, batch.num_targets, batch.num_sequences) == ((0, 3, 5), 3, 2)
    assert pack([b"\xff\x00"]).tokens.tolist() == [255, 0]


def test_padding_adds_rows_without_targets() -> None:
    padded = pack([b"abc"]).padded_to(7)
    assert padded.num_tokens == 7 and padded.cu_seqlens == (0, 3) and padded.num_targets == 2
    assert padded.targets[3:].tolist() == [IGNORED_TARGET] * 4


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_shards_put_together_are_the_whole(tp_size: int) -> None:
    for name, full in full_weights(SMALL, seed=3).items():
        shards = [shard(name, full, rank, tp_size) for rank in range(tp_size)]
        assert torch.equal(unshard(name, shards), full)
        assert all(s.is_contiguous() for s in shards)
        assert shards[0].numel() * (1 if is_replicated(name) else tp_size) == full.numel()


def test_qkv_shard_holds_whole_heads_of_q_k_and_v() -> None:
    full = torch.arange(3 * 32).float()[:, None].expand(-1, 32)
    rows = shard("layers.0.qkv", full, rank=1, tp_size=4)[:, 0].view(3, 8)
    assert rows.tolist() == [[part * 32 + 8 + i for i in range(8)] for part in range(3)]


def test_weights_depend_on_the_seed_alone() -> None:
    first, second, other = full_weights(SMALL, 1), full_weights(SMALL, 1), full_weights(SMALL, 2)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["head"], other["head"])


@pytest.mark.parametrize(
    ("config", "tp_size", "message"),
    [
        (ModelConfig(hidden=30), 2, "hidden=30 gives heads=8"),
        (ModelConfig(hidden=24, heads=8), 2, "hidden=24 gives heads=8"),  # 3 features a head: RoPE needs pairs
        (ModelConfig(), 3, "heads=8 is not divisible by tp_size=3.*--heads 9"),
        (ModelConfig(ffn=690), 4, "ffn=690 is not divisible by tp_size=4.*--ffn 692"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(config: ModelConfig, tp_size: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config.validate(tp_size)


def test_packed_attention_is_masked_attention_with_a_block_diagonal_causal_mask() -> None:
    torch.manual_seed(0)
    cu_seqlens = (0, 5, 6, 13)
    q, k, v = (torch.randn(13, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    rows = torch.arange(13)
    sequence = torch.bucketize(rows, torch.tensor(cu_seqlens[1:]), right=True)
    mask = (sequence[:, None] == sequence[None, :]) & (rows[:, None] >= rows[None, :])
    scores = torch.einsum("qhd,khd->hqk", q, k) / 4**0.5
    expected = torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, -torch.inf).softmax(-1), v)
    actual = packed_causal_attention(q, k, v, cu_seqlens)
    torch.testing.assert_close(actual, expected)
    weight = torch.randn_like(actual)
    for a, e in zip(
        torch.autograd.grad(actual, (q, k, v), weight), torch.autograd.grad(expected, (q, k, v), weight), strict=True
    ):
        torch.testing.assert_close(a, e)


def test_attention_gives_padding_rows_zeros_and_others_nothing_of_them() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(9, 2, 4) for _ in range(3))
    out = packed_causal_attention(q, k, v, (0, 4, 6))
    assert torch.equal(out[6:], torch.zeros(3, 2, 4))
    torch.testing.assert_close(out[:6], packed_causal_attention(q[:6], k[:6], v[:6], (0, 4, 6)))


def test_rotary_positions_restart_and_scores_depend_on_distance_alone() -> None:
    batch = pack([b"abcdefgh", b"abcdefgh"])
    table = rotary_table(batch, head_dim=8, base=100.0)
    assert torch.equal(table.cos[:8], table.cos[8:])
    torch.manual_seed(0)
    a, b = torch.randn(1, 1, 8, dtype=torch.float32), torch.randn(1, 1, 8)
    rotated_a, rotated_b = table.rotate(a.expand(16, 1, 8)), table.rotate(b.expand(16, 1, 8))
    scores = (rotated_a[3:8, 0] * rotated_b[0:5, 0]).sum(-1)  # always three apart
    torch.testing.assert_close(scores, scores[:1].expand(5))
    assert not torch.allclose((rotated_a[3:8, 0] * rotated_b[1:6, 0]).sum(-1), scores)


def test_documents_do_not_see_each_other_nor_the_future() -> None:
    model = ReferenceDecoder(SMALL, full_weights(SMALL, 0))
    alone, together = model(pack([b"hello world"])), model(pack([b"first one", b"hello world"]))
    torch.testing.assert_close(together[9:], alone, atol=1e-5, rtol=1e-4)
    changed = model(pack([b"hello worlX"]))
    torch.testing.assert_close(changed[:10], alone[:10], atol=1e-6, rtol=1e-5)
    assert not torch.allclose(changed[10], alone[10], atol=1e-3)


def test_loss_ignores_masked_rows_and_takes_none() -> None:
    logits = torch.randn(3, 256)
    targets = torch.tensor([5, IGNORED_TARGET, 7])
    expected = F.cross_entropy(logits[[0, 2]], targets[[0, 2]], reduction="sum")
    torch.testing.assert_close(token_loss_sum(logits, targets), expected)
    assert token_loss_sum(logits[:0], targets[:0]).item() == 0.0


def test_reference_learns_and_leaves_the_given_weights_alone() -> None:
    documents = (b"the same words again and again, the same words again",)
    steps = [StepPlan(documents, TokenPartition.balanced(len(documents[0]), 2), False)] * 8
    weights = full_weights(SMALL, 0)
    before = {name: w.clone() for name, w in weights.items()}
    seen: list[int] = []
    run = run_reference(
        SMALL,
        weights,
        steps,
        device=torch.device("cpu"),
        dtype=torch.float32,
        learning_rate=1e-2,
        on_step=seen.append,
    )
    assert run.losses[0] == pytest.approx(5.55, abs=0.1)  # log(256): nothing known yet
    assert run.losses[-1] < 0.7 * run.losses[0]
    assert seen == list(range(8))
    assert all(torch.equal(weights[name], before[name]) for name in weights)
    assert run.first_gradients.keys() == weights.keys()
    assert all(gradient.abs().max() > 0 for gradient in run.first_gradients.values())
