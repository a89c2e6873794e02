"""Edge: keeps parameters in their buffer while the module lives its life.

| what happens to the module | what keeps the aliasing |
|---|---|
| a parameter is assigned, or loaded with `assign=True` | torch's parameter registration hook |
| a module inside is added or replaced | torch's module registration hook, and the next forward |
| `.to()`, `.half()`, `.cuda()`, `.share_memory()` | the root's own `_apply` |
| `param.data = ...`, `vector_to_parameters` | the forward pre-hook, and every whole-vector call |
| `copy.deepcopy`, `torch.save`, `pickle` | `Stores.__getstate__` and `__setstate__` |
| `module.zero_grad()` | the root's own `zero_grad` |

Each registration hook is one for the process, set at the first `flatten`; modules it does not
know cost it one dictionary look-up per registration.
"""

from __future__ import annotations

from typing import Protocol
from weakref import ref

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils.weak import WeakIdKeyDictionary


class Watcher(Protocol):
    """What keeps a module's parameters in their buffers; see `_stores`."""

    module: nn.Module
    tree_changed: bool

    def assigned(self, owner: nn.Module, attribute: str, param: nn.Parameter) -> None:
        """A parameter is about to be registered."""


# By identity: a module may compare as it likes, and have no hash.
_owners = WeakIdKeyDictionary()
_trees = WeakIdKeyDictionary()
_installed: list[torch.utils.hooks.RemovableHandle] = []


def watch(stores: Watcher, owners: list[tuple[nn.Module, str]]) -> None:
    """Have `stores.assigned` called for every parameter assigned to one of the owners."""
    if not _installed:
        _installed.append(register_module_parameter_registration_hook(_on_registration))
        _installed.append(register_module_module_registration_hook(_on_module))
    for module, attribute in owners:
        _owners.setdefault(module, {})[attribute] = ref(stores)


def watch_tree(stores: Watcher) -> None:
    """Have `stores.tree_changed` set where a module is put into one of its modules."""
    for module in stores.module.modules():
        _trees[module] = ref(stores)


def is_watched(module: nn.Module) -> bool:
    """Whether a parameter registered directly in the module lies in a flat buffer."""
    return any(stores() is not None for stores in _owners.get(module, {}).values())


def _on_registration(module: nn.Module, attribute: str, param: nn.Parameter) -> None:
    owner = _owners.get(module, {}).get(attribute)
    stores = None if owner is None else owner()
    if stores is not None:
        stores.assigned(module, attribute, param)


def _on_module(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
    tree = _trees.get(module)
    stores = None if tree is None else tree()
    if stores is not None:
        stores.tree_changed = True
