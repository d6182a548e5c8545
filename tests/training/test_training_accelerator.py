"""The accelerator itself: arguments, prepare, steps, triggers."""

from __future__ import annotations

import copy
import inspect
import pickle
import sys
import time
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from nbstate import utils
from nbstate.errors import ArgumentTypeError, ArgumentValueError, StateConflictError
from nbstate.state import AcceleratorState, GradientAccumulationPlugin, InitProcessGroupKwargs, ParallelismConfig
from nbstate.telemetry.board import Slot
from nbstate.training import (
    AcceleratedOptimizer,
    AcceleratedScheduler,
    Accelerator,
    AutocastKwargs,
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    extract_model_from_parallel,
    fp8,
)

Ranks = Callable[..., list[Any]]

UNSERVED = [
    "deepspeed_plugin",
    "megatron_lm_plugin",
    "dynamo_backend",
    "dynamo_plugin",
    "deepspeed_plugins",
]


@pytest.mark.parametrize("name", UNSERVED)
def test_what_is_not_served_yet_is_refused_by_name(name: str) -> None:
    with pytest.raises(NotImplementedError, match=rf"Accelerator\({name}=\.\.\.\)"):
        Accelerator(**{name: "something"})
    assert not AcceleratorState.is_initialized()


def test_arguments_stand_in_the_order_users_know() -> None:
    peer = pytest.importorskip("accelerate").Accelerator
    assert list(inspect.signature(Accelerator).parameters) == list(inspect.signature(peer).parameters)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"gradient_accumulation_steps": 0}, ArgumentValueError, "at least 1, not 0"),
        ({"gradient_accumulation_steps": 1.5}, ArgumentTypeError, "float"),
        (
            {"gradient_accumulation_steps": 2, "gradient_accumulation_plugin": GradientAccumulationPlugin()},
            ArgumentValueError,
            "not both",
        ),
        ({"mixed_precision": "fp4"}, ArgumentValueError, "'bf16'"),
        ({"kwargs_handlers": [3]}, ArgumentTypeError, "not int"),
        ({"kwargs_handlers": [AutocastKwargs(), AutocastKwargs()]}, ArgumentValueError, "more than one AutocastKwargs"),
        ({"split_batches": True, "dataloader_config": DataLoaderConfiguration()}, ArgumentValueError, "contradicts"),
        ({"mixed_precision": "fp8"}, ArgumentValueError, "fp8.*torchao"),
        ({"mixed_precision": "FP8"}, ArgumentValueError, "fp8.*torchao"),
        (
            {"parallelism_config": ParallelismConfig(dp_shard_size=2)},
            ArgumentValueError,
            "dp_shard_size=2.*there are 1",
        ),
        ({"parallelism_config": ParallelismConfig(tp_size=2)}, ArgumentValueError, "tp_size=2.*there are 1"),
    ],
)
def test_bad_arguments_are_refused_before_any_state_is_built(
    options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        Accelerator(**options)
    assert not AcceleratorState.is_initialized()


def test_8_bits_are_refused_where_the_device_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8", types.ModuleType("FakeTorchao"))
    with pytest.raises(ArgumentValueError, match=r"capability 8\.9 or later .* computes on cpu"):
        Accelerator(mixed_precision="fp8", cpu=True)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    with pytest.raises(ArgumentValueError, match="computes on cpu"):
        Accelerator()
    assert not AcceleratorState.is_initialized()


def test_which_layers_compute_in_8_bits() -> None:
    sizes = [(16, 16), (16, 32), (32, 30), (30, 32), (32, 16), (16, 4)]
    model = torch.nn.Sequential(*(torch.nn.Linear(*size) for size in sizes), torch.nn.LayerNorm(4))
    chosen = fp8.suits(model)
    assert [name for name, module in model.named_modules() if chosen(module, name)] == ["1", "4"]
    assert not fp8.suits(torch.nn.Tanh())(torch.nn.Tanh(), "")


def test_layers_are_handed_to_torchao_with_the_users_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, seen = types.ModuleType("FakeTorchao"), []
    fake.convert_to_float8_training = lambda model, **options: seen.append((model, options))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchao.float8", fake)
    model = torch.nn.Linear(16, 16)
    recipe = fp8.AORecipeKwargs(config="theirs", module_filter_func=lambda module, name: True)
    fp8.convert(model, recipe)
    assert seen == [(model, {"config": "theirs", "module_filter_fn": recipe.module_filter_func})]


def test_another_precision_than_the_states_is_a_conflict() -> None:
    Accelerator(mixed_precision="bf16")
    with pytest.raises(StateConflictError):
        Accelerator(mixed_precision="fp16")
    assert Accelerator().mixed_precision == "bf16"


def test_steps_come_from_the_launch_unless_they_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    assert Accelerator().gradient_accumulation_steps == 4
    assert Accelerator(gradient_accumulation_steps=3).gradient_accumulation_steps == 3
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "many")
    with pytest.raises(ArgumentValueError, match="'many'"):
        Accelerator()


