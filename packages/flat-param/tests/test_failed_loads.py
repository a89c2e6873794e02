"""A load that fails does not change a module or its optimizer, in a group of one."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from flat_param import (
    StateError,
    full_state_dict,
    fully_shard,
    load_full_state_dict,
    load_sharded,
    save_sharded,
)
from flat_param.checkpoint import _files

pytestmark = pytest.mark.usefixtures("group_of_one")
X = torch.ones(1, 3)


class Counting(nn.Module):
    """A layer with a buffer and extra state."""

    def __init__(self, word: Any = "first") -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("seen", torch.zeros(2))
        self.word = word

    def forward(self, x: Tensor) -> Tensor:
        """Of the layer."""
        y: Tensor = self.layer(x) + self.seen
        return y

    def get_extra_state(self) -> Any:
        """The word."""
        return self.word

    def set_extra_state(self, state: Any) -> None:
        """Take another."""
        self.word = state


class Stops(Adam):
    """Does not take a state."""

    stops: BaseException | None = None

    def load_state_dict(self, state: Any) -> None:
        """Raise after all, as an interrupt may."""
        super().load_state_dict(state)
        if self.stops is not None:
            raise self.stops


class Wrapped(Optimizer):
    """Around another optimizer, whose state it has, as accelerate's are."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner

    state = property(
        lambda self: self.inner.state, lambda self, state: setattr(self.inner, "state", state)
    )
    param_groups = property(
        lambda self: self.inner.param_groups,
        lambda self, groups: setattr(self.inner, "param_groups", groups),
    )

    def load_state_dict(self, state: Any) -> None:
        """Of the other."""
        self.inner.load_state_dict(state)


def made(word: Any = "first", seed: int = 0) -> tuple[nn.Module, Stops]:
    """A module and its optimizer after a step."""
    torch.manual_seed(seed)
    module = nn.Sequential(Counting(word), nn.Linear(2, 2))
    fully_shard(module[0])
    fully_shard(module)
    optimizer = Stops(module.parameters(), lr=0.1)
    module(X).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return module, optimizer


def other_state(word: Any = "second") -> dict[str, Any]:
    """Of another module, with another buffer and rate."""
    module, optimizer = made(word, seed=1)
    optimizer.param_groups[0]["lr"] = 9.0
    module[0].seen.fill_(7)
    return full_state_dict(module, optimizer=optimizer)


def values(module: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    """All tensors, copied."""
    moments = [each[key] for each in optimizer.state.values() for key in ("exp_avg", "step")]
    return [each.detach().clone() for each in (*module.parameters(), module[0].seen, *moments)]


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("wrap", [lambda optimizer: optimizer, Wrapped], ids=["plain", "wrapped"])
def test_everything_is_as_it_was(error: BaseException, wrap: Callable[[Any], Any]) -> None:
    """Parameters, buffers, extra state, optimizer state and groups; the next step is right."""
    module, optimizer = made()
    before, state, out = values(module, optimizer), other_state(), module(X).detach()
    optimizer.stops = error
    with pytest.raises((type(error), StateError)):
        load_full_state_dict(module, state, optimizer=wrap(optimizer))
    assert all(map(torch.equal, values(module, optimizer), before))
    assert (module[0].word, optimizer.param_groups[0]["lr"]) == ("first", 0.1)
    assert torch.equal(module(X), out)
    optimizer.stops = None
    load_full_state_dict(module, state, optimizer=wrap(optimizer))
    assert (module[0].word, optimizer.param_groups[0]["lr"]) == ("second", 9.0)
    assert module[0].seen.tolist() == [7, 7]


class InPlace(Counting):
    """Hands out what it goes on changing."""

    def set_extra_state(self, state: Any) -> None:
        """Copy it into what there is."""
        self.word["scale"].copy_(state["scale"])


def test_extra_state_that_changes_in_place_is_put_back() -> None:
    """What was handed out is copied."""
    module = nn.Sequential(InPlace({"scale": torch.ones(2)}), nn.Linear(2, 2))
    fully_shard(module)
    optimizer = Stops(module.parameters())
    optimizer.stops = ValueError("no")
    module(X).sum().backward()
    optimizer.step()
    with pytest.raises((ValueError, StateError)):
        load_full_state_dict(module, other_state({"scale": torch.zeros(2)}), optimizer=optimizer)
    assert torch.equal(module[0].word["scale"], torch.ones(2))


def test_extra_state_without_a_copy_is_put_back_itself() -> None:
    """Such as a lock; a load is not refused because of it."""
    module, optimizer = made()
    module[0].word = lock = threading.Lock()
    optimizer.stops = ValueError("no")
    with pytest.raises((ValueError, StateError)):
        load_full_state_dict(module, other_state(), optimizer=optimizer)
    assert module[0].word is lock


def test_parameters_of_groups_with_other_options_are_not_merged() -> None:
    """A group of the optimizer has one rate, and nothing has changed."""
    module, optimizer = made()
    state = full_state_dict(module, optimizer=optimizer)
    first, *others = state["optim"]["param_groups"][0]["params"]
    group = {**state["optim"]["param_groups"][0], "params": others}
    state["optim"]["param_groups"] = [{**group, "params": [first], "lr": 9.0}, group]
    before = values(module, optimizer)
    with pytest.raises(StateError, match=r"were saved in groups with different options \(lr\)"):
        load_full_state_dict(module, state, optimizer=optimizer)
    assert all(map(torch.equal, values(module, optimizer), before))


def test_interrupt_while_files_are_read_stays_an_interrupt(tmp_path: Path) -> None:
    """At each Python call of the reader, also those that torch makes in C++."""
    module = fully_shard(nn.Linear(3, 2))
    save_sharded(module, tmp_path)
    left = at = 0

    def interrupt(frame: Any, event: str, arg: object) -> None:
        nonlocal left
        if event == "call" and frame.f_code.co_filename == _files.__file__:
            left -= 1
            if left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt

    while left <= 0:
        at += 1
        left = at
        sys.settrace(interrupt)
        try:
            load_sharded(module, tmp_path)
        except KeyboardInterrupt:
            assert left == 0
        finally:
            sys.settrace(None)
    assert at > 10
