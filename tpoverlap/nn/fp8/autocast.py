"""``fp8_autocast``: Transformer Engine's way to say in which forwards FP8 is used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from tpoverlap.errors import ConfigError
from tpoverlap.gemm.fp8 import Float8CurrentScaling, Fp8State, Recipe

_recipe: ContextVar[tuple[bool, Recipe | None]] = ContextVar("tpoverlap_fp8_autocast", default=(False, None))


@contextmanager
def fp8_autocast(enabled: bool = True, fp8_recipe: Recipe | None = None) -> Iterator[None]:
    """Layers of `tpoverlap.nn` that were made without a recipe of their own use FP8 in this block's forwards.

    ``enabled=False`` also switches off layers that have a recipe. Backward follows its forward. Local to the thread.

    Args:
        enabled: whether to use FP8.
        fp8_recipe: None: `Float8CurrentScaling`. (Transformer Engine's default is delayed scaling.)

    Raises:
        ConfigError: not a recipe.
    """
    if fp8_recipe is not None and not isinstance(fp8_recipe, Recipe):
        raise ConfigError(f"fp8_recipe must be a recipe such as Float8CurrentScaling(), got {fp8_recipe!r}")
    token = _recipe.set((True, (fp8_recipe or Float8CurrentScaling()) if enabled else None))
    try:
        yield
    finally:
        _recipe.reset(token)


@contextmanager
def as_noted(note: tuple[bool, Recipe | None]) -> Iterator[None]:
    """Like the forward that ``note`` was taken in, for its recomputation."""
    token = _recipe.set(note)
    try:
        yield
    finally:
        _recipe.reset(token)


def note_autocast() -> tuple[bool, Recipe | None]:
    """What `as_noted` takes."""
    return _recipe.get()


def autocast_recipe(own: Recipe | None) -> Recipe | None:
    """The recipe of a forward: the layer's ``own``, else the block's; None: no FP8."""
    inside, recipe = _recipe.get()
    if not inside:
        return own
    return None if recipe is None else own or recipe


def state_of(owner: torch.nn.Module, own: Recipe | None, num_weights: int, device: torch.device) -> Fp8State | None:
    """The state for a forward of the layer ``owner``, kept as its submodule ``fp8``; None: no FP8.

    It is made when it is first needed. (A layer that has a recipe of its own makes it at once, so that a checkpoint can
    be loaded into it.)
    """
    recipe = autocast_recipe(own)
    if recipe is None:
        return None
    state = owner.fp8
    if not isinstance(state, Fp8State) or state.recipe != recipe:
        state = Fp8State(recipe, num_weights, device).train(owner.training)
        owner.fp8 = state
    return state
