"""A region under the recipe engine, and what is asked about it and its operators."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sac_policies import checkpoint, recompute_all, report
from sac_policies.budget._measure import _changes
from sac_policies.engines.recipe import _shared_values
from sac_policies.engines.recipe._calls import Calls, CallsMode
from sac_policies.engines.recipe._replay import _rebuilt, is_unhooked
from sac_policies.engines.recipe._shared_values import SharedValue
from sac_policies.engines.recipe.tables._replay_table import RULES

aten = torch.ops.aten


def leaf(*shape: int) -> torch.Tensor:
    """A leaf of this shape with spread values."""
    numel = torch.Size(shape).numel()
    return torch.linspace(-1.3, 1.7, numel).reshape(shape).requires_grad_()


W = leaf(6, 6)

TABLE = torch.linspace(0.1, 2, 6)

replays_products_with_numbers = pytest.mark.skipif(
    not is_unhooked((W * 0.5).grad_fn),
    reason="torch 2.9 does not tell whether there were hooks, so products with a number are kept",
)


def run(function: Callable[..., Any], *args: Any, policy: Any = None) -> Any:
    """Call under the recipe engine, keeping as little as it can."""
    return checkpoint(function, *args, policy=policy or recompute_all(), engine="recipe")


def bytes_held(function: Callable[..., Any], *args: Any, policy: Any = None) -> int:
    """What the engine holds of what the region makes."""
    return report(function, *args, policy=policy or recompute_all(), engine="recipe").held_bytes


def is_plain(function: Callable[..., Any], *leaves: torch.Tensor, policy: Any = None) -> bool:
    """Whether gradients are bitwise those of no checkpointing."""
    expected = torch.autograd.grad(function(*leaves).sum(), leaves)
    found = torch.autograd.grad(run(function, *leaves, policy=policy).sum(), leaves)
    return all(map(torch.equal, expected, found))


class Counts(TorchDispatchMode):
    """Counts operators, and notes the storages of sums."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[Any] = Counter()
        self.sums: list[weakref.ref[Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops[func] += 1
        out = func(*args, **(kwargs or {}))
        if func is aten.add.Tensor:
            self.sums.append(weakref.ref(out.untyped_storage()))
        return out


class Readings:
    """While it is entered: how often a value was made again, and what waited in vain.

    Attributes:
        most_made: how often the value was made that was made most often; at least 1.
        left: shapes of what was still there when backward had ended.
    """

    def __init__(self) -> None:
        self.left: list[torch.Size] = []
        self._made: Counter[int] = Counter()
        self._patch = pytest.MonkeyPatch()

    @property
    def most_made(self) -> int:
        return max(self._made.values(), default=1)

    def __enter__(self) -> Readings:
        get, clear = SharedValue.get, _shared_values._clear

        def counted(cell: SharedValue, make: Callable[[], torch.Tensor]) -> torch.Tensor:
            def once() -> torch.Tensor:
                self._made[id(cell)] += 1
                return make()

            return get(cell, once)

        def looked_at(cells: list[Any]) -> None:
            values = [cell.value for cell in (each() for each in cells) if cell is not None]
            self.left.extend(value.shape for value in values if value is not None)
            clear(cells)

        self._patch.setattr(SharedValue, "get", counted)
        self._patch.setattr(_shared_values, "_clear", looked_at)
        return self

    def __exit__(self, *error: object) -> None:
        self._patch.undo()


def through_edges(make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """What the rule of a node makes of its operands: each saved, a leaf, or seen when given."""
    seen = Calls()
    with CallsMode(seen):
        node = make().grad_fn
    with torch.no_grad():
        return _rebuilt(RULES[type(node).__name__], node, True, seen)


def bytes_kept(function: Callable[..., Any], *args: Any, policy: Any = None) -> int:
    """What the allocator has given when a forward under the engine is over, but for its output."""
    alive: list[torch.Tensor] = []

    def forward() -> None:
        alive.append(run(function, *args, policy=policy))

    gc.collect()  # what an earlier profile saw made would be released in this one
    kept = sum(size for _, size in _changes(forward))
    return kept - alive.pop().untyped_storage().nbytes()


def is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have equal bits, and lie alike in memory."""
    alike = (one.dtype, one.stride()) == (other.dtype, other.stride())
    return alike and torch.equal(one, other)
