"""The example scripts of accelerate's documentation, written anew on digits: only the import differs.

Each function below is one script. It gets the names that it would import, from one library or the other, and returns
the trained weights and what it measured. Both libraries run it on the same two ranks, and must agree.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

Ranks = Callable[..., list[Any]]
Outcome = tuple[torch.Tensor, list[Any]]

TRAINED_ON, EPOCHS, BATCH = 300, 2, 16


def names_of(library: str) -> SimpleNamespace:
    """What the scripts import."""
    lib = importlib.import_module(library)
    utils = importlib.import_module(f"{library}.utils")
    local_sgd = lib if library == "nbstate" else importlib.import_module("accelerate.local_sgd")
    from_utils = (
        "DataLoaderConfiguration",
        "DDPCommunicationHookType",
        "DistributedDataParallelKwargs",
        "GradientAccumulationPlugin",
        "ProjectConfiguration",
        "find_executable_batch_size",
        "set_seed",
    )
    return SimpleNamespace(
        Accelerator=lib.Accelerator,
        LocalSGD=local_sgd.LocalSGD,
        **{name: getattr(utils, name) for name in from_utils},
    )


def start_anew(library: str) -> None:
    state = importlib.import_module(f"{library}.state")
    for singleton in (state.GradientState, state.AcceleratorState):
        singleton._reset_state()


def digits(batch_size: int) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """A training set that does not divide into global batches, and neither does the test set."""
    pixels, labels = load_digits(return_X_y=True)
    images, classes = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels)
    train = TensorDataset(images[:TRAINED_ON], classes[:TRAINED_ON])
    test = TensorDataset(images[TRAINED_ON : TRAINED_ON + 117], classes[TRAINED_ON : TRAINED_ON + 117])
    return DataLoader(train, batch_size=batch_size, shuffle=True), DataLoader(test, batch_size=batch_size)


def network() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(32, 10))


def shuffled_alike(lib: Any) -> Any:
    return lib.DataLoaderConfiguration(use_seedable_sampler=True, data_seed=4)


def outcome(accelerator: Any, model: torch.nn.Module, measured: list[Any]) -> Outcome:
    own = accelerator.unwrap_model(model)
    return torch.cat([parameter.detach().flatten() for parameter in own.parameters()]), measured


def evaluate(accelerator: Any, model: torch.nn.Module, loader: DataLoader[Any]) -> tuple[float, int]:
    """Accuracy over the real samples, and how many these are."""
    model.eval()
    right = seen = 0
    for images, classes in loader:
        with torch.no_grad():
            guesses = model(images).argmax(dim=-1)
        guesses, references = accelerator.gather_for_metrics((guesses, classes))
        right += int((guesses == references).sum())
        seen += len(references)
    return right / seen, seen


def classification(lib: Any, _: str) -> Outcome:
    accelerator = lib.Accelerator(dataloader_config=shuffled_alike(lib))
    lib.set_seed(42)
    train_loader, test_loader = digits(BATCH)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-2, epochs=EPOCHS, steps_per_epoch=len(train_loader))
    model, optimizer, train_loader, test_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, test_loader, scheduler
    )
    measured: list[Any] = []
    for _epoch in range(EPOCHS):
        model.train()
        for images, classes in train_loader:
            loss = torch.nn.functional.cross_entropy(model(images), classes)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        measured += [*evaluate(accelerator, model, test_loader), scheduler.get_last_lr()[0]]
    return outcome(accelerator, model, measured)


def gradient_accumulation(lib: Any, _: str) -> Outcome:
    accelerator = lib.Accelerator(gradient_accumulation_steps=4, dataloader_config=shuffled_alike(lib))
    lib.set_seed(42)
    train_loader, test_loader = digits(8)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 50))
    model, optimizer, train_loader, test_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, test_loader, scheduler
    )
    synchronised: list[Any] = []
    for _epoch in range(EPOCHS):
        model.train()
        for images, classes in train_loader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.cross_entropy(model(images), classes)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                synchronised.append(accelerator.sync_gradients)
    measures = [*synchronised, scheduler.get_last_lr()[0], *evaluate(accelerator, model, test_loader)]
    return outcome(accelerator, model, measures)


def checkpointing(lib: Any, folder: str) -> Outcome:
    """Trains to the middle of the second epoch, then again from the last checkpoint to the end."""
    stopped = train_with_checkpoints(lib, folder, resume_from=None, stop_at=14)
    resumed = train_with_checkpoints(lib, folder, resume_from=f"{folder}/step_12", stop_at=None)
    whole = train_with_checkpoints(lib, f"{folder}/whole", resume_from=None, stop_at=None)
    torch.testing.assert_close(resumed[0], whole[0])
    return resumed[0], [*stopped[1], *resumed[1], *whole[1]]


def train_with_checkpoints(lib: Any, folder: str, resume_from: str | None, stop_at: int | None) -> Outcome:
    accelerator = lib.Accelerator(dataloader_config=shuffled_alike(lib), project_dir=folder)
    lib.set_seed(42)
    train_loader, test_loader = digits(BATCH)
    # No dropout: accelerate draws the order of an epoch anew when it resumes, from the random numbers of the dropout.
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7, gamma=0.8)
    model, optimizer, train_loader, test_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, test_loader, scheduler
    )
    first_epoch = overall_step = resume_step = 0
    if resume_from:
        accelerator.load_state(resume_from)
        overall_step = int(Path(resume_from).name.removeprefix("step_"))
        first_epoch, resume_step = divmod(overall_step, len(train_loader))
    for epoch in range(first_epoch, EPOCHS):
        model.train()
        active = train_loader
        if epoch == first_epoch and resume_step:
            train_loader.set_epoch(epoch)
            active = accelerator.skip_first_batches(train_loader, resume_step)
        for images, classes in active:
            loss = torch.nn.functional.cross_entropy(model(images), classes)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            overall_step += 1
            if overall_step % 6 == 0:
                accelerator.save_state(f"{folder}/step_{overall_step}")
            if overall_step == stop_at:
                return outcome(accelerator, model, [overall_step])
    return outcome(accelerator, model, [overall_step, *evaluate(accelerator, model, test_loader)])


def early_stopping(lib: Any, _: str) -> Outcome:
    accelerator = lib.Accelerator(dataloader_config=shuffled_alike(lib))
    lib.set_seed(42)
    train_loader, _test = digits(BATCH)
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model, optimizer, train_loader = accelerator.prepare(model, optimizer, train_loader)
    steps = 0
    for _epoch in range(20):
        model.train()
        stop = False
        for images, classes in train_loader:
            loss = torch.nn.functional.cross_entropy(model(images), classes)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            if loss.item() < 0.6:  # differs between ranks; whoever is first stops all
                accelerator.set_trigger()
            if accelerator.check_trigger():
                stop = True
                break
        if stop:
            break
    return outcome(accelerator, model, [steps])


def local_metrics(lib: Any, _: str) -> Outcome:
    accelerator = lib.Accelerator()
    lib.set_seed(42)
    _train, test_loader = digits(BATCH)
    model, test_loader = accelerator.prepare(network(), test_loader)
    model.eval()
    losses: list[float] = []
    guessed: list[int] = []
    for images, classes in test_loader:
        with torch.no_grad():
            scores = model(images)
        each = torch.nn.functional.cross_entropy(scores, classes, reduction="none")
        everyones = accelerator.gather_for_metrics({"loss": each, "guess": scores.argmax(-1)})
        losses += everyones["loss"].tolist()
        guessed += everyones["guess"].tolist()
    longest = accelerator.pad_across_processes(torch.ones(2 + accelerator.process_index), dim=0)
    mean = accelerator.reduce(torch.tensor(float(accelerator.process_index)), reduction="mean")
    return outcome(accelerator, model, [losses, guessed, accelerator.gather(longest).tolist(), float(mean)])


def local_sgd(lib: Any, _: str) -> Outcome:
    accelerator = lib.Accelerator(dataloader_config=shuffled_alike(lib), gradient_accumulation_steps=2)
    lib.set_seed(42)
    train_loader, test_loader = digits(BATCH)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)
    for _epoch in range(EPOCHS):
        model.train()
        with lib.LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=3, enabled=True) as local:
            for images, classes in train_loader:
                with accelerator.accumulate(model):
                    loss = torch.nn.functional.cross_entropy(model(images), classes)
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                    local.step()
    return outcome(accelerator, model, [*evaluate(accelerator, model, test_loader)])


def memory(lib: Any, _: str) -> Outcome:
    accelerator = lib.Accelerator(dataloader_config=shuffled_alike(lib))
    tried: list[int] = []

    @lib.find_executable_batch_size(starting_batch_size=64, reduce_batch_size_fn=lambda: tried[-1] // 2)
    def train(batch_size: int) -> Outcome:
        tried.append(batch_size)
        accelerator.free_memory()
        lib.set_seed(42)
        train_loader, _test = digits(batch_size)
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, train_loader = accelerator.prepare(model, optimizer, train_loader)
        for images, classes in train_loader:
            if len(images) > 20:
                raise RuntimeError("CUDA out of memory.")
            accelerator.backward(torch.nn.functional.cross_entropy(model(images), classes))
            optimizer.step()
            optimizer.zero_grad()
        return outcome(accelerator, model, list(tried))

    trained: Outcome = train()
    return trained


def compressed_gradients(lib: Any, _: str) -> Outcome:
    hook = lib.DistributedDataParallelKwargs(comm_hook=lib.DDPCommunicationHookType.FP16)
    accelerator = lib.Accelerator(dataloader_config=shuffled_alike(lib), kwargs_handlers=[hook])
    lib.set_seed(42)
    train_loader, test_loader = digits(BATCH)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)
    model.train()
    for images, classes in train_loader:
        accelerator.backward(torch.nn.functional.cross_entropy(model(images), classes))
        optimizer.step()
        optimizer.zero_grad()
    return outcome(accelerator, model, [*evaluate(accelerator, model, test_loader)])


SCRIPTS = (
    classification,
    gradient_accumulation,
    checkpointing,
    early_stopping,
    local_metrics,
    local_sgd,
    memory,
    compressed_gradients,
)


def run_all(library: str, folder: str) -> dict[str, Outcome]:
    torch.set_num_threads(1)
    lib = names_of(library)
    results = {}
    for script in SCRIPTS:
        start_anew(library)
        results[script.__name__] = script(lib, f"{folder}/{script.__name__}")
    return results


def test_the_example_scripts_give_what_accelerate_gives(in_ranks: Ranks, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    # Not forked: the ranks would inherit that warnings are errors here.
    theirs = in_ranks(run_all, "accelerate", str(tmp_path / "theirs"), start_method="forkserver")
    ours = in_ranks(run_all, "nbstate", str(tmp_path / "ours"), start_method="forkserver")
    for rank, (their, our) in enumerate(zip(theirs, ours, strict=True)):
        for script in SCRIPTS:
            (their_weights, their_measures), (our_weights, our_measures) = their[script.__name__], our[script.__name__]
            where = f"{script.__name__} on rank {rank}"
            torch.testing.assert_close(our_weights, their_weights, msg=lambda text, where=where: f"{where}: {text}")
            assert our_measures == (pytest.approx(their_measures) if _flat(our_measures) else their_measures), where


def _flat(values: list[Any]) -> bool:
    return not any(isinstance(value, list) for value in values)
