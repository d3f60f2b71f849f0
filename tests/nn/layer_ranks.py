"""Rank functions of `test_layer_options`: what conformance's numbers alone do not show."""

from __future__ import annotations

import copy
from typing import Any

import torch

import tpoverlap as tpo
from tests.manager.ranks import CAPACITY, WIDTH, LogLines, assert_right, make_manager, outcome_of, seeded
from tpoverlap import te
from tpoverlap.tokens import TokenPartition

Outcomes = dict[str, Any]


def _shard(manager: tpo.UserBufferManager, num_tokens: int, seed: int = 5) -> torch.Tensor:
    rows = TokenPartition.balanced(num_tokens, manager.tp_size).rows(manager.rank)
    return seeded(num_tokens, WIDTH, seed=seed)[rows].clone().requires_grad_()


def _calls(manager: tpo.UserBufferManager, name: str) -> dict[str, int]:
    return manager.stats().get(name, {"calls": 0})


def frozen(rank: int, size: int) -> None:
    """LoRA's base: frozen weights gather nothing in backward, and nothing trains means no operation at all."""
    with make_manager() as manager:
        layer = tpo.nn.LayerNormMLP(WIDTH, 4 * size, manager=manager).requires_grad_(False)
        manager.set_active_shape(3 * size)
        x = _shard(manager, 3 * size)
        layer(x).sum().backward()
        assert x.grad is not None and all(p.grad is None for p in layer.parameters())
        # one reduce-scatter of dx; no gather for wgrad, and nothing beside a wgrad that is not there
        assert _calls(manager, "fc1_dgrad")["calls"] == 1 and _calls(manager, "fc1_wgrad")["calls"] == 0
        before = manager.stats()
        y = layer(x.detach())
        assert not y.requires_grad
        after = manager.stats()
        assert all(after[name] == before[name] for name in ("fc1_dgrad", "fc2_dgrad"))


def flags(rank: int, size: int) -> None:
    """What each flag does is in the counters of its name, and nowhere else."""
    cases: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
        "default": ({}, {"fc1_fprop": "ring_exchange", "fc1_dgrad": "bulk", "fc1_wgrad": "bulk"}),
        "no ag": ({"ub_overlap_ag": False}, {"fc1_fprop": "sequential", "fc2_dgrad": "sequential"}),
        "no rs": ({"ub_overlap_rs": False}, {"fc2_fprop": "sequential", "fc1_fprop": "ring_exchange"}),
        "no bulk dgrad": ({"ub_bulk_dgrad": False}, {"fc1_dgrad": "sequential", "fc1_wgrad": "bulk"}),
        "no bulk wgrad": ({"ub_bulk_wgrad": False}, {"fc1_dgrad": "bulk", "fc1_wgrad": "sequential"}),
        "rs dgrad": ({"ub_overlap_rs_dgrad": True}, {"fc1_dgrad": "ring_exchange bulk", "fc1_wgrad": ""}),
        "saved": ({"save_gathered": True}, {"fc1_dgrad": "", "fc1_wgrad": "bulk"}),
    }  # fmt: skip
    for what, (options, expected) in cases.items():
        _expect_methods(what, {}, options, expected)
    # Against the configuration: the layer's word counts, for this layer.
    scattering = {"fc1_dgrad": {"method": "ring_exchange"}}
    _expect_methods("configured", scattering, {}, {"fc1_dgrad": "ring_exchange bulk"})
    _expect_methods("turned", scattering, {"ub_bulk_dgrad": True}, {"fc1_dgrad": "bulk"})
    _expect_methods(
        "turned by no",
        scattering,
        {"ub_overlap_rs_dgrad": False, "ub_bulk_wgrad": False},
        {"fc1_dgrad": "bulk sequential"},
    )
    with make_manager() as manager:
        plan = manager.plan()
    _expect_methods("pinned", {}, {"ub_overlap_ag": False}, {"fc1_fprop": "sequential"}, plan=plan)


