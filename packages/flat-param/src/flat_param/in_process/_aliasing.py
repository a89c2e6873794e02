"""Hooks on the modules of a flattened tree that keep it flat.

| event | noticed by |
|---|---|
| a parameter is assigned, or loaded with `assign=True` | each module's `register_parameter` |
| a module inside is added or replaced | a comparison of the tree at the next forward |
| `.to()`, `.half()`, `.cuda()`, `.share_memory()` | the root's `_apply` |
| `param.data = ...`, `vector_to_parameters` | the forward pre-hook, and whole-vector calls |
| `copy.deepcopy`, `torch.save`, `pickle` | `FlatSegments.__getstate__` and `__setstate__` |

Nothing is installed outside the tree. torch's global registration hooks would apply to the whole
process, and a compiled forward that creates a module would trace them. A hook is copied and pickled
as the plain method; a copied root installs new hooks at its first use.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from operator import attrgetter, is_, methodcaller
from typing import Any
from weakref import WeakMethod, ref

from torch import nn

_children = attrgetter("_modules")
_values = methodcaller("values")  # of a scripted module, which has no dict
_NAME = "register_parameter"

Assigned = Callable[[nn.Module, str, "nn.Parameter | None"], None]
"""Called with a module, a name, and the parameter that was registered there."""


class _Register:
    """`register_parameter` of one module, which also notifies the flat views of the module."""

    def __init__(self, module: nn.Module) -> None:
        self._module = ref(module)
        self.watchers: list[WeakMethod[Assigned]] = []

    @property
    def module(self) -> nn.Module:
        module = self._module()
        assert module is not None
        return module

    def __call__(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter; if a flat view refuses it, keep the previous parameter."""
        module = self.module
        registry = module._parameters
        had, before = name in registry, registry.get(name)
        type(module).register_parameter(module, name, param)
        try:
            for watcher in self.watchers:
                assigned = watcher()
                if assigned is not None:
                    assigned(module, name, param)
        except BaseException:
            registry[name] = before
            if not had:
                del registry[name]
            raise

    def __reduce__(self) -> Any:
        return getattr, (self.module, _NAME)


def registered(module: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """Return every location below a root at which a parameter is registered."""
    return [
        (owner, attribute, param)
        for owner in module.modules()
        for attribute, param in owner._parameters.items()
        if param is not None
    ]


class Tree:
    """The modules of a root, watched until they leave it.

    Args:
        root: the flattened module.
        assigned: called for each assigned parameter; a method, held weakly.
    """

    def __init__(self, root: nn.Module, assigned: Assigned) -> None:
        self._assigned = WeakMethod(assigned)
        self._modules = list(root.modules())
        self._inner = [module for module in self._modules if _children(module)]
        self._leaves = [module for module in self._modules if not _children(module)]
        self._seen = self._now()
        for module in self._modules:
            self._watch(module)

    def changed(self) -> bool:
        """Whether a module was added, replaced or removed; some 100 ns per module."""
        now = self._now()
        if len(now) != len(self._seen) or not all(map(is_, now, self._seen)):
            return True
        return any(map(_children, self._leaves))

    def leave(self, stay: Tree | None = None) -> None:
        """Stop watching, except for modules of another tree of the same view."""
        kept = set() if stay is None else set(map(id, stay._modules))
        for module in self._modules:
            instead = vars(module).get(_NAME)
            if id(module) not in kept and isinstance(instead, _Register):
                gone = (self._assigned(), None)
                instead.watchers = [each for each in instead.watchers if each() not in gone]
                if not instead.watchers:
                    del vars(module)[_NAME]

    def _now(self) -> list[nn.Module | None]:
        return list(chain.from_iterable(map(_values, map(_children, self._inner))))

    def _watch(self, module: nn.Module) -> None:
        """Watch a module. Several views may share a module without parameters."""
        instead = vars(module).get(_NAME)
        if not isinstance(instead, _Register) or instead.module is not module:
            instead = vars(module)[_NAME] = _Register(module)
        if all(known() != self._assigned() for known in instead.watchers):
            instead.watchers.append(self._assigned)