def test_prepare_keeps_order_and_kinds_and_hands_the_rest_back() -> None:
    accelerator = Accelerator()
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    other = object()
    loader = DataLoader(torch.ones(2, 1))  # type: ignore[arg-type]
    prepared = accelerator.prepare(scheduler, other, loader, optimizer, model)
    kinds = AcceleratedScheduler, object, DataLoader, AcceleratedOptimizer, torch.nn.Linear
    assert all(isinstance(item, kind) for item, kind in zip(prepared, kinds, strict=True))
    assert prepared[0].optimizers == [prepared[3]]
    assert prepared[1] is other
    again = accelerator.prepare(*prepared)
    assert all(one is two for one, two in zip(prepared, again, strict=True))
    assert accelerator.prepare(model) is model


def test_device_placement_is_one_entry_an_object() -> None:
    accelerator = Accelerator()
    with pytest.raises(ArgumentValueError, match="2 entries for 1 object"):
        accelerator.prepare(torch.nn.Linear(1, 1), device_placement=[True, False])
    assert isinstance(accelerator.prepare(torch.nn.Linear(1, 1), device_placement=[False]), torch.nn.Linear)


def wrapped_models() -> dict[str, Any]:
    hook = DDPCommunicationHookType.FP16
    accelerator = Accelerator(
        kwargs_handlers=[
            DistributedDataParallelKwargs(find_unused_parameters=True, comm_hook=hook),
            InitProcessGroupKwargs(timeout=60),
        ]
    )
    model = torch.nn.Linear(1, 1, bias=False)
    ddp = accelerator.prepare(model)
    frozen = torch.nn.Linear(1, 1).requires_grad_(False)
    accelerator.backward(ddp(torch.full((1, 1), 1.0 + 2.0**-12)).sum())
    return {
        "wrapped": isinstance(ddp, DistributedDataParallel),
        "unused": ddp.find_unused_parameters,
        "unwrapped": accelerator.unwrap_model(ddp) is model,
        "again": accelerator.prepare(ddp) is accelerator.prepare(model) is ddp,
        "frozen": accelerator.prepare(frozen) is frozen,
        "evaluated": accelerator.prepare_model(torch.nn.Linear(1, 1), evaluation_mode=True).__class__.__name__,
        "rounded by the hook": model.weight.grad.item(),  # type: ignore[union-attr]
        "distributed": (accelerator.use_distributed, accelerator.multi_device, accelerator.num_processes),
    }


def test_models_are_wrapped_where_there_are_ranks(in_ranks: Ranks) -> None:
    for found in in_ranks(wrapped_models):
        assert found == {
            "wrapped": True,
            "unused": True,
            "unwrapped": True,
            "again": True,
            "frozen": True,
            "evaluated": "Linear",
            "rounded by the hook": 1.0,
            "distributed": (True, False, 2),
        }


def hooked(hook: str, wrapper: str) -> float:
    """A gradient of 1 and one of 1 + 2**-12, whose mean no half precision can hold."""
    handler = DistributedDataParallelKwargs(
        comm_hook=DDPCommunicationHookType(hook),
        comm_wrapper=DDPCommunicationHookType(wrapper),
        comm_state_option={"matrix_approximation_rank": 1, "start_powerSGD_iter": 2} if "sgd" in hook else {},
    )
    accelerator = Accelerator(kwargs_handlers=[handler])
    model = torch.nn.Linear(1, 1, bias=False)
    ddp = accelerator.prepare(model)
    accelerator.backward(ddp(torch.full((1, 1), 1.0 + 2.0**-12 * accelerator.process_index)).sum())
    assert model.weight.grad is not None
    return model.weight.grad.item()


def test_hooks_send_gradients_in_another_form(each_in_ranks: Ranks) -> None:
    exact, rounded = 1 + 2.0**-13, 1.0
    expected = {
        ("no", "no"): exact,
        ("fp16", "no"): rounded,
        ("power_sgd", "no"): exact,
        ("batched_power_sgd", "no"): exact,
        ("power_sgd", "fp16"): rounded,
    }
    for case, found in zip(expected, each_in_ranks(hooked, list(expected)), strict=True):
        assert found == (expected[case],) * 2, case