def _expect_methods(
    what: str, ub_cfgs: dict[str, Any], options: dict[str, Any], expected: dict[str, str], **more: Any
) -> None:
    with make_manager(ub_cfgs=ub_cfgs, **more) as manager:
        layer = tpo.nn.LayerNormMLP(WIDTH, 4 * manager.tp_size, manager=manager, **options)
        manager.set_active_shape(2 * manager.tp_size)
        layer(_shard(manager, 2 * manager.tp_size)).sum().backward()
        for name, methods in expected.items():
            counted = {
                key.removeprefix("method_") for key, n in _calls(manager, name).items() if "method_" in key and n
            }
            assert counted == set(methods.split()), f"{what}: {name} ran {counted}, expected {methods!r}"


def nothing_saved_lies_in_the_buffer(rank: int, size: int, save_gathered: bool) -> None:
    """Every tensor that autograd keeps, of every layer, in both modes."""
    with make_manager() as manager:
        assert manager.channel is not None
        kept: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            manager.set_active_shape(3 * size)
            layer = tpo.nn.TransformerLayer(
                WIDTH, 4 * size, 2 * size, kv_channels=4, manager=manager, save_gathered=save_gathered
            )
            layer(_shard(manager, 3 * size), torch.tensor([0, 3 * size])).sum()
        gathered = [t for t in kept if t.shape == (3 * size, WIDTH)]
        assert len(kept) > 10 and bool(gathered) == save_gathered, [tuple(t.shape) for t in kept]
        assert not any(manager.channel.holds(t) for t in kept)


def delayed_first_in_first_out(rank: int, size: int) -> str:
    """Two microbatches of different T, both delayed: each call computes one; a third has nothing left."""
    with make_manager() as manager:
        layer = tpo.nn.LayerNormLinear(WIDTH, 4 * size, manager=manager, ub_name="qkv", delay_wgrad_compute=True)
        twin = tpo.nn.LayerNormLinear(WIDTH, 4 * size, manager=manager, ub_name="qkv")
        twin.load_state_dict(layer.state_dict())
        grads = []
        for num_tokens in (3 * size, 5 * size - 1):
            with manager.microbatch(num_tokens):
                layer(_shard(manager, num_tokens)).pow(2).sum().backward()
                twin(_shard(manager, num_tokens)).pow(2).sum().backward()
                assert twin.weight.grad is not None
                grads.append(twin.weight.grad.clone())
        assert layer.weight.grad is None and layer.need_backward_dw() and not twin.need_backward_dw()
        assert layer.bias is not None and layer.bias.grad is not None
        calls = manager.stats()
        for expected in grads:
            layer.backward_dw()
            torch.testing.assert_close(layer.weight.grad, expected)
        assert manager.stats() == calls, "backward_dw communicates nothing"
        twin.backward_dw()  # not delayed: nothing happens
        assert len(copy.deepcopy(layer)._gemms[0].delayed) == 0  # type: ignore[arg-type]
        outcome = outcome_of(layer.backward_dw)
        assert outcome is not None and outcome[0][0] == "ConfigError"
        return outcome[1]


def megatron_convention(rank: int, size: int) -> None:
    """grad stays None; with Megatron's attribute it is set to True and a dummy gradient makes hooks fire."""
    with make_manager() as manager:
        layer = tpo.nn.Linear(
            WIDTH, 4 * size, False, parallel_mode="column", manager=manager, ub_name="qkv", fuse_wgrad_accumulation=True
        )
        manager.set_active_shape(2 * size)
        outcome = outcome_of(lambda: layer(_shard(manager, 2 * size)))
        assert outcome is not None and "needs weight.main_grad" in outcome[1] and "float32" in outcome[1]
        with torch.no_grad():
            layer(_shard(manager, 2 * size))  # nothing to accumulate
        layer.weight.main_grad = torch.zeros(3)
        outcome = outcome_of(lambda: layer(_shard(manager, 2 * size)))
        assert outcome is not None and "main_grad is [3]" in outcome[1]
        for attributes, expected in (({}, None), ({"grad_added_to_main_grad": False, "zero_out_wgrad": True}, 0.0)):
            for name, value in attributes.items():
                setattr(layer.weight, name, value)
            layer.weight.main_grad = torch.ones_like(layer.weight)
            fired: list[bool] = []
            handle = layer.weight.register_post_accumulate_grad_hook(
                lambda p, fired=fired: fired.append(p.grad is not None)
            )
            layer(_shard(manager, 2 * size)).sum().backward()
            handle.remove()
            assert any(fired) == bool(attributes)
            assert (layer.weight.grad is None) == (expected is None)
            if expected is not None:
                assert layer.weight.grad.abs().max() == expected and layer.weight.grad_added_to_main_grad
            whole = seeded(2 * size, WIDTH, seed=5)
            torch.testing.assert_close(layer.weight.main_grad, 1 + whole.sum(0).expand(4, -1))
            layer.weight.grad = None


