"""Recipes, histories and cached weights."""

from __future__ import annotations

import copy
import io
import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tpoverlap.errors import ConfigError
from tpoverlap.gemm.fp8 import (
    DelayedScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    Format,
    Fp8State,
    Quantizer,
    Recipe,
)


def test_the_number_that_ranks_compare_follows_writes_from_outside_only(monkeypatch: pytest.MonkeyPatch) -> None:
    quantizer, other = (Quantizer(DelayedScaling(amax_history_len=3), "input") for _ in range(2))
    first = quantizer.agreement
    assert first == other.agreement != Quantizer(DelayedScaling(margin=1), "input").agreement
    with monkeypatch.context() as patch:  # the steady state reads no tensor
        patch.setattr(torch.Tensor, "cpu", None)
        for amax in (2.0, 3.0, 4.0):
            quantizer.record(torch.tensor([[amax]]))
            assert quantizer.agreement == first
    other.load_state_dict(quantizer.state_dict())
    loaded = other.agreement
    assert loaded != first
    again = Quantizer(DelayedScaling(amax_history_len=3), "input")
    again.load_state_dict(quantizer.state_dict(), assign=True)
    assert again.agreement == loaded
    other.scale.mul_(2)
    other.record(torch.tensor([[5.0]]))  # a write of its own does not hide one from outside
    assert other.agreement not in (first, loaded)
    current = Quantizer(Float8CurrentScaling(), "input")
    assert current.agreement == Quantizer(Float8CurrentScaling(), "grad").agreement != first


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Float8CurrentScaling("e3m4"), "fp8_format='e3m4' is unknown; use one of e4m3, hybrid"),
        (lambda: Float8CurrentScaling(amax_epsilon=-1.0), "amax_epsilon"),
        (
            lambda: Float8CurrentScaling(amax_epsilon=True),
            "at least 0, got True",
        ),
        (lambda: Float8CurrentScaling(amax_epsilon="1"), "amax_epsilon"),  # type: ignore[arg-type]
        (lambda: DelayedScaling(amax_history_len=0), "amax_history_len must be an integer of at least 1, got 0"),
        (lambda: DelayedScaling(amax_compute_algo="mean"), "use 'max' or 'most_recent'"),
        (lambda: DelayedScaling(margin=0.5), "margin"),  # type: ignore[arg-type]
        (lambda: Float8RowwiseScaling("hybrid"), "row-wise scaling runs with fp8_format='e4m3' only"),
        (lambda: Fp8State("delayed"), "use Float8CurrentScaling"),  # type: ignore[arg-type]
        (lambda: Fp8State(Recipe()), "use Float8CurrentScaling"),
    ],
)
def test_illegal_recipes(make, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        make()


def test_formats() -> None:
    hybrid, e4m3 = Float8CurrentScaling(), Float8CurrentScaling(Format.E4M3)
    assert [hybrid.dtype(role) for role in ("input", "weight", "grad")] == [torch.float8_e4m3fn] * 2 + [
        torch.float8_e5m2
    ]
    assert e4m3.dtype("grad") == torch.float8_e4m3fn
    assert Float8CurrentScaling("HYBRID") == hybrid


TINY = torch.finfo(torch.float32).tiny
amaxes = st.lists(st.floats(0, 1e6, width=32), min_size=1, max_size=12)


@given(amaxes, st.integers(1, 6), st.sampled_from(["max", "most_recent"]), st.integers(-2, 2))
def test_delayed_scales_follow_the_window(history, length, algorithm, margin) -> None:
    recipe = DelayedScaling(amax_history_len=length, amax_compute_algo=algorithm, margin=margin)
    quantizer, scale = Quantizer(recipe, "input"), None
    for step, amax in enumerate(history, 1):
        x = torch.tensor([[-amax, amax / 2]])
        quantised = quantizer.local(x, record=True)
        # without a history the scale is the tensor's own
        used = max(amax * 2.0**margin / 448, TINY) if amax and scale is None else 1.0 if scale is None else scale
        assert float(quantised.scale) == pytest.approx(used, rel=1e-6), "the scale is that of former steps"
        window = history[max(0, step - length) : step]
        chosen = max(window) if algorithm == "max" else window[-1]
        if chosen > 0:
            scale = max(chosen * 2.0**margin / 448, TINY)
        elif not max(window):
            scale = None  # forgotten: all zeros
        if scale is not None:
            assert float(quantizer.scale) == pytest.approx(scale, rel=1e-6)


def test_an_overflow_does_not_hold_the_scale_up() -> None:
    quantizer = Quantizer(DelayedScaling(amax_history_len=4), "input")
    quantizer.record(torch.tensor([[2.0]]))
    before = float(quantizer.scale)
    for bad in (math.inf, math.nan):
        quantizer.record(torch.tensor([[bad]]))
        assert float(quantizer.scale) == before
    assert quantizer.amax_history.tolist() == [0.0, 0.0, 2.0, 0.0]


def test_magnitudes_of_several_ranks_are_put_together() -> None:
    quantizer = Quantizer(DelayedScaling(amax_history_len=4), "input")
    quantizer.record(torch.tensor([[1.0], [5.0], [3.0]]))
    assert float(quantizer.amax_history[0]) == 5.0


def test_no_record_leaves_the_history_alone() -> None:
    quantizer = Quantizer(DelayedScaling(amax_history_len=4), "input")
    quantizer.local(torch.ones(1, 2), record=False)
    assert not bool(quantizer.amax_history.any())


def test_state_dict_carries_histories_through_a_file() -> None:
    recipe = DelayedScaling(amax_history_len=3)
    state, fresh = Fp8State(recipe, 2), Fp8State(recipe, 2)
    for index in range(2):
        state.quantizer("grad", index).local(torch.full((2, 2), 3.0 + index), record=True)
        state.quantized_weight(index, torch.full((2, 2), 0.5))
    state.input.local(torch.full((2, 2), 7.0), record=True)
    file = io.BytesIO()
    torch.save(state.state_dict(), file)
    file.seek(0)
    fresh.load_state_dict(torch.load(file))
    assert {"input.amax_history", "input.scale", "weight.1.amax_history", "grad.0.scale"} <= set(fresh.state_dict())
    for name, value in state.state_dict().items():
        assert torch.equal(value, fresh.state_dict()[name]), name
    assert float(fresh.input.scale) == pytest.approx(7 / 448)
    assert not Fp8State(Float8CurrentScaling()).state_dict(), "current scaling has nothing to remember"


def test_histories_stay_float32_when_the_model_is_cast() -> None:
    state = Fp8State(DelayedScaling(amax_history_len=3))
    state.input.record(torch.tensor([[1.0 + 2.0**-20]]))
    state.to(torch.bfloat16)
    assert state.input.amax_history.dtype == state.input.scale.dtype == torch.float32
    assert float(state.input.amax_history[0]) == 1.0 + 2.0**-20


@pytest.mark.parametrize("recipe", [Float8CurrentScaling(), DelayedScaling(), Float8RowwiseScaling()])
def test_weights_are_quantised_once_a_version(recipe: Recipe) -> None:
    state = Fp8State(recipe, cache_weights=True)
    weight = torch.nn.Parameter(torch.randn(16, 32))
    first = state.quantized_weight(0, weight)
    assert state.quantized_weight(0, weight) is first
    assert state.quantized_weight(0, torch.nn.Parameter(weight.detach().clone())) is not first, "another tensor"
    state.quantized_weight(0, weight)
    with torch.no_grad():
        weight.mul_(2)
    second = state.quantized_weight(0, weight)
    assert second is not first
    if not isinstance(recipe, DelayedScaling):
        assert torch.equal(second.weight.dequantize(), 2 * first.weight.dequantize())
    weight.data.mul_(2)  # no new version: the documented remedy
    assert state.quantized_weight(0, weight) is second
    state.forget_weights()
    assert state.quantized_weight(0, weight) is not second
    uncached = Fp8State(recipe)
    assert uncached.quantized_weight(0, weight) is not uncached.quantized_weight(0, weight)
    with torch.inference_mode():
        frozen = torch.randn(16, 32)
        assert state.quantized_weight(0, frozen) is not state.quantized_weight(0, frozen)


@pytest.mark.parametrize("recipe", [Float8CurrentScaling(), Float8RowwiseScaling()])
def test_both_orientations_of_a_weight(recipe: Recipe) -> None:
    weight = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
    made = Fp8State(recipe).quantized_weight(0, weight)
    assert made.weight.data.shape == (16, 32) and made.transposed.data.shape == (32, 16)
    assert made.transposed.scale.shape == ((32, 1) if isinstance(recipe, Float8RowwiseScaling) else (1, 1))
    assert torch.allclose(made.weight.dequantize(), weight, rtol=0.07, atol=1e-2)
    assert torch.allclose(made.transposed.dequantize().t(), weight, rtol=0.07, atol=1e-2)


def test_copies_and_pickles() -> None:
    state = Fp8State(DelayedScaling(amax_history_len=3))
    state.quantized_weight(0, torch.nn.Parameter(torch.ones(16, 16)))
    for other in (copy.deepcopy(state), torch.load(_pickled(state), weights_only=False)):
        assert torch.equal(other.quantizer("weight").amax_history, state.quantizer("weight").amax_history)
        other.quantizer("weight").record(torch.tensor([[9.0]]))
        assert float(state.quantizer("weight").amax_history[0]) == 1.0, "its own history"


def test_copies_on_the_meta_device() -> None:
    """Models are made, and copied, before they have memory."""
    made = copy.deepcopy(Fp8State(DelayedScaling(amax_history_len=3), device="meta")).to_empty(device="cpu")
    assert made.quantizer("input").amax_history.shape == (3,) and made.quantizer("input") is made.input


def test_pickles_of_a_version_without_the_quantizers_by_role() -> None:
    state = Fp8State(DelayedScaling(amax_history_len=3), num_weights=2)
    older = state.__getstate__()
    older.pop("_by_role", None)
    other = Fp8State.__new__(Fp8State)
    other.__setstate__(older)
    assert [other.quantizer("grad", index) for index in range(2)] == list(state.grad)


def test_what_was_checked_is_for_one_manager_and_these_shapes() -> None:
    class Manager:
        """Anything that can be referred to weakly."""

    state, manager, other = Fp8State(num_weights=2), Manager(), Manager()
    weights = [torch.zeros(32, 16), torch.zeros(48, 16)]
    assert not state.is_accepted(manager, weights)
    state.accept(manager, weights)
    assert state.is_accepted(manager, [torch.ones(32, 16), weights[1]]), "another weight of that shape"
    assert not state.is_accepted(other, weights)
    assert not state.is_accepted(manager, weights[:1]) and not state.is_accepted(manager, weights[::-1])
    for copied in (copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
        assert not copied.is_accepted(manager, weights)


def test_the_same_numbers_are_the_same_recipe() -> None:
    """Ranks compare texts, and kernels take what a number is: an epsilon of 0 and one of 0.0 must not differ."""
    recipes = Float8CurrentScaling(amax_epsilon=0, use_power_2_scales=0), Float8CurrentScaling()  # type: ignore[arg-type]
    one, other = (Quantizer(recipe, "input") for recipe in recipes)
    assert one.agreement == other.agreement
    assert isinstance(one.rule.epsilon, float)


def _pickled(state: Fp8State) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file
