"""Pushes hooks and a dispatch mode; tells what an engine holds between forward and backward.

Rule 1. What is held is counted by storage, each once, while the output is alive and after the
        function has returned: what backward will find.
Rule 2. A storage that no operator of the region made is its caller's (parameters, inputs) and is
        not counted. Nor is what another checkpoint inside the region holds.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.weak import TensorWeakRef

from ._tensors import tensors_in
from ._torch_compat import storage_bytes, storage_key
from ._torch_compat._nested import any_nested
from ._watching_mode import WatchingMode
from .engines._fsdp import RANGE_OPS, Ranges
from .engines._guards import is_guarding, noting, original_of, stands_for_itself
from .engines.contexts._regions import Region
from .engines.recipe._explained import SavedTensor, explain, unobserved
from .policies._operators import facts_of
from .policies._policies import Answer, Constant, Policy
from .policies._views import Operator, OpView, RegionSummary, Unmatched

Call = tuple[str, int]


@dataclass(frozen=True)
class Holding:
    """What is held of the storages that one call made.

    Attributes:
        size_bytes: all of them together.
        why: for what reason the recipe engine keeps them; "" from other engines.
    """

    size_bytes: int
    why: str = ""


def of_contexts(region: Region, makers: Makers) -> dict[Call, Holding]:
    """Tell what the contexts engine holds in this region now; `makers` saw its forward."""
    found: dict[Call, Holding] = {}
    counted: set[int] = set()
    for (op, index), kept in region.kept.items():
        tensors = {storage_key(tensor): tensor for tensor in kept.resident()}
        new = [t for key, t in tensors.items() if key in makers.made and key not in counted]
        counted.update(tensors)
        found[str(op), index] = Holding(sum(map(storage_bytes, new)))
    return found


@dataclass(frozen=True, eq=False)
class Unwatched(Policy):
    """Another policy, whose names are looked for in no region: nothing is warned of."""

    inner: Policy

    def decide(self, view: OpView) -> Answer:
        return self.inner.decide(view)

    def constant(self, op: Operator) -> Constant:
        return self.inner.constant(op)

    @property
    def parts(self) -> tuple[Policy, ...]:
        return (self.inner,)

    def unmatched(self, seen: RegionSummary) -> tuple[str, ...]:
        del seen
        return ()

    def missing(self, seen: RegionSummary) -> tuple[Unmatched, ...]:
        del seen
        return ()


def guards_of_contexts(run: Callable[[Policy], Any], policy: Policy) -> int:
    """Tell the bytes of what the contexts engine makes to see changes of leaves by.

    Args:
        run: runs a forward under the contexts engine with a policy, and returns what it returns.
        policy: which one.
    """
    with noting() as made:
        out = run(Unwatched(policy))
    size_bytes = _bytes_alive(made)
    del out
    return size_bytes


def _bytes_alive(made: list[TensorWeakRef]) -> int:
    alive = [tensor for tensor in (ref() for ref in made) if tensor is not None]
    return sum(map(storage_bytes, alive))


def of_recipe(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], policy: Policy
) -> tuple[tuple[SavedTensor, ...], dict[Call, Holding], int]:
    """Run a forward under the recipe engine; tell what autograd saved, and what is held of it.

    Last come the bytes of what the engine made to see changes of parameters and inputs by.

    Args:
        function: what would be checkpointed.
        args: its positional arguments.
        kwargs: its keyword arguments.
        policy: one that the engine can follow.
    """
    makers, held = Makers(), _Held()
    alive: list[int] = []

    # The engine gives what it keeps to the hooks around it.
    hooks = saved_tensors_hooks(lambda t: held.pack(t, makers), _Packed.read)
    with hooks, noting(), makers:
        saved, reasons = explain(
            function, args, kwargs, policy, ended=lambda: alive.extend(held.alive())
        )
    # Under hooks it guards less, since what they have moved away nobody changes.
    with noting() as made:
        out = unobserved(function, args, kwargs, policy)
    guard_bytes = _bytes_alive(made)
    del out
    if len(reasons) != len(held.packed):
        reasons = ["a region inside this one keeps it"] * len(held.packed)
    return saved, held.by_call(alive, reasons), guard_bytes


class _Packed:
    """One kept tensor, as autograd holds it."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def read(self) -> torch.Tensor:
        """Give autograd the tensor."""
        return self.tensor


class _Held:
    """What the engine kept, in order: its storage, size and maker, and whether it still lives."""

    def __init__(self) -> None:
        self.packed: list[tuple[weakref.ref[_Packed], int, int, Call | None]] = []

    def pack(self, tensor: torch.Tensor, makers: Makers) -> _Packed:
        """Note a tensor that is kept."""
        packed, key = _Packed(tensor), storage_key(tensor)
        size = storage_bytes(tensor)
        self.packed.append((weakref.ref(packed), key, size, makers.made.get(original_of(key))))
        return packed

    def alive(self) -> list[int]:
        """Numbers of those that autograd still holds."""
        return [n for n, (packed, *_) in enumerate(self.packed) if packed() is not None]

    def by_call(self, alive: list[int], reasons: list[str]) -> dict[Call, Holding]:
        """Sum up by the call that made each storage."""
        counted: set[int] = set()
        found: dict[Call, Holding] = {}
        for number in alive:
            _, key, size, made = self.packed[number]
            if made is None or key in counted:
                continue
            counted.add(key)
            before = found.get(made, Holding(0, reasons[number]))
            found[made] = Holding(before.size_bytes + size, before.why)
        return found


class Makers(WatchingMode):
    """Notes which call made each storage, and numbers calls as a region does.

    Attributes:
        made: storage to (operator, number among its calls).
        saw_nested: whether a call was given a nested tensor, or made one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, Call] = {}
        self.saw_nested = False
        self._calls: Counter[str] = Counter()
        self._ranges = Ranges()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        if func in RANGE_OPS:
            self._ranges.follow(func, args)
        out = func(*args, **given)
        if not (facts_of(func).bookkeeping or self._ranges.inside or is_guarding()):
            name = str(func)
            self._note(out, (args, given), (name, self._calls[name]))
            self._calls[name] += 1
        return out

    def _note(self, out: Any, given: Any, call: Call) -> None:
        old = {storage_key(tensor) for tensor in tensors_in(given)}
        self.saw_nested |= any_nested(tensors_in((out, given)))
        for tensor in tensors_in(out):
            key = storage_key(tensor)
            if key not in old:
                self.made[key] = call
                stands_for_itself(key)


def run_backward(out: Any) -> None:
    """Run backward from every output, leaving no gradient behind."""
    roots = [each for each in tensors_in(out) if each.requires_grad]
    leaves = list(_leaves([root.grad_fn for root in roots]))
    if leaves:
        ones = [torch.ones_like(root) for root in roots]
        torch.autograd.grad(roots, leaves, ones, allow_unused=True)


def _leaves(nodes: list[Any]) -> Iterator[torch.Tensor]:
    """Tensors that the graph behind `nodes` would accumulate gradients into."""
    seen: set[Any] = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        nodes.extend(each for each, _ in node.next_functions)
