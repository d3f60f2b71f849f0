"""What a layer keeps for FP8: a quantizer for each of its tensors, and its weights in FP8, once a version."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from tpoverlap.errors import ConfigError
from tpoverlap.gemm.fp8.quantize import QuantizedTensor
from tpoverlap.gemm.fp8.quantizer import Quantizer
from tpoverlap.gemm.fp8.recipes import Float8CurrentScaling, Recipe


@dataclass
class QuantizedWeight:
    """A weight [N, K] in FP8, in the two orientations that GEMMs read.

    The second one is made along with the first if it is known to be needed, else when it is asked for.
    """

    weight: QuantizedTensor
    _rowwise: tuple[Quantizer, torch.Tensor] | None
    _transposed: QuantizedTensor | None = None

    @property
    def transposed(self) -> QuantizedTensor:
        """[K, N]: for the input gradient."""
        if self._transposed is None:
            if self._rowwise is None:
                self._transposed = self.weight.transposed()
            else:  # its scales belong to input features: quantised anew, not converted
                quantizer, source = self._rowwise
                self._transposed = quantizer.local(source.t(), record=False)
        return self._transposed


class Fp8State(torch.nn.Module):
    """FP8 of one layer: pass it as ``fp8=`` to `all_gather_gemm` and `gemm_reduce_scatter`, always the same one.

    A submodule of the layer, so that ``state_dict`` carries delayed scaling's histories (names ``input``,
    ``weight.0``, ``grad.0``, ...). Magnitudes of tensors that travel are put together over the ranks, so they are equal
    everywhere; those of weights and of other tensors are this rank's own. ``state.eval()`` stops recording.

    Weights are quantised in every forward, unless ``cache_weights``: then once a version. Writing through
    ``weight.data``, as some distributed optimizers do, makes no new version: then call `forget_weights` after it, or
    the old weights stay in use without any error.

    Args:
        recipe: `Float8CurrentScaling` (default), `DelayedScaling` or `Float8RowwiseScaling`.
        num_weights: weights of the layer that share one gather.
        device: of the histories; None: the default device.
        cache_weights: quantise a weight once a version: for several microbatches a step.
    """

    def __init__(
        self,
        recipe: Recipe | None = None,
        num_weights: int = 1,
        device: torch.device | str | None = None,
        cache_weights: bool = False,
    ) -> None:
        super().__init__()
        self.recipe = Float8CurrentScaling() if recipe is None else recipe
        if not isinstance(self.recipe, Recipe) or type(self.recipe) is Recipe:
            raise ConfigError(
                f"the FP8 recipe is {recipe!r}; use Float8CurrentScaling(), DelayedScaling() or Float8RowwiseScaling()"
            )
        place = None if device is None else torch.device(device)
        self.cache_weights = cache_weights
        self.input = Quantizer(self.recipe, "input", place)
        weights = [Quantizer(self.recipe, "weight", place) for _ in range(num_weights)]
        grads = [Quantizer(self.recipe, "grad", place) for _ in range(num_weights)]
        self.weight, self.grad = torch.nn.ModuleList(weights), torch.nn.ModuleList(grads)
        self._by_role = self._quantizers()
        self._cache: dict[int, tuple[weakref.ref[torch.Tensor], int, QuantizedWeight]] = {}
        self._accepted: tuple[weakref.ref[object], list[torch.Size]] | None = None

    def _quantizers(self) -> dict[str, list[Quantizer]]:
        """Beside the modules: they are asked for several times an operation, and a module's own look-up is slow."""
        modules: dict[str, Iterable[torch.nn.Module]] = {
            "input": [self.input],
            "weight": self.weight,
            "grad": self.grad,
        }
        return {role: [one for one in listed if isinstance(one, Quantizer)] for role, listed in modules.items()}

    @property
    def num_weights(self) -> int:
        """Weights this state was made for."""
        return len(self.weight)

    def quantized_weight(self, index: int, weight: torch.Tensor, *, transposes: bool = False) -> QuantizedWeight:
        """Weight ``index`` in FP8: from the cache if this very tensor has not changed since.

        ``transposes``: both orientations are needed, so they are made in one pass.
        """
        caches = self.cache_weights
        if caches:
            found = self._cache.get(index)
            version = -1 if weight.is_inference() else weight._version  # inference tensors count no versions
            if found is not None and found[0]() is weight and found[1] == version and version >= 0:
                return found[2]
        quantizer, source = self._by_role["weight"][index], weight
        if torch.is_grad_enabled() or quantizer.is_rowwise:  # its quantisation would be recorded, or it is kept
            source = weight.detach()
        quantised = quantizer.local(source, record=self.training, transposes=transposes)
        made = QuantizedWeight(quantised, (quantizer, source) if quantizer.is_rowwise else None)
        if caches and not torch.is_inference_mode_enabled():  # what is made there cannot be saved for backward
            self._cache[index] = (weakref.ref(weight), version, made)
        return made

    def quantizer(self, role: str, index: int = 0) -> Quantizer:
        """The quantizer of the input, or of weight or output gradient ``index``."""
        return self._by_role[role][index]

    def is_accepted(self, manager: object, weights: Sequence[torch.Tensor]) -> bool:
        """Whether `accept` was called last with this manager and weights of these shapes."""
        accepted = self._accepted
        if accepted is None or accepted[0]() is not manager:
            return False
        return [weight.shape for weight in weights] == accepted[1]

    def accept(self, manager: object, weights: Sequence[torch.Tensor]) -> None:
        """What depends on the manager and on the weights' shapes alone was checked, and need not be again."""
        self._accepted = weakref.ref(manager), [weight.shape for weight in weights]

    def forget_weights(self) -> None:
        """Quantise the weights again in the next forward: after writing them through ``.data``."""
        self._cache.clear()

    def __deepcopy__(self, memo: dict[int, object]) -> Fp8State:
        """A copy with its own histories and no cached weight: those belong to the original's parameters."""
        made = Fp8State(self.recipe, self.num_weights, None, self.cache_weights)
        for name, buffer in self.named_buffers():
            made.get_submodule(name.rpartition(".")[0])._buffers[name.rpartition(".")[2]] = buffer.clone()
        made.train(self.training)
        memo[id(self)] = made
        return made

    def __getstate__(self) -> dict[str, object]:
        """Pickled without cached weights (weak references cannot be)."""
        state = {**super().__getstate__(), "_cache": {}, "_accepted": None}  # type: ignore[no-untyped-call]
        del state["_by_role"]
        return state

    def __setstate__(self, state: dict[str, object]) -> None:
        """Also what an older version pickled."""
        super().__setstate__({"_accepted": None, **state})  # type: ignore[no-untyped-call]
        self._by_role = self._quantizers()

    def extra_repr(self) -> str:
        """Shown by ``print(module)``."""
        return f"{self.recipe}"
