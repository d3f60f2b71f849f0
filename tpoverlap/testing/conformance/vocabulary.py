"""Item 6 of the layers issue: vocabulary-parallel embedding, head and cross-entropy against plain torch.

Rank functions, as in `gemms`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from tpoverlap.nn.cross_entropy import vocab_parallel_cross_entropy
from tpoverlap.nn.vocab import VocabParallelEmbedding, VocabParallelHead
from tpoverlap.testing.conformance import plain
from tpoverlap.testing.conformance.comparison import Comparison
from tpoverlap.testing.conformance.setting import Setting, said
from tpoverlap.tokens import TokenPartition

IGNORED = -100


def check_vocabulary(rank: int, size: int, setting: Setting, tied: bool = False) -> dict[str, Any]:
    """Tokens -> embedding -> head -> loss and back, V not divisible by R; ``tied``: one table for both ends."""
    comparison, vocab_size = Comparison(), 5 * size + 1
    with setting.open_manager(rank) as manager:
        if not tied:  # else the names stay unregistered
            manager.register("embedding", width=setting.hidden)
            manager.register("lm_head", width=setting.hidden)
        embedding = VocabParallelEmbedding(vocab_size, setting.hidden, manager=manager)
        head = VocabParallelHead(setting.hidden, vocab_size, manager=manager, weight=embedding.weight if tied else None)
        tables = [setting.draw(rank, (vocab_size, setting.hidden), "table", i, scale=0.3) for i in range(2 - tied)]
        own = TokenPartition.balanced(vocab_size, size).rows(rank)
        with torch.no_grad():
            embedding.weight.copy_(tables[0][own])
            head.weight.copy_(tables[-1][own])
        for turn, partition in enumerate(setting.partitions(size)):
            comparison.where = f"rank {rank}, tied {tied}, T={partition.total} {list(partition.counts)}"
            rows, num_tokens = partition.rows(rank), partition.total
            generator = torch.Generator().manual_seed(turn)
            tokens, targets = (
                torch.randint(vocab_size, (num_tokens,), generator=generator).to(embedding.weight.device)
                for _ in range(2)
            )
            targets[turn % 3 :: 3] = IGNORED
            embedding.zero_grad(set_to_none=True)
            head.zero_grad(set_to_none=True)
            how = 4 * turn + turn % 3  # T cannot be inferred from a rank's rows: not all are equal
            with said(manager, partition, how) as explicit:
                x = embedding(tokens, explicit)
                logits = head(x, explicit)
            losses = vocab_parallel_cross_entropy(logits, targets, vocab_size, manager)
            comparison.same("x", x, tables[0][tokens][rows])
            weights = setting.draw(rank, (num_tokens,), "weights", turn).float()
            (losses * weights).sum().backward()
            mean = vocab_parallel_cross_entropy(
                logits.detach(), targets, vocab_size, manager, ignore_index=IGNORED, reduction="mean"
            )
            counted = int((targets != IGNORED).sum())
            comparison.true("the mean is over what counts", counted == 0 or bool(mean.isfinite()))
            twin, reference = (
                _plain([t.to(dtype).requires_grad_() for t in tables], tokens, targets, weights, size)
                for dtype in (setting.dtype, setting.reference_dtype)
            )
            comparison.close("losses", losses.detach().double(), twin[0].double(), reference[0].double())
            comparison.close("logits", logits.detach(), twin[1][:, own], reference[1][:, own])
            for name, table, expected, wanted in zip(
                ("d embedding", "d head"), (embedding.weight, head.weight), twin[2], reference[2], strict=False
            ):
                comparison.close(name, table.grad, expected[own], wanted[own])
            manager.check()
    return comparison.summary()


def _plain(
    tables: list[torch.Tensor], tokens: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor, size: int
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """(losses [T], logits [T, V], gradients of the tables); dx summed over the ranks' parts of the vocabulary."""
    vocab_size, shards = tables[0].shape[0], TokenPartition.balanced(tables[0].shape[0], size)
    x = F.embedding(tokens, tables[0])
    copies = plain.fan_out(x, size)
    logits = torch.cat([plain.linear(c, tables[-1][shards.rows(q)], None) for q, c in enumerate(copies)], dim=1)
    wide = torch.promote_types(logits.dtype, torch.float32)
    losses = F.cross_entropy(logits.to(wide), targets, ignore_index=IGNORED, reduction="none")
    assert losses.shape == weights.shape and logits.shape[1] == vocab_size, "one loss a row"
    grads = torch.autograd.grad((losses * weights.to(wide)).sum(), tables)
    return losses.detach(), logits.detach(), list(grads)
