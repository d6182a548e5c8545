"""Big tensors and arrays reach the ranks once, by value, whatever they look like."""

from __future__ import annotations

import gc
import os
import socket
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from nbstate import RankError, ShippingError, notebook_launcher
from nbstate.launch import shipping
from nbstate.launch.plan import Fd
from nbstate.launch.preflight import choose_start_method
from nbstate.launch.shipping import pack, unpack
from nbstate.launch.tensors import BIG

MB = 2**20
base = torch.arange(300_000, dtype=torch.float32)
view = base[10:].view(-1, 10)[:, ::2]
filler: Any = torch.zeros(0)
words: list[str] = []


class Tagged(torch.Tensor):
    """A subclass that pickles as torch sees fit."""


def there_and_back(value: Any) -> Any:
    """What a rank would get for an argument."""
    with packed(value) as payload:
        _, (arrived,), _ = unpack(payload)
    torch._utils._validate_loaded_sparse_tensors()  # torch holds on to a sparse one until then
    return arrived


@contextmanager
def packed(*args: Any) -> Iterator[Any]:
    """A payload whose descriptor may be closed by ``unpack``, as a rank's own one is."""
    payload = pack(len, args, {})
    try:
        yield replace(payload, shared=Fd(os.dup(payload.shared.fd)) if payload.shared else None)
    finally:
        payload.close()


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    built = torch.nn.Sequential(torch.nn.Linear(200, 200), torch.nn.BatchNorm1d(200), torch.nn.Linear(200, 200))
    built[2].weight = built[0].weight
    return built


TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    **{
        str(dtype).removeprefix("torch."): partial(lambda dtype: torch.ones(BIG + 1).to(dtype), dtype)
        for dtype in (torch.float64, torch.bfloat16, torch.complex64, torch.int8, torch.bool, torch.float8_e4m3fn)
    },
    "requires grad": lambda: torch.ones(BIG, requires_grad=True),
    "transposed": lambda: torch.randn(200, 300).t(),
    "expanded": lambda: torch.randn(BIG, 1).expand(BIG, 3),
    "conjugate": lambda: torch.randn(BIG, dtype=torch.complex64).conj(),
    "negative": lambda: torch.randn(BIG, dtype=torch.complex64).conj().imag,
    "a small part of a big one": lambda: torch.randn(BIG)[17:19],
    "empty view of a big one": lambda: torch.randn(BIG)[:0],
    "nothing at all": lambda: torch.empty(0, 3),
    "scalar": lambda: torch.tensor(3),
    "small": lambda: torch.arange(3),
    "from numpy": lambda: torch.from_numpy(np.arange(BIG)),
    "in shared memory": lambda: torch.ones(BIG).share_memory_(),
    "sparse": lambda: torch.eye(200).to_sparse(),
    "big sparse": lambda: torch.ones(200, 200).to_sparse(),
    "sparse rows": lambda: torch.ones(200, 200).to_sparse_csr(),
    "parameter": lambda: torch.nn.Parameter(torch.randn(BIG), requires_grad=False),
    "subclass": lambda: torch.randn(BIG).as_subclass(Tagged),
    "of no device": lambda: torch.empty(BIG, device="meta"),
}


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("kind", TENSORS)
def test_every_kind_of_tensor_arrives_as_it_was(kind: str) -> None:
    sent = TENSORS[kind]()
    got = there_and_back(sent)
    assert type(got) is type(sent)
    assert (got.dtype, got.shape, got.layout, got.device) == (sent.dtype, sent.shape, sent.layout, sent.device)
    assert (got.requires_grad, got.is_conj(), got.is_neg()) == (sent.requires_grad, sent.is_conj(), sent.is_neg())
    if sent.layout is torch.strided:
        assert got.stride() == sent.stride()
    if sent.device.type == "cpu":
        assert torch.equal(_comparable(got), _comparable(sent))


def _comparable(tensor: torch.Tensor) -> torch.Tensor:
    dense = tensor.detach().to_dense()
    return dense if dense.is_complex() else dense.double()


@pytest.mark.filterwarnings("ignore:.*quantized:UserWarning", "ignore:TypedStorage:UserWarning")
def test_quantized_tensors_arrive_as_they_were() -> None:
    sent = torch.quantize_per_tensor(torch.randn(BIG), 0.1, 3, torch.quint8)
    got = there_and_back(sent)
    assert (got.q_scale(), got.q_zero_point()) == (0.1, 3)
    assert torch.equal(got.int_repr(), sent.int_repr())


def test_what_arrives_belongs_to_the_receiver() -> None:
    sent = torch.zeros(BIG)
    with packed(sent) as payload:
        twice = [unpack(replace(payload, shared=Fd(os.dup(payload.shared.fd))))[1][0] for _ in range(2)]
        os.close(payload.shared.fd)
    twice[0] += 1
    twice[0].share_memory_().add_(1)
    assert [one.sum().item() for one in (sent, *twice)] == [0, 2 * BIG, 0]


