"""Training with state elsewhere is training with state at hand, whatever happens in between."""

from __future__ import annotations

import copy
import errno
import os
import pickle
import re
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adafactor, Adagrad, AdamW, NAdam, Optimizer, lr_scheduler

from flat_param import StateError, flatten, offload_optimizer

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": lambda params: AdamW(params, lr=0.01),
    "AdamW foreach": lambda params: AdamW(params, lr=0.01, foreach=True, amsgrad=True),
    "AdamW fused": lambda params: AdamW(params, lr=0.01, fused=True),
    "SGD": lambda params: SGD(params, lr=0.01),
    "SGD momentum": lambda params: SGD(params, lr=0.01, momentum=0.9, nesterov=True),
    "Adagrad": lambda params: Adagrad(params, lr=0.01),
    "Adafactor": lambda params: Adafactor(params, lr=0.01),
    "NAdam foreach": lambda params: NAdam(params, lr=0.01, foreach=True),
}


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(9, 20), nn.ReLU(), nn.Linear(20, 6), nn.Linear(6, 6))


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    weights = [param for param in model.parameters() if param.dim() == 2]
    biases = [param for param in model.parameters() if param.dim() == 1]
    return [{"params": weights, "weight_decay": 0.1}, {"params": biases, "lr": 0.003}]


def _backward(model: Any, step: int) -> None:
    """One layer has no gradient in every other step."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(4, 9, generator=generator)
    (model if step % 2 else model[:3])(x).pow(2).mean().backward()


def _train(model: nn.Module, optimizer: Optimizer, steps: range = range(5)) -> None:
    for step in steps:
        optimizer.zero_grad()
        _backward(model, step)
        optimizer.step()


def _same(first: Any, second: Any) -> bool:
    """Whether nested values are equal to the last bit."""
    if isinstance(first, Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(_same(first[k], second[k]) for k in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(_same, first, second))
    return bool(first == second)


@pytest.fixture(params=["memory", "files"])
def folder(request: Any, tmp_path: Path) -> Path | None:
    """Where state goes; None for CPU memory."""
    return tmp_path if request.param == "files" else None


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_and_state_are_the_same_to_the_last_bit(kind: str, folder: Path | None) -> None:
    """With groups, a scheduler, and parameters without gradients; offloaded midway too."""
    found = []
    for way in ("at hand", "from the start", "midway"):
        model = _model()
        optimizer = OPTIMIZERS[kind](_groups(model))
        if way == "from the start":
            offload_optimizer(optimizer, folder=folder, bucket_numel=100)
        else:
            _train(model, optimizer, range(2))
        if way == "midway":
            offload_optimizer(optimizer, folder=folder, bucket_numel=100)
        if way == "from the start":
            _train(model, optimizer, range(2))
        schedule = lr_scheduler.ExponentialLR(optimizer, 0.7)
        for step in range(2, 7):
            _train(model, optimizer, range(step, step + 1))
            schedule.step()
        found.append((optimizer.state_dict(), model.state_dict()))
    assert _same(found[0], found[1])
    assert _same(found[0], found[2])


@pytest.mark.parametrize("kind", ["AdamW", "AdamW fused", "SGD momentum", "Adagrad"])
def test_chunks_of_a_flat_module_are_stepped_the_same(kind: str, folder: Path | None) -> None:
    """And their state is given by parameter, as without it."""
    found = []
    for offloaded in (False, True):
        model = _model()
        flat = flatten(model)
        optimizer = OPTIMIZERS[kind](flat.chunks(64))
        if offloaded:
            offload_optimizer(optimizer, folder=folder, bucket_numel=128)
        _train(model, optimizer)
        found.append((flat.optimizer_state(optimizer), model.state_dict()))
        flat.load_optimizer_state(optimizer, found[-1][0])
        _train(model, optimizer, range(5, 8))
        found.append((flat.optimizer_state(optimizer), model.state_dict()))
    assert _same(found[0], found[2])
    assert _same(found[1], found[3])


def test_state_lies_in_the_files_between_steps(tmp_path: Path) -> None:
    """All but counts: what `state` has is mapped from a file of the folder."""
    model = _model()
    optimizer = offload_optimizer(AdamW(model.parameters()), folder=tmp_path)
    _train(model, optimizer)
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("this system does not tell what is mapped")
    spans = [
        tuple(int(edge, 16) for edge in line.split()[0].split("-"))
        for line in maps.read_text().splitlines()
        if str(tmp_path) in line
    ]
    for values in optimizer.state.values():
        for key, value in values.items():
            mapped = any(start <= value.data_ptr() < stop for start, stop in spans)
            assert mapped == (key != "step")


def test_state_dicts_go_from_one_kind_to_the_other(tmp_path: Path) -> None:
    """Through torch's own methods, and through a file."""
    found = []
    for first, second in ((False, False), (True, True), (True, False), (False, True)):
        model = _model()
        optimizer = AdamW(model.parameters(), lr=0.01)
        _train(model, offload_optimizer(optimizer, folder=tmp_path) if first else optimizer)
        torch.save(optimizer.state_dict(), tmp_path / "state.pt")
        other = AdamW(model.parameters(), lr=0.5)
        other = offload_optimizer(other, folder=tmp_path) if second else other
        other.load_state_dict(torch.load(tmp_path / "state.pt"))
        _train(model, other, range(5, 8))
        found.append((other.state_dict(), model.state_dict()))
    assert all(_same(found[0], each) for each in found)