def test_a_wrapper_that_is_none_is_refused(in_ranks: Ranks) -> None:
    for text in in_ranks(wrong_wrapper):
        assert text == "comm_wrapper is NO, FP16 or BF16, not POWER_SGD."


def wrong_wrapper() -> str:
    try:
        hooked("fp16", "power_sgd")
    except ArgumentTypeError as error:
        return str(error)
    return "no error"


def test_unwrapping_reaches_children_and_keeps_compiled_models_compiled() -> None:
    model = torch.nn.Linear(1, 1)
    parent = torch.nn.Sequential(torch.nn.DataParallel(model))
    assert extract_model_from_parallel(parent, recursive=True)[0] is model  # type: ignore[index]
    compiled = torch.compile(model)
    assert extract_model_from_parallel(compiled) is compiled
    assert extract_model_from_parallel(compiled, keep_torch_compile=False) is model


def test_bf16_computes_in_half_and_returns_full() -> None:
    accelerator = Accelerator(mixed_precision="bf16")
    seen = []

    class Watched(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            y = self.inner(x)
            seen.append(y.dtype)
            return {"y": (y, "label")}

    own = Watched()
    model = accelerator.prepare(own)
    output = model(torch.ones(1, 2))["y"]
    assert seen == [torch.bfloat16]
    assert output[0].dtype == torch.float32
    assert output[1] == "label"
    twin = copy.deepcopy(model)
    twin.inner.weight.data.zero_()
    assert not torch.equal(twin(torch.ones(1, 2))["y"][0], model(torch.ones(1, 2))["y"][0])
    assert list(model.state_dict()) == ["inner.weight", "inner.bias"]
    assert accelerator.unwrap_model(model, keep_fp32_wrapper=False) is own
    assert own(torch.ones(1, 2))["y"][0].dtype == torch.float32
    assert seen[-1] == torch.float32


def test_a_model_in_half_precision_can_be_pickled() -> None:
    model = Accelerator(mixed_precision="bf16").prepare(torch.nn.Linear(2, 2))
    twin = pickle.loads(pickle.dumps(model))
    assert torch.equal(twin(torch.ones(1, 2)), model(torch.ones(1, 2)))


def test_autocast_context() -> None:
    weight = torch.ones(2, 2)
    accelerator = Accelerator(mixed_precision="bf16")
    with accelerator.autocast():
        assert (weight @ weight).dtype == torch.bfloat16
    with accelerator.autocast(AutocastKwargs(enabled=False)):
        assert (weight @ weight).dtype == torch.float32


def test_no_precision_means_no_wrapping() -> None:
    accelerator = Accelerator()
    with accelerator.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
    assert "forward" not in vars(accelerator.prepare(torch.nn.Linear(1, 1)))
    assert accelerator.scaler is None


def sync_by_hand() -> tuple[float, ...]:
    accelerator = Accelerator()
    model = accelerator.prepare(torch.nn.Linear(1, 1, bias=False))
    weight = accelerator.unwrap_model(model).weight
    x = torch.full((1, 1), 1.0 + accelerator.process_index)

    def gradient() -> float:
        value = weight.grad.item()
        weight.grad = None
        return float(value)

    with accelerator.no_sync(model):
        accelerator.backward(model(x).sum())
    alone = gradient()
    accelerator.backward(model(x).sum())
    together = gradient()
    with accelerator.no_sync(model):
        first, second = model(x).sum(), model(x).sum()
        accelerator.backward(first)
        with accelerator.trigger_sync_in_backward(model):
            accelerator.backward(second)
    triggered = gradient()
    accelerator.backward(model(x).sum())
    return alone, together, triggered, gradient()


def test_no_sync_and_trigger_sync(in_ranks: Ranks) -> None:
    assert in_ranks(sync_by_hand) == [(1.0, 1.5, 3.0, 1.5), (2.0, 1.5, 3.0, 1.5)]


def accumulate_two_models() -> tuple[float, float]:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    models = accelerator.prepare(torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1, bias=False))
    x = torch.full((1, 1), 1.0 + accelerator.process_index)
    with accelerator.accumulate(*models):
        for model in models:
            accelerator.backward(model(x).sum())
    first, second = (accelerator.unwrap_model(model).weight.grad.item() for model in models)
    return first, second


