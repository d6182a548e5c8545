"""Models that are sharded over ranks, for real: gloo runs FSDP2 on the CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy

from nbstate.errors import ArgumentTypeError, ArgumentValueError, StateConflictError
from nbstate.state import (
    AcceleratorState,
    DistributedType,
    GradientAccumulationPlugin,
    GradientState,
    ParallelismConfig,
)
from nbstate.training import Accelerator, GradScalerKwargs
from nbstate.training.fully_shard import FullyShardedDataParallelPlugin, is_sharded

Ranks = Callable[..., list[Any]]


class Block(torch.nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.up = torch.nn.Linear(width, 2 * width)
        self.down = torch.nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.tanh(self.up(x)))
        return out


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block(), Block()])
        self.norm = torch.nn.BatchNorm1d(6)
        # More ranks than rows leave some of them with nothing of this one.
        self.head = torch.nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(self.norm(x))
        return out


def units(model: torch.nn.Module | None = None, **options: Any) -> list[str]:
    model = model or Net()
    found = FullyShardedDataParallelPlugin(**options).units(model)
    return sorted(name for name, module in model.named_modules() if module in found)


def test_which_modules_are_units() -> None:
    blocks = ["blocks.0", "blocks.1"]
    assert units() == units(auto_wrap_policy="no_wrap", transformer_cls_names_to_wrap=["Block"]) == []
    assert units(transformer_cls_names_to_wrap=["Block"]) == blocks
    assert units(auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap="Block") == blocks
    assert units(auto_wrap_policy=lambda module: isinstance(module, Block)) == blocks
    assert units(auto_wrap_policy=ModuleWrapPolicy({Block})) == blocks
    assert units(auto_wrap_policy="size_based_wrap", min_num_params=150) == blocks
    assert units(auto_wrap_policy="size_based_wrap", min_num_params=80) == ["blocks.0.up", "blocks.1.up"]
    model = Net()
    model._no_split_modules = ["Block"]  # type: ignore[assignment]
    assert units(model) == blocks
    each = functools.partial(size_based_auto_wrap_policy, min_num_params=80)
    assert units(auto_wrap_policy=each) == ["blocks.0", "blocks.0.up", "blocks.1", "blocks.1.up"]


def test_inner_units_come_before_the_ones_around_them() -> None:
    model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(1, 1)))
    found = FullyShardedDataParallelPlugin(auto_wrap_policy=lambda module: True).units(model)
    assert found == [model[0][0], model[0]]  # type: ignore[index]


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"fsdp_version": 1}, NotImplementedError, "version 2"),
        ({"auto_wrap_policy": "by_colour"}, ArgumentValueError, "'size_based_wrap'"),
        ({"auto_wrap_policy": 3}, ArgumentTypeError, "not int"),
        ({"auto_wrap_policy": "size_based_wrap"}, ArgumentValueError, "min_num_params"),
        ({"state_dict_type": "SHARDED_STATE_DICT"}, NotImplementedError, "only 'FULL_STATE_DICT'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        FullyShardedDataParallelPlugin(**options)


def test_a_class_that_no_module_is_of_is_named() -> None:
    with pytest.raises(ArgumentValueError, match="names Blok, but no module of Net"):
        units(transformer_cls_names_to_wrap=["Blok"])


def test_alone_there_is_nothing_to_shard() -> None:
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin())
    model = Net()
    assert accelerator.prepare(model) is model
    assert not is_sharded(model)
    assert accelerator.distributed_type is DistributedType.NO
    with pytest.raises(ArgumentTypeError, match="fsdp_plugin is a FullyShardedDataParallelPlugin, not a str"):
        Accelerator(fsdp_plugin="yes")  # type: ignore[arg-type]


def make(layout: dict[str, int] | None = None, precision: str = "no", steps: int = 1, **plugin: Any) -> Accelerator:
    AcceleratorState.reset(reset_partial_state=False)
    return Accelerator(
        parallelism_config=ParallelismConfig(**layout) if layout else None,
        fsdp_plugin=FullyShardedDataParallelPlugin(**plugin),
        mixed_precision=precision,
        gradient_accumulation_steps=steps,
        kwargs_handlers=[GradScalerKwargs(init_scale=8.0)],
    )


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net().double()


def rows(rank: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(rank)).double()


def whole(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters by name, put together from all ranks."""
    return {
        name: (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).detach().clone()
        for name, parameter in model.named_parameters()
    }


