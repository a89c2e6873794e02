"""Hooks of a leaf run once, also where Python read what a node saved of the leaf."""

from __future__ import annotations

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from sac_policies._torch_compat import _leaf_hooks
from sac_policies._torch_compat._leaf_hooks import FORGETS_HOOKS, restore_hooks

from ._recipe import run


def _read(leaf: torch.Tensor) -> torch.Tensor:
    """Make something of a leaf, under hooks, and read what its node saved of it."""
    with saved_tensors_hooks(lambda t: t, lambda t: t):
        made = leaf.sin()
    assert torch.equal(made.grad_fn._saved_self, leaf)
    return made


def test_torch_is_known_to_forget_hooks_or_not() -> None:
    """Where it does not, nothing is restored."""
    leaf, seen = torch.ones(3, requires_grad=True), []
    leaf.register_hook(seen.append)
    _read(leaf).sum().backward()
    assert bool(seen) is not FORGETS_HOOKS


@pytest.mark.parametrize("forgets", [FORGETS_HOOKS, True])
def test_restored_hooks_run_once_in_their_order(forgets: bool, monkeypatch) -> None:
    """Whether torch had forgotten them or not."""
    monkeypatch.setattr(_leaf_hooks, "FORGETS_HOOKS", forgets)
    leaf, seen = torch.ones(3, requires_grad=True), []
    leaf.register_hook(lambda grad: seen.append("first"))
    leaf.register_hook(lambda grad: seen.append("second") or grad * 2)
    made = _read(leaf)
    restore_hooks(made.grad_fn)
    made.sum().backward()
    assert seen == ["first", "second"]
    assert torch.equal(leaf.grad, torch.ones(3).cos() * 2)


def test_restored_hooks_can_be_removed(monkeypatch) -> None:
    """The handle that registering them gave is good as before."""
    monkeypatch.setattr(_leaf_hooks, "FORGETS_HOOKS", True)
    leaf, seen = torch.ones(3, requires_grad=True), []
    handle = leaf.register_hook(seen.append)
    made = _read(leaf)
    restore_hooks(made.grad_fn)
    handle.remove()
    made.sum().backward()
    assert seen == []


def test_edges_to_no_leaf_have_no_hooks(monkeypatch) -> None:
    """To what another node made, and to what needs no gradient."""
    monkeypatch.setattr(_leaf_hooks, "FORGETS_HOOKS", True)
    leaf = torch.ones(3, requires_grad=True)
    made = leaf.sin() * torch.ones(3)
    restore_hooks(made.grad_fn)
    made.sum().backward()
    assert torch.equal(leaf.grad, torch.ones(3).cos())


@pytest.mark.parametrize("forgets", [FORGETS_HOOKS, True])
def test_hooks_of_a_parameter_run_once_where_a_replay_reads_it(forgets: bool, monkeypatch) -> None:
    """The replay reads what the product saved of its weight."""
    monkeypatch.setattr(_leaf_hooks, "FORGETS_HOOKS", forgets)
    x, w = torch.ones(2, 3, requires_grad=True), torch.ones(3, 3, requires_grad=True)
    seen: list[torch.Tensor] = []
    w.register_hook(seen.append)
    run(lambda t: (t @ w).sin(), x).sum().backward()
    assert len(seen) == 1