def test_accumulate_holds_back_every_model(in_ranks: Ranks) -> None:
    assert in_ranks(accumulate_two_models) == [(0.5, 0.5), (1.0, 1.0)]


def test_accumulate_without_ranks_takes_any_model_and_survives_an_error(slot: Slot) -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    with pytest.raises(KeyError), accelerator.accumulate(torch.nn.Linear(1, 1), object()):
        raise KeyError
    assert slot.read("step") == 1
    assert not accelerator.sync_gradients
    accelerator.sync_gradients = True
    assert accelerator.sync_gradients


def test_backward_divides_by_the_number_of_steps_and_passes_arguments() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=4)
    weight = torch.nn.Parameter(torch.ones(1))
    loss = (weight * 2).sum()
    accelerator.backward(loss, retain_graph=True)
    accelerator.backward(loss)
    assert weight.grad is not None
    assert weight.grad.item() == 1.0


def trigger_on_one(rank: int) -> list[bool]:
    accelerator = Accelerator()
    seen = [accelerator.check_trigger()]
    if accelerator.process_index == rank:
        accelerator.set_trigger()
    return [*seen, accelerator.check_trigger(), accelerator.check_trigger()]


def test_a_trigger_on_one_rank_is_seen_by_all_once(in_ranks: Ranks) -> None:
    assert in_ranks(trigger_on_one, 1) == [[False, True, False]] * 2
    assert trigger_on_one(0) == [False, True, False]


def control_processes() -> tuple[Any, ...]:
    accelerator = Accelerator()
    with accelerator.split_between_processes(["A", "B", "C"], apply_padding=True) as part:
        pass
    accelerator.wait_for_everyone()
    with accelerator.main_process_first():
        turn = time.monotonic_ns()
    with accelerator.local_main_process_first():
        pass
    accelerator.print("once")
    turns = accelerator.gather(torch.tensor([turn])).tolist()
    return (
        turns == sorted(turns),
        part,
        accelerator.on_main_process(lambda: "main")(),
        accelerator.on_last_process(lambda: "last")(),
        accelerator.on_process(process_index=1)(lambda: "one")(),
        accelerator.on_local_process(local_process_index=0)(lambda: "zero")(),
        accelerator.on_local_main_process(lambda: "local")(),
        (accelerator.is_main_process, accelerator.is_local_main_process, accelerator.is_last_process),
        (accelerator.process_index, accelerator.local_process_index, accelerator.device.type),
    )


def test_process_control_is_handed_on(in_ranks: Ranks, capfd: pytest.CaptureFixture[str]) -> None:
    first, second = in_ranks(control_processes)
    assert first == (True, ["A", "B"], "main", None, None, "zero", "local", (True, True, False), (0, 0, "cpu"))
    assert second == (True, ["C", "C"], None, "last", "one", None, None, (False, False, True), (1, 1, "cpu"))
    assert capfd.readouterr().out.count("once") == 1


def reduce_sum() -> tuple[float, Any]:
    accelerator = Accelerator()
    rank = torch.tensor(1.0 + accelerator.process_index)
    padded = accelerator.pad_across_processes(torch.ones(1 + accelerator.process_index))
    return accelerator.reduce(rank).item(), padded.tolist()


def test_reduce_sums_by_default(in_ranks: Ranks) -> None:
    assert in_ranks(reduce_sum) == [(3.0, [1, 0]), (3.0, [1, 1])]


def test_free_memory_forgets_what_was_prepared() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    with accelerator.accumulate(model):
        pass
    assert accelerator.step == 1
    assert accelerator.free_memory(model) == [None]
    assert accelerator.step == 0
    assert accelerator.clear() == []
    assert not accelerator._models


def test_settings_can_be_read() -> None:
    config = DataLoaderConfiguration(split_batches=True, dispatch_batches=False, even_batches=False, non_blocking=True)
    accelerator = Accelerator(dataloader_config=config)
    assert (accelerator.split_batches, accelerator.dispatch_batches, accelerator.even_batches) == (True, False, False)
    assert (accelerator.non_blocking, accelerator.use_seedable_sampler) == (True, False)
    assert not accelerator.use_stateful_dataloader
    assert (accelerator.parallelism_config, accelerator.torch_device_mesh, accelerator.backend) == (None, None, None)
    assert Accelerator(split_batches=True).split_batches


def test_every_name_of_utils_is_there() -> None:
    assert all(hasattr(utils, name) for name in utils.__all__)
