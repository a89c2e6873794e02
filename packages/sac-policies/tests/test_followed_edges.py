"""Replays through edges, followed: what they hold, for how long, and whatever fails meanwhile."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from sac_policies import MutationError, RecomputeError, recompute_all
from sac_policies.engines.recipe._run import known_of
from sac_policies.engines.recipe._shared_values import SharedValue
from sac_policies.engines.recipe._writes import habits_of
from sac_policies.policies._unmatched import subject_of

from ._recipe import Counts, bytes_kept, is_plain, leaf, run

ALL = recompute_all()
W = leaf(8, 8)


@pytest.fixture(autouse=True)
def _anew() -> None:
    """Nothing is known of functions that other tests ran: they share code."""
    known_of(ALL).repeats.forget()


@pytest.fixture
def x() -> Tensor:
    """An input."""
    return leaf(8, 8)


def shape_of(function: Callable[..., Any], *args: Any) -> Any:
    """What is known of a function's forwards with such inputs."""
    return known_of(ALL).repeats._shape(subject_of(function), habits_of(function), args)


def learnt(function: Callable[..., Tensor], *given: Tensor) -> None:
    """Have it followed once."""
    for _ in range(3):
        run(function, *given).sum().backward()
    assert shape_of(function, *given).followed == 1


def test_value_is_made_once_for_all_readers(x: Tensor) -> None:
    """Two consumers and a replay read the sum, as where the forward decides for itself."""

    def function(y: Tensor) -> Tensor:
        made = y + W
        return made.sin() + made.cos() + (made * 2.0).exp().sin()

    def sums() -> int:
        out = run(function, x).sum()
        with Counts() as counts:
            out.backward()
        return counts.ops[torch.ops.aten.add.Tensor]

    run(function, x)
    alone = sums()
    assert sums() == alone
    assert shape_of(function, x).followed == 1


def test_follower_keeps_what_the_second_forward_kept(x: Tensor) -> None:
    """Not a byte more, with masks and what is kept for replays."""

    def function(y: Tensor) -> Tensor:
        made = torch.linalg.inv(y + 9.0 * torch.eye(8))
        dropped = F.dropout((made + W).repeat(4, 4), 0.5)
        return (dropped + dropped).cos() + (dropped * dropped).sin()

    run(function, x)
    written = bytes_kept(function, x)
    assert bytes_kept(function, x) == written
    assert shape_of(function, x).followed == 1


def test_values_are_gone_after_backward(x: Tensor) -> None:
    """What a value is made of is let go with the graph's."""

    def function(y: Tensor) -> Tensor:
        return (torch.linalg.inv(y + 9.0 * torch.eye(8)) + W).cos()

    learnt(function, x)
    gc.collect()
    out = run(function, x)
    cells = [each for each in gc.get_objects() if type(each) is SharedValue and each.operands]
    (cell,) = map(weakref.ref, cells)
    del cells
    gc.disable()
    try:
        out.sum().backward()
        assert cell() is None
    finally:
        gc.enable()


def test_failed_forward_leaves_nothing(x: Tensor) -> None:
    """No cycle through the graph holds what was taken: of who writes down, and of who follows."""

    class Token:
        pass

    fails: list[bool] = []
    alive: list[weakref.ref[Token]] = []

    def function(y: Tensor) -> Tensor:
        made = (y.sin() + W).cos()
        if fails:
            made.grad_fn.metadata["token"] = token = Token()
            alive.append(weakref.ref(token))
            raise KeyError("as asked")
        return made

    run(function, x)
    for _ in range(3):
        fails.append(True)
        with pytest.raises(KeyError):
            run(function, x)
        gc.collect()
        assert alive.pop()() is None
        fails.clear()
        assert is_plain(function, x)


def test_failed_backward_leaves_values_for_the_next(x: Tensor) -> None:
    """What its readers did not read is made again."""

    def function(y: Tensor) -> Tensor:
        made = y.sin() + W
        return made.cos() + made.exp().sin()

    def fail(grad: Tensor) -> None:
        raise KeyError("as asked")

    learnt(function, x)
    expected = torch.autograd.grad(function(x).sum(), x)[0]
    out = run(function, x)
    handle = out.grad_fn.next_functions[0][0].register_prehook(fail)
    with pytest.raises(KeyError):
        out.sum().backward(retain_graph=True)
    handle.remove()
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], expected)


def test_freed_graph_and_unseen_write_are_refused(x: Tensor) -> None:
    """As where a forward decides for itself."""
    weight = leaf(8, 8)

    def function(y: Tensor) -> tuple[Tensor, Tensor]:
        made = y.sin() + weight
        return made, made.cos()

    for _ in range(3):
        made, out = run(function, x)
    weight.data.add_(1.0)
    with pytest.raises(MutationError, match="other values"):
        out.sum().backward()
    weight.data.sub_(1.0)
    made, out = run(function, x)
    made.sum().backward()
    with pytest.raises(RecomputeError, match="freed"):
        out.sum().backward()


def test_threads_follow_each_for_itself(x: Tensor) -> None:
    """Steps are shared, what is taken is not."""

    def function(y: Tensor) -> Tensor:
        return ((y + W).sin().t() + y).cos()

    learnt(function, x)
    expected = torch.autograd.grad(function(x).sum(), x)[0]
    found: list[bool] = []

    def steps() -> None:
        for _ in range(20):
            own = torch.autograd.grad(run(function, x).sum(), x)[0]
            found.append(torch.equal(own, expected))

    threads = [threading.Thread(target=steps) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert found == [True] * 80
    assert shape_of(function, x).followed == 81
