"""The engine object tells of the end of every backward, before its caller goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from flat_param import _torch_compat as compat


class Stopped(Exception):
    """What ends a backward in the middle."""


def _hooked(hook: Callable[[torch.Tensor], object]) -> torch.Tensor:
    """A loss in whose backward a hook is called."""
    with torch.enable_grad():
        middle = torch.ones(2, requires_grad=True).square()
        middle.register_hook(lambda grad: hook(grad) and None)
        return middle.sum()


def _stops(grad: torch.Tensor) -> None:
    raise Stopped


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


def test_backward_inside_another_tells_nobody() -> None:
    """Not even where it raises, and the one around it goes on."""
    told: list[str] = []

    def hook(grad: torch.Tensor) -> None:
        compat.when_backward_returns(lambda: told.append("over"))
        with pytest.raises(Stopped):
            _hooked(_stops).backward()
        _hooked(lambda grad: None).backward()
        compat.when_backward_returns(lambda: told.append("over, too"))
        assert told == []

    assert compat.tell_of_returns()
    _hooked(hook).backward()
    assert told == ["over", "over, too"]


def test_backward_of_another_thread_may_be_the_one_that_is_meant() -> None:
    """So it is told when that has returned as well; one that began later is not waited for."""
    told: list[str] = []

    def of_the_thread(grad: torch.Tensor) -> None:
        begun.set()
        assert go_on.wait(60)

    def hook(grad: torch.Tensor) -> None:
        compat.when_backward_returns(lambda: told.append("over"))

    assert compat.tell_of_returns()
    begun, go_on = threading.Event(), threading.Event()
    other = threading.Thread(target=_hooked(of_the_thread).backward)
    other.start()
    assert begun.wait(60)
    _hooked(hook).backward()
    assert told == []
    go_on.set()
    other.join()
    assert told == ["over"]


def test_engine_of_somebody_else_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then nobody is told."""
    theirs = object()
    monkeypatch.setattr(torch.autograd.Variable, "_execution_engine", theirs)
    assert not compat.tell_of_returns()
    assert torch.autograd.Variable._execution_engine is theirs
