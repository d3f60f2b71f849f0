"""Rank functions of `test_weights` and `test_weights_llama`."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

import tpoverlap as tpo
from tests.manager.ranks import WIDTH, make_manager, outcome_of, seeded
from tests.nn import plain_llama as llama
from tpoverlap.integrations.transformers import llama_tensors, load_llama
from tpoverlap.tokens import TokenPartition

VOCAB = 13  # divisible by neither 2 nor 3; at 3 ranks 5 + 4 + 4, where torch.chunk makes 5 + 5 + 3
FEATURES = 12
HEADS, GROUPS = 12, 6


class Everything(torch.nn.Module):
    """One of each way to be cut, with all biases; and a parameter of somebody else."""

    def __init__(self, manager: tpo.UserBufferManager, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        common: dict[str, Any] = {"manager": manager, "params_dtype": dtype}
        heads: dict[str, Any] = {"num_gqa_groups": GROUPS, "kv_channels": 4}
        self.column = tpo.nn.Linear(WIDTH, FEATURES, parallel_mode="column", ub_name="qkv", **common)
        self.row = tpo.nn.Linear(FEATURES, WIDTH, parallel_mode="row", ub_name="proj", **common)
        self.plain = tpo.nn.LayerNormMLP(WIDTH, FEATURES, **common)
        self.attention = tpo.nn.MultiheadAttention(WIDTH, HEADS, **heads, **common)
        self.layer = tpo.nn.TransformerLayer(WIDTH, FEATURES, HEADS, activation="swiglu", **heads, **common)
        self.embedding = tpo.nn.VocabParallelEmbedding(VOCAB, WIDTH, **common)
        self.head = tpo.nn.VocabParallelHead(WIDTH, VOCAB, **common)
        self.foreign = torch.nn.Parameter(seeded(3, seed=1).to(dtype))


def fill(model: Everything, seed: int = 70) -> dict[str, torch.Tensor]:
    """Load a full parameter of random numbers everywhere; returns them."""
    full: dict[str, torch.Tensor] = {}
    for number, (name, parameter) in enumerate(model.named_parameters()):
        if name != "foreign":
            owner = model.get_submodule(name.rpartition(".")[0])
            shape = owner.shard_specs[name.rpartition(".")[2]].full_shape
            full[name] = seeded(*shape, seed=seed + number, dtype=parameter.dtype)
            tpo.nn.load_full_weight(model, name, full[name])
    return full


def round_trip(rank: int, size: int) -> None:
    """Each rank holds what the documented layout says, and the full parameter comes back bit for bit."""
    for dtype in (torch.float32, torch.bfloat16):
        with make_manager() as manager:
            model = Everything(manager, dtype)
            full = fill(model)
            held = dict(model.named_parameters())
            rows, groups = FEATURES // size, GROUPS // size
            own = slice(rank * rows, (rank + 1) * rows)
            group = (HEADS // GROUPS + 2) * 4
            qkv = slice(rank * groups * group, (rank + 1) * groups * group)
            fc1 = full["layer.layernorm_mlp.fc1_weight"]
            fc1_bias = full["layer.layernorm_mlp.fc1_bias"]
            vocabulary = TokenPartition.balanced(VOCAB, size).rows(rank)
            expected = {
                "column.weight": full["column.weight"][own],
                "column.bias": full["column.bias"][own],
                "row.weight": full["row.weight"][:, own],
                "row.bias": full["row.bias"],
                "plain.layer_norm_bias": full["plain.layer_norm_bias"],
                "plain.fc1_weight": full["plain.fc1_weight"][own],
                "plain.fc2_weight": full["plain.fc2_weight"][:, own],
                "layer.layernorm_mlp.fc1_weight": torch.cat([fc1[:FEATURES][own], fc1[FEATURES:][own]]),
                "layer.layernorm_mlp.fc1_bias": torch.cat([fc1_bias[:FEATURES][own], fc1_bias[FEATURES:][own]]),
                "attention.qkv.weight": full["attention.qkv.weight"][qkv],
                "attention.qkv.bias": full["attention.qkv.bias"][qkv],
                "embedding.weight": full["embedding.weight"][vocabulary],
                "head.weight": full["head.weight"][vocabulary],
            }
            for name, value in expected.items():
                assert torch.equal(held[name], value), name
            for name, value in full.items():
                again = tpo.nn.full_weight(model, name)
                assert again.dtype == dtype and torch.equal(again, value), name


def wrong_calls(rank: int, size: int) -> dict[str, Any]:
    """What each wrong call says."""
    with make_manager() as manager:
        layer = tpo.nn.LayerNormMLP(WIDTH, FEATURES, manager=manager)
        before = layer.fc1_weight.clone()
        model = torch.nn.ModuleList([layer, torch.nn.Linear(2, 2)])
        meta = tpo.nn.LayerNormMLP(WIDTH, FEATURES, manager=manager, device="meta")
        biased = tpo.nn.TransformerLayer(WIDTH, FEATURES, HEADS, kv_channels=4, manager=manager)
        whole = torch.zeros(FEATURES, WIDTH)
        outcomes = {
            "shard": outcome_of(lambda: tpo.nn.load_full_weight(layer, "fc1_weight", whole[: FEATURES // size])),
            "name": outcome_of(lambda: tpo.nn.full_weight(layer, "fc1.weight")),
            "foreign": outcome_of(lambda: tpo.nn.full_weight(model, "1.weight")),
            "meta": outcome_of(lambda: tpo.nn.load_full_weight(meta, "fc1_weight", whole)),
            "not llama": outcome_of(lambda: load_llama({}, [biased])),
        }
        with_model = Llama(manager)
        held = [parameter.clone() for parameter in with_model.parameters()]
        for what, key, value in (
            ("missing", "model.layers.1.mlp.up_proj.weight", None),
            ("head", "lm_head.weight", None),
            ("misfit", "model.layers.1.self_attn.k_proj.weight", torch.zeros(4, WIDTH)),
            ("norm", "model.norm.weight", torch.zeros(4)),
        ):
            tensors = llama.checkpoint()
            del tensors[key]
            if value is not None:
                tensors[key] = value
            outcomes[what] = outcome_of(lambda tensors=tensors: with_model.load(tensors))
        # the meta layer's to_empty makes new parameters: what is known about them must survive that
        tpo.nn.load_full_weight(meta.to_empty(device="cpu"), "fc1_weight", whole)
        assert torch.equal(tpo.nn.full_weight(meta, "fc1_weight"), whole)
        assert torch.equal(layer.fc1_weight, before), "a refused call must leave the weight alone"
        for was, parameter in zip(held, with_model.parameters(), strict=True):
            assert torch.equal(was, parameter), "a refused checkpoint must be left unread"
        return outcomes


class Llama(torch.nn.Module):
    """`plain_llama` on tensor-parallel layers."""

    def __init__(self, manager: tpo.UserBufferManager, *, tied: bool = False) -> None:
        super().__init__()
        for name in ("embedding", "lm_head"):
            manager.register(name, width=llama.HIDDEN)
        self.embedding = tpo.nn.VocabParallelEmbedding(llama.VOCAB, llama.HIDDEN, manager=manager)
        self.layers = torch.nn.ModuleList(
            tpo.nn.TransformerLayer(
                llama.HIDDEN, llama.FFN, llama.HEADS, llama.GROUPS, kv_channels=llama.HEAD_DIM, manager=manager,
                layernorm_epsilon=llama.EPS, normalization="RMSNorm", activation="swiglu", bias=False,
                rotary_base=llama.ROPE_THETA,
            )
            for _ in range(llama.LAYERS)
        )  # fmt: skip
        self.norm = torch.nn.Parameter(torch.ones(llama.HIDDEN))  # what is uninitialised may be NaN, equal to nothing
        weight = self.embedding.weight if tied else None
        self.head = tpo.nn.VocabParallelHead(llama.HIDDEN, llama.VOCAB, weight=weight, manager=manager)

    @property
    def ends(self) -> dict[str, Any]:
        return {"embedding": self.embedding, "norm": self.norm, "head": self.head}

    def load(self, tensors: dict[str, torch.Tensor]) -> list[str]:
        return load_llama(tensors, list(self.layers), **self.ends)

    def forward(self, tokens: torch.Tensor, cu_seqlens: list[int]) -> torch.Tensor:
        sequences = tpo.nn.PackedSequences(cu_seqlens, cu_seqlens[-1], tokens.device)
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, sequences)
        return self.head(F.rms_norm(x, (llama.HIDDEN,), self.norm, llama.EPS))


def llama_there_and_back(rank: int, size: int, tied: bool, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Logits of the loaded model against plain torch; returns the tensors read back from it."""
    sequences = [torch.tensor([3, 1, 4, 1, 5]), torch.tensor([9, 2, 6, 10]), torch.tensor([0])]
    cu_seqlens = [0, 5, 9, 10]
    with make_manager(capacity_shape=(24, llama.HIDDEN)) as manager:
        model = Llama(manager, tied=tied)
        unused = model.load({**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)})
        assert unused == ["model.layers.0.self_attn.rotary_emb.inv_freq"]
        with manager.microbatch(cu_seqlens[-1]), torch.no_grad():
            logits = model(torch.cat(sequences), cu_seqlens)
        expected = llama.logits(tensors, sequences)[:, model.head.vocabulary]
        torch.testing.assert_close(logits, expected, atol=2e-4, rtol=2e-4)
        back = llama_tensors(list(model.layers), **model.ends)
        # A pipeline's second stage has the same names.
        stage = llama_tensors([model.layers[1]], first_layer=1, norm=model.norm)
        assert all(torch.equal(value, back[name]) for name, value in stage.items()) and len(stage) == 10
        assert all(value.is_contiguous() for value in back.values())
        return back