@pytest.mark.parametrize("length", [10, BIG])
def test_views_of_one_storage_share_one_afterwards(length: int) -> None:
    whole = torch.zeros(length)
    got = there_and_back({"whole": whole, "part": whole[2:5], "bits": whole.view(torch.int32)})
    got["part"].fill_(1.0)
    assert got["whole"].sum() == 3
    assert got["bits"].count_nonzero() == 3
    assert len({one.untyped_storage().data_ptr() for one in got.values()}) == 1


def test_a_storage_is_sent_once_and_stays_out_of_the_pickle() -> None:
    whole = torch.zeros(4 * BIG)
    with packed([whole, whole[5:], whole.t(), np.zeros(BIG), torch.zeros(BIG // 8)]) as payload:
        assert sorted(length for _, length in payload.places) == [8 * BIG, 16 * BIG]
        assert len(payload.data) < BIG
        os.close(payload.shared.fd)


def test_modules_keep_their_tied_parameters() -> None:
    sent = model()
    got = there_and_back({"model": sent, "state": sent.state_dict()})
    assert got["model"][2].weight is got["model"][0].weight
    assert got["state"]["2.weight"].data_ptr() == got["model"][0].weight.data_ptr()
    for name, value in sent.state_dict().items():
        assert torch.equal(got["state"][name], value)


def test_numpy_arrays_and_frames_arrive_as_they_were() -> None:
    import pandas as pd

    locked = np.arange(BIG)
    locked.flags.writeable = False
    fortran = np.asfortranarray(np.random.default_rng(0).random((300, 200)))
    sent = [np.arange(BIG), locked, fortran, fortran[::2, 1:], np.array(["a", None]), np.zeros((0, 3))]
    got = there_and_back(sent)
    for one, other in zip(sent, got, strict=True):
        assert (one.dtype, one.flags.f_contiguous) == (other.dtype, other.flags.f_contiguous)
        np.testing.assert_array_equal(one, other)
    got[0][0] = 7
    assert not got[1].flags.writeable
    frame = pd.DataFrame({"x": np.arange(BIG), "y": ["text"] * BIG})
    pd.testing.assert_frame_equal(there_and_back(frame), frame)


def test_bytes_that_are_large_arrive_too() -> None:
    sent = os.urandom(3 * BIG)
    assert there_and_back([sent, torch.ones(3)])[0] == sent


def test_small_calls_need_no_file() -> None:
    assert pack(max, (1, torch.ones(3)), {}).shared is None


def test_a_call_that_was_packed_holds_on_to_nothing() -> None:
    sent = torch.zeros(BIG)
    gone = weakref.ref(sent)
    gc.disable()
    try:
        payload = pack(len, (sent,), {})
        fd = payload.shared.fd  # type: ignore[union-attr]
        del sent
        assert gone() is None
        del payload
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
    finally:
        gc.enable()


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="only Linux can seal a file")
def test_nobody_can_change_the_file() -> None:
    with packed(torch.ones(BIG)) as payload, open(payload.shared.fd, "r+b", buffering=0) as file:
        with pytest.raises(PermissionError):
            file.write(b"changed")
        with pytest.raises(PermissionError):
            file.truncate(0)


def test_without_memfd_the_file_is_private_and_has_no_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with packed(torch.ones(BIG)) as payload:
        status = os.fstat(payload.shared.fd)
        assert (status.st_mode & 0o777, status.st_nlink) == (0o600, 0)
        assert not list(tmp_path.iterdir())
        assert unpack(payload)[1][0].sum() == BIG


def test_a_lack_of_shared_memory_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shipping, "lay_out", full)
    with pytest.raises(ShippingError, match=r"with tensors and arrays 4 MB, cannot travel .*No space left"):
        pack(len, (torch.zeros(MB),), {})


def in_a_rank(tensor: torch.Tensor, array: np.ndarray, *, net: torch.nn.Module) -> dict[str, Any]:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    before = (tensor.sum().item(), base.sum().item(), array.sum().item())
    tensor += rank + 1
    array += rank + 1
    view.zero_()
    net(torch.ones(4, 200)).sum().backward()
    with torch.no_grad():
        net[0].weight -= net[0].weight.grad
    dist.barrier()
    return {
        "before": before,
        "after": (tensor.sum().item(), array.sum().item(), base.count_nonzero().item()),
        "weight": net[2].weight.detach().clone(),
        "open": [name for name in map(os.readlink, _descriptors()) if "nbstate-tensors" in name],
    }


def _descriptors() -> list[str]:
    found = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return [path for path in found if os.path.lexists(path)]


def test_ranks_and_kernel_do_not_see_each_others_writes(start_method: str) -> None:
    tensor, array, net = torch.zeros(MB), np.zeros(MB), model()
    weight = net[0].weight.detach().clone()
    sent = base.clone()
    first, second = notebook_launcher(
        in_a_rank, (tensor, array), num_processes=2, kwargs={"net": net}, start_method=start_method
    )
    assert first["before"] == second["before"] == (0.0, sent.sum().item(), 0.0)
    zeroed = sent.count_nonzero() - view.numel()
    assert (first["after"], second["after"]) == ((MB, MB, zeroed), (2 * MB, 2 * MB, zeroed))
    assert torch.equal(first["weight"], second["weight"])
    assert not torch.equal(first["weight"], weight)
    assert (tensor.sum(), array.sum()) == (0, 0)
    assert torch.equal(base, sent)
    assert torch.equal(net[0].weight, weight)
    # Python's map keeps one duplicate, however many tensors there are
    assert len(first["open"]) == (start_method != "fork")


def refuse(tensor: torch.Tensor) -> None:
    raise ValueError(tensor.numel())


def test_launches_that_fail_leave_nothing() -> None:  # the fixture nothing_left looks
    with pytest.raises(RankError, match=str(MB)):
        notebook_launcher(refuse, (torch.zeros(MB),), num_processes=2)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ValueError, match="cannot be had"):
            notebook_launcher(len, (torch.zeros(MB),), num_processes=2, use_port=taken.getsockname()[1])


