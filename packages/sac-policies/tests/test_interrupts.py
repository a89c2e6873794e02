"""Ctrl-C anywhere in the package leaves no state: the next step matches the plain one."""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from itertools import count
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules import module as torchs_modules
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import sac_policies
from sac_policies import (
    Policy,
    checkpoint,
    checkpoint_name,
    recompute_all,
    save_named,
    save_ops,
    scoped,
)
from sac_policies._torch_compat import saved_tensor_hooks
from sac_policies.eager import _tape
from sac_policies.policies import _names

_POLICY = save_ops("aten.addmm")
_INSIDE = str(Path(sac_policies.__file__).parent)


class _Interrupt:
    """Raises KeyboardInterrupt at one Python call inside the package, counted from 0."""

    def __init__(self, at: int) -> None:
        self.left = at
        self.raised = False

    def __call__(self, frame, event, arg):
        if event == "call" and frame.f_code.co_filename.startswith(_INSIDE):
            if self.left == 0:
                self.raised, self.left = True, -1
                sys.settrace(None)
                raise KeyboardInterrupt
            self.left -= 1


@pytest.mark.parametrize("name", ["push_hooks", "saved_tensor_hooks", "pop_hooks"])
@pytest.mark.parametrize("at", [1, 2])
def test_interrupt_after_a_call_of_torch_leaves_no_hooks(monkeypatch, name, at):
    """Functions of torch that enter and leave saved-tensor hooks."""
    real, numbers = getattr(_tape, name), count(1)

    def interrupted(*args):
        found = real(*args)
        if next(numbers) == at:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(_tape, name, interrupted)
    x = torch.ones(2, requires_grad=True)
    with contextlib.suppress(KeyboardInterrupt):
        checkpoint(torch.sin, x, policy=recompute_all())
    assert saved_tensor_hooks() is None
    assert _tape._current.tape is None


class _Both(nn.Module):
    """A region inside a region, with a cache."""

    def __init__(self, layer: nn.Module, policy: Policy, checkpointed: bool) -> None:
        super().__init__()
        self.layer, self.policy, self.checkpointed = layer, policy, checkpointed

    def inner(self, t: torch.Tensor) -> torch.Tensor:
        """Apply the layer to any shape."""
        return F.silu(checkpoint_name(self.layer(t), "wave")).sin()

    def forward(self, t: torch.Tensor, cache: list[torch.Tensor]) -> torch.Tensor:
        """Apply the layer in nested regions."""
        cache.append(t)
        if not self.checkpointed:
            return self.inner(t.cos()) * t
        return checkpoint(self.inner, t.cos(), policy=self.policy) * t


def _step(layer: nn.Module, x: torch.Tensor, policy: Policy | None) -> None:
    """One forward and backward."""
    both = _Both(layer, policy or _POLICY, policy is not None)
    h = x * 1.0
    out = both(h, []) if policy is None else checkpoint(both, h, [], policy=policy)
    out.square().sum().backward()


def _gradients(layer: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    return [each.grad for each in (*layer.parameters(), x)]


# Python only reports exceptions raised while a generator is closed.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interrupt_at_any_call_leaves_nothing_behind(equal):
    """After each call: modes, hooks and depth are restored, and the next gradients are plain."""
    named = save_named("wave", missing_ok=True)
    policy = scoped(_POLICY, "layer", missing_ok=True) | named  # follows modules and names
    torch.manual_seed(0)
    layer, x = nn.Linear(4, 4), torch.randn(3, 4, requires_grad=True)
    _step(layer, x, None)
    plain = [grad.clone() for grad in _gradients(layer, x)]
    _step(layer, x, policy)  # the first use of a policy initializes caches
    at, alive = 0, []
    while True:
        layer.zero_grad()
        x.grad = None
        interrupt = _Interrupt(at)
        sys.settrace(interrupt)
        try:
            _step(layer, x, policy)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        if not interrupt.raised:
            break
        layer.zero_grad()
        x.grad = None
        seen: list = []
        layer_forward = layer.forward

        def watched(t, seen=seen, forward=layer_forward):
            out = forward(t)
            seen.append(weakref.ref(out))
            return out

        layer.forward = watched
        try:
            _step(layer, x, policy)
        finally:
            del layer.forward
        assert equal(_gradients(layer, x), plain), at
        assert _tape._current.tape is None, at
        assert _get_current_dispatch_mode_stack() == [], at
        assert _names._listeners.stack == [], at
        assert not torchs_modules._global_forward_hooks, at
        assert not torchs_modules._global_forward_pre_hooks, at
        alive += seen
        at += 1
    assert at > 20
    gc.collect()
    assert not any(each() is not None for each in alive)
