"""AcceleratorState: PartialState, plus how the model is computed and laid out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from nbstate.errors import StateConflictError
from nbstate.state.control import ProcessControl
from nbstate.state.html import render_card
from nbstate.state.kinds import DistributedType, parse_precision
from nbstate.state.parallelism import ParallelismConfig
from nbstate.state.partial import PartialState, planned_world_size
from nbstate.state.singleton import SharedState, building

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["AcceleratorState", "is_initialized"]

_OWN = frozenset({"distributed_type", "parallelism_config", "device_mesh", "mixed_precision"})


class AcceleratorState(SharedState, ProcessControl):
    """How this run trains. A singleton: any number of instances, one state.

    Has every attribute and method of ``PartialState``, which it builds if need be.

    Parameters
    ----------
    mixed_precision : {"no", "fp16", "bf16", "fp8"}, optional
        Default: what the launch asked for, otherwise ``"no"``.
    cpu : bool
        Whether to compute on the CPU though there is an accelerator.
    parallelism_config : ParallelismConfig, optional
        How the ranks are laid out. ``distributed_type`` becomes ``FSDP`` if it cuts the model over ranks.
    dynamo_plugin, deepspeed_plugin, fsdp_plugin, torch_tp_plugin, megatron_lm_plugin
        Not served: anything but None raises ``NotImplementedError``.
    **kwargs
        For ``PartialState``.

    Attributes
    ----------
    mixed_precision : str
        What the forward pass computes in.
    parallelism_config : ParallelismConfig or None
        As given.
    device_mesh : DeviceMesh or None
        The layout as torch knows it; None without a layout, and alone.

    Raises
    ------
    StateConflictError
        If the state exists and was built otherwise. The text names the argument; nothing is changed.
    ArgumentValueError
        If the precision is unknown, or the layout does not fill the world.

    Examples
    --------
    >>> AcceleratorState.reset()
    >>> AcceleratorState(mixed_precision="bf16", cpu=True).mixed_precision
    'bf16'
    >>> AcceleratorState.reset()
    """

    _shared_state: ClassVar[dict[str, Any]] = {}
    _names = PartialState._names | _OWN

    mixed_precision: str
    parallelism_config: ParallelismConfig | None
    device_mesh: DeviceMesh | None

    def __init__(
        self,
        mixed_precision: str | None = None,
        cpu: bool = False,
        dynamo_plugin: Any = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        parallelism_config: ParallelismConfig | None = None,
        _from_accelerator: bool = False,
        **kwargs: Any,
    ) -> None:
        _refuse_plugins(
            dynamo_plugin=dynamo_plugin,
            deepspeed_plugin=deepspeed_plugin,
            fsdp_plugin=fsdp_plugin,
            torch_tp_plugin=torch_tp_plugin,
            megatron_lm_plugin=megatron_lm_plugin,
        )
        precision = None if mixed_precision is None else parse_precision(mixed_precision)
        with building():
            if self.initialized:
                self._check_same(precision, cpu, parallelism_config, kwargs)
                return
            self._shared_state.clear()
            self._build(precision, cpu, parallelism_config, kwargs)
            type(self)._inherited = False

    def _check_same(
        self, precision: str | None, cpu: bool, layout: ParallelismConfig | None, kwargs: dict[str, Any]
    ) -> None:
        if precision is not None and precision != self.mixed_precision:
            raise _conflict("mixed_precision", precision, self.mixed_precision)
        if cpu and self.device.type != "cpu":
            raise _conflict("cpu", True, f"device {self.device}")
        if layout is not None and layout != self.parallelism_config:
            raise _conflict("parallelism_config", layout, self.parallelism_config)
        PartialState(**kwargs)  # checks them, as the state exists

    def _build(
        self, precision: str | None, cpu: bool, layout: ParallelismConfig | None, kwargs: dict[str, Any]
    ) -> None:
        if layout is not None:
            # Before a group is made: a rank that destroys it at once would break the others still on their way in.
            layout.check_world(planned_world_size(kwargs))
        existed = bool(PartialState._shared_state)
        partial = PartialState(cpu=cpu, **kwargs)
        try:
            kind, mesh = partial.distributed_type, None
            if layout is not None:
                layout.check_world(partial.num_processes)
                mesh = layout.build_device_mesh(partial.device.type) if partial.use_distributed else None
                kind = DistributedType.FSDP if layout.shards else kind
        except BaseException:
            if not existed:
                PartialState.reset()
            raise
        self._shared_state.update(
            mixed_precision=precision or partial.environment.mixed_precision,
            distributed_type=kind,
            parallelism_config=layout,
            device_mesh=mesh,
        )
        # One answer to "which precision?", whichever singleton is asked.
        PartialState._shared_state["mixed_precision"] = self.mixed_precision

    def __getattr__(self, name: str) -> Any:
        if type(self)._shared_state and name in PartialState._names and name not in _OWN:
            return getattr(PartialState.__new__(PartialState), name)
        return super().__getattr__(name)

    @property
    def default_device(self) -> Any:
        """The best device here: what a process alone would take."""
        return PartialState.__new__(PartialState).default_device

    @classmethod
    def _is_built(cls) -> bool:
        return bool(cls._shared_state and PartialState._shared_state)

    @classmethod
    def is_initialized(cls) -> bool:
        """Whether the state is built, and the ``PartialState`` under it is still there. Builds nothing."""
        return cls._is_built()

    @classmethod
    def reset(cls, reset_partial_state: bool = True) -> None:
        """Forget the state, so that the next one may be built otherwise.

        Parameters
        ----------
        reset_partial_state : bool
            Whether ``PartialState`` is reset with it, and its process group destroyed. Without, the device and the
            world stay and only the precision and the layout may change.
        """
        with building():
            cls._shared_state.clear()
            cls._inherited = False
            if reset_partial_state:
                PartialState.reset()
            elif PartialState._shared_state:
                launched = PartialState._shared_state["environment"]
                PartialState._shared_state["mixed_precision"] = launched.mixed_precision

    @classmethod
    def _reset_state(cls, reset_partial_state: bool = False) -> None:
        cls.reset(reset_partial_state)

    def __repr__(self) -> str:
        if not self.initialized:
            return "AcceleratorState(not built)"
        layout = f", {self.parallelism_config}" if self.parallelism_config is not None else ""
        return (
            f"AcceleratorState(process {self.process_index} of {self.num_processes}, local {self.local_process_index}, "
            f"{self.device}, {self.distributed_type.value}, precision {self.mixed_precision}{layout})"
        )

    def _repr_html_(self) -> str:
        if not self.initialized:
            return render_card("AcceleratorState", "not built; AcceleratorState() builds it", {})
        rows = PartialState.__new__(PartialState)._rows()
        rows |= {"distributed_type": self.distributed_type.value, "mixed_precision": self.mixed_precision}
        if self.parallelism_config is not None:
            rows["parallelism_config"] = " * ".join(f"{k} {v}" for k, v in self.parallelism_config.sizes.items())
        return render_card(
            "AcceleratorState", f"process {self.process_index} of {self.num_processes} on {self.device}", rows
        )


def _refuse_plugins(**plugins: Any) -> None:
    for name, plugin in plugins.items():
        if plugin is not None:
            raise NotImplementedError(f"AcceleratorState does not serve {name}; leave it out")


def _conflict(argument: str, asked: Any, built: Any) -> StateConflictError:
    return StateConflictError(
        f"{argument}={asked!r}, but AcceleratorState was built with {built!r}; "
        "call AcceleratorState.reset() first to build it otherwise"
    )


def is_initialized() -> bool:
    """Whether ``AcceleratorState`` is built. Builds nothing."""
    return AcceleratorState.is_initialized()
