"""A value that readers share is made once, and gone with the last or when backward ends."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from sac_policies import checkpoint, recompute_all
from sac_policies.engines.recipe import _shared_values
from sac_policies.engines.recipe._shared_values import SharedValue, Source, Unpacked

from ._recipe import Counts, leaf, run

aten = torch.ops.aten


pytestmark = pytest.mark.usefixtures("no_collector")


class Watch(Counts):
    """Notes the storage of every silu output."""

    def __init__(self, seen: list[weakref.ref[Any]]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if func is aten.silu.default:
            self.seen.append(weakref.ref(out.untyped_storage()))
        return out


def test_value_with_two_readers_is_replayed_once() -> None:
    """The second reader finds the value the first one made."""
    x, w1, w2 = leaf(5, 4), leaf(4, 4), leaf(4, 4)

    def function(t: torch.Tensor) -> torch.Tensor:
        y = F.silu(t)
        return y @ w1 + y @ w2

    out = run(function, x)
    with Counts() as counts:
        out.sum().backward()
    assert counts.ops[aten.silu.default] == 1


def test_value_read_by_a_replay_waits_for_its_own_reader() -> None:
    """silu(x) * g is replayed for the product's reader, and silu(x) once for both."""
    x, g, w = leaf(5, 4), leaf(5, 4), leaf(4, 4)
    out = run(lambda t, u: (F.silu(t) * u) @ w, x, g)
    with Counts() as counts:
        out.sum().backward()
    assert counts.ops[aten.silu.default] == 1
    assert counts.ops[aten.mul.Tensor] == 3  # one replay, two gradients of the product


def test_nothing_is_left_after_a_partial_backward() -> None:
    """A value that still waits for a reader is dropped when backward ends."""
    x, w1, w2 = leaf(5, 4), leaf(4, 4), leaf(4, 4)
    seen: list[weakref.ref[Any]] = []

    def function(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = F.silu(t)
        return y @ w1, y @ w2

    one, two = checkpoint(function, x, policy=recompute_all(), engine="recipe")
    with Watch(seen):
        torch.autograd.grad(one.sum(), w1, retain_graph=True)
        first = [ref() is None for ref in seen]
        torch.autograd.grad((one + two).sum(), [w1, w2], retain_graph=True)
    assert first == [True]
    assert [ref() is None for ref in seen] == [True, True]


def test_value_of_a_failed_backward_goes_with_its_graph() -> None:
    """A backward that raises half-way leaves nothing behind once the graph is gone."""
    x, w1, w2 = leaf(5, 4), leaf(4, 4), leaf(4, 4)
    seen: list[weakref.ref[Any]] = []

    def function(t: torch.Tensor) -> torch.Tensor:
        y = F.silu(t)
        return y @ w1 + y @ w2

    def fail(grads: Any) -> None:
        raise ArithmeticError

    out = run(function, x)
    out.grad_fn.next_functions[0][0].register_prehook(fail)
    with Watch(seen), pytest.raises(ArithmeticError):
        out.sum().backward()
    assert [ref() is None for ref in seen] == [False]
    del out
    assert [ref() is None for ref in seen] == [True]


def test_without_a_backward_number_each_reader_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch does not say which backward runs, values are not shared and stay right."""
    monkeypatch.setattr(_shared_values, "backward_id", lambda: -1)
    x, w1, w2 = leaf(5, 4), leaf(4, 4), leaf(4, 4)

    def function(t: torch.Tensor) -> torch.Tensor:
        y = F.silu(t)
        return y @ w1 + y @ w2

    with Counts() as counts:
        (found,) = torch.autograd.grad(run(function, x).sum(), x)
    assert counts.ops[aten.silu.default] == 3
    assert torch.equal(found, torch.autograd.grad(function(x).sum(), x)[0])


def test_without_a_queue_each_reader_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch calls nothing after backward, nothing may be left for later."""
    monkeypatch.setattr(_shared_values, "after_backward", lambda callback: False)
    x, w1, w2 = leaf(5, 4), leaf(4, 4), leaf(4, 4)
    out = run(lambda t: F.silu(t) @ w1 + F.silu(t) @ w2, x)
    (found,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(found, torch.autograd.grad((F.silu(x) @ w1 + F.silu(x) @ w2).sum(), x)[0])


_numbers = itertools.count(10**6)


class Backward:
    """Stands for a running backward: its number, and what it calls at its end."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.number = next(_numbers)
        self.calls: list[Any] = []
        monkeypatch.setattr(_shared_values, "backward_id", lambda: self.number)
        monkeypatch.setattr(
            _shared_values, "after_backward", lambda call: self.calls.append(call) or True
        )

    def end(self) -> None:
        """End it; the next one has another number."""
        for call in self.calls:
            call()
        self.calls.clear()
        self.number = next(_numbers)


@pytest.fixture
def backward(monkeypatch: pytest.MonkeyPatch) -> Backward:
    """Have a backward run."""
    return Backward(monkeypatch)


def _made(values: list[torch.Tensor]) -> torch.Tensor:
    """Make a value, and note it."""
    values.append(torch.ones(2))
    return values[-1]


def test_value_is_there_until_its_last_reader_has_it(backward: Backward) -> None:
    """Then readers are counted anew: a retained graph is read again."""
    cell, values = SharedValue(readers=3), []
    got = [cell.get(lambda: _made(values)) for _ in range(3)]
    assert [id(each) for each in got] == [id(values[0])] * 3
    assert cell.value is None
    cell.get(lambda: _made(values))
    assert cell.value is values[1]


def test_single_reader_leaves_nothing(backward: Backward) -> None:
    """Nobody else is to come."""
    cell = SharedValue(readers=1)
    cell.get(lambda: torch.ones(2))
    assert cell.value is None
    assert not backward.calls


def test_value_that_waits_goes_when_backward_ends(backward: Backward) -> None:
    """And the readings of the next one are counted from none."""
    cell, values = SharedValue(readers=2), []
    cell.get(lambda: _made(values))
    backward.end()
    assert (cell.value, cell.read) == (None, 0)
    assert cell.get(lambda: _made(values)) is cell.get(lambda: _made(values))
    assert len(values) == 2


def test_value_of_a_backward_that_never_ended_goes_with_the_next(backward: Backward) -> None:
    """One that failed calls nothing at its end."""
    left, other = SharedValue(readers=2), SharedValue(readers=2)
    left.get(lambda: torch.ones(2))
    backward.calls.clear()
    backward.number = next(_numbers)
    other.get(lambda: torch.ones(2))
    assert left.value is None
    assert other.value is not None


def test_replay_leaves_what_hooks_unpacked_for_its_consumer(
    backward: Backward, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is unpacked once, however many replays read it before; the consumer is the last."""
    cell, values = Unpacked(readers=1), []
    monkeypatch.setattr(_shared_values.replays, "depth", 1)
    first, second = (cell.get(lambda: _made(values)) for _ in range(2))
    assert cell.value is first is second
    monkeypatch.setattr(_shared_values.replays, "depth", 0)
    assert cell.get(lambda: _made(values)) is first
    assert cell.value is None


def test_unpacked_value_may_stay_for_a_replay_after_its_consumer(backward: Backward) -> None:
    """Until backward ends."""
    cell = Unpacked(readers=1)
    cell.stay()
    assert cell.get(lambda: torch.ones(2)) is cell.value
    backward.end()
    assert cell.value is None


def test_source_is_read_anew_each_time() -> None:
    """What reads it looks whether it was changed."""
    seen: list[int] = []
    source = Source(3, lambda held: seen.append(held) or torch.ones(1))
    source.value()
    source.value()
    assert seen == [3, 3]
