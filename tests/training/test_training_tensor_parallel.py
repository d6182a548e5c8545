"""Layers that are cut over ranks, for real, alone and together with sharding and replicas."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.utils.data import DataLoader

from nbstate.errors import ArgumentTypeError, ArgumentValueError
from nbstate.state import AcceleratorState, ParallelismConfig, PartialState
from nbstate.training import Accelerator, GradScalerKwargs
from nbstate.training.layout import data_mesh
from nbstate.training.spreading import layout_for
from nbstate.training.tensor_parallel import TorchTensorParallelPlugin, styles

Ranks = Callable[..., list[Any]]

PLAN = {"0": "colwise", "2": "rowwise"}


class Tied(torch.nn.Module):
    """An embedding that is also the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(8, 4)
        self.head = torch.nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.embed(x))
        return out


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 1)
    )


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        ({"0": "sideways"}, "'sideways' for '0'; served are colwise"),
        ({"layers.*": "colwise"}, r"names 'layers\.\*'; Sequential has no such"),
        (None, "Sequential brings none"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(in_ranks: Ranks, plan: Any, text: str) -> None:
    if plan is not None:
        with pytest.raises(ArgumentValueError, match=text):
            styles(net(), plan)
        return
    for told in in_ranks(without_plan):
        assert text in told


def without_plan() -> str:
    try:
        make({"tp_size": 2}, None).prepare(net())
    except ArgumentValueError as error:
        return str(error)
    return "no error"


def test_words_and_styles_of_torch_may_be_mixed() -> None:
    own = ColwiseParallel()
    found = styles(net(), {"0": own, "2": "rowwise", "3": "replicate"})
    assert found["0"] is own
    assert list(found) == ["0", "2"]


def test_the_layout_that_plugins_mean() -> None:
    two = TorchTensorParallelPlugin(tp_size=2)
    assert layout_for(None, None, two, 4) == ParallelismConfig(dp_replicate_size=2, tp_size=2)
    assert layout_for(ParallelismConfig(tp_size=2), None, TorchTensorParallelPlugin(), 2) == ParallelismConfig(
        tp_size=2
    )
    with pytest.raises(ArgumentValueError, match="does not divide the number of ranks, 3"):
        layout_for(None, None, two, 3)
    with pytest.raises(ArgumentValueError, match="contradicts"):
        layout_for(ParallelismConfig(tp_size=4), None, two, 4)
    with pytest.raises(ArgumentTypeError, match="torch_tp_plugin"):
        layout_for(None, None, "two", 4)  # type: ignore[arg-type]
    with pytest.raises(ArgumentValueError, match="at least 1"):
        TorchTensorParallelPlugin(tp_size=0)
    with pytest.raises(ArgumentTypeError, match="'2'"):
        TorchTensorParallelPlugin(tp_size="2")  # type: ignore[arg-type]


def test_what_cannot_be_served_is_refused_before_anything_starts() -> None:
    with pytest.raises(ArgumentValueError, match=r"cp_size=2.*cuda and xpu devices only, not on cpu"):
        Accelerator(parallelism_config=ParallelismConfig(cp_size=2))
    with pytest.raises(NotImplementedError, match="sp_size"):
        Accelerator(parallelism_config=ParallelismConfig(sp_size=2))
    with pytest.raises(NotImplementedError, match="give dp_shard_size the ranks"):
        Accelerator(parallelism_config=ParallelismConfig(dp_replicate_size=2, cp_size=2, tp_size=2))
    assert not AcceleratorState.is_initialized()


def make(layout: dict[str, int], plan: Any, precision: str = "no", steps: int = 1) -> Accelerator:
    # FSDP2 warns of the view in which a layer that was cut hands out its result; nothing here changes it in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    AcceleratorState.reset(reset_partial_state=False)
    return Accelerator(
        parallelism_config=ParallelismConfig(**layout),
        torch_tp_plugin=TorchTensorParallelPlugin(tp_plan=plan),
        mixed_precision=precision,
        gradient_accumulation_steps=steps,
        kwargs_handlers=[GradScalerKwargs(init_scale=8.0)],
    )


def data(n: int = 22) -> torch.Tensor:
    return torch.cat([torch.randn(n, 6, generator=torch.Generator().manual_seed(0)), torch.arange(n)[:, None]], 1)


def reference(parts: int, steps: int, clip: float) -> tuple[dict[str, torch.Tensor], list[float], int]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1000)
    size, rows, norms = 4 * parts, data(), []
    batches = [rows[start : start + size] for start in range(0, len(rows), size)]
    if parts > 1:
        batches[-1] = torch.cat([batches[-1], rows[: size - len(batches[-1])]])
    for number, batch in enumerate(batches, 1):
        (model(batch[:, :6]).pow(2).mean() / steps).backward()
        if number % steps == 0 or number == len(batches):
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip).item())
            optimizer.step()
            for _ in range(parts):
                scheduler.step()
            optimizer.zero_grad()
    return {name: value.detach() for name, value in model.named_parameters()}, norms, scheduler.last_epoch


def train(layout: dict[str, int], steps: int) -> Any:
    accelerator = make(layout, PLAN, steps=steps)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1000)
    loader: DataLoader[Any] = DataLoader(data(), batch_size=4)  # type: ignore[arg-type]
    optimizer, scheduler, loader, model = accelerator.prepare(optimizer, scheduler, loader, model)
    norms, seen, objects = [], [], []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch[:, :6]).pow(2).mean())
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        seen += accelerator.gather_for_metrics(batch[:, 6]).int().tolist()
        objects += accelerator.gather_for_metrics(batch[:, 6].int().tolist(), use_gather_object=True)
    weights = {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
        for name, value in model.named_parameters()
    }
    own = model.get_parameter("0.weight").to_local().numel()
    return weights, norms, scheduler.scheduler.last_epoch, seen, objects, own


