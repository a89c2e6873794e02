"""Optimizer state of separate parameters and of chunks, converted both ways."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from torchparts_conformance import requirement
from torchparts_conformance.cases.flat_param._builds import blocks

OPTIMIZERS = {
    "Adam": lambda params: torch.optim.Adam(params, lr=0.01, foreach=False),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9, foreach=False),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.01, foreach=False),
}


def _model(device):
    """A model with a frozen parameter, and a parameter without a gradient."""
    model, x = blocks(device, torch.float32)
    model.frozen = nn.Parameter(torch.ones(3, device=device), requires_grad=False)
    model.unused = nn.Parameter(torch.ones(3, device=device))
    return model, x


def _train(model, optimizer, x):
    for _ in range(3):
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()


def _assert_same(one, other, device):
    """Bitwise on the CPU; kernels of an accelerator depend on size and alignment."""
    tolerance = {"rtol": 0, "atol": 0} if device == "cpu" else {}
    for left, right in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(left, right, **tolerance)


@requirement(
    "FP-203",
    "Optimizer state of separate parameters MUST load into an optimizer over chunks and convert "
    "back bitwise, steps MUST equal those of separate parameters, bitwise on the CPU, and the "
    "state of other parameters MUST be refused before anything is loaded.",
    rationale=(
        "a run that began with separate parameters can continue over chunks with its moments; "
        "kernels of an accelerator may round differently for another size or alignment"
    ),
    profile="flatten",
)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_continues_over_chunks_and_back(part, device, name):
    """Three steps apart, three over chunks and three apart equal nine steps apart."""
    plain, x = _model(device)
    optimizer = OPTIMIZERS[name](plain.parameters())
    _train(plain, optimizer, x)
    model = copy.deepcopy(plain)
    flat = part.flatten(model)
    chunked = OPTIMIZERS[name](flat.chunks(16))
    flat.load_optimizer_state(chunked, optimizer.state_dict())
    trained = [name for name, p in plain.named_parameters() if p.requires_grad]
    back = _by_position(flat.optimizer_state(chunked), trained)["state"]
    for number, values in _numbered(optimizer, plain).items():
        for what, value in values.items():
            assert torch.equal(torch.as_tensor(back[number][what]), torch.as_tensor(value))
    _train(plain, optimizer, x)
    _train(model, chunked, x)
    _assert_same(plain, model, device)
    state = flat.optimizer_state(chunked)
    again = copy.deepcopy(plain)
    named = {key: p for key, p in again.named_parameters() if p.requires_grad}
    separate = OPTIMIZERS[name](named.values())
    separate.load_state_dict(_by_position(state, list(named)))
    _train(plain, optimizer, x)
    _train(again, separate, x)
    _assert_same(plain, again, device)


def _numbered(optimizer, model):
    """State of each parameter with a gradient, by its number among the trained ones."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return {n: optimizer.state[p] for n, p in enumerate(trained) if p in optimizer.state}


def _by_position(state, names):
    """Named state in the format of `torch.optim.Optimizer.load_state_dict`."""
    at = {name: index for index, name in enumerate(names)}
    groups = [
        {**group, "params": [at[name] for name in group["params"]]}
        for group in state["param_groups"]
    ]
    return {
        "state": {at[name]: values for name, values in state["state"].items()},
        "param_groups": groups,
    }


@requirement("FP-203")
def test_state_of_other_parameters_is_refused(part, device):
    """By name or number, before anything is loaded."""
    model, x = _model(device)
    flat = part.flatten(model)
    chunked = OPTIMIZERS["Adam"](flat.chunks(16))
    _train(model, chunked, x)
    before = copy.deepcopy(chunked.state_dict())
    other = nn.Linear(2, 2, device=device)
    theirs = OPTIMIZERS["Adam"](other.parameters())
    _train(other, theirs, torch.ones(1, 2, device=device))
    with pytest.raises((RuntimeError, ValueError), match=r"\d"):
        flat.load_optimizer_state(chunked, theirs.state_dict())
    after = chunked.state_dict()
    for key, values in before["state"].items():
        for what, value in values.items():
            found = after["state"][key][what]
            assert torch.equal(torch.as_tensor(found), torch.as_tensor(value))
