"""Hooks on inputs: each gradient is told once, and nobody is kept alive."""

from __future__ import annotations

import gc
import weakref

import torch

from flat_param.sharded._input_hooks import InputHooks


class Listener:
    """Counts what it is told."""

    def __init__(self) -> None:
        self.heard = 0
        self.hooks = InputHooks(self.hear)

    def hear(self) -> None:
        """One input has its gradient."""
        self.heard += 1


def test_each_input_is_told_once_a_backward() -> None:
    """However often it went in; what needs no gradient does not count."""
    listener = Listener()
    x, y = (torch.ones(2, requires_grad=True) for _ in "xy")
    listener.hooks.add(([x, torch.ones(2)], {"again": x}))
    listener.hooks.add(y)
    assert listener.hooks.count == 2
    (x * y + x).sum().backward()
    assert listener.heard == 2


def test_forgotten_inputs_tell_nobody() -> None:
    """And may be hooked again."""
    listener, x = Listener(), torch.ones(2, requires_grad=True)
    listener.hooks.add(x)
    listener.hooks.clear()
    x.sum().backward()
    assert (listener.heard, listener.hooks.count) == (0, 0)
    listener.hooks.add(x)
    x.sum().backward()
    assert listener.heard == 1


def test_hooks_keep_nobody_alive() -> None:
    """A gradient that comes later is told to nobody."""
    listener, x = Listener(), torch.ones(2, requires_grad=True)
    listener.hooks.add(x)
    gone = weakref.ref(listener)
    del listener
    gc.collect()
    assert gone() is None
    x.sum().backward()
