"""Hooks that a region registers run as often as in plain autograd, and torch is left as it was."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from sac_policies import checkpoint, recompute_all, save_ops
from sac_policies.engines.contexts import _passing

PLAIN = RemovableHandle.__init__
ALL = recompute_all()


def _on_input(x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
    x.register_hook(lambda grad: grad * 1.5)
    return layer(x).sin()


def _on_module(x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
    handle = layer.register_full_backward_hook(lambda *_: None)
    out = layer(x)
    handle.remove()
    return out.sin()


def _inside(x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
    made = layer(x)
    made.register_hook(lambda grad: grad * 2)
    return made.sin().cos()


@pytest.mark.parametrize("engine", ["contexts", "auto", "recipe"])
@pytest.mark.parametrize("policy", [recompute_all(), save_ops("aten.addmm")])
@pytest.mark.parametrize("function", [_on_input, _on_module, _inside])
def test_hooks_of_a_region_run_once(function: Any, policy: Any, engine: Any) -> None:
    """Of a tensor from outside, of a module, and of a value of the region."""
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)

    def gradients(run: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        x = torch.arange(8.0).view(2, 4).requires_grad_()
        return list(torch.autograd.grad(run(x * 1.0).sum(), [x, *layer.parameters()]))

    plain = gradients(lambda x: function(x, layer))
    ours = gradients(lambda x: checkpoint(function, x, layer, policy=policy, engine=engine))
    assert all(map(torch.equal, ours, plain))
    assert not layer._backward_hooks


@pytest.mark.parametrize("engine", ["contexts", "recipe"])
def test_hooks_of_leaves_stay(engine: Any, equal: Any) -> None:
    """Those a parameter and an input had before: in backward, in a later one, and elsewhere."""

    def gradients(region: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        layer, x = nn.Linear(4, 4), torch.arange(8.0).view(2, 4).requires_grad_()
        for leaf in (x, *layer.parameters()):
            leaf.register_hook(lambda grad: grad * 1.5)

        def function(t: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.silu(layer(t.sin())).sin()

        for _ in range(2):
            run = checkpoint(function, x, policy=ALL, engine=engine) if region else function(x)
            run.sum().backward()
        (layer.weight * x.sum()).sum().backward()
        return [leaf.grad for leaf in (x, *layer.parameters())]  # type: ignore[misc]

    assert equal(gradients(True), gradients(False))


def test_torch_is_replaced_while_a_recomputation_runs() -> None:
    """Neither before nor after; also where it raises, and where two threads end in any order."""
    x = torch.ones(3, requires_grad=True)
    seen: list[bool] = []
    both, first_is_through = threading.Barrier(2), threading.Event()

    def function(x: torch.Tensor, waits: str = "") -> torch.Tensor:
        seen.append(RemovableHandle.__init__ is PLAIN)
        if waits and len(seen) > 2:
            both.wait(30)
            if waits == "last":
                first_is_through.wait(30)
        return x.sin().cos()

    def fails_again(x: torch.Tensor) -> torch.Tensor:
        seen.append(RemovableHandle.__init__ is PLAIN)
        if len(seen) == 2:
            raise ValueError
        return x.sin().cos()

    def run(function: Any, *args: Any) -> torch.Tensor:
        return checkpoint(function, *args, policy=recompute_all(), engine="contexts").sum()

    run(function, x).backward()
    assert seen == [True, False]
    assert RemovableHandle.__init__ is PLAIN

    seen.clear()
    out = run(fails_again, x)
    with pytest.raises(ValueError):
        out.backward()
    assert seen == [True, False]
    assert RemovableHandle.__init__ is PLAIN

    seen.clear()
    first, last = run(function, x, "first"), run(function, x, "last")
    threads = [threading.Thread(target=each.backward) for each in (first, last)]
    for thread in threads:
        thread.start()
    threads[0].join(60)
    assert RemovableHandle.__init__ is not PLAIN  # the last still runs
    first_is_through.set()
    threads[1].join(60)
    assert seen == [True, True, False, False]
    assert RemovableHandle.__init__ is PLAIN


class Blocking:
    """A lock that says when somebody has to wait for it."""

    def __init__(self, lock: Any, blocked: threading.Event) -> None:
        self.lock, self.blocked = lock, blocked

    def __enter__(self) -> None:
        acquire = getattr(self.lock, "acquire", lambda blocking: True)
        if not acquire(blocking=False):
            self.blocked.set()
            acquire()

    def __exit__(self, *_: object) -> None:
        self.lock.__exit__(None, None, None)


def test_recomputation_that_begins_while_the_last_one_ends_notes_its_hooks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It begins where the other has seen that none is left, and has not put torch's own back."""
    first, second, went_on = _Mode(), _Mode(), threading.Event()
    begins = threading.Thread(
        target=lambda: (_passing.watch_hooks(second), went_on.set()), daemon=True
    )

    class Recomputing(set[Any]):
        def __bool__(self) -> bool:
            found = len(self) > 0
            if not found and not begins.is_alive() and not went_on.is_set():
                begins.start()
                assert went_on.wait(30)  # it has begun, or waits for the lock
            return found

    monkeypatch.setattr(_passing, "_recomputing", Recomputing())
    monkeypatch.setattr(_passing, "_lock", Blocking(_passing._lock, went_on))
    _passing.watch_hooks(first)
    _passing.unwatch_hooks(first)
    begins.join(30)
    assert hasattr(RemovableHandle.__init__, "notes")
    _passing.unwatch_hooks(second)
    assert RemovableHandle.__init__ is PLAIN


class _Mode:
    """Stands for a recomputation."""
