"""UserBufferManager: one per tensor-parallel group. Names -> communicators, active shape, statistics, life time."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch

from tpoverlap.active_shape import ActiveShape, ShapeLike, require_capacity
from tpoverlap.comm import Channel, Meter
from tpoverlap.communicator import CommOverlap, LayerCommunicators
from tpoverlap.config import KNOWN_NAMES, resolve
from tpoverlap.config.resolver import ConfigSource
from tpoverlap.dispatch import method_for_use
from tpoverlap.errors import CapacityError, ConfigError, NotInitializedError
from tpoverlap.explanation import explanation, overflow_message
from tpoverlap.memory import Backend, select_backend
from tpoverlap.memory_report import manager_regions, report_memory, standard_regions
from tpoverlap.method_tables import CacheSource, MethodTables
from tpoverlap.name_table import NameTable
from tpoverlap.operation_cache import OperationUse
from tpoverlap.overlap import OperationContext
from tpoverlap.plan import make_plan, pinned_evidence, pinned_methods
from tpoverlap.settings import Registration, Settings, config_contents, plan_contents, require_agreement
from tpoverlap.setup import (
    BACKENDS,
    DTYPES,
    OVERFLOW_MODES,
    parse_capacity,
    parse_max_rows,
    parse_modes,
    parse_registration,
    refused_input,
    require_choice,
    require_fp8,
    resolve_device,
    resolve_group,
    resolve_timeout,
)
from tpoverlap.tokens import TokenPartition

logger = logging.getLogger("tpoverlap")


class UserBufferManager:
    """Registers communication buffers once, at a capacity; every microbatch sets a smaller active shape.

    ======================================  ====================================================================
    ``set_active_shape((T, H))``            T of the next operations; local, asynchronous, no allocation
    ``with microbatch(T): ...``             the same, scoped
    ``layer("qkv")``                        fprop, dgrad and wgrad communicators, for autograd functions
    ``get("qkv_fprop")``                    one communicator
    ``register("mtp_proj", width=W)``       further names and widths; collective
    ``explain(name, T)``, ``plan()``        which method, from which source, and why
    ``stats()``, ``memory_report()``        what happened, what it takes
    ``check()``                             wait for the device and raise what went wrong
    ``close()``, ``abort()``                collective end; local end
    ======================================  ====================================================================

    Construction is collective over ``group``. Args:
        group: ProcessGroup, 1-D DeviceMesh, or None for the default group.
        capacity_shape: (C, H): most tokens of the group, and width of the communicated activation.
        dtype: of the communicated activation: bfloat16, float16 or float32.
        device: None: the current GPU if there is one, else the CPU.
        ub_cfgs: options by GEMM name (mapping or YAML file), see docs/configuration.md.
        quantization_modes: NONE (None), FP8 (for layers that have an `Fp8State`), or both; they share the regions.
        backend: "auto", "cuda", "shared" or "process_group"; or a `Backend` class, for tests.
        timeout_s: bound of every wait for a peer; None: the group's own time-out.
        on_overflow: "error", or "sequential" to run a T above C on the plain collectives.
        plan: a former manager's ``plan()``, to pin its choices.
        max_rows_per_rank: most rows of one rank; None: ceil(C / R).
        tuning_cache: folder with what ``tpoverlap tune`` measured, read by rank 0; None: the user's cache on CUDA
            devices, none on the CPU; True: the user's; False: names keep their default methods, whatever T is.
        meter: measure how long operations wait and for which rank; `stats` then says so. Costs under 1 %.

    Raises:
        ConfigError, ActiveShapeError: an argument is illegal. RankMismatchError: ranks were given different ones.
        BackendUnavailableError: no backend works. NotInitializedError: no process group.
    """

    def __init__(
        self,
        group: Any,
        capacity_shape: tuple[int, int],
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | int | None = None,
        ub_cfgs: ConfigSource = None,
        quantization_modes: Any = None,
        backend: str | type[Backend] = "auto",
        timeout_s: float | None = None,
        on_overflow: str = "error",
        plan: Mapping[str, Any] | None = None,
        max_rows_per_rank: int | None = None,
        tuning_cache: CacheSource = None,
        meter: bool = False,
    ) -> None:
        self.group = resolve_group(group)
        self.rank, self.tp_size = self.group.rank(), self.group.size()
        settings: Settings | Exception
        try:
            self.device = resolve_device(device)
            self.capacity_shape = parse_capacity(capacity_shape)
            self.dtype = dtype
            self.on_overflow = on_overflow
            self.timeout_s = resolve_timeout(timeout_s, self.group, self.device)
            require_choice("dtype", dtype, DTYPES)
            if not (isinstance(backend, type) and issubclass(backend, Backend)):
                require_choice("backend", backend, BACKENDS)
            require_choice("on_overflow", on_overflow, OVERFLOW_MODES)
            self.quantization_modes = parse_modes(quantization_modes, self.device)
            self.max_rows_per_rank = parse_max_rows(max_rows_per_rank, self.capacity_shape[0], self.tp_size)
            config = resolve(ub_cfgs, self.tp_size, fp8="fp8" in self.quantization_modes)
            self._pinned = pinned_methods(plan, self.tp_size, config)
            evidence = pinned_evidence(plan)
            settings = Settings(
                self.capacity_shape,
                str(dtype),
                self.device.type,
                backend if isinstance(backend, str) else backend.name,
                self.timeout_s,
                on_overflow,
                self.max_rows_per_rank,
                config.digest,
                "" if plan is None else str(plan["hash"]),
                self.quantization_modes,
            )
        except Exception as error:  # of any kind: the other ranks are about to wait for this one
            settings = error
        behind = {"ub_cfgs": lambda: config_contents(config), "plan": lambda: plan_contents(plan)}
        require_agreement(self.group, settings, behind)
        self._config = config
        self.active = ActiveShape(self.tp_size, self.capacity_shape[1])
        self._names = NameTable(self, config, self.capacity_shape[1], self.capacity_shape[0], self.max_rows_per_rank)
        self._closed = False
        self._logged_overflow: TokenPartition | None = None
        self.said: set[str] = set()  # by layers: what is logged once
        self.channel: Channel | None = None
        self.backend_name, self.backend_reason = "none", "R = 1: nothing is communicated"
        self._tables = MethodTables(evidence, config, self._pinned, self.tp_size, dtype)
        if self.tp_size > 1:
            self._open_channel(backend, tuning_cache)
        if meter and self.channel is not None:
            self.channel.meter = Meter(self.device)
        self._log_setup()

    # -- set-up --------------------------------------------------------------------------------------------------

    def _open_channel(self, backend: str | type[Backend], tuning_cache: CacheSource) -> None:
        choice = select_backend(backend, self.group, self.device)
        self.backend_name, self.backend_reason = choice.backend.name, choice.reason
        self._tables.agree(self.group, self.device, self.backend_name, tuning_cache)
        capacity_tokens, width = self.capacity_shape
        itemsize, rows = self.dtype.itemsize, self.max_rows_per_rank
        regions = manager_regions(
            capacity_tokens, width, itemsize, self.tp_size, rows, fp8="fp8" in self.quantization_modes
        )
        streams = max((c.config.num_max_streams for c in self._names if c.config.method == "pipeline"), default=0)
        streams = max(streams, 3 if "pipeline" in self._pinned.values() or not self._tables.evidence.is_empty else 0)
        self.channel = Channel(choice.backend, regions, self.timeout_s, streams)
        self.active.refused = self.channel.diagnosis.refused
        self.channel.diagnosis.know_possible(
            lambda: self._tables.possible_labels(self._names, fp8="fp8" in self.quantization_modes)
        )

    def _log_setup(self) -> None:
        if self.rank == 0:
            plan = self.plan()
            methods = {name: row["method"] for name, row in plan["methods"].items()}
            where = f"capacity {self.capacity_shape}, backend {self.backend_name} ({self.backend_reason})"
            logger.info("tpoverlap: R=%d, %s, plan %s %s", self.tp_size, where, plan["hash"], methods)

    def register(
        self, name: str, width: int, max_tokens: int | None = None, max_rows_per_rank: int | None = None
    ) -> None:
        """A further layer or GEMM name with its own width. Collective: call it on every rank, in the same order.

        It shares the existing regions where they are large enough, else a further arena is allocated.

        Args:
            name: a layer ("mtp_proj": its fprop, dgrad, wgrad) or one GEMM ("lm_head_fprop").
            width: of the activation that is communicated.
            max_tokens: None: the manager's capacity.
            max_rows_per_rank: None: ceil(max_tokens / R), or the manager's if that was given and is more.

        Raises:
            ConfigError, ActiveShapeError: an argument is illegal here or on another rank, or the name is taken.
            RankMismatchError: ranks register different things. In all cases nothing was registered.
        """
        self.require_open()
        registration: Registration | Exception
        try:
            if self.channel is not None:
                self.channel.check()
            self._names.require_new(name)
            own = (self.capacity_shape[0], self.max_rows_per_rank)
            registration = parse_registration(name, width, max_tokens, max_rows_per_rank, own, self.tp_size)
        except Exception as error:  # of any kind: the other ranks are about to wait for this one
            registration = error
        agreed = require_agreement(self.group, registration)
        regions = ("ag", "rs")
        if self.channel is not None:
            wanted = standard_regions(
                agreed.max_tokens, agreed.width, self.dtype.itemsize, self.tp_size, agreed.max_rows_per_rank, f"-{name}"
            )
            existing = (self.channel.regions["ag"], self.channel.regions["rs"])
            if any(spec.slot_bytes > region.slot_bytes for spec, region in zip(wanted, existing, strict=True)):
                self.channel.add_regions(wanted)
                regions = (wanted[0].name, wanted[1].name)
        self._names.register(name, agreed.width, agreed.max_tokens, agreed.max_rows_per_rank, *regions)
        self._tables.forget()

    # -- active shape --------------------------------------------------------------------------------------------

    def set_active_shape(
        self, shape: ShapeLike | None = None, partition: TokenPartition | None = None
    ) -> TokenPartition | None:
        """T of the operations that follow: ``(T, H)``, ``T`` or a TokenPartition; balanced unless counts are given.

        Local and asynchronous; gives the partition. Without arguments it is None, and T is inferred from inputs again.

        Raises:
            ActiveShapeError: malformed, or H differs. CapacityError: more than C rows, or than max_rows_per_rank.
        """
        self.require_open()
        parsed = None if shape is None and partition is None else self._parse_fitting(shape, partition)
        self.active.set(parsed)
        return parsed

    @contextmanager
    def microbatch(
        self, shape: ShapeLike | None = None, partition: TokenPartition | None = None
    ) -> Iterator[TokenPartition]:
        """``set_active_shape`` for a block, in this thread; gives the partition. Scopes nest."""
        self.require_open()
        parsed = self._parse_fitting(shape, partition)
        with self.active.scope(parsed):
            yield parsed

    def _parse_fitting(self, shape: ShapeLike | None, partition: TokenPartition | None) -> TokenPartition:
        limits = (self.capacity_shape[0], self.max_rows_per_rank) if self.on_overflow == "error" else None
        return self.active.parse_fitting(shape, partition, limits)

    @property
    def partition(self) -> TokenPartition | None:
        """Rows of each rank; None before any shape was set."""
        return self.active.partition

    @property
    def active_shape(self) -> tuple[int, int]:
        """(T, H); the capacity before any shape was set."""
        partition = self.active.partition
        return self.capacity_shape if partition is None else (partition.total, self.capacity_shape[1])

    @property
    def num_tokens(self) -> int:
        """T; C before any shape was set."""
        return self.active_shape[0]

    # -- names ---------------------------------------------------------------------------------------------------

    def get(self, name: str, *, quantised: bool = False) -> CommOverlap:
        """The communicator of a GEMM name; ``quantised``: the one whose buffer holds FP8 rows.

        Raises:
            ConfigError: no such name (the message lists those there are), or no FP8 mode.
        """
        self.require_open()
        if not quantised:
            return self._names.get(name)
        require_fp8(name, self.quantization_modes)
        return self._names.get(name).as_quantised()

    def layer(self, name: str, *, row: bool | None = None) -> LayerCommunicators:
        """The communicators of a layer: what ``all_gather_gemm`` and ``gemm_reduce_scatter`` take.

        Args:
            name: "qkv", "proj", "fc1", "fc2" or a registered name; an unregistered one runs without overlap.
            row: whether fprop reduce-scatters; None: as the name is configured.
        """
        if self._closed:
            self.require_open()
        if row is None:
            fprop = f"{name}_fprop"
            row = fprop in self._names and self._names.get(fprop).is_reduce_scatter
        return self._names.layer(name, row=row)

    def has_fixed_direction(self, name: str) -> bool:
        """Whether ``name`` may be used in one direction only: one of the twelve, or configured. Else use decides."""
        return name in KNOWN_NAMES or self._config.source(name) == "explicit"

    # -- operations (called by nn) -------------------------------------------------------------------------------

    def operation(
        self,
        communicator: CommOverlap,
        partition: TokenPartition,
        *,
        scatter: bool,
        beside: bool = False,
        features: int | None = None,
        detail: int = 0,
        fp8: bool = False,
    ) -> OperationContext:
        """Everything a method needs for one operation of ``communicator``; decides the method and counts it.

        Args:
            communicator: whose name, options and regions to use.
            partition: rows of each rank.
            scatter: reduce-scatter instead of all-gather.
            beside: the whole collective runs beside a GEMM that does not depend on it.
            features: of the sharded side of the GEMM on this rank; None: unknown, so T does not enter the choice.
            detail: hash of what else all ranks must agree on.
            fp8: it runs under a recipe, where other methods may be the best ones at the same T.

        Raises:
            CapacityError: it does not fit and on_overflow is "error". ConfigError: the method cannot do this.
        """
        if self._closed:
            self.require_open()
        if communicator.chosen_for is not communicator.config:
            communicator.operations.clear()
            communicator.chosen_for = communicator.config
        use = (id(partition), scatter, beside, features, detail, fp8)
        context = communicator.operations.get(use)
        if context is None:
            context = communicator.operations.again(partition, use)
            if context is None:
                context = self._new_operation(communicator, partition, use)
                communicator.operations.keep(partition, use, context)
        communicator.statistics.record(context.method, partition.total, overflow=context.overflow)
        if context.overflow and partition != self._logged_overflow:
            self._logged_overflow = partition  # one line a microbatch, not one an operation
            logger.warning(overflow_message(self.rank, communicator, partition))
        return context

    def _new_operation(
        self, communicator: CommOverlap, partition: TokenPartition, use: OperationUse
    ) -> OperationContext:
        _, scatter, beside, features, detail, fp8 = use
        overflow = False
        if partition.total > communicator.max_tokens or partition.max_count > communicator.max_rows_per_rank:
            overflow = self._overflows(communicator, partition)
        by_tokens = self._tables.find(communicator, scatter=scatter, beside=beside, features=features, fp8=fp8)
        decision = self._tables.decide(communicator, partition.total, by_tokens, overflow=overflow)
        method, config = decision.method, decision.config or communicator.config
        if not decision.for_use:
            method = method_for_use(method, config, name=communicator.name, scatter=scatter, beside=beside)
        return OperationContext(
            self.channel,
            self.group,
            self.rank,
            method,
            config,
            communicator.name,
            communicator.scatter_region if scatter else communicator.gather_region,
            partition,
            communicator.width,
            self.dtype,
            overflow or not communicator.registered,
            overflow=overflow,
            detail=detail,
        )

    def _overflows(self, communicator: CommOverlap, partition: TokenPartition) -> bool:
        try:
            require_capacity(partition, communicator.max_tokens, communicator.max_rows_per_rank, communicator.name)
        except CapacityError:
            if self.on_overflow == "error":
                raise
            return True
        return False

    def next_gather_slot(self, communicator: CommOverlap, partition: TokenPartition) -> torch.Tensor:
        """View of the [T, H] slot that the next all-gather of ``communicator`` uses. For `CommOverlap.get_buffer`."""
        self.require_open()
        if self.channel is None:
            raise ConfigError("R = 1 has no communication buffer")
        shape = (partition.total, communicator.width)
        return self.channel.hand_out_slot(communicator.gather_region, shape, communicator.buffer_dtype)

    # -- reports -------------------------------------------------------------------------------------------------

    def explain(self, name: str, num_tokens: int | None = None, features: int | None = None) -> str:
        """In words what happens to ``name`` at T = ``num_tokens``: method, source, reason, rows, backend.

        None takes the active shape with its rows a rank, or the capacity where there is none. Where the method depends
        on T it depends on the GEMM's shape too: ``features``, of its sharded side on this rank; None: as it last ran.
        """
        self.require_open()
        communicator = self._names.find(name)
        partition = communicator.partition if num_tokens is None else None
        if partition is None:
            tokens = communicator.max_tokens if num_tokens is None else num_tokens
            partition = TokenPartition.balanced(tokens, self.tp_size)
        tokens = partition.total
        try:
            overflow = self._overflows(communicator, partition)
        except CapacityError as error:
            return f"{name} at T={partition.total}: CapacityError: {error}"
        by_tokens, remark = self._tables.explained(communicator, features)
        decision = self._tables.decide(communicator, tokens, by_tokens, overflow=overflow)
        notes = [note for note in self._config.notes if note.name == name]
        backend, fp8 = f"{self.backend_name}: {self.backend_reason}", None
        if "fp8" in self.quantization_modes:
            table, other = self._tables.explained(communicator, features, fp8=True)
            fp8 = (self._tables.decide(communicator, tokens, table, overflow=overflow), other)
        return explanation(communicator, partition, decision, backend, notes, self.dtype, remark, fp8)

    def plan(self) -> dict[str, Any]:
        """The dispatch choices of all names: serialisable, with a hash; pin them with ``plan=``."""
        self.require_open()
        names = {c.name: (self._tables.planned(c), c.is_reduce_scatter) for c in self._names if c.registered}
        return make_plan(names, self.tp_size, self.capacity_shape, self._tables.evidence)

    def stats(self) -> dict[str, dict[str, Any]]:
        """For each name that was called, registered or not: calls, methods, T histogram, sequential, overflow counts,
        and with ``meter=True`` what `Meter.stats` says.
        """
        self.require_open()
        used = (*self._names, *self._names.unregistered)
        metered = {} if self.channel is None or self.channel.meter is None else self.channel.meter.stats()
        return {c.name: {**c.statistics.as_dict(), **metered.get(c.name, {})} for c in used if c.statistics.calls}

    def memory_report(self) -> dict[str, Any]:
        """Bytes that this rank holds: registered memory by region, and the number of allocations since set-up began."""
        self.require_open()
        staging = [tensor for c in (*self._names, *self._names.unregistered) for tensor in c.stagings()]
        return report_memory(self.channel, self.backend_name, staging, self.capacity_shape, self.dtype)

    # -- end of life ---------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Wait for the device and raise what went wrong. Call it before ``optimizer.step()``."""
        self.require_open()
        if self.channel is None:
            return
        self.channel.check()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.channel.check_peers()

    def close(self) -> None:
        """Free everything. Collective, but local after an error; idempotent."""
        if not self._closed:
            self._closed = True
            if self.channel is not None:
                self.channel.close()
            self._names.forget()

    def abort(self) -> None:
        """End at once, without waiting for anybody; peers get PeerTimeoutError. Idempotent."""
        if not self._closed:
            self._closed = True
            if self.channel is not None:
                self.channel.abort()
            self._names.forget()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"backend {self.backend_name}, active shape {self.active_shape}"
        return f"UserBufferManager(rank {self.rank} of {self.tp_size}, capacity {self.capacity_shape}, {state})"

    def __deepcopy__(self, memo: dict[int, Any]) -> UserBufferManager:
        """A copied model (for averaging, say) uses the same buffers: they belong to the group, not to the model."""
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            "a UserBufferManager owns memory of this process and cannot be pickled: save model.state_dict()"
        )

    def __enter__(self) -> UserBufferManager:
        self.require_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.abort()

    def require_open(self) -> None:
        """Raise NotInitializedError after `close` or `abort`."""
        if self._closed:
            raise NotInitializedError("this manager was closed; create a new one")

    def require_input(self, x: torch.Tensor, what: str, name: str | None = None) -> None:
        """Raise ActiveShapeError unless ``x`` is 2-D and on this manager's device, in its dtype."""
        if isinstance(x, torch.Tensor) and x.ndim == 2 and x.dtype == self.dtype and x.device == self.device:
            return
        if name is not None:
            what = f"{name}: {what}"
        raise refused_input(x, what, self.dtype, self.device)
