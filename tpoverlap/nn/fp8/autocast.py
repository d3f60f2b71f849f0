"""``fp8_autocast``: Transformer Engine's way to say in which forwards FP8 is used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from tpoverlap.errors import ConfigError
from tpoverlap.gemm.fp8 import Float8CurrentScaling, Recipe

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


def autocast_recipe(own: Recipe | None) -> Recipe | None:
    """The recipe of a forward: the layer's ``own``, else the block's; None: no FP8."""
    inside, recipe = _recipe.get()
    if not inside:
        return own
    return None if recipe is None else own or recipe