def save_checkpoint(rank: int, size: int, folder: str) -> dict[str, Any]:
    """Saved from R ranks; and loaded again into fresh layers on as many."""
    with make_manager() as manager:
        model = Everything(manager)
        full = fill(model)
        state = tpo.nn.dtensor_state_dict(model)
        assert list(state) == list(model.state_dict())
        for name in ("column.weight", "row.weight", "attention.qkv.weight"):
            assert isinstance(state[name], DTensor) and torch.equal(state[name].full_tensor(), full[name])
        for name, value in full.items():
            assert state[name].shape == value.shape, name
        moments = {name: 2 * parameter.detach() for name, parameter in model.named_parameters()}
        dcp.save({"model": state, "exp_avg": tpo.nn.dtensor_state_dict(model, moments)}, checkpoint_id=folder)
        with pytest.raises(tpo.ConfigError, match=r"row\.weight: this rank's part is"):
            tpo.nn.dtensor_state_dict(model, {"row.weight": full["row.weight"]})
        again = Everything(manager)
        dcp.load({"model": tpo.nn.dtensor_state_dict(again)}, checkpoint_id=folder)
        for (name, a), b in zip(model.named_parameters(), again.parameters(), strict=True):
            assert torch.equal(a, b), name
        return full


def load_checkpoint(rank: int, size: int, folder: str, full: dict[str, torch.Tensor]) -> None:
    """Loaded on another number of ranks."""
    with make_manager() as manager:
        model = Everything(manager)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float("nan"))
        moments = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
        state = {"model": tpo.nn.dtensor_state_dict(model), "exp_avg": tpo.nn.dtensor_state_dict(model, moments)}
        dcp.load(state, checkpoint_id=folder)
        for name, parameter in model.named_parameters():
            assert torch.equal(moments[name], 2 * parameter), name
        for name, value in full.items():
            assert torch.equal(tpo.nn.full_weight(model, name), value), name
        assert torch.equal(model.foreign, seeded(3, seed=1))


