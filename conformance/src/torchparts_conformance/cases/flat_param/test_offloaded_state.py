"""Optimizer state that lies elsewhere between steps: the same training, and no half steps."""

from __future__ import annotations

import copy

import pytest
import torch

from torchparts_conformance import requirement
from torchparts_conformance.cases.flat_param._builds import blocks

OPTIMIZERS = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01),
}


def _train(model, optimizer, x, steps=3):
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()


def _same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one.cpu(), other.cpu())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    return one == other


@requirement(
    "FP-210",
    level="MUST",
    text=(
        "Steps of an optimizer whose state is offloaded, to CPU memory or to a folder, MUST be "
        "those that it makes with its state at hand, bitwise, and so MUST the state that it "
        "gives and the steps after that state was loaded."
    ),
    rationale="where state lies is a matter of memory, and not of results",
    since="0.1.0",
    profile="flatten",
)
@pytest.mark.parametrize("in_files", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_offloaded_training_is_training(part, device, name, in_files, tmp_path):
    """Six steps with a load after three, beside six at hand."""
    found = []
    for offloaded in (False, True):
        model, x = blocks(device, torch.float32)
        optimizer = OPTIMIZERS[name](model.parameters())
        if offloaded:
            options = {"folder": tmp_path} if in_files else {}
            optimizer = part.offload_optimizer(optimizer, bucket_numel=20, **options)
        _train(model, optimizer, x)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        _train(model, optimizer, x)
        found.append([model.state_dict(), optimizer.state_dict()])
    assert _same(*found)


def _interrupted():
    """A class of optimizers: torch changes those of which one is made."""

    class Interrupted(torch.optim.SGD):
        """Is interrupted when it is given its third piece of work."""

        left = 0

        def step(self, closure=None):
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
            return super().step(closure)

    return Interrupted


@requirement(
    "FP-211",
    level="MUST",
    text=(
        "A step of an offloaded optimizer that was stopped among its parameters MUST be told: "
        "its state and its next step MUST be refused until state is loaded, and training from "
        "there MUST be as if nothing had been stopped."
    ),
    rationale="a state of which half is a step older than the other trains on and is never found",
    since="0.1.0",
    profile="flatten",
)
def test_step_that_was_stopped_is_told(part, device):
    """After two of its buckets; what was saved before loads, and the step is made again."""
    model, x = blocks(device, torch.float32)
    optimizer = _interrupted()(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = part.offload_optimizer(optimizer, bucket_numel=1)
    _train(model, optimizer, x)
    before = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    _train(model, optimizer, x, 1)
    after = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    model.load_state_dict(before[0])
    optimizer.load_state_dict(copy.deepcopy(before[1]))
    optimizer.left = 3
    with pytest.raises(KeyboardInterrupt):
        _train(model, optimizer, x, 1)
    for refused in (optimizer.step, optimizer.state_dict):
        with pytest.raises(RuntimeError, match="stopped"):
            refused()
    model.load_state_dict(before[0])
    optimizer.load_state_dict(before[1])
    _train(model, optimizer, x, 1)
    assert _same([model.state_dict(), optimizer.state_dict()], after)
