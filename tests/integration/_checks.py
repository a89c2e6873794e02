"""Comparisons: bit-identical gradients, kept bytes, and an unchanged model."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import torch
from _models import Case
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def tensors_of(state: dict[str, Any]) -> dict[str, Tensor]:
    """Copy tensors, so that they outlive the model."""
    return {name: value.detach().clone() for name, value in state.items()}


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """Assert the same names with bit-identical values."""
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def grads_of(model: nn.Module) -> dict[str, Tensor | None]:
    """Return gradients by parameter name."""
    return {name: param.grad for name, param in model.named_parameters()}


def assert_same_grads(ours: nn.Module, theirs: nn.Module) -> None:
    """Assert that the same parameters have bit-identical gradients."""
    first, second = grads_of(ours), grads_of(theirs)
    assert first.keys() == second.keys()
    some = {name for name, grad in second.items() if grad is not None}
    assert some
    assert {name for name, grad in first.items() if grad is not None} == some
    assert [name for name in some if not torch.equal(first[name], second[name])] == []


def twins(case: Case) -> tuple[nn.Module, nn.Module]:
    """Return a model to change and a plain copy."""
    plain = case.build()
    return copy.deepcopy(plain), plain


def assert_same_step(
    case: Case, ours: nn.Module, theirs: nn.Module, *, buffers: bool = True
) -> None:
    """Assert that forward and backward give bit-identical loss, gradients and state."""
    losses = []
    for model in (ours, theirs):
        model.zero_grad()
        loss = case.loss(model)
        loss.backward()
        losses.append(loss.detach())
    assert torch.equal(*losses)
    assert_same_grads(ours, theirs)
    if buffers:
        assert_same(tensors_of(ours.state_dict()), tensors_of(theirs.state_dict()))


def shape_of(model: nn.Module) -> dict[str, Any]:
    """Return what must not change: classes, names and attributes of modules."""
    return {
        "classes": [(name, type(module)) for name, module in model.named_modules()],
        "parameters": [(name, id(param)) for name, param in model.named_parameters()],
        "names": list(model.state_dict()),
        "attributes": [sorted(vars(module)) for module in model.modules()],
        "hooks": [
            sum(len(value) for name, value in vars(module).items() if name.endswith("_hooks"))
            for module in model.modules()
        ],
    }


class _Allocations(TorchDispatchMode):
    """Tracks storages that operators allocate."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, tuple[StorageWeakRef, int, str]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        before = {t.untyped_storage()._cdata for t in _tensors((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for leaf in _tensors(out):
            storage = leaf.untyped_storage()
            if storage._cdata not in before:
                self.found[storage._cdata] = (StorageWeakRef(storage), storage.nbytes(), str(func))
        return out


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def kept_bytes(forward: Callable[[], Tensor], *, leave_out: tuple[str, ...] = ()) -> int:
    """Return the bytes that a forward allocated and kept for backward.

    Args:
        forward: returns the loss, whose backward is then run.
        leave_out: operators whose results are not counted.
    """
    with _Allocations() as allocations:
        loss = forward()
    gc.collect()
    found = allocations.found.values()
    kept = sum(n for ref, n, op in found if op not in leave_out and not ref.expired())
    loss.backward()
    return kept