@pytest.mark.parametrize(
    ("ranks", "layouts"),
    [
        (2, [{"tp_size": 2}]),
        (4, [{"tp_size": 4}, {"dp_shard_size": 2, "tp_size": 2}, {"dp_replicate_size": 2, "tp_size": 2}]),
    ],
)
def test_a_model_that_is_cut_learns_what_a_whole_one_does(
    each_in_ranks: Ranks, ranks: int, layouts: list[dict[str, int]]
) -> None:
    """Weights, norms, the pace of the scheduler, and every sample once although ranks share them."""
    cases = [(layout, steps) for layout in layouts for steps in (1, 2)]
    for (layout, steps), results in zip(cases, each_in_ranks(train, cases, ranks=ranks), strict=True):
        expected, norms, last = reference(ranks // layout["tp_size"], steps, 0.5)
        for weights, measured, epoch, seen, objects, own in results:
            torch.testing.assert_close(weights, expected, msg=lambda text, layout=layout: f"{layout}: {text}")
            assert measured == pytest.approx(norms, rel=1e-4), layout
            assert epoch == last, layout
            assert seen == objects == list(range(22)), layout
            assert own == 48 // layout["tp_size"] // layout.get("dp_shard_size", 1), layout


def scaled() -> tuple[float, bool, bool]:
    """Gradients of 'fp16' where some parameters are cut and others whole; infinite in one rank's part alone."""
    accelerator = make({"tp_size": 2}, PLAN, precision="fp16")
    model = net()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = data()[:4, :6]
    accelerator.backward(model(x).sum())
    norm = accelerator.clip_grad_norm_(model.parameters(), 100.0).item()
    optimizer.step()
    optimizer.zero_grad()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    accelerator.backward(model(x).sum())
    if accelerator.process_index:
        model.get_parameter("0.weight").grad.to_local()[0, 0] = float("inf")  # type: ignore[union-attr]
    optimizer.step()
    kept = all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    return norm, optimizer.step_was_skipped, kept


def test_all_ranks_leave_out_a_step_that_is_infinite_in_one_part(in_ranks: Ranks) -> None:
    model = net()
    model(data()[:4, :6]).sum().backward()  # type: ignore[no-untyped-call]
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()]).item()  # type: ignore[misc]
    assert in_ranks(scaled) == [(pytest.approx(norm, rel=0.02), True, True)] * 2


def tie() -> tuple[Any, ...]:
    x = torch.arange(8)[None]
    torch.manual_seed(0)
    whole = Tied()
    expected = whole(x)
    found = []
    both = {"embed": "embedding_rowwise", "head": "colwise_gather_output"}
    model = make({"tp_size": 2}, both).prepare(whole)
    found.append(model.head.weight is model.embed.weight)
    found.append(torch.allclose(model(x), expected))
    try:
        make({"tp_size": 2}, {"head": "colwise_rep"}).prepare(Tied())
    except ArgumentValueError as error:
        found.append(str(error))
    return tuple(found)


def test_tied_parameters_stay_tied_or_are_refused(in_ranks: Ranks) -> None:
    text = "embed.weight and head.weight are one parameter"
    for tied, right, told in in_ranks(tie):
        assert tied
        assert right
        assert text in told


def llama() -> tuple[float, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16, attn_implementation="eager",
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    ids = torch.arange(8)[None]
    with torch.no_grad():
        expected = model(ids).logits
    cut = make({"tp_size": 2}, None).prepare(model)
    with torch.no_grad():
        found = cut(ids).logits
    up = cut.model.layers[0].mlp.up_proj.weight
    return (found - expected).abs().max().item(), tuple(up.to_local().shape)


def test_a_model_of_transformers_brings_its_own_plan(in_ranks: Ranks) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    # Not forked: the ranks would inherit that warnings are errors here.
    for difference, shape in in_ranks(llama, start_method="forkserver"):
        assert difference < 1e-5
        assert shape == (8, 8)


def meshes() -> list[tuple[Any, ...]]:
    PartialState()
    layouts = [
        {"dp_shard_size": 4},
        {"dp_replicate_size": 2, "dp_shard_size": 2},
        {"dp_shard_size": 2, "tp_size": 2},
        {"dp_shard_size": 2, "cp_size": 2},
        {"dp_replicate_size": 2, "cp_size": 2},
    ]
    found = []
    for layout in layouts:
        mesh = ParallelismConfig(**layout).build_device_mesh("cpu")
        assert mesh is not None
        part = data_mesh(mesh)
        found.append((part.mesh_dim_names, tuple(part.shape), part.mesh.flatten().tolist()))
    return found


def test_parameters_are_sharded_over_the_ranks_whose_gradients_are_averaged(in_ranks: Ranks) -> None:
    for rank, found in enumerate(in_ranks(meshes, ranks=4)):
        assert found == [
            (("dp_shard",), (4,), [0, 1, 2, 3]),
            (("dp_replicate", "dp_shard"), (2, 2), [0, 1, 2, 3]),
            (("dp_shard",), (2,), [0, 2] if rank % 2 == 0 else [1, 3]),
            # Ranks of one context-parallel group share in the sharding.
            (("dp_shard_cp",), (4,), [0, 1, 2, 3]),
            (("dp_replicate", "dp_shard_cp"), (2, 2), [0, 1, 2, 3]),
        ]
