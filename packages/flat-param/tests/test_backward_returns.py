"""The engine object tells of the end of every backward, before its caller goes on."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from flat_param import _torch_compat as compat
from flat_param._torch_compat import _backward_returns


class Stopped(Exception):
    """What ends a backward in the middle."""


def _hooked(hook: Callable[[torch.Tensor], object]) -> torch.Tensor:
    """A loss in whose backward a hook is called."""
    with torch.enable_grad():
        middle = torch.ones(2, requires_grad=True).square()
        middle.register_hook(lambda grad: hook(grad) and None)
        return middle.sum()


def test_return_of_a_backward_is_told_once_also_where_it_raises() -> None:
    """Before the caller goes on; what was told of one is not told of the next."""
    told: list[str] = []

    def hook(grad: torch.Tensor) -> None:
        compat.when_backward_returns(lambda: told.append("over"))
        assert told == []
        raise Stopped

    assert compat.tell_of_returns()
    assert compat.tell_of_returns()
    with pytest.raises(Stopped):
        _hooked(hook).backward()
    assert told == ["over"]
    _hooked(lambda grad: compat.when_backward_returns(lambda: told.append("next"))).backward()
    assert told == ["over", "next"]


def _never() -> None:
    raise AssertionError


def _whole(loss: torch.Tensor) -> None:
    loss.backward()


def _of_one_leaf(loss: torch.Tensor) -> None:
    torch.autograd.grad(loss, loss.grad_fn.next_functions[0][0].next_functions[0][0].variable)


@pytest.mark.parametrize("run", [_whole, _of_one_leaf])
def test_backward_inside_another_is_told_when_it_has_raised_itself(
    run: Callable[[torch.Tensor], None],
) -> None:
    """Not when the one around it is over, of which others are told, before and behind it."""
    told: list[str] = []

    def inner(grad: torch.Tensor) -> None:
        compat.when_backward_returns(lambda: told.append("inner"))
        assert told == []
        raise Stopped

    def outer(grad: torch.Tensor) -> None:
        compat.when_backward_returns(lambda: told.append("outer"))
        with pytest.raises(Stopped):
            run(_hooked(inner))
        assert told == ["inner"]
        compat.when_backward_returns(lambda: told.append("outer, too"))
        run(_hooked(lambda grad: compat.when_backward_returns(lambda: told.append("next"))))
        assert told == ["inner", "next"]
        raise Stopped

    assert compat.tell_of_returns()
    with pytest.raises(Stopped):
        run(_hooked(outer))
    assert told == ["inner", "next", "outer", "outer, too"]


def test_backwards_deeper_than_a_stack_goes_are_told_each_at_its_own_end() -> None:
    """From the 60th on, torch has threads of its own work at them."""
    told, threads = list[int](), set[int]()

    def hook(level: int, grad: torch.Tensor) -> None:
        threads.add(threading.get_ident())
        compat.when_backward_returns(lambda: told.append(level))
        if level < 70:
            _hooked(partial(hook, level + 1)).backward()
        assert told == [*range(70, level, -1)]

    assert compat.tell_of_returns()
    _hooked(partial(hook, 1)).backward()
    assert told == [*range(70, 0, -1)]
    assert len(threads) > 1


def test_backwards_of_several_threads_are_told_each_at_its_own_end() -> None:
    """One inside another that has it called by a thread, and one beside both."""
    told: list[str] = []

    def beside(grad: torch.Tensor) -> None:
        compat.when_backward_returns(lambda: told.append("beside"))
        begun.set()
        assert go_on.wait(60)

    def outer(grad: torch.Tensor) -> None:
        compat.when_backward_returns(lambda: told.append("outer"))
        inner = _hooked(lambda grad: compat.when_backward_returns(lambda: told.append("inner")))
        thread = threading.Thread(target=inner.backward)
        thread.start()
        thread.join()
        assert told == ["inner"]

    assert compat.tell_of_returns()
    begun, go_on = threading.Event(), threading.Event()
    other = threading.Thread(target=_hooked(beside).backward)
    other.start()
    assert begun.wait(60)
    try:
        _hooked(outer).backward()
        assert told == ["inner", "outer"]
    finally:
        go_on.set()
        other.join()
    assert told == ["inner", "outer", "beside"]


def test_where_torch_hands_nothing_on_to_its_threads_nobody_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its engine stays as it is."""
    theirs = _backward_returns._TellingBackward.__base__()
    monkeypatch.setattr(torch.autograd.Variable, "_execution_engine", theirs)
    for name in ("_stash_obj_in_tls", "_get_obj_in_tls", "_is_key_in_tls"):
        monkeypatch.delattr(torch._C, name)
    assert not compat.tell_of_returns()
    assert torch.autograd.Variable._execution_engine is theirs
    compat.when_backward_returns(_never)


def test_engine_of_somebody_else_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then nobody is told."""
    theirs = object()
    monkeypatch.setattr(torch.autograd.Variable, "_execution_engine", theirs)
    assert not compat.tell_of_returns()
    assert torch.autograd.Variable._execution_engine is theirs


def test_what_is_told_lives_as_long_as_its_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch 2.9 drops what it was given without having taken it, which ends a process."""
    assert compat.tell_of_returns()
    counts: list[int] = []
    tell = _backward_returns._tell

    def noted(told: Any) -> None:
        before = sys.getrefcount(told)
        tell(told)
        counts.append(sys.getrefcount(told) - before)

    monkeypatch.setattr(_backward_returns, "_tell", noted)
    none = sys.getrefcount(None)
    for _ in range(200):
        _hooked(lambda grad: None).backward()
    assert set(counts[::2]) == {1}
    assert abs(sys.getrefcount(None) - none) < 100