def returned(rank: int, size: int) -> None:
    """return_bias and the norm's output, own rows and gathered; the gathered one is differentiable."""
    with make_manager() as manager:
        manager.set_active_shape(3 * size)
        own = TokenPartition.balanced(3 * size, size).rows(rank)
        norm = torch.nn.functional.layer_norm(seeded(3 * size, WIDTH, seed=5), (WIDTH,))
        common = {"manager": manager, "return_bias": True}
        for make in (
            lambda **o: tpo.nn.LayerNormLinear(WIDTH, 4 * size, ub_name="qkv", **common, **o),
            lambda **o: tpo.nn.LayerNormMLP(WIDTH, 4 * size, **common, **o),
            lambda **o: tpo.nn.MultiheadAttention(WIDTH, size, 4, input_layernorm=True, **common, **o),
        ):
            _, bias, normed = make(return_layernorm_output=True)(_shard(manager, 3 * size))
            torch.testing.assert_close(normed, norm[own])
            assert isinstance(bias, torch.nn.Parameter)
            x = _shard(manager, 3 * size)
            _, _, gathered = make(return_layernorm_output_gathered=True)(x)
            torch.testing.assert_close(gathered, norm)
            gathered.pow(2).sum().backward()  # every rank's use of it counts
            reference = seeded(3 * size, WIDTH, seed=5).requires_grad_()
            (size * torch.nn.functional.layer_norm(reference, (WIDTH,)).pow(2)).sum().backward()
            torch.testing.assert_close(x.grad, reference.grad[own], atol=1e-5, rtol=1e-4)
        y, bias = tpo.nn.Linear(4 * size, WIDTH, parallel_mode="row", ub_name="proj", **common)(
            seeded(3 * size, 4, seed=1)
        )
        assert y.shape == (3, WIDTH) and bias.shape == (WIDTH,)


def zero_centered(rank: int, size: int) -> None:
    """Zeros as weights are the identity scale, as ones are without it."""
    with make_manager() as manager:
        manager.set_active_shape(2 * size)
        a, b = (
            tpo.nn.LayerNormLinear(
                WIDTH, 4 * size, manager=manager, ub_name="qkv", normalization="RMSNorm", zero_centered_gamma=zero
            )
            for zero in (True, False)
        )
        b.weight.data.copy_(a.weight.data)
        assert a.layer_norm_weight.abs().max() == 0 and b.layer_norm_weight.min() == 1
        torch.testing.assert_close(a(_shard(manager, 2 * size)), b(_shard(manager, 2 * size)))


def unregistered_says_so_once(rank: int, size: int) -> list[str]:
    """Two layers of a name nobody registered: one line, right numbers, and the registered neighbour still overlaps."""
    with make_manager() as manager, LogLines() as log:
        manager.set_active_shape(2 * size)
        neighbour = tpo.nn.Linear(WIDTH, 4 * size, parallel_mode="column", manager=manager, ub_name="qkv")
        for _ in range(2):
            layer = tpo.nn.LayerNormLinear(WIDTH, 4 * size, manager=manager, ub_name="nobody", ub_overlap_rs_dgrad=True)
            layer(_shard(manager, 2 * size)).sum().backward()
        neighbour(_shard(manager, 2 * size)).sum().backward()
        stats = manager.stats()
        assert stats["nobody_fprop"]["method_sequential"] == stats["nobody_fprop"]["calls"] == 2
        assert stats["nobody_dgrad"]["method_sequential"] == stats["nobody_dgrad"]["calls"] == 4
        assert stats["qkv_fprop"]["method_ring_exchange"] == 1 and stats["qkv_dgrad"]["method_bulk"] == 1
        return log.having("nobody")


