"""The dispatcher: operators, modes and tensor classes, and what is done where torch is silent."""

from __future__ import annotations

import pytest
import torch

import mod_tracker._torch_compat as compat
from mod_tracker import profile_memory
from mod_tracker._torch_compat import _dispatcher


def test_tensor_subclasses_are_plain_inside_the_context(monkeypatch):
    """`__torch_function__` is not asked; without torch's switch nothing changes."""

    class Loud(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            raise ZeroDivisionError

    with compat.without_torch_function():
        assert not Loud(2).requires_grad
    monkeypatch.setattr(_dispatcher, "look_up", lambda dotted: None)
    with compat.without_torch_function(), pytest.raises(ZeroDivisionError):
        assert not Loud(2).requires_grad


def test_composite_operators_are_known():
    """A layer's operator has parts; a product has none; without the question, nothing has."""
    assert compat.is_composite(torch.ops.aten.linear.default)
    assert not compat.is_composite(torch.ops.aten.mm.default)
    assert not compat.is_composite(object())


def test_where_torch_tells_nothing_of_its_modes_every_step_is_looked_at(monkeypatch, mlp):
    """Nobody could say whether a context of the user's is open, so none is opened or closed."""
    monkeypatch.setattr(_dispatcher, "look_up", lambda name: None)
    assert (_dispatcher.mode_depth(), _dispatcher.top_mode()) == (-1, None)
    assert _dispatcher.top_saved_hooks() is _dispatcher.guarded_keys() is None
    with profile_memory() as report:
        for _ in range(7):
            mlp(torch.randn(2, 4)).sum().backward()
    assert report.notes == ()


@pytest.mark.parametrize("error", [AttributeError, TypeError, RuntimeError])
def test_operator_that_torch_does_not_let_be_watched_is_left_alone(monkeypatch, error):
    """Whatever it raises: the report looks at every operator then."""

    def refuse(*_, **__):
        raise error

    monkeypatch.setattr(torch.library, "Library", refuse)
    operator = torch.ops.aten.mm.default
    assert _dispatcher.intercept(operator, lambda run, below: run) is None


def test_autocast_is_left_out_of_what_contexts_have_switched():
    """Others are not: inference mode would put back what is switched inside of it."""
    before = _dispatcher.guarded_keys()
    assert before is not None
    with torch.autocast("cpu", torch.bfloat16):
        assert _dispatcher.guarded_keys() == before
    with torch.inference_mode():
        assert _dispatcher.guarded_keys() is None
    _dispatcher._autocast_keys.cache_clear()
    with torch.autocast("cpu", torch.bfloat16):
        assert _dispatcher.guarded_keys() == before
