"""What an FP8 call is refused for, before any rank waits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tpoverlap.communicator import CommOverlap, Communicators, LayerCommunicators
from tpoverlap.errors import ActiveShapeError, ConfigError
from tpoverlap.gemm.fp8 import Fp8State, require_features, require_output_dtype
from tpoverlap.setup import require_fp8


def require_unquantised(comm: Communicators) -> None:
    """Raise ConfigError for a communicator of FP8 rows in a call without ``fp8=``."""
    if isinstance(comm, CommOverlap) and comm.is_quantised:
        raise ConfigError(
            f"{comm.name}: this communicator's buffer holds FP8 rows; pass fp8=Fp8State(recipe) as well, or the "
            "communicator without FP8"
        )


def require_fp8_gemm(
    layer: LayerCommunicators, fp8: Fp8State, x: torch.Tensor, weights: Sequence[torch.Tensor]
) -> None:
    """Raise unless ``x`` and ``weights`` [N, K] can be multiplied in FP8 by this manager.

    Raises:
        ConfigError: the manager has no FP8 mode, the state is for another number of weights or another recipe's dtype.
        ActiveShapeError: K or an N is not a multiple of 16, or the input lies in the communication buffer.
    """
    manager = layer.manager
    if not isinstance(fp8, Fp8State) or not fp8.is_accepted(manager, weights):
        _require_fits(layer, fp8, x, weights)
        fp8.accept(manager, weights)
    channel = manager.channel
    if channel is not None and channel.holds(x) and x.numel():  # an empty one may be a view of the buffer
        raise ActiveShapeError(
            f"{layer.name}: an FP8 layer cannot take an input that lies in the communication buffer, where peers "
            "are about to write FP8 rows; clone it"
        )


def _require_fits(layer: LayerCommunicators, fp8: Fp8State, x: torch.Tensor, weights: Sequence[torch.Tensor]) -> None:
    """What depends on the manager, the state and the weights' shapes alone."""
    manager = layer.manager
    if not isinstance(fp8, Fp8State):
        raise ConfigError(f"{layer.name}: fp8 must be an Fp8State (it keeps what the recipe needs), got {fp8!r}")
    require_fp8(layer.name, manager.quantization_modes)
    if fp8.num_weights != len(weights):
        raise ConfigError(
            f"{layer.name}: {len(weights)} weights, but the Fp8State was made for {fp8.num_weights}; "
            f"make one with Fp8State(recipe, num_weights={len(weights)}) for each layer"
        )
    require_output_dtype(layer.name, manager.dtype, manager.device, rowwise=fp8.input.is_rowwise)
    require_features(layer.name, "in_features", x.shape[1])
    for weight in weights:
        require_features(layer.name, "out_features", weight.shape[0])