def one_sequence_is_said(rank: int, size: int) -> list[list[str]]:
    """What is logged where no ``cu_seqlens`` says which rows attend to which: three calls, the first with it."""
    found = []
    with make_manager() as manager:
        manager.set_active_shape(3 * size)
        options = {"kv_channels": 4, "manager": manager}
        layers = [tpo.nn.MultiheadAttention(WIDTH, size, **options), tpo.nn.TransformerLayer(WIDTH, 8, size, **options)]
        for cu_seqlens in ([0, 3 * size], None, None):
            with LogLines() as log:
                for layer in layers:
                    layer(_shard(manager, 3 * size), cu_seqlens)
            found.append(log.having("cu_seqlens"))
    return found


def registered_later(rank: int, size: int) -> None:
    """A layer made before its name was registered overlaps from then on."""
    with make_manager() as manager:
        layer = tpo.nn.LayerNormLinear(WIDTH, 4 * size, manager=manager, ub_name="mtp")
        manager.register("mtp", width=WIDTH)
        manager.set_active_shape(2 * size)
        layer(_shard(manager, 2 * size)).sum().backward()
        assert manager.stats()["mtp_fprop"]["method_ring_exchange"] == 1


def default_manager(rank: int, size: int) -> str:
    """Without manager= the layers use te's; before that they say what to do."""
    outcome = outcome_of(lambda: tpo.nn.LayerNormMLP(WIDTH, 4 * size))
    te.initialize_ub((CAPACITY, WIDTH), size, dtype=torch.float32, timeout_s=20.0)
    try:
        layer = tpo.nn.LayerNormMLP(WIDTH, 4 * size, tp_size=size)
        te.set_ub_active_shape([2 * size, WIDTH])
        layer(_shard(te.get_manager(), 2 * size)).sum().backward()
    finally:
        te.destroy_ub()
    assert outcome is not None and outcome[0][0] == "NotInitializedError"
    return outcome[1]


def misuses(rank: int, size: int, offender: int | None) -> Outcomes:
    """Each wrong call on ``offender`` (None: on every rank); afterwards the manager works as if nothing had been."""
    with make_manager() as manager:
        manager.set_active_shape(3 * size)
        outcomes: Outcomes = {}
        if offender in (None, rank):
            outcomes = {name: outcome_of(lambda call=call: call(manager)) for name, call in MISUSES.items()}
        assert_right(manager, TokenPartition.balanced(3 * size, size), backward=True)
        manager.check()
        return outcomes


def float32_under_autocast(rank: int, size: int) -> Any:
    """A residual stream in float32 under autocast, given to a layer of a bfloat16 manager."""
    with make_manager(dtype=torch.bfloat16) as manager, torch.autocast("cpu", dtype=torch.bfloat16):
        return outcome_of(lambda: _qkv(manager)(torch.zeros(3, WIDTH)))


def _mha(manager: tpo.UserBufferManager, cu_seqlens: Any = None, **options: Any) -> Any:
    size = manager.tp_size
    layer = tpo.nn.MultiheadAttention(
        WIDTH, options.pop("heads", 2 * size), **{"kv_channels": 4} | options, manager=manager
    )
    return layer(_shard(manager, 3 * size), cu_seqlens)


def _mlp(manager: tpo.UserBufferManager, ffn: int | None = None, **options: Any) -> Any:
    return tpo.nn.LayerNormMLP(WIDTH, 4 * manager.tp_size if ffn is None else ffn, manager=manager, **options)


def _qkv(manager: tpo.UserBufferManager, features: int = 0, **options: Any) -> Any:
    named = {"ub_name": "qkv"} | options
    return tpo.nn.LayerNormLinear(WIDTH, features or 4 * manager.tp_size, manager=manager, **named)


