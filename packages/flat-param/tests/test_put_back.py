"""What is tried with a module and its optimizer leaves them as they were if it fails."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from flat_param import fully_shard
from flat_param.checkpoint._put_back import is_extra, owner_of_extra, put_back_on_error


class Counting(nn.Module):
    """A layer with a buffer and extra state."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("cached", torch.zeros(2), persistent=False)
        self.word = "first"

    def forward(self, x):
        return self.layer(x) + self.seen

    def get_extra_state(self):
        return self.word

    def set_extra_state(self, state):
        self.word = state


def _change(module, optimizer):
    """Change all there is."""
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.add_(1)
    for each in module.modules():
        if isinstance(each, Counting):
            each.word = "second"
    if optimizer is not None:
        optimizer.load_state_dict(
            {"state": {}, "param_groups": [optimizer.state_dict()["param_groups"][0] | {"lr": 9.0}]}
        )


def _values(module):
    return [tensor.detach().clone() for tensor in (*module.parameters(), module[0].seen)]


@pytest.fixture
def trained(group_of_one):
    """A sharded module and its optimizer after a step."""
    module = nn.Sequential(Counting(), nn.Linear(2, 2))
    fully_shard(module[0])
    fully_shard(module)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return module, optimizer


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, GeneratorExit])
def test_everything_is_as_it_was(trained, error):
    """Parameters, buffers, extra state, optimizer state and groups, whatever was raised."""
    module, optimizer = trained
    before, state = _values(module), optimizer.state
    with pytest.raises(error), put_back_on_error(module, optimizer):
        _change(module, optimizer)
        raise error
    assert all(map(torch.equal, _values(module), before))
    assert module[0].word == "first"
    assert optimizer.state is state
    assert len(state) == len(list(module.parameters()))
    assert optimizer.param_groups[0]["lr"] == 0.1
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()


def test_what_succeeds_stays(trained):
    """Nothing is put back then."""
    module, optimizer = trained
    before = _values(module)
    with put_back_on_error(module, optimizer):
        _change(module, optimizer)
    assert all(torch.equal(now, was + 1) for now, was in zip(_values(module), before, strict=True))
    assert (module[0].word, optimizer.param_groups[0]["lr"]) == ("second", 9.0)


def test_module_alone_needs_no_optimizer(trained):
    """As `load_full_state_dict` has it."""
    module, _ = trained
    before = _values(module)
    with pytest.raises(ValueError, match="stopped"), put_back_on_error(module, None):
        _change(module, None)
        raise ValueError("stopped")
    assert all(map(torch.equal, _values(module), before))


def test_next_forward_reads_what_was_put_back(trained):
    """A unit that was shown whole meanwhile gathers again."""
    module, _ = trained
    plain = module(torch.ones(1, 3)).detach()
    with pytest.raises(ValueError, match="stopped"), put_back_on_error(module, None):
        _change(module, None)
        module(torch.ones(1, 3))
        raise ValueError("stopped")
    assert torch.equal(module(torch.ones(1, 3)).detach(), plain)


def test_extra_state_is_told_by_the_last_word():
    """Of the root, of a module below, and of nothing that has it in the middle of its name."""
    module = nn.Sequential(Counting())
    assert is_extra("_extra_state")
    assert is_extra("0._extra_state")
    assert not is_extra("0.weight")
    assert not is_extra("my_extra_state")
    assert not is_extra("_extra_state.weight")
    assert owner_of_extra(module, "0._extra_state") is module[0]
    assert owner_of_extra(module, "_extra_state") is module


class Refusing(Counting):
    """Takes no extra state that it has not had a moment ago."""

    def set_extra_state(self, state):
        raise RuntimeError("refused")


def test_all_else_is_put_back_where_a_module_refuses_its_extra_state(group_of_one):
    """A module's own code comes last; its error says what it was raised in."""
    module = nn.Sequential(Refusing(), nn.Linear(2, 2))
    fully_shard(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    before, state = _values(module), optimizer.state
    with (
        pytest.raises(RuntimeError, match="refused") as error,
        put_back_on_error(module, optimizer),
    ):
        _change(module, optimizer)
        raise ValueError("stopped")
    assert isinstance(error.value.__context__, ValueError)
    assert all(map(torch.equal, _values(module), before))
    assert (optimizer.state is state, optimizer.param_groups[0]["lr"]) == (True, 0.1)


class Handing(Counting):
    """Hands out what it goes on changing, a tensor among it."""

    def __init__(self):
        super().__init__()
        self.word = {"count": 0, "scale": torch.ones(2)}


@pytest.mark.parametrize("is_alone", [False, True])
def test_extra_state_that_changes_in_place_is_put_back(group_of_one, is_alone):
    """Whether it is a tensor or holds one: what was handed out is copied."""
    module = nn.Sequential(Handing(), nn.Linear(2, 2))
    if is_alone:
        module[0].word = torch.ones(2)
    fully_shard(module)
    with pytest.raises(ValueError, match="stopped"), put_back_on_error(module, None):
        word = module[0].word
        (word if is_alone else word["scale"]).add_(1)
        raise ValueError("stopped")
    word = module[0].word
    assert torch.equal(word if is_alone else word["scale"], torch.ones(2))


def test_extra_state_without_a_copy_is_put_back_itself(group_of_one):
    """Such as a lock; a load is not refused because of it."""
    module = nn.Sequential(Counting(), nn.Linear(2, 2))
    module[0].word = lock = threading.Lock()
    fully_shard(module)
    with pytest.raises(ValueError, match="stopped"), put_back_on_error(module, None):
        module[0].word = "second"
        raise ValueError("stopped")
    assert module[0].word is lock


class Wrapped(torch.optim.Optimizer):
    """An optimizer around another, whose state is that of the inner one, as accelerate has them."""

    def __init__(self, inner):
        self.inner = inner

    @property
    def state(self):
        return self.inner.state

    @state.setter
    def state(self, state):
        self.inner.state = state

    @property
    def param_groups(self):
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, groups):
        self.inner.param_groups = groups


def test_state_of_a_wrapped_optimizer_is_put_back(trained):
    """It has no state among its own attributes."""
    module, optimizer = trained
    state, wrapped = optimizer.state, Wrapped(optimizer)
    with pytest.raises(RuntimeError, match="stopped"), put_back_on_error(module, wrapped):
        wrapped.state = {}
        raise RuntimeError("stopped")
    assert optimizer.state is state
