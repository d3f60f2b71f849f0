"""``fp8_autocast``: Transformer Engine's way to say in which forwards FP8 is used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

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


class Fp8Slot(torch.nn.Module):
    """Where a layer keeps the `Fp8State` of one of its GEMMs.

    A layer with a recipe of its own has the state at once. Else it is made in the first forward inside `fp8_autocast`,
    and anew for another recipe; what ``load_state_dict`` brought before that waits for it.
    """

    state: Fp8State | None
    _waiting: dict[str, torch.Tensor]

    def __init__(self, own: Recipe | None, device: torch.device) -> None:
        super().__init__()
        self._own, self._device, self._waiting = own, device, {}
        self.state = None if own is None else Fp8State(own, 1, device)

    def current(self) -> Fp8State | None:
        """The state for a forward that starts now; None: no FP8."""
        recipe = autocast_recipe(self._own)
        if recipe is None:
            return None
        state: Any = self._modules.get("state")  # as `self.state`, whose look-up is slow
        if state is None or (state.recipe is not recipe and state.recipe != recipe):
            with torch.inference_mode(False):  # the first forward may be in that mode; its buffers are written later
                state = Fp8State(recipe, 1, self._device).train(self.training)
                self._take_waiting(state)
            self.state = state
        current: Fp8State = state
        return current

    def _take_waiting(self, state: Fp8State) -> None:
        if not self._waiting:
            return
        try:
            state.load_state_dict(self._waiting)
        except RuntimeError as error:
            raise ConfigError(
                f"the FP8 histories of the state dict that was loaded do not fit the recipe of this forward, "
                f"{state.recipe}; use the recipe they were saved with, or load without the names that contain "
                f"'fp8.state.': {error}"
            ) from error
        self._waiting = {}

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        if self._modules.get("state") is None:
            below = f"{prefix}state."
            # Taken out of this module's own view of the state dict, where they would count as unexpected.
            taken = {name: state_dict.pop(name) for name in list(state_dict) if name.startswith(below)}
            self._waiting = {name.removeprefix(below): value.detach().clone() for name, value in taken.items()}
        super()._load_from_state_dict(state_dict, prefix, *others)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.update({f"{prefix}state.{name}": value for name, value in self._waiting.items()})
