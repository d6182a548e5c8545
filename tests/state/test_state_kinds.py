from __future__ import annotations

from datetime import timedelta

import pytest

from nbstate.errors import ArgumentTypeError, ArgumentValueError
from nbstate.state import (
    DistributedType,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    ParallelismConfig,
    PrecisionType,
)
from nbstate.state.kinds import parse_precision


def test_words_compare_with_strings():
    assert DistributedType.MULTI_CPU == "MULTI_CPU"
    assert str(DistributedType.NO) == "DistributedType.NO"
    assert PrecisionType.list() == ["no", "fp16", "bf16", "fp8"]


def test_precision_is_read_in_any_case():
    assert parse_precision("BF16") == parse_precision(PrecisionType.BF16) == "bf16"
    with pytest.raises(ArgumentValueError, match="'no', 'fp16', 'bf16', 'fp8'"):
        parse_precision("fp64")


def test_group_kwargs_give_only_what_was_asked_for():
    assert InitProcessGroupKwargs().to_kwargs() == {}
    assert InitProcessGroupKwargs(backend="nccl").to_kwargs() == {}
    assert InitProcessGroupKwargs(backend="gloo", timeout=timedelta(seconds=5)).to_kwargs() == {
        "backend": "gloo",
        "timeout": timedelta(seconds=5),
    }
    assert InitProcessGroupKwargs(timeout=1.5).timeout == timedelta(seconds=1.5)


@pytest.mark.parametrize(
    ("wrong", "error"), [("5", ArgumentTypeError), (True, ArgumentTypeError), (0, ArgumentValueError)]
)
def test_wrong_timeouts_are_refused(wrong, error):
    with pytest.raises(error, match="timeout"):
        InitProcessGroupKwargs(timeout=wrong)


def test_accumulation_plugin():
    plugin = GradientAccumulationPlugin(num_steps=2, sync_each_batch=True)
    assert plugin.to_kwargs() == {"num_steps": 2, "sync_each_batch": True}
    defaults = GradientAccumulationPlugin()
    assert (defaults.num_steps, defaults.adjust_scheduler, defaults.sync_with_dataloader) == (None, True, True)
    with pytest.raises(ArgumentValueError, match="num_steps must be 1 or more"):
        GradientAccumulationPlugin(num_steps=0)
    with pytest.raises(ArgumentTypeError, match="num_steps must be a whole number"):
        GradientAccumulationPlugin(num_steps=1.5)


def test_a_layout_must_fill_the_world():
    config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    config.check_world(4)
    told = r"dp_replicate_size=2 \* dp_shard_size=2 \* cp_size=1 \* sp_size=1 \* tp_size=1 = 4 ranks, but there are 6"
    with pytest.raises(ArgumentValueError, match=told):
        config.check_world(6)
    with pytest.raises(ArgumentValueError, match="tp_size must be 1 or more"):
        ParallelismConfig(tp_size=0)
    with pytest.raises(ArgumentTypeError, match="cp_size must be a whole number"):
        ParallelismConfig(cp_size="2")


def test_no_mesh_alone():
    assert ParallelismConfig().build_device_mesh("cpu") is None
    with pytest.raises(ArgumentValueError, match="= 2 ranks, but there are 1"):
        ParallelismConfig(tp_size=2).build_device_mesh("cpu")
