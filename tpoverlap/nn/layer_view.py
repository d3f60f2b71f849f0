"""LayerView: what autograd functions get from a layer: its communicators under its own flags, and what to keep.

The manager's `LayerCommunicators` belong to a name and are shared by every layer of that name; a view belongs to one
layer. It changes options of its own calls only: regions, counters and shapes stay those of the name.

=====================  ==========================================  =============================================
Transformer Engine's   True                                        False
flag (None: as the
name is configured)
=====================  ==========================================  =============================================
``ub_overlap_ag``      as configured                               column fprop, row dgrad: gather, then GEMM
``ub_overlap_rs``      as configured                               row fprop: GEMM, then scatter
``ub_overlap_rs_dgrad``  column: dx is scattered in dgrad          column: dx is scattered beside wgrad (bulk)
``ub_bulk_dgrad``      column: bulk mode; x is gathered beside     column: x is gathered before dgrad
                       dgrad
``ub_bulk_wgrad``      column: bulk mode; dx is scattered beside   column: dx is scattered after wgrad
                       wgrad
=====================  ==========================================  =============================================

A flag of the other parallel mode has no effect, as in Transformer Engine, whose users pass all five to every layer.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from tpoverlap.communicator import CommOverlap, LayerCommunicators
from tpoverlap.config import default_config
from tpoverlap.errors import ConfigError
from tpoverlap.nn.weight_grads import PLAIN, WeightGrads


@dataclass(frozen=True)
class OverlapFlags:
    """Transformer Engine's five flags, by their names without ``ub_``. None: as the name is configured."""

    overlap_ag: bool | None = None
    overlap_rs: bool | None = None
    overlap_rs_dgrad: bool | None = None
    bulk_dgrad: bool | None = None
    bulk_wgrad: bool | None = None

    def require_consistent(self, *, delay_wgrad_compute: bool) -> None:
        """Raise ConfigError, naming both, for flags that contradict each other."""
        for name, value in (("ub_bulk_dgrad", self.bulk_dgrad), ("ub_bulk_wgrad", self.bulk_wgrad)):
            if value and self.overlap_rs_dgrad:
                raise ConfigError(
                    f"{name}=True and ub_overlap_rs_dgrad=True contradict each other: the input gradient is "
                    "reduce-scattered either inside dgrad's GEMM or beside wgrad's; set one of them to False"
                )
        if delay_wgrad_compute and self.bulk_wgrad:
            raise ConfigError(
                "ub_bulk_wgrad=True and delay_wgrad_compute=True contradict each other: a delayed wgrad GEMM is not "
                "there to hide the reduce-scatter; leave ub_bulk_wgrad out (dgrad's own GEMM then hides it)"
            )


@dataclass(frozen=True)
class LayerView(LayerCommunicators):
    """The communicators of one layer under its flags.

    Attributes:
        row: whether fprop reduce-scatters.
        save_gathered: column layers keep the gathered input [T, K] for backward instead of the shard [T_r, K].
        weight_grads: where weight gradients go, and when.
    """

    row: bool = False
    save_gathered: bool = False
    weight_grads: WeightGrads = field(default_factory=WeightGrads)


def grads_of(layer: LayerCommunicators) -> WeightGrads:
    """Where the weight gradients of a function called with ``layer`` go."""
    return layer.weight_grads if isinstance(layer, LayerView) else PLAIN


def view_of(
    layer: LayerCommunicators, row: bool, flags: OverlapFlags, save_gathered: bool, grads: WeightGrads
) -> LayerView:
    """``layer`` as one layer sees it."""
    fprop, dgrad, wgrad = layer.fprop, layer.dgrad, layer.wgrad
    if row:
        fprop = _unless_off(fprop, flags.overlap_rs)
        dgrad = _unless_off(dgrad, flags.overlap_ag)
    else:
        fprop = _unless_off(fprop, flags.overlap_ag)
        scatters = _scatters_in_dgrad(layer, flags)
        if scatters != layer.scatters_in_dgrad:
            dgrad, wgrad = _turned(layer.dgrad, scatters), None
        if not scatters:
            if wgrad is None and flags.bulk_wgrad is False:
                wgrad = _sequential(_turned(layer.dgrad, True))
            elif wgrad is not None:
                wgrad = _unless_off(wgrad, flags.bulk_wgrad)
            dgrad = _unless_off(dgrad, flags.bulk_dgrad)
    return LayerView(layer.manager, layer.name, fprop, dgrad, wgrad, row, save_gathered, grads)


def _scatters_in_dgrad(layer: LayerCommunicators, flags: OverlapFlags) -> bool:
    if flags.overlap_rs_dgrad is not None:
        return flags.overlap_rs_dgrad
    if flags.bulk_dgrad or flags.bulk_wgrad:
        return False
    return layer.scatters_in_dgrad


def _turned(dgrad: CommOverlap, scatters: bool) -> CommOverlap:
    """``dgrad`` in the other direction, with that direction's default options."""
    config = default_config("unregistered", scatters, dgrad.manager.tp_size)  # ring_exchange; a gather is always bulk
    if not dgrad.registered:
        config = replace(config, method="sequential")
    return dgrad.with_config(config)


def _unless_off(communicator: CommOverlap, flag: bool | None) -> CommOverlap:
    return _sequential(communicator) if flag is False else communicator


def _sequential(communicator: CommOverlap) -> CommOverlap:
    return communicator.with_config(replace(communicator.config, method="sequential", atomic_gemm=False))
