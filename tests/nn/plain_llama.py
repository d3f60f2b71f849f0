"""Llama in plain torch, on a dict of Hugging Face's tensor names: the reference of `test_weights_llama`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.manager.ranks import seeded

HIDDEN, FFN, HEADS, GROUPS, HEAD_DIM, VOCAB, LAYERS = 16, 24, 12, 6, 4, 11, 2
ROPE_THETA, EPS = 500.0, 1e-5


def checkpoint(*, tied: bool = False) -> dict[str, Tensor]:
    """Every tensor of a small Llama, whole."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    if not tied:
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    for layer in range(LAYERS):
        for name, shape in {
            "input_layernorm": (HIDDEN,),
            "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
            "self_attn.k_proj": (GROUPS * HEAD_DIM, HIDDEN),
            "self_attn.v_proj": (GROUPS * HEAD_DIM, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
            "post_attention_layernorm": (HIDDEN,),
            "mlp.gate_proj": (FFN, HIDDEN),
            "mlp.up_proj": (FFN, HIDDEN),
            "mlp.down_proj": (HIDDEN, FFN),
        }.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
    return {name: seeded(*shape, seed=50 + number) for number, (name, shape) in enumerate(shapes.items())}


def logits(tensors: Mapping[str, Tensor], sequences: Sequence[Tensor]) -> Tensor:
    """[T, V] of the sequences one behind the other, each run for itself."""
    return torch.cat([_one_sequence(tensors, tokens) for tokens in sequences])


def _one_sequence(tensors: Mapping[str, Tensor], tokens: Tensor) -> Tensor:
    x = tensors["model.embed_tokens.weight"][tokens]
    angles = torch.outer(torch.arange(len(tokens)).float(), ROPE_THETA ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM))
    angles = torch.cat([angles, angles], 1)
    for number in range(LAYERS):
        weights = {
            name.removeprefix(f"model.layers.{number}."): value
            for name, value in tensors.items()
            if name.startswith(f"model.layers.{number}.")
        }
        x = x + _attention(weights, F.rms_norm(x, (HIDDEN,), weights["input_layernorm.weight"], EPS), angles)
        h = F.rms_norm(x, (HIDDEN,), weights["post_attention_layernorm.weight"], EPS)
        gated = F.silu(h @ weights["mlp.gate_proj.weight"].t()) * (h @ weights["mlp.up_proj.weight"].t())
        x = x + gated @ weights["mlp.down_proj.weight"].t()
    x = F.rms_norm(x, (HIDDEN,), tensors["model.norm.weight"], EPS)
    return x @ tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"]).t()


def _attention(weights: Mapping[str, Tensor], x: Tensor, angles: Tensor) -> Tensor:
    def heads(name: str) -> Tensor:  # [heads, tokens, d]
        return (x @ weights[f"self_attn.{name}_proj.weight"].t()).view(len(x), -1, HEAD_DIM).transpose(0, 1)

    def turned(t: Tensor) -> Tensor:
        first, second = t[..., : HEAD_DIM // 2], t[..., HEAD_DIM // 2 :]
        return t * angles.cos() + torch.cat([-second, first], -1) * angles.sin()

    q, k, v = turned(heads("q")), turned(heads("k")), heads("v")
    k, v = (t.repeat_interleave(HEADS // GROUPS, 0) for t in (k, v))
    out = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
    return out.transpose(0, 1).flatten(1) @ weights["self_attn.o_proj.weight"].t()