def histories(rank: int, size: int, folder: str, save: bool) -> None:
    """Delayed scaling: a rank's histories come back to that rank; another R has to leave them out."""
    with make_manager(quantization_modes=["none", "fp8"], backend="shared") as manager:
        options = {"parallel_mode": "column", "ub_name": "qkv", "fp8_recipe": tpo.DelayedScaling()}
        model = torch.nn.Sequential(tpo.nn.Linear(WIDTH, 96, manager=manager, **options))
        state = tpo.nn.dtensor_state_dict(model)
        histories = {name: value for name, value in state.items() if ".fp8." in name}
        assert histories and all(name.endswith(f".rank_{rank}_of_{size}") for name in histories)
        if not save:
            with pytest.raises(CheckpointException, match=f"Missing key.*rank_{rank}_of_{size}"):
                dcp.load(state, checkpoint_id=folder)
            dcp.load(tpo.nn.dtensor_state_dict(model, fp8_histories=False), checkpoint_id=folder)
            return
        history = model[0].fp8.state.weight[0].amax_history
        history.fill_(3.0 + rank)
        dcp.save(state, checkpoint_id=folder)
        history.zero_()
        dcp.load(tpo.nn.dtensor_state_dict(model), checkpoint_id=folder)
        assert torch.equal(history, torch.full_like(history, 3.0 + rank))


