"""The same decoder in one process, in plain torch without tensor parallelism: for ``--check-reference``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpoverlap.tools.train.attention import packed_causal_attention, rotary_table
from tpoverlap.tools.train.batching import StepPlan
from tpoverlap.tools.train.fp8 import Fp8Linears
from tpoverlap.tools.train.packing import IGNORED_TARGET, PackedBatch, pack
from tpoverlap.tools.train.weights import ModelConfig


class ReferenceDecoder(nn.Module):
    """tokens [T] -> logits [T, V]. Parameters carry the names of `weights.full_weights`, "." replaced by "/"."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor], fp8: Fp8Linears | None = None) -> None:
        super().__init__()
        self.config, self._fp8 = config, fp8
        self.weights = nn.ParameterDict({name.replace(".", "/"): nn.Parameter(w) for name, w in weights.items()})

    def named_weights(self) -> dict[str, nn.Parameter]:
        """Parameters under the names of `weights.full_weights`."""
        return {name.replace("/", "."): parameter for name, parameter in self.weights.items()}

    def forward(self, batch: PackedBatch) -> Tensor:
        """Logits [T, V]."""
        w, config = self.named_weights(), self.config
        rotary = rotary_table(batch, config.head_dim, config.rope_base)
        x = F.embedding(batch.tokens, w["embedding"])
        for i in range(config.layers):
            layer = f"layers.{i}."
            h = F.rms_norm(x, (config.hidden,), w[layer + "attention_norm"], config.norm_eps)
            qkv = self._linear(h, layer + "qkv")[0].view(-1, 3, config.heads, config.head_dim)
            attended = packed_causal_attention(
                rotary.rotate(qkv[:, 0]), rotary.rotate(qkv[:, 1]), qkv[:, 2], batch.cu_seqlens
            )
            x = x + self._linear(attended.flatten(1), layer + "proj")[0]
            h = F.rms_norm(x, (config.hidden,), w[layer + "mlp_norm"], config.norm_eps)
            gate, up = self._linear(h, layer + "gate", layer + "up")
            x = x + self._linear(F.silu(gate) * up, layer + "down")[0]
        return F.linear(F.rms_norm(x, (config.hidden,), w["norm"], config.norm_eps), w["head"])

    def _linear(self, x: Tensor, *names: str) -> tuple[Tensor, ...]:
        weights = self.named_weights()
        if self._fp8 is not None:
            return self._fp8(x, weights, *names)
        return tuple(F.linear(x, weights[name]) for name in names)


@dataclass(frozen=True)
class ReferenceRun:
    """Loss at every step, and the first step's gradient of every weight (float32, on the CPU)."""

    losses: tuple[float, ...]
    first_gradients: dict[str, Tensor]


def run_reference(
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    steps: Sequence[StepPlan],
    *,
    device: torch.device,
    dtype: torch.dtype,
    learning_rate: float,
    microbatches: int = 1,
    fp8: Fp8Linears | None = None,
    on_step: Callable[[int], None] = lambda step: None,
) -> ReferenceRun:
    """Train on ``steps`` from ``weights`` and return what the TP run must reproduce.

    ``microbatches`` of ``steps`` make one step of the optimizer; their gradients add up one after another.
    ``fp8``: runs the layers' GEMMs (not the head), in the order of the microbatches.
    """
    model = ReferenceDecoder(config, {name: w.detach().clone() for name, w in weights.items()}, fp8).to(device, dtype)
    optimizer = make_optimizer(list(model.parameters()), learning_rate)
    losses: list[float] = []
    gradients: dict[str, Tensor] = {}
    for index in range(len(steps) // microbatches):
        group = steps[index * microbatches : (index + 1) * microbatches]
        batches = [pack(step.documents).to(device) for step in group]
        num_targets, total = sum(batch.num_targets for batch in batches), 0.0
        optimizer.zero_grad(set_to_none=True)
        for batch in batches:
            loss = token_loss_sum(model(batch), batch.targets) / num_targets
            loss.backward()
            total += loss.item()
        if index == 0:
            gradients = gradients_on_cpu(model.named_weights())
        optimizer.step()
        losses.append(total)
        on_step(index)
    return ReferenceRun(tuple(losses), gradients)


def token_loss_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum of the cross entropies (nats, float32) of rows [n, V] with a target [n]; 0 for n = 0."""
    return F.cross_entropy(logits.float(), targets, ignore_index=IGNORED_TARGET, reduction="sum")


def make_optimizer(parameters: Sequence[nn.Parameter], learning_rate: float) -> torch.optim.Optimizer:
    """AdamW, the same for the TP ranks and the reference."""
    return torch.optim.AdamW(parameters, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)


def gradients_on_cpu(named_weights: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Gradient of every weight as float32 on the CPU, zeros where there is none."""
    return {
        name: torch.zeros_like(w, dtype=torch.float32, device="cpu") if w.grad is None else w.grad.float().cpu().clone()
        for name, w in named_weights.items()
    }