def test_closure_is_called_once_and_its_loss_returned(folder: Path | None) -> None:
    """With gradients on, as torch does."""
    model, calls = _model(), []
    optimizer = offload_optimizer(SGD(model.parameters(), lr=0.1), folder=folder, bucket_numel=1)

    def closure() -> Tensor:
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = model(torch.ones(2, 9)).sum()
        loss.backward()
        return loss

    with torch.no_grad():
        first = optimizer.step(closure)
        second = optimizer.step(closure)
    assert calls == [True, True]
    assert second < first


class Inheriting(AdamW):
    """Steps as its base class does, whose step torch gives hooks, too."""

    def step(self, closure: Any = None) -> Any:
        """Step."""
        return super().step(closure)


@pytest.mark.parametrize("kind", [AdamW, Inheriting])
def test_hooks_of_a_step_are_called_once_a_step(folder: Path | None, kind: Any) -> None:
    """Not once a bucket; also after a load, with which torch looks at them again."""
    model, told = _model(), list[str]()
    AdamW(model.parameters())
    optimizer = kind(model.parameters())
    optimizer.register_step_pre_hook(lambda *_: told.append("before"))
    offload_optimizer(optimizer, folder=folder, bucket_numel=1)
    optimizer.register_step_post_hook(lambda *_: told.append("after"))
    _train(model, optimizer, range(1))
    optimizer.load_state_dict(optimizer.state_dict())
    _train(model, optimizer, range(1))
    assert told == ["before", "after"] * 2


def test_group_that_is_added_later_is_stepped(folder: Path | None) -> None:
    """In separate buckets."""
    found = []
    for offloaded in (False, True):
        model = _model()
        first, second = _groups(model)
        optimizer = AdamW([first])
        if offloaded:
            offload_optimizer(optimizer, folder=folder, bucket_numel=50)
        _train(model, optimizer, range(2))
        optimizer.add_param_group(second)
        _train(model, optimizer, range(2, 5))
        found.append((optimizer.state_dict(), model.state_dict()))
    assert _same(*found)