def reference(ranks: int, steps: int, clip: float, warm: bool) -> tuple[dict[str, torch.Tensor], list[float]]:
    """What four steps on one process give: the mean of what each rank's rows give."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    norms = []
    if warm:
        model(rows(9)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    for number in range(1, 5):
        for rank in range(ranks):
            (model(rows(rank)).pow(2).mean() / steps / ranks).backward()
        if number % steps == 0:
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip).item())
            optimizer.step()
            optimizer.zero_grad()
    return whole(model), norms


def train(layout: dict[str, int] | None, steps: int, warm: bool, together: bool, plugin: dict[str, Any]) -> Any:
    """Four steps of a sharded model that only the main process initialised rightly."""
    accelerator = make(layout, steps=steps, **plugin)
    model = net(accelerator.process_index if not warm else 0)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.05)
    if warm:
        model(rows(9)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if together:
        optimizer, model = accelerator.prepare(optimizer, model)
    else:
        model = accelerator.prepare(model)
        optimizer = accelerator.prepare(optimizer)
    norms = []
    for _ in range(4):
        with accelerator.accumulate(model):
            accelerator.backward(model(rows(accelerator.process_index)).pow(2).mean())
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
            optimizer.step()
            optimizer.zero_grad()
    held = sum(parameter.to_local().numel() for parameter in model.parameters())
    return whole(model), norms, held, accelerator.distributed_type


BLOCKS = {"transformer_cls_names_to_wrap": ["Block"]}
CASES: list[tuple[Any, ...]] = [
    (None, 1, False, True, {}),
    (None, 2, False, False, BLOCKS),
    (None, 1, True, True, {**BLOCKS, "reshard_after_forward": False}),
    (None, 2, True, False, {**BLOCKS, "activation_checkpointing": True}),
]


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        (2, CASES),
        (4, [({"dp_replicate_size": 2, "dp_shard_size": 2}, 2, False, True, BLOCKS), (None, 1, True, True, BLOCKS)]),
    ],
)
def test_a_sharded_model_learns_what_a_whole_one_does(
    each_in_ranks: Ranks, ranks: int, cases: list[tuple[Any, ...]]
) -> None:
    """Parameters, and norms of gradients; the optimizer made before, with steps behind it or not."""
    for case, results in zip(cases, each_in_ranks(train, cases, ranks=ranks), strict=True):
        expected, norms = reference(ranks, case[1], 0.5, case[2])
        shards = 2 if case[0] else ranks
        size = sum(value.numel() for value in expected.values())
        for found, measured, _, kind in results:
            torch.testing.assert_close(found, expected, msg=lambda text, case=case: f"{case}: {text}")
            assert measured == pytest.approx(norms), case
            assert kind is DistributedType.FSDP
        held = [result[2] for result in results]
        assert sum(held) == size * ranks // shards, case


def synchronisation() -> dict[str, Any]:
    """When gradients go out, under contexts within contexts."""
    accelerator = make(steps=2)
    model = accelerator.prepare(net())
    weight = model.head.bias

    def gradient() -> float | None:
        return None if weight.grad is None else weight.grad.full_tensor().item()

    x = rows(0)[:, :6] * 0 + 1.0
    seen: dict[str, Any] = {}

    def back() -> None:
        accelerator.backward(model(x + accelerator.process_index * 0).sum() * (1 + accelerator.process_index))

    with accelerator.no_sync(model):
        with accelerator.no_sync(model):
            back()
        back()
        seen["held"] = gradient()
    back()
    seen["sent"] = gradient()
    weight.grad = None
    with accelerator.no_sync(model):
        back()
        with accelerator.trigger_sync_in_backward(model):
            back()
        seen["triggered"] = gradient()
    GradientState(GradientAccumulationPlugin(num_steps=2, sync_each_batch=True))
    weight.grad = None
    with accelerator.accumulate(model):
        back()
        seen["each"] = gradient(), accelerator.sync_gradients
    return seen


def test_gradients_go_out_when_they_should(in_ranks: Ranks) -> None:
    # Four rows, halved by the accumulation; ranks weigh 1 and 2.
    one = 4 * 0.5 * 1.5
    for seen in in_ranks(synchronisation):
        assert seen == {"held": None, "sent": 3 * one, "triggered": 2 * one, "each": (one, False)}


def around() -> dict[str, Any]:
    accelerator = make(**BLOCKS)
    own = net()
    model = accelerator.prepare(own)
    state = accelerator.get_state_dict(model)
    try:
        Accelerator(parallelism_config=ParallelismConfig(dp_replicate_size=2))
        conflict = ""
    except StateConflictError as error:
        conflict = str(error)
    accelerator.clip_grad_value_(model.parameters(), 1.0)
    model(rows(0)).sum().backward()
    accelerator.clip_grad_value_(model.parameters(), 0.01)
    largest = max(parameter.grad.full_tensor().abs().max().item() for parameter in model.parameters())
    return {
        "itself": accelerator.unwrap_model(model) is model is own is accelerator.prepare(model),
        "units": [name for name, module in model.named_modules() if is_sharded(module)],
        "state": {name: tuple(value.shape) for name, value in state.items()},
        "plain": all(type(value) is torch.Tensor for value in state.values()),
        "synced": accelerator.gradient_state.is_xla_gradients_synced,
        "conflict": "parallelism_config" in conflict,
        "largest": largest,
        "evaluated": is_sharded(accelerator.prepare_model(net(), evaluation_mode=True)),
    }


def test_a_sharded_model_is_the_users_own_and_its_state_gathers(in_ranks: Ranks) -> None:
    shapes = {name: tuple(value.shape) for name, value in Net().state_dict().items()}
    for rank, found in enumerate(in_ranks(around)):
        assert found == {
            "itself": True,
            "units": ["", "blocks.0", "blocks.1"],
            "state": shapes if rank == 0 else {},
            "plain": True,
            "synced": True,
            "conflict": True,
            "largest": pytest.approx(0.01),
            "evaluated": False,
        }


def half(precision: str) -> tuple[Any, ...]:
    """A step with finite gradients, then one that is infinite on one rank only."""
    accelerator = make(precision=precision)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 3))
    seen: list[torch.dtype] = []
    model[1].register_forward_pre_hook(lambda module, args: seen.append(module.weight.dtype))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = rows(accelerator.process_index).float()
    out = model(x)
    accelerator.backward(out.sum())
    norm = accelerator.clip_grad_norm_(model.parameters(), 100.0).item()
    optimizer.step()
    optimizer.zero_grad()
    before = whole(model)
    accelerator.backward(model(x * (float("inf") if accelerator.process_index else 1.0)).sum())
    optimizer.step()
    kept = all(torch.equal(value, before[name]) for name, value in whole(model).items())
    return out.dtype, seen[0], norm, accelerator.optimizer_step_was_skipped, kept


def test_precision_of_sharded_models(each_in_ranks: Ranks) -> None:
    cases = [("no",), ("fp16",), ("bf16",)]
    found = each_in_ranks(half, cases)
    dtypes = torch.float32, torch.float16, torch.bfloat16
    norm = found[0][0][2]
    for (precision,), dtype, ranks in zip(cases, dtypes, found, strict=True):
        for out, parameter, measured, skipped, kept in ranks:
            assert (out, parameter) == (torch.float32, dtype), precision
            assert measured == pytest.approx(norm, rel=0.02), precision
            # A rank whose own part is finite leaves the step out as well.
            assert (skipped, kept) == ((True, True) if precision == "fp16" else (False, False)), precision


def test_layouts_that_do_not_fit_are_refused_on_every_rank(in_ranks: Ranks) -> None:
    for text in in_ranks(misfit):
        assert "dp_shard_size=3" in text
        assert "there are 2" in text


def save_and_go_on(folder: str) -> tuple[list[torch.Tensor], list[torch.Tensor], list[str]]:
    """Parameters after four steps in one go, and with a checkpoint and a fresh model in the middle."""

    def prepared() -> tuple[Accelerator, Any, Any]:
        accelerator = make(steps=1, **BLOCKS)
        model = net()
        return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.05))

    def steps(accelerator: Accelerator, model: Any, optimizer: Any, numbers: Sequence[int]) -> None:
        for number in numbers:
            accelerator.backward(model(rows(2 * number + accelerator.process_index)).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()

    first = prepared()
    steps(*first, [0, 1])
    first[0].save_state(folder)
    steps(*first, [2, 3])
    second = prepared()
    steps(*second, [7])
    second[0].load_state(folder)
    steps(*second, [2, 3])
    held = [type(parameter).__name__ for parameter in second[1].parameters()]
    return list(whole(first[1]).values()), list(whole(second[1]).values()), held


def test_a_sharded_run_goes_on_from_its_checkpoint(in_ranks: Ranks, tmp_path: Path) -> None:
    for straight, resumed, kinds in in_ranks(save_and_go_on, str(tmp_path / "place"), start_method="forkserver"):
        torch.testing.assert_close(resumed, straight)
        assert set(kinds) == {"DTensor"}


def misfit() -> str:
    try:
        make({"dp_shard_size": 3})
    except ArgumentValueError as error:
        return str(error)
    return "no error"
