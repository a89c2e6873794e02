"""What is placed on the modules of a flattened tree, so that it stays flat.

| what happens to the module | what keeps the aliasing |
|---|---|
| a parameter is assigned, or loaded with `assign=True` | each module's own `register_parameter` |
| a module inside is added or replaced | a look at the tree at the next forward |
| `.to()`, `.half()`, `.cuda()`, `.share_memory()` | the root's own `_apply` |
| `param.data = ...`, `vector_to_parameters` | the forward pre-hook, and every whole-vector call |
| `copy.deepcopy`, `torch.save`, `pickle` | `Stores.__getstate__` and `__setstate__` |
| `module.zero_grad()` | the root's own `zero_grad` |
| `module.state_dict()` | each module's own `_save_to_state_dict` |

Rule 1: nothing is placed outside the tree. torch's registration hooks would be one call, but they
are the whole process's, and a compiled forward that builds any module would trace them too.
Rule 2: what a module carries copies and pickles as the method of its class, so that a module taken
out of the tree needs nothing from here; a copied root places its own again.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from operator import attrgetter, is_, methodcaller
from typing import Any, Protocol
from weakref import ref

import torch
from torch import nn

_children = attrgetter("_modules")
_values = methodcaller("values")  # of a scripted module, it is no dict


class Watcher(Protocol):
    """What keeps a module's parameters in their buffers; see `_flat_segments`."""

    def assigned(self, owner: nn.Module, attribute: str, param: nn.Parameter | None) -> None:
        """A parameter has been registered, or removed."""

    def separate(self, owner: nn.Module, state: dict[str, Any], prefix: str) -> None:
        """Make what a state dict holds of an owner's parameters look apart."""

    def holds(self, owner: nn.Module) -> bool:
        """Whether a parameter registered directly in the owner lies in a buffer."""


class _Instead:
    """Called in place of a method of one module's class, for the flat views that it is part of."""

    name: str

    def __init__(self, module: nn.Module, watchers: list[ref[Watcher]]) -> None:
        self._module = ref(module)
        self.watchers = watchers

    def alive(self) -> list[Watcher]:
        """The flat views that are still there."""
        return [watcher for watcher in (ref_() for ref_ in self.watchers) if watcher is not None]

    def module(self) -> nn.Module:
        """The module that carries this."""
        module = self._module()
        assert module is not None
        return module

    def __reduce__(self) -> Any:
        return getattr, (self.module(), self.name)  # Rule 2


class _Register(_Instead):
    name = "register_parameter"

    def __call__(self, name: str, param: nn.Parameter | None) -> None:
        register(self.module(), name, param, self.alive())


class _Save(_Instead):
    name = "_save_to_state_dict"

    def __call__(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        save(self.module(), destination, prefix, keep_vars, self.alive())


def register(
    module: nn.Module, name: str, param: nn.Parameter | None, watchers: Iterable[Watcher]
) -> None:
    """Register a parameter and tell of it; where it is refused, the module keeps what it had."""
    registry = module._parameters
    had, before = name in registry, registry.get(name)
    type(module).register_parameter(module, name, param)
    try:
        for watcher in watchers:
            watcher.assigned(module, name, param)
    except BaseException:
        registry[name] = before
        if not had:
            del registry[name]
        raise


def save(
    module: nn.Module,
    destination: dict[str, Any],
    prefix: str,
    keep_vars: bool,
    watchers: Iterable[Watcher],
) -> None:
    """Do what the class does, and make parameters look apart unless they themselves are asked for.

    A traced `state_dict()` gives plain views: what a graph is told of memory has to be true.
    """
    type(module)._save_to_state_dict(module, destination, prefix, keep_vars)
    if not keep_vars and not torch.compiler.is_compiling():
        for watcher in watchers:
            watcher.separate(module, destination, prefix)


def registered(module: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """Every place below a root where a parameter is registered."""
    return [
        (owner, attribute, param)
        for owner in module.modules()
        for attribute, param in owner._parameters.items()
        if param is not None
    ]


class Tree:
    """The modules below a root, watched until they leave it.

    The root is not: it carries methods of its watcher, which are copied along with it.
    """

    def __init__(self, root: nn.Module, watcher: Watcher) -> None:
        self._watcher = watcher
        modules = list(root.modules())
        self._modules = modules[1:]
        self._inner = [module for module in modules if _children(module)]
        self._leaves = [module for module in modules if not _children(module)]
        self._seen = self._now()
        for module in self._modules:
            _watch(module, watcher)

    def changed(self) -> bool:
        """Whether a module was added, replaced or removed; some 100 ns per module."""
        now = self._now()
        if len(now) != len(self._seen) or not all(map(is_, now, self._seen)):
            return True
        return any(map(_children, self._leaves))

    def leave(self, stay: Tree | None = None) -> None:
        """Stop watching, but for the modules of another tree of the same watcher."""
        kept = set() if stay is None else set(map(id, stay._modules))
        for module in self._modules:
            if id(module) not in kept:
                _unwatch(module, self._watcher)

    def _now(self) -> list[nn.Module | None]:
        return list(chain.from_iterable(map(_values, map(_children, self._inner))))


def is_watched(module: nn.Module) -> bool:
    """Whether a parameter registered directly in the module lies in a flat buffer."""
    instead = vars(module).get(_Save.name)
    if isinstance(instead, _Save):
        return any(watcher.holds(module) for watcher in instead.alive())
    return "_flat_params" in vars(module)


def _watch(module: nn.Module, watcher: Watcher) -> None:
    """Have a flat view told of a module's parameters; several may share one without any."""
    instead = vars(module).get(_Save.name)
    if isinstance(instead, _Save) and instead.module() is module:
        if all(known is not watcher for known in instead.alive()):
            instead.watchers.append(ref(watcher))
        return
    watchers = [ref(watcher)]
    for kind in (_Register, _Save):
        vars(module)[kind.name] = kind(module, watchers)


def _unwatch(module: nn.Module, watcher: Watcher) -> None:
    for kind in (_Register, _Save):
        instead = vars(module).get(kind.name)
        if isinstance(instead, kind):
            left = [known for known in instead.watchers if known() not in (watcher, None)]
            instead.watchers[:] = left
            if not left:
                del vars(module)[kind.name]
