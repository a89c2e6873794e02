"""Recipes through edges: writes that autograd does not see are noticed, before or after."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from sac_policies import MutationError, profile, report, solve
from sac_policies.engines.recipe import _writes

from ._recipe import bytes_held, is_plain, leaf, run

pytestmark = pytest.mark.filterwarnings("ignore::sac_policies.UnmatchedEntryWarning")


def test_write_that_autograd_does_not_see_keeps_values(monkeypatch) -> None:
    """The first forward is watched: nothing is read through edges in such a function."""
    x = leaf(6, 6)

    def body(t: torch.Tensor) -> torch.Tensor:
        y = t + t.cos()
        with torch.no_grad():
            y.mul_(3)
        return (y + t).sin()

    for _ in range(3):
        assert is_plain(body, x)
    assert bytes_held(body, x) == 144
    plan = solve(profile(body, x), 1.0)
    assert is_plain(body, x, policy=plan)
    assert plan.kept_bytes == report(body, x, policy=plan).held_bytes == 144


@pytest.mark.parametrize("size", [6, 96])
@pytest.mark.parametrize("through", [lambda y: y.detach(), lambda y: y.data, lambda y: y])
def test_write_that_was_not_there_at_first_is_an_error(size: int, through: Any) -> None:
    """What is rebuilt is compared: a wrong gradient never."""
    x, writes = leaf(size, size), [False]

    def body(t: torch.Tensor) -> torch.Tensor:
        y = t + t.cos()
        if writes[0]:
            with torch.no_grad():
                through(y)[0, 1].add_(1e-3)
        return (y + t).sin()

    run(body, x).sum().backward()
    writes[0] = True
    out = run(body, x)
    with pytest.raises(
        MutationError,
        match=r"sac_policies\.checkpoint: replay of aten\.add\.Tensor for the saved tensor of "
        r"shape \(\d+, \d+\) gives other values than the forward, but .* wrote past autograd",
    ):
        out.sum().backward()


def _read_twice(t: torch.Tensor, *, write: bool = True) -> torch.Tensor:
    h = t @ t
    if write:
        h.data.clamp_(-0.1, 0.1)
    return torch.tanh(h) * h


def _own_result(t: torch.Tensor, *, write: bool = True) -> torch.Tensor:
    h = torch.exp(t @ t)
    if write:
        h.data[0].clamp_(-0.1, 0.1)
    return h * 2


def _after_all_readers(t: torch.Tensor, *, write: bool = True) -> torch.Tensor:
    h = t @ t
    y = torch.tanh(h) * h
    if write:
        h.data.mul_(0.5)
    return y + h


def _between_two_readers(t: torch.Tensor, *, write: bool = True) -> torch.Tensor:
    h = t @ t
    y = h.sin()
    if write:
        h.data.view(-1).mul_(0.5)
    return y + h.cos()


_PAST_THE_COUNTER = [_read_twice, _own_result, _after_all_readers, _between_two_readers]


@pytest.mark.parametrize("body", _PAST_THE_COUNTER)
@pytest.mark.parametrize("size", [6, 96])
def test_write_past_the_version_counter_gives_plains_gradients(body: Any, size: int) -> None:
    """What a function so writes to is kept from the first forward on, as it was left there."""
    x = leaf(size, size)
    for _ in range(3):
        assert is_plain(body, x)
    plan = solve(profile(body, x), 1.0)
    assert is_plain(body, x, policy=plan)


@pytest.mark.parametrize("body", [_read_twice, _between_two_readers])
@pytest.mark.parametrize("size", [6, 96])
def test_write_past_the_version_counter_that_was_not_there_at_first(body: Any, size: int) -> None:
    """Plain's gradients, as of the value that is there at the last reader, or an error."""
    x, writes = leaf(size, size), [False]

    def function(t: torch.Tensor) -> torch.Tensor:
        return body(t, write=writes[0])

    run(function, x).sum().backward()
    writes[0] = True
    out = run(function, x)
    if body is _read_twice:
        with pytest.raises(MutationError, match="gives other values than the forward"):
            out.sum().backward()
        return
    (found,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(found, torch.autograd.grad(body(x).sum(), x)[0])


@pytest.mark.parametrize("size", [6, 96])
def test_parameter_changed_past_its_counter_is_seen(size: int) -> None:
    """An operand at an edge is a leaf: what becomes of it shows in what is rebuilt."""
    x, w = leaf(size, size), leaf(size, size)
    out = run(lambda t: (t + w).sin(), x)
    w.data[0, 0] += 1
    with pytest.raises(MutationError, match="gives other values than the forward"):
        out.sum().backward()


def test_in_place_change_of_an_argument_is_an_error() -> None:
    """The region holds its argument for replays, and its version."""
    x = leaf(6, 6)
    given = x.exp()
    out = run(lambda t: (t + t.detach().requires_grad_()).sin(), given)
    given.add_(1)
    with pytest.raises(MutationError):
        out.sum().backward()


def test_function_that_writes_unseen_is_forgotten_with_it() -> None:
    """Nothing keeps it alive."""

    def body(t: torch.Tensor) -> torch.Tensor:
        y = t + t
        with torch.no_grad():
            y.mul_(2)
        return y.sin()

    run(body, leaf(2, 2))
    assert _writes.habits_of(body) == _writes.Habit.WRITES
    known = len(_writes._habits)
    code = weakref.ref(body.__code__)
    del body
    gc.collect()
    assert (code() is None) == (len(_writes._habits) < known)


def test_write_of_a_recomputation_inside_a_forward_is_not_its_own() -> None:
    """A gradient inside a new function runs another region again, which writes to its values."""
    x = leaf(6, 6)

    def clamped(t: torch.Tensor) -> torch.Tensor:
        h = t.sin() * t
        h.data.clamp_(-0.1, 0.1)
        return h.cos() * h

    before = torch_checkpoint(clamped, x, use_reentrant=False)

    def body(t: torch.Tensor) -> torch.Tensor:
        (inner,) = torch.autograd.grad(before.sum(), x, retain_graph=True)
        return (t.exp() + t).sin() * inner

    assert is_plain(body, x)
    assert not _writes.habits_of(body)
