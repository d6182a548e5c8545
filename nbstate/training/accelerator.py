"""``Accelerator``: one object that makes a training loop for one process run on many."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from nbstate.errors import ArgumentValueError
from nbstate.state import (
    AcceleratorState,
    GradientAccumulationPlugin,
    GradientState,
    InitProcessGroupKwargs,
    ParallelismConfig,
    PartialState,
)
from nbstate.state.partial import planned_world_size
from nbstate.training import arguments, clipping, fp8, parallelism, precision
from nbstate.training.accumulation import Accumulation
from nbstate.training.dataloader import PreparedLoader, prepare_data_loader, skip_first_batches
from nbstate.training.fully_shard import FullyShardedDataParallelPlugin
from nbstate.training.handlers import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
)
from nbstate.training.layout import check_layout
from nbstate.training.memory import release_memory
from nbstate.training.optimizer import AcceleratedOptimizer
from nbstate.training.project import ProjectConfiguration
from nbstate.training.saving import Saving
from nbstate.training.scheduler import AcceleratedScheduler
from nbstate.training.spreading import Spread, layout_for
from nbstate.training.tensor_parallel import TorchTensorParallelPlugin
from nbstate.training.tracking import Tracking, check_trackers

__all__ = ["Accelerator"]


class Accelerator(Saving, Tracking):
    """Prepares models, loaders, optimizers and schedulers for this rank, and runs their steps.

    Parameters
    ----------
    device_placement : bool
        Move models and batches to the rank's device.
    split_batches : bool, optional
        As in ``DataLoaderConfiguration``; give one or the other.
    mixed_precision : {"no", "fp16", "bf16", "fp8"}, optional
        What models compute in; the launch's by default.
    gradient_accumulation_steps : int
        Batches whose gradients make one optimizer step; the launch's (``ACCELERATE_GRADIENT_ACCUMULATION_STEPS``) if
        left at 1.
    cpu : bool
        Compute on the CPU even where there is an accelerator.
    dataloader_config : DataLoaderConfiguration, optional
        How loaders are shared.
    rng_types : sequence of str, optional
        Random states to synchronise when an iteration over a loader starts, besides the shuffle: "torch", "cuda", ...
    gradient_accumulation_plugin : GradientAccumulationPlugin, optional
        Everything about accumulation; give this or ``gradient_accumulation_steps``.
    step_scheduler_with_optimizer : bool
        Whether prepared schedulers keep pace with the optimizer.
    kwargs_handlers : sequence, optional
        ``DistributedDataParallelKwargs``, ``GradScalerKwargs``, ``AutocastKwargs``, ``InitProcessGroupKwargs``,
        ``AORecipeKwargs``, each at most once.
    parallelism_config : ParallelismConfig, optional
        How the ranks are laid out; replicas by default.
    fsdp_plugin : FullyShardedDataParallelPlugin, optional
        How models are sharded; without a layout they are sharded over all ranks.
    torch_tp_plugin : TorchTensorParallelPlugin, optional
        By which plan layers are cut.
    log_with : str, GeneralTracker, or a sequence of these, optional
        What ``log`` hands measurements to: "tensorboard", or trackers of your own.
    project_dir : path, optional
        Where checkpoints and logs go; or say more by ``project_config``.
    project_config : ProjectConfiguration, optional
        Where they go, and how checkpoints are named and kept.
    deepspeed_plugin, megatron_lm_plugin, dynamo_backend, dynamo_plugin, deepspeed_plugins
        Not served yet: anything but None raises NotImplementedError.

    Examples
    --------
    >>> import torch
    >>> from nbstate.training import Accelerator
    >>> accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> loader = torch.utils.data.DataLoader(torch.ones(6, 2), batch_size=2)
    >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    >>> for batch in loader:
    ...     with accelerator.accumulate(model):
    ...         accelerator.backward(model(batch).mean())
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    ...         print(accelerator.sync_gradients)
    False
    True
    True
    """

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool | None = None,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
        torch_tp_plugin: TorchTensorParallelPlugin | None = None,
        megatron_lm_plugin: Any = None,
        rng_types: Sequence[Any] | None = None,
        log_with: Any = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: Sequence[Any] | None = None,
        dynamo_backend: Any = None,
        dynamo_plugin: Any = None,
        deepspeed_plugins: Any = None,
        parallelism_config: ParallelismConfig | None = None,
    ) -> None:
        arguments.refuse_unserved(
            deepspeed_plugin=deepspeed_plugin,
            megatron_lm_plugin=megatron_lm_plugin,
            dynamo_backend=dynamo_backend,
            dynamo_plugin=dynamo_plugin,
            deepspeed_plugins=deepspeed_plugins,
        )
        handlers = arguments.sort_handlers(kwargs_handlers)
        plugin = arguments.accumulation_plugin(gradient_accumulation_steps, gradient_accumulation_plugin)
        self.dataloader_config = arguments.loader_configuration(split_batches, dataloader_config)
        precision.check_precision(mixed_precision, cpu)
        self.log_with = check_trackers(log_with)
        self.trackers = []

        group = handlers.get(InitProcessGroupKwargs)
        options = group.to_kwargs() if group else {}
        layout = layout_for(parallelism_config, fsdp_plugin, torch_tp_plugin, planned_world_size(options))
        check_layout(layout, cpu)
        self.spread = Spread(handlers.get(DistributedDataParallelKwargs), fsdp_plugin, torch_tp_plugin)
        self.state = AcceleratorState(mixed_precision=mixed_precision, cpu=cpu, parallelism_config=layout, **options)
        self._process = PartialState()
        self.gradient_state = GradientState(plugin)
        if not (self.sync_gradients or self.gradient_state.in_dataloader):
            # A cell that was interrupted between two synchronised steps must not leave the next one without any.
            self.gradient_state._set_sync_gradients(True)
        self.device_placement = device_placement
        self.rng_types = rng_types
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self.ddp_handler = self.spread.ddp
        self.autocast_handler: AutocastKwargs | None = handlers.get(AutocastKwargs)
        self.fp8_recipe: fp8.AORecipeKwargs | None = handlers.get(fp8.AORecipeKwargs)
        self.scaler = precision.grad_scaler(self.mixed_precision, self.device, handlers.get(GradScalerKwargs))
        self._begin_saving(arguments.project_configuration(project_dir, project_config))
        self.step = 0
        self._models: list[torch.nn.Module] = []
        self._optimizers: list[AcceleratedOptimizer] = []
        self._schedulers: list[AcceleratedScheduler] = []
        self._dataloaders: list[PreparedLoader] = []

    @property
    def sync_gradients(self) -> bool:
        """Whether gradients are synchronised in this step."""
        return self.gradient_state.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, sync_gradients: bool) -> None:
        self.gradient_state._set_sync_gradients(sync_gradients)

    @property
    def gradient_accumulation_steps(self) -> int:
        """Batches whose gradients make one optimizer step."""
        return self.gradient_state.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        old = self.gradient_state
        GradientState(
            GradientAccumulationPlugin(
                num_steps=steps,
                adjust_scheduler=old.adjust_scheduler,
                sync_with_dataloader=old.sync_with_dataloader,
                sync_each_batch=old.sync_each_batch,
            )
        )

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the gradient scaler left out the last step of any prepared optimizer."""
        return any(optimizer.step_was_skipped for optimizer in self._optimizers)

    def prepare(self, *args: Any, device_placement: Sequence[bool | None] | None = None) -> Any:
        """Make objects ready for this rank.

        Parameters
        ----------
        *args
            Models, loaders, optimizers and schedulers, in any order. Others, and those that were prepared before, are
            handed back as they are.
        device_placement : sequence of bool, optional
            For each object, whether it is moved to the rank's device; the accelerator's setting by default.

        Returns
        -------
        object or tuple
            The prepared objects in the order given; a single one by itself.
        """
        places = list(device_placement) if device_placement is not None else [None] * len(args)
        if len(places) != len(args):
            raise ArgumentValueError(f"device_placement has {len(places)} entries for {len(args)} objects.")
        first = [self._prepare_one(item, place) for item, place in zip(args, places, strict=True)]
        # A scheduler follows the prepared form of its optimizer, wherever that one stands among the arguments.
        done = tuple(self.prepare_scheduler(item) if isinstance(item, LRScheduler) else item for item in first)
        return done[0] if len(done) == 1 else done

    def _prepare_one(self, item: Any, place: bool | None) -> Any:
        if isinstance(item, torch.nn.Module):
            return self.prepare_model(item, device_placement=place)
        if isinstance(item, DataLoader):
            return self.prepare_data_loader(item, device_placement=place)
        if isinstance(item, torch.optim.Optimizer):
            return self.prepare_optimizer(item, device_placement=place)
        return item

    def prepare_model(
        self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        """Move a model to the device, give it its precision, and wrap it in DDP where there are several ranks.

        Parameters
        ----------
        model : torch.nn.Module
            The same on every rank. For one that was prepared before, or the model inside, that is handed back.
        device_placement : bool, optional
            Whether to move it.
        evaluation_mode : bool
            The model will not be trained, so its gradients need no averaging.
        """
        for known in self._models:
            if model is known or model is parallelism.extract_model_from_parallel(known, keep_torch_compile=False):
                return known
        own = parallelism.extract_model_from_parallel(model, keep_torch_compile=False)
        if self.mixed_precision == "fp8":
            fp8.convert(own, self.fp8_recipe)
        precision.wrap_forward(own, self.mixed_precision, self.device, self.autocast_handler)
        place = self.device_placement if device_placement is None else device_placement
        model = self.spread.model(model, self.state, place, training=not evaluation_mode)
        self.spread.optimizers(self._optimizers)
        self._models.append(model)
        return model

    def prepare_data_loader(
        self, data_loader: DataLoader[Any], device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> PreparedLoader:
        """Make a loader that gives this rank its part; ``DataLoaderConfiguration`` says how."""
        config = self.dataloader_config
        prepared = prepare_data_loader(
            data_loader,
            self.device,
            split_batches=config.split_batches,
            put_on_device=self.device_placement if device_placement is None else device_placement,
            rng_types=self.rng_types,
            dispatch_batches=config.dispatch_batches,
            even_batches=config.even_batches,
            slice_fn_for_dispatch=slice_fn_for_dispatch,
            use_seedable_sampler=config.use_seedable_sampler,
            data_seed=config.data_seed,
            non_blocking=config.non_blocking,
            use_stateful_dataloader=config.use_stateful_dataloader,
        )
        if not any(prepared is known for known in self._dataloaders):
            self._dataloaders.append(prepared)
        return prepared

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Wrap an optimizer so that it acts only on steps that synchronise gradients."""
        if isinstance(optimizer, AcceleratedOptimizer):
            prepared = optimizer
        else:
            place = self.device_placement if device_placement is None else device_placement
            prepared = AcceleratedOptimizer(optimizer, place, self.scaler)
        if not any(prepared is known for known in self._optimizers):
            self._optimizers.append(prepared)
        return prepared

    def prepare_scheduler(self, scheduler: LRScheduler | AcceleratedScheduler) -> AcceleratedScheduler:
        """Wrap a scheduler so that it keeps pace with its optimizer."""
        if isinstance(scheduler, AcceleratedScheduler):
            prepared = scheduler
        else:
            followed = [known for known in self._optimizers if known.optimizer is scheduler.optimizer]
            prepared = AcceleratedScheduler(
                scheduler, followed or list(self._optimizers), self.step_scheduler_with_optimizer, self.split_batches
            )
        if not any(prepared is known for known in self._schedulers):
            self._schedulers.append(prepared)
        return prepared

    def accumulate(self, *models: Any) -> Accumulation:
        """A context for one batch: decides whether this step synchronises gradients.

        Parameters
        ----------
        *models
            The models that are trained in it.
        """
        return Accumulation(self, models)

    def no_sync(self, model: Any) -> contextlib.AbstractContextManager[None]:
        """A context in which backward passes through a model leave gradients on their own rank."""
        return parallelism.Unsynchronised((model,))

    @staticmethod
    def trigger_sync_in_backward(model: Any) -> contextlib.AbstractContextManager[None]:
        """A context in which the next backward synchronises although its forward ran under ``no_sync``."""
        return parallelism.trigger_sync(model)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Back-propagate a loss, divided by the number of batches that make one step.

        Parameters
        ----------
        loss : torch.Tensor
            Mean over this rank's batch.
        **kwargs
            Handed to ``loss.backward``.
        """
        steps = self.gradient_state.num_steps
        if steps != 1:
            loss = loss / steps
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        loss.backward(**kwargs)  # type: ignore[no-untyped-call]

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Divide gradients by the scaler's scale, once a step; ``clip_grad_norm_`` does it itself. On XLA, reduce them.

        Parameters
        ----------
        optimizer : optimizer or sequence, optional
            Prepared ones; all by default.
        """
        if not self.sync_gradients:
            return
        if optimizer is None:
            optimizer = self._optimizers
        these = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
        parallelism.reduce_on_xla(these, self.gradient_state)
        for one in these:
            one.unscale()

    def clip_grad_norm_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """Scale gradients down so that their common norm is at most ``max_norm``; returns the norm before."""
        self.unscale_gradients()
        return clipping.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)

    def clip_grad_value_(self, parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float) -> None:
        """Cut every gradient to at most ``clip_value`` in size."""
        self.unscale_gradients()
        clipping.clip_grad_value_(parameters, clip_value)

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> contextlib.AbstractContextManager[Any]:
        """A context that computes in the mixed precision, for what a prepared model's forward does not cover."""
        return precision.autocast(self.mixed_precision, self.device, autocast_handler or self.autocast_handler)

    def unwrap_model(
        self, model: torch.nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> torch.nn.Module:
        """The user's own model, out of what ``prepare`` put around it."""
        return parallelism.extract_model_from_parallel(model, keep_fp32_wrapper, keep_torch_compile)

    def skip_first_batches(self, dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
        """A loader without its first batches, to go on in the middle of an epoch."""
        return skip_first_batches(dataloader, num_batches)

    def free_memory(self, *objects: Any) -> list[None]:
        """Forget what was prepared, so that it can be freed.

        Parameters
        ----------
        *objects
            What the caller will drop as well.

        Returns
        -------
        list of None
            One for each object: ``model, optimizer = accelerator.free_memory(model, optimizer)``.
        """
        for known in (self._models, self._optimizers, self._schedulers, self._dataloaders):
            known.clear()
        self.step = 0
        count = len(objects)
        del objects
        release_memory()
        return [None] * count

    clear = free_memory
