"""Ctrl-C anywhere inside the package leaves nothing behind: the next step is plain's."""

from __future__ import annotations

import gc
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules import module as torchs_modules
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.hooks import RemovableHandle

import sac_policies
from sac_policies import Policy, checkpoint, name, save_named, save_ops, scoped
from sac_policies.engines._engine_disabled import active
from sac_policies.engines.contexts import _forward, _recompute
from sac_policies.engines.recipe._shared_values import replays
from sac_policies.policies import _names
from sac_policies.policies._unmatched import watch_of

_POLICY = save_ops("aten.addmm")
_PLAIN_HANDLE = RemovableHandle.__init__
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


class _Both(nn.Module):
    """A region inside a region, with a cache."""

    def __init__(self, layer: nn.Module, policy: Policy, engine: str | None) -> None:
        super().__init__()
        self.layer, self.policy, self.engine = layer, policy, engine

    def inner(self, t: torch.Tensor) -> torch.Tensor:
        """Any shape that the layer takes."""
        return F.silu(name(self.layer(t), "wave")).sin()

    def forward(self, t: torch.Tensor, cache: list[torch.Tensor]) -> torch.Tensor:
        """The same."""
        cache.append(t)
        if self.engine is None:
            return self.inner(t.cos()) * t
        return checkpoint(self.inner, t.cos(), policy=self.policy, engine=self.engine) * t


def _step(layer: nn.Module, x: torch.Tensor, engine: str | None, policy: Policy = _POLICY) -> None:
    """One forward and backward."""
    both = _Both(layer, policy, engine)
    h = x * 1.0
    out = both(h, []) if engine is None else checkpoint(both, h, [], policy=policy, engine=engine)
    out.square().sum().backward()


def _gradients(layer: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    return [each.grad for each in (*layer.parameters(), x)]


# What is raised while a generator is closed, Python reports and goes on.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("engine", "policy"),
    [
        ("recipe", _POLICY),
        ("recipe", save_named("wave", missing_ok=True)),
        ("recipe", scoped(_POLICY, "layer", missing_ok=True)),
        ("contexts", _POLICY),
    ],
    ids=["recipe", "recipe, names", "recipe, modules", "contexts"],
)
def test_interrupt_at_any_call_leaves_nothing_behind(engine, policy, equal):
    """Every call: modes, hooks and depth are as before, and the next step's gradients plain's."""
    torch.manual_seed(0)
    layer, x = nn.Linear(4, 4), torch.randn(3, 4, requires_grad=True)
    _step(layer, x, None)
    plain = [grad.clone() for grad in _gradients(layer, x)]
    _step(layer, x, engine, policy)  # the first use of a policy observes
    at, alive = 0, []
    while True:
        layer.zero_grad()
        x.grad = None
        interrupt = _Interrupt(at)
        sys.settrace(interrupt)
        try:
            _step(layer, x, engine, policy)
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
            _step(layer, x, engine, policy)
        finally:
            del layer.forward
        assert equal(_gradients(layer, x), plain), at
        assert not active.modes, at
        assert RemovableHandle.__init__ is _PLAIN_HANDLE, at
        assert replays.depth == 0, at
        assert _names._listeners.stack == [], at
        assert not torchs_modules._global_forward_hooks, at
        assert not torchs_modules._global_forward_pre_hooks, at
        assert not watch_of(policy)._running, at
        alive += seen
        at += 1
    assert at > 20
    gc.collect()
    assert not any(each() is not None for each in alive)


def test_region_that_cannot_be_entered_listens_to_no_names(monkeypatch):
    """Interrupted half-way in, it leaves nothing that would hear of the next naming."""

    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(_forward, "saved_tensor_hooks", interrupted)
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(KeyboardInterrupt):
        checkpoint(torch.sin, x, policy=save_named("wave", missing_ok=True), engine="contexts")
    assert _names._listeners.stack == []
    assert active.modes == []


@pytest.mark.parametrize("mode", [_forward.Forward, _recompute.Recompute])
def test_interrupt_before_a_mode_of_a_report_ends_leaves_no_mode(mode):
    """A report runs regions of its own: as many ends as it has, each interrupted once."""
    x = torch.randn(3, 4, requires_grad=True)
    code, ends = mode.__exit__.__code__, 0
    while True:
        seen = [-1]

        def interrupt(frame, event, arg, at=ends, seen=seen):
            if event == "call" and frame.f_code is code:
                seen[0] += 1
                if seen[0] == at:
                    sys.settrace(None)
                    raise KeyboardInterrupt

        sys.settrace(interrupt)
        try:
            sac_policies.report(lambda t: (t @ t.t()).sin().cos(), x, policy=save_ops("aten.mm"))
        except KeyboardInterrupt:
            ends += 1
        else:
            break
        finally:
            sys.settrace(None)
        assert _get_current_dispatch_mode_stack() == []
    assert ends