def _loss(manager: tpo.UserBufferManager, targets: list[int], **options: Any) -> Any:
    logits = torch.zeros(3, 2)
    return tpo.nn.vocab_parallel_cross_entropy(logits, torch.tensor(targets), 2 * manager.tp_size, manager, **options)


def _layer(manager: tpo.UserBufferManager, x: torch.Tensor) -> Any:
    layer = tpo.nn.TransformerLayer(WIDTH, 4 * manager.tp_size, manager.tp_size, kv_channels=4, manager=manager)
    return layer(x)


MISUSES: dict[str, Any] = {
    "dtype of a normed column": lambda m: _qkv(m)(_shard(m, 3 * m.tp_size).bfloat16()),
    "dtype of an MLP": lambda m: _mlp(m)(_shard(m, 3 * m.tp_size).double()),
    "dtype of a layer": lambda m: _layer(m, _shard(m, 3 * m.tp_size).half()),
    "width of a normed column": lambda m: _qkv(m)(torch.zeros(3, WIDTH + 1)),
    "width of an MLP": lambda m: _mlp(m, normalization="RMSNorm")(torch.zeros(3, 1)),
    "width of a layer": lambda m: _layer(m, torch.zeros(3, WIDTH - 1)),
    "three dimensions": lambda m: _mlp(m)(torch.zeros(1, 3, WIDTH)),
    "device of a normed column": lambda m: _qkv(m)(torch.zeros(3, WIDTH, device="meta")),
    "no tensor": lambda m: _mlp(m)([[0.0] * WIDTH] * 3),
    "bulk dgrad and rs dgrad": lambda m: _mlp(m, ub_bulk_dgrad=True, ub_overlap_rs_dgrad=True),
    "bulk wgrad and rs dgrad": lambda m: _qkv(m, ub_bulk_wgrad=True, ub_overlap_rs_dgrad=True),
    "bulk wgrad and delay": lambda m: _qkv(m, ub_bulk_wgrad=True, delay_wgrad_compute=True),
    "overlap off and a flag": lambda m: tpo.nn.TransformerLayer(
        WIDTH, 4 * m.tp_size, m.tp_size, kv_channels=4, manager=m, ub_tp_comm_overlap=False, ub_overlap_ag=True
    ),
    "few names": lambda m: tpo.nn.TransformerLayer(WIDTH, 8, 2, manager=m, ub_names=("qkv", "proj", "fc1")),
    "few names of an MLP": lambda m: _mlp(m, ub_names=("fc1",)),
    "a string of names": lambda m: _mha(m, ub_names="qk"),
    "negative eps": lambda m: _mlp(m, eps=-1e-5),
    "zero eps": lambda m: _qkv(m, eps=0.0),
    "infinite eps": lambda m: _mha(m, input_layernorm=True, layernorm_epsilon=float("inf")),
    "negative rotary base": lambda m: _mha(m, rotary_base=-10_000.0),
    "rotary base is no number": lambda m: _mha(m, rotary_base=float("nan")),
    "rotary table": lambda m: tpo.nn.RotaryTable.of(torch.arange(4), 4, 0.0),
    "ffn": lambda m: _mlp(m, 4 * m.tp_size + 1),
    "features": lambda m: _qkv(m, 4 * m.tp_size + 1),
    "heads": lambda m: _mha(m, heads=2 * m.tp_size + 1),
    "no heads": lambda m: _mha(m, heads=0),
    "heads are text": lambda m: _mha(m, heads="4"),
    "ffn is no whole number": lambda m: _mlp(m, 4.0 * m.tp_size),
    "an MLP of width 0": lambda m: tpo.nn.LayerNormMLP(0, 4 * m.tp_size, manager=m),
    "an MLP of width -1": lambda m: tpo.nn.LayerNormMLP(-1, 4 * m.tp_size, manager=m),
    "an MLP without features": lambda m: _mlp(m, 0),
    "a column without features": lambda m: tpo.nn.Linear(WIDTH, 0, parallel_mode="column", manager=m, ub_name="qkv"),
    "a column of width 0": lambda m: tpo.nn.Linear(0, 4 * m.tp_size, parallel_mode="column", manager=m, ub_name="qkv"),
    "a row of width -16": lambda m: tpo.nn.Linear(m.tp_size, -16, parallel_mode="row", manager=m, ub_name="proj"),
    "a normed column of width 0": lambda m: tpo.nn.LayerNormLinear(0, 4 * m.tp_size, manager=m, ub_name="qkv"),
    "attention of width 0": lambda m: tpo.nn.MultiheadAttention(0, m.tp_size, manager=m),
    "heads of width -4": lambda m: _mha(m, kv_channels=-4),
    "heads of width 0": lambda m: _mha(m, kv_channels=0),
    "no groups": lambda m: _mha(m, num_gqa_groups=0),
    "a layer of width 0": lambda m: tpo.nn.TransformerLayer(0, 4 * m.tp_size, m.tp_size, manager=m),
    "a layer without an MLP": lambda m: tpo.nn.TransformerLayer(WIDTH, 0, m.tp_size, manager=m),
    "embeddings of width 0": lambda m: tpo.nn.VocabParallelEmbedding(9, 0, manager=m),
    "a vocabulary of -9": lambda m: tpo.nn.VocabParallelHead(WIDTH, -9, manager=m),
    "a head of width 0": lambda m: tpo.nn.VocabParallelHead(0, 9, manager=m),
    "rotary of no features": lambda m: tpo.nn.RotaryTable.of(torch.arange(4), 0),
    "rotary of odd features": lambda m: tpo.nn.RotaryTable.of(torch.arange(4), 3),
    "a tensor of angles": lambda m: tpo.nn.MultiheadAttention(WIDTH, 2 * m.tp_size, kv_channels=4, manager=m)(
        _shard(m, 3 * m.tp_size), rotary_pos_emb=torch.zeros(3 * m.tp_size, 4)
    ),
    "groups": lambda m: _mha(m, num_gqa_groups=m.tp_size + 1),
    "heads by groups": lambda m: _mha(m, heads=3 * m.tp_size, num_gqa_groups=2 * m.tp_size),
    "hidden by heads": lambda m: _mha(m, heads=3 * m.tp_size, kv_channels=None),
    "odd rotary": lambda m: _mha(m, kv_channels=3, rotary_base=100.0),
    "dropout": lambda m: _mha(m, attention_dropout=0.1),
    "mask": lambda m: _mha(m, attn_mask_type="arbitrary"),
    "norm output without norm": lambda m: _mha(m, return_layernorm_output=True),
    "normalization": lambda m: _qkv(m, normalization="rmsnorm"),
    "activation": lambda m: _mlp(m, activation="swiglue"),
    "no name": lambda m: _qkv(m, ub_name=None),
    "row norm": lambda m: _qkv(m, parallel_mode="row"),
    "wrong direction": lambda m: _qkv(m, ub_name="proj"),
    "tp_size": lambda m: _qkv(m, tp_size=7),
    "cu_seqlens too short": lambda m: _mha(m, torch.tensor([0, 2])),
    "cu_seqlens not increasing": lambda m: _mha(m, torch.tensor([0, 2, 2, 3 * m.tp_size])),
    "width": lambda m: tpo.nn.LayerNormMLP(WIDTH + 1, 4 * m.tp_size, manager=m)(torch.zeros(3, WIDTH + 1)),
    "rows": lambda m: _mlp(m)(torch.zeros(4, WIDTH)),
    "whole rows": lambda m: _mlp(m, sequence_parallel=False)(torch.zeros(4, WIDTH)),
    "vocabulary": lambda m: tpo.nn.VocabParallelEmbedding(m.tp_size - 1, WIDTH, manager=m),
    "tokens": lambda m: tpo.nn.VocabParallelEmbedding(9, WIDTH, manager=m)(torch.zeros(3, dtype=torch.long)),
    "tied": lambda m: tpo.nn.VocabParallelHead(WIDTH, 9, manager=m, weight=torch.nn.Parameter(torch.zeros(1, WIDTH))),
    "targets": lambda m: _loss(m, [0, 1]),
    "reduction": lambda m: _loss(m, [0, 1, 1], reduction="average"),
}  # fmt: skip