def sum_at_the_second_attempt(tensor: torch.Tensor) -> float:
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        tensor.zero_()
        raise ValueError("not yet")
    return tensor.sum().item()


def test_ranks_that_are_restarted_find_the_tensors_as_they_were() -> None:
    results = notebook_launcher(
        sum_at_the_second_attempt, (torch.ones(MB),), num_processes=2, max_restarts=1, start_method="forkserver"
    )
    assert results == [MB, MB]


def memory_in_use(kernel: int) -> tuple[float, float]:
    """Bytes that kernel and ranks hold together, once each has read all of ``filler``."""
    dist.init_process_group("gloo")
    total = filler.sum().item()
    pids = [0] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    used = sum(_share(pid) for pid in (kernel, *pids)) if dist.get_rank() == 0 else 0
    dist.barrier()
    return total, used


def _measured(start_method: str) -> tuple[float, float]:
    results = notebook_launcher(memory_in_use, (os.getpid(),), num_processes=2, start_method=start_method)
    return tuple(results[0])


def _share(pid: int) -> int:
    """A process's proportional share of memory that is no file: that of others who map torch's libraries varies."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="Linux's /proc says who shares memory")
@pytest.mark.parametrize("start_method", ["fork", "forkserver"])  # spawn maps as forkserver does, and is slow
def test_a_big_tensor_costs_one_copy_for_all_ranks(start_method: str) -> None:
    global filler
    size = 200 * MB
    held = torch.ones(size // 4)
    try:
        without = _measured(start_method)[1]
        filler = held
        total, used = _measured(start_method)
    finally:
        filler = torch.zeros(0)
    assert total == size // 4
    copies = (used - without) / size
    low, high = (-0.2, 0.2) if start_method == "fork" else (0.9, 1.2)
    assert low < copies < high


def number_of_words(_: Any = None) -> int:
    return len(words)


def calls_it() -> int:
    return number_of_words()


class Holder:
    def __init__(self, content: bytes) -> None:
        self.content = content

    def go(self) -> int:
        return len(self.content)


def test_big_tensors_stay_with_forkserver() -> None:
    choice = choose_start_method("auto", len, (torch.zeros(20 * MB),), {})
    assert (choice.start_method, choice.note) == ("forkserver", "")


@pytest.mark.parametrize(
    ("function", "args", "named"),
    [
        (print, (["x"] * 1000, bytes(2 * MB), 1), "args[1] (bytes, 2 MB)"),
        (partial(print, 1, sep=bytes(2 * MB)), (), "kwargs['sep'] of the partial (bytes, 2 MB)"),
        (Holder(bytes(2 * MB)).go, (), "the object that go() is bound to (Holder, 2 MB)"),
        (number_of_words, (), "the global 'words' that number_of_words() uses (list, 2 MB)"),
        (calls_it, (), "the global 'words' that number_of_words() uses (list, 2 MB)"),
    ],
)
def test_what_makes_a_call_large_is_named(
    function: Any, args: tuple[Any, ...], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shipping, "LARGE_PAYLOAD", MB)
    words[:] = ["x" * 2 * MB] if function in (number_of_words, calls_it) else []
    try:
        payload = pack(function, args, {})
    finally:
        words.clear()
    assert payload.warning.endswith(f"the most is in {named}")


def test_a_large_keyword_is_named_and_still_arrives(capsys: pytest.CaptureFixture[str]) -> None:
    results = notebook_launcher(_length, num_processes=2, kwargs={"content": bytes(71 * MB)})
    assert results == [71 * MB] * 2
    assert capsys.readouterr().out == (
        "nbstate: besides big tensors the call carries 71 MB, of which every rank makes a copy of its own; "
        "the most is in kwargs['content'] (bytes, 71 MB)\n"
    )


def _length(content: bytes) -> int:
    return len(content)