def resume(rank: int, size: int) -> None:
    """Two layers trained at changing T: saved after three steps, the next four have the same losses bit for bit."""
    with make_manager() as manager:

        def fresh(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
            torch.manual_seed(seed)
            options = {"kv_channels": 4, "normalization": "RMSNorm", "activation": "swiglu", "manager": manager}
            model = torch.nn.ModuleList(tpo.nn.TransformerLayer(WIDTH, FEATURES, size, **options) for _ in range(2))
            return model, torch.optim.AdamW(model.parameters(), lr=0.01)

        def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
            losses = []
            for step in steps:
                num_tokens = (7, 24, 2, 13)[step % 4]
                with manager.microbatch(num_tokens) as partition:
                    x = seeded(num_tokens, WIDTH, seed=step)[partition.rows(rank)]
                    for layer in model:
                        x = layer(x)
                    loss = x.pow(2).sum() / num_tokens
                    loss.backward()
                tpo.sync_replicated_grads(model, manager.group)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            return losses

        model, optimizer = fresh(1)
        train(model, optimizer, range(3))
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        expected = train(model, optimizer, range(3, 7))
        resumed, resumed_optimizer = fresh(2)
        file.seek(0)
        saved = torch.load(file)
        resumed.load_state_dict(saved["model"])
        resumed_optimizer.load_state_dict(saved["optimizer"])
        assert train(resumed, resumed_optimizer, range(3, 7)) == expected
        assert len(set(expected)) == 4


class Lora(torch.nn.Module):
    """y = base(x) + (norm(x) A^T) B^T on a frozen `LayerNormLinear`; B's rows are cut as the base's."""

    def __init__(self, base: tpo.nn.LayerNormLinear, lora_rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = torch.nn.Parameter(seeded(lora_rank, base.in_features, seed=21))
        self.a.sequence_parallel = True  # every rank sees its own output features' part of A's gradient: sum them
        self.b = torch.nn.Parameter(base.weight.new_zeros(base.weight.shape[0], lora_rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, normed = self.base(x)
        return y + F.linear(F.linear(normed, self.a), self.b)


def watch_operations(manager: tpo.UserBufferManager) -> list[tuple[str, bool]]:
    """(name, whether it scatters) of every operation from now on."""
    asked: list[tuple[str, bool]] = []
    operation = manager.operation

    def watched(comm: Any, *args: Any, **more: Any) -> Any:
        asked.append((comm.name, more["scatter"]))
        return operation(comm, *args, **more)

    manager.operation = watched
    return asked


def lora(rank: int, size: int) -> None:
    """A frozen base under an adapter: one reduce-scatter in backward and no gather at all; gradients as plain torch.

    Without sequence parallelism: one all-reduce, which sums the adapter's part of dx, too.
    """
    for flags in ({}, {"ub_overlap_rs_dgrad": True}, {"save_gathered": True}, {"sequence_parallel": False}):
        with make_manager() as manager:
            features, num_tokens = 4 * size, 3 * size + 1
            options = {"normalization": "RMSNorm", "bias": False, "return_layernorm_output_gathered": True}
            base = tpo.nn.LayerNormLinear(WIDTH, features, manager=manager, ub_name="qkv", **options, **flags)
            weight, b = seeded(features, WIDTH, seed=22), seeded(features, 2, seed=23)
            tpo.nn.load_full_weight(base, "weight", weight)
            layer = Lora(base)
            own = slice(4 * rank, 4 * rank + 4)
            layer.b.data.copy_(b[own])
            asked = watch_operations(manager)
            partition = TokenPartition.balanced(num_tokens, size)
            manager.set_active_shape(partition)
            x, dy = seeded(num_tokens, WIDTH, seed=24), seeded(num_tokens, features, seed=25)
            whole = "sequence_parallel" in flags
            rows = slice(None) if whole else partition.rows(rank)
            shard = x[rows].clone().requires_grad_()
            layer(shard).backward(dy[:, own])
            tpo.sync_replicated_grads(layer, manager.group)
            gather, scatter, back = ("qkv_fprop", False), ("qkv_dgrad", True), ("qkv_dgrad", False)
            assert asked == ([scatter, back] if whole else [gather, scatter]), asked
            calls = {name: row["calls"] for name, row in manager.stats().items() if row["calls"]}
            assert calls == ({"qkv_dgrad": 2} if whole else {"qkv_fprop": 1, "qkv_dgrad": 1}), calls

            x.requires_grad_()
            a, b = layer.a.detach().clone().requires_grad_(), b.requires_grad_()
            normed = F.rms_norm(x, (WIDTH,), eps=1e-5)
            (normed @ weight.t() + normed @ a.t() @ b.t()).backward(dy)
            close = {"atol": 1e-4, "rtol": 1e-4}
            torch.testing.assert_close(shard.grad, x.grad[rows], **close)
            torch.testing.assert_close(layer.a.grad, a.grad, **close)
            torch.testing.assert_close(layer.b.grad, b.grad[own], **close)
            assert base.weight.grad is None
