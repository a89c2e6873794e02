"""Where Python calls a module, compiled or not, and who looks on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from sac_policies._torch_compat._module_calls import (
    around_calls,
    called_at,
    is_compiled,
    original,
)

X = torch.ones(2, 3)


def in_place() -> nn.Module:
    """One that was compiled in place."""
    module = nn.Linear(3, 3)
    module.compile(backend="eager")
    return module


def wrapped() -> nn.Module:
    """One that another module was compiled to."""
    return torch.compile(nn.Linear(3, 3), backend="eager")  # type: ignore[return-value]


def plain() -> nn.Module:
    """One that is not compiled."""
    return nn.Linear(3, 3)


@pytest.mark.parametrize("make", [in_place, wrapped, plain])
def test_what_a_module_was_and_whether_it_is_compiled(make: Any) -> None:
    """Either way of compiling is known."""
    module = make()
    assert is_compiled(module) is (make is not plain)
    assert type(original(module)) is nn.Linear
    assert (original(module) is module) is (make is not wrapped)
    assert (called_at(module) == "forward") is (make is not in_place)


@pytest.mark.parametrize("make", [in_place, wrapped, plain])
def test_calls_are_seen_from_outside(make: Any) -> None:
    """What looks on may break a graph, and is gone afterwards."""
    torch.compiler.reset()
    module, seen = make(), []
    before = dict(vars(module))
    watched = around_calls(
        module,
        lambda args, kwargs: seen.append((len(args), list(kwargs), torch.compiler.is_compiling())),
        lambda out: seen.append((tuple(out.shape), torch.compiler.is_compiling())),
    )
    with watched:
        module(X)
        module(input=X)
    module(X)
    assert seen == [(1, [], False), ((2, 3), False), (0, ["input"], False), ((2, 3), False)]
    assert vars(module).keys() == before.keys()
    assert vars(module).get(called_at(module)) is before.get(called_at(module))


@pytest.mark.parametrize("make", [in_place, wrapped, plain])
def test_a_call_that_raises_has_an_end(make: Any) -> None:
    """Which is told that nothing came out."""
    torch.compiler.reset()
    module, ended = make(), []
    with (
        pytest.raises((RuntimeError, TypeError)),
        around_calls(module, lambda *_: None, ended.append),
    ):
        module(torch.ones(2, 4))
    assert ended == [None]
    assert module(X).shape == X.shape
    assert ended == [None]


def test_forward_called_by_its_name_is_a_call() -> None:
    """Hooks would not see it."""
    module, seen = plain(), []
    with around_calls(module, lambda *_: seen.append("begin"), lambda _: seen.append("end")):
        module.forward(X)
    assert seen == ["begin", "end"]
    assert "forward" not in vars(module)


def test_a_forward_that_was_put_there_comes_back() -> None:
    """As it was."""
    module = plain()
    put = module.forward
    module.forward = put  # type: ignore[method-assign]
    with around_calls(module, lambda *_: None, lambda _: None):
        assert module.forward is not put
    assert vars(module)["forward"] is put