def test_gradient_scaler_steps_it(folder: Path | None) -> None:
    """And leaves a step out whose gradients are not finite."""
    found = []
    for offloaded in (False, True):
        model = _model()
        optimizer = AdamW(model.parameters(), lr=0.01, fused=True)
        if offloaded:
            offload_optimizer(optimizer, folder=folder, bucket_numel=50)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for step in range(4):
            optimizer.zero_grad()
            loss = model(torch.full((2, 9), float(step))).mean()
            (scaler.scale(loss) * (float("inf") if step == 2 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
        found.append((optimizer.state_dict(), model.state_dict()))
    assert _same(*found)


def test_load_that_fails_leaves_everything(folder: Path | None, monkeypatch: Any) -> None:
    """What torch refuses, and a folder that is full."""
    model = _model()
    optimizer = offload_optimizer(AdamW(model.parameters()), folder=folder)
    _train(model, optimizer)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match="group"):
        optimizer.load_state_dict(AdamW([nn.Parameter(torch.ones(1))]).state_dict())
    other = copy.deepcopy(before)
    other["state"][0]["exp_avg"] += 1

    def full(*_: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "from_file", full)
        if folder is not None:  # in CPU memory nothing is allocated on the CPU
            with pytest.raises(StateError, match="full"):
                optimizer.load_state_dict(other)
    assert _same(optimizer.state_dict(), before)


REFUSED: list[tuple[Callable[[list[nn.Parameter]], Any], str]] = [
    (
        lambda params: offload_optimizer(offload_optimizer(SGD(params))),
        "OffloadedSGD has its state elsewhere already, but there is one such place. Call it once.",
    ),
    (
        lambda params: offload_optimizer(nn.ParameterList(params)),
        "ParameterList is no optimizer, but its state is moved. Pass one of torch.optim",
    ),
    (
        lambda params: offload_optimizer(LBFGS(params)),
        "LBFGS looks at all parameters together, but they are stepped in buckets. Use another.",
    ),
    (
        lambda params: offload_optimizer(SGD(params, differentiable=True)),
        "SGD is differentiable, but its state leaves the graph. Pass differentiable=False.",
    ),
    (
        lambda params: offload_optimizer(lr_scheduler.ConstantLR(SGD(params)).optimizer),
        "SGD has a scheduler around its step, but that would go past its state. Make the scheduler "
        "after this call.",
    ),
    (
        lambda params: offload_optimizer(SGD(params), bucket_numel=0),
        "SGD cannot be stepped with bucket_numel=0, but a bucket has at least one element. "
        "Pass a whole number above 0.",
    ),
    (
        lambda params: copy.deepcopy(offload_optimizer(SGD(params))),
        "OffloadedSGD cannot be copied or pickled, but its state is kept elsewhere. Save its "
        "state_dict(), and load it into another one.",
    ),
    (
        lambda params: pickle.dumps(offload_optimizer(SGD(params))),
        "OffloadedSGD cannot be copied or pickled, but its state is kept elsewhere. Save its "
        "state_dict(), and load it into another one.",
    ),
]


@pytest.mark.parametrize(("call", "words"), REFUSED)
def test_what_cannot_be_offloaded_is_refused(call: Any, words: str) -> None:
    """By name, and with a way on."""
    with pytest.raises(StateError, match=re.escape(f"flat_param.offload_optimizer: {words}")):
        call([nn.Parameter(torch.ones(1))])


class Stopping(AdamW):
    """Interrupted after some more buckets."""

    left = 2

    def step(self, closure: Any = None) -> Any:
        """Step, or be interrupted."""
        Stopping.left -= 1
        if not Stopping.left:
            raise KeyboardInterrupt
        return super().step(closure)


def test_step_after_an_interrupted_step_steps_all_parameters(folder: Path | None) -> None:
    """Buckets before the interrupt have stepped once more; options, groups and hooks are whole."""
    model = _model()
    optimizer = Stopping(_groups(model), lr=0.01)
    offload_optimizer(optimizer, folder=folder, bucket_numel=100)
    told = list[str]()
    optimizer.register_step_pre_hook(lambda *_: told.append("step"))
    Stopping.left = 100
    _backward(model, 1)
    optimizer.step()
    Stopping.left = 2
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    Stopping.left = 100
    optimizer.step()
    assert told == ["step"] * 3
    assert [int(optimizer.state[param]["step"]) for param in model.parameters()] == [3] + [2] * 5


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have other limits")
def test_disk_that_is_full_in_a_step_is_told(tmp_path: Path) -> None:
    """The system refuses a bucket's file as a full disk does; with room again, a load mends it."""
    model = _model()
    optimizer = offload_optimizer(AdamW(model.parameters()), folder=tmp_path, bucket_numel=100)
    start = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    _backward(model, 1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(StateError, match="bytes of state cannot be written to folder"):
            optimizer.step()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    model.load_state_dict(start[0])
    optimizer.load_state_dict(start[1])
    _train(model, optimizer)
    other = _model()
    _train(other, AdamW(other.parameters()))
    assert _same(model.state_dict(), other.state_dict())


def test_layouts_and_dtypes_of_state_are_kept(folder: Path | None) -> None:
    """Transposed, expanded, in 16 bits: each steps as without it."""
    found = []
    for offloaded in (False, True):
        params = [
            nn.Parameter(torch.arange(6.0).view(2, 3).t()),
            nn.Parameter(torch.arange(5, dtype=torch.bfloat16)),
            nn.Parameter(torch.arange(4.0, dtype=torch.float64)),
        ]
        optimizer = SGD(params, lr=0.5, momentum=0.5)
        if offloaded:
            offload_optimizer(optimizer, folder=folder, bucket_numel=11)
        for _ in range(3):
            for param in params:
                param.grad = torch.ones_like(param)
            optimizer.step()
        state = [optimizer.state[param]["momentum_buffer"] for param in params]
        assert [each.stride() for each in state] == [param.stride() for param in params]
        found.append((state, params))
    assert _same(*found)


def test_files_have_no_name(tmp_path: Path) -> None:
    """Nothing is left in the folder, even if the process is killed."""
    model = _model()
    optimizer = offload_optimizer(AdamW(model.parameters()), folder=tmp_path)
    _train(model, optimizer)
    assert list(tmp_path.iterdir()) == []


def test_folder_that_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    """At once, and by its path."""
    text = (
        "flat_param.offload_optimizer: 64 bytes of state cannot be written to folder "
        f"'{tmp_path}/none' ({os.strerror(errno.ENOENT)}), but state is kept in files there. Pass "
        "a writable folder that exists and has room for all of it, "
        "or leave it out to use CPU memory."
    )
    with pytest.raises(StateError, match=re.escape(text)):
        offload_optimizer(SGD(_model().parameters()), folder=tmp_path / "none")


@pytest.mark.accelerator
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
def test_cpu_memory_is_pinned_where_there_is_an_accelerator() -> None:
    """So that the host does not wait for each copy."""
    param = nn.Parameter(torch.zeros(5, device=torch.accelerator.current_accelerator()))
    param.grad = torch.ones_like(param)
    optimizer = offload_optimizer(SGD([param], lr=1.0, momentum=0.5))
    optimizer.step()
    assert optimizer.state[param]["momentum_buffer"].is_pinned()
