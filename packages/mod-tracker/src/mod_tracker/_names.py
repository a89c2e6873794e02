"""One name per module, given once and never changed.

A name is a root label, a dot, and the module's state_dict prefix below that root:
"Encoder.layers.0". The label is the class name of the root; a second root of the same class
gets "Encoder#2". Wrappers of torch.compile are left out of names. Modules are identified by `id`
and a weak reference, since a module may define `__eq__` and be unhashable.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from ._torch_compat import children_of, parameters_of, unwrap


def walk(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield (state_dict prefix, module) for a module and all modules below it, each once.

    Parents come before their children, and children in order of registration. No method of a module
    is called, since a module may override it.
    """
    seen: set[int] = set()
    waiting = [(prefix, module)]
    while waiting:
        place, found = waiting.pop()
        found = unwrap(found)
        if id(found) in seen:
            continue
        seen.add(id(found))
        yield place, found
        children = children_of(found)
        if children:
            start = f"{place}." if place else ""
            below = [(start + key, child) for key, child in children.items() if child is not None]
            waiting += reversed(below)


def keys_below(holder: nn.Module) -> dict[int, str]:
    """Return the shortest state_dict prefix below `holder` of each module there, by `id`."""
    found = {id(holder): ""}
    level = [("", holder)]
    while level:
        below = []
        for prefix, parent in level:
            for key, child in children_of(parent).items():
                inner = None if child is None else unwrap(child)
                if inner is not None and id(inner) not in found:
                    found[id(inner)] = f"{prefix}{key}"
                    below.append((f"{prefix}{key}.", inner))
        level = below
    del found[id(holder)]
    return found


def module_at(holder: nn.Module, key: str) -> nn.Module | None:
    """Return the module with a state_dict prefix below `holder`, or None."""
    module: nn.Module | None = holder
    for part in key.split("."):
        module = None if module is None else children_of(unwrap(module)).get(part)
    return None if module is None else unwrap(module)


class _Held(weakref.ref[nn.Module]):
    """Weak reference to a module, with its name."""

    __slots__ = ("identity", "name")
    identity: int
    name: str


class Names:
    """Names of modules, modules of names, and owners of parameters.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> names, model = Names(), nn.Sequential(nn.Linear(2, 2))
        >>> names.adopt(model), names.of(model[0])
        ('Sequential', 'Sequential.0')
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._names: dict[int, _Held] = {}
        self._modules: dict[str, _Held] = {}
        self._labels: dict[str, int] = {}
        self._owners = WeakTensorKeyDictionary()

    def of(self, module: nn.Module) -> str | None:
        held = self._names.get(id(unwrap(module)))
        return None if held is None else held.name

    def module(self, name: str) -> nn.Module | None:
        held = self._modules.get(name)
        return None if held is None else held()

    def roots(self) -> dict[str, nn.Module]:
        """Return the living roots by label, in the order in which they were named."""
        pairs = [(name, held()) for name, held in list(self._modules.items()) if "." not in name]
        return {label: module for label, module in pairs if module is not None}

    def adopt(self, module: nn.Module, *, around: Iterable[nn.Module] = ()) -> str:
        """Name a module and the modules below it, unless they have names; return its name.

        Args:
            module: the module that is called.
            around: modules whose calls are around this one, innermost first. The name begins with
                the name of the first of these that contains the module. If none does, the module is
                a root.
        """
        known = self.of(module)
        if known is not None:
            return known
        module = unwrap(module)
        with self._lock:
            known = self.of(module)
            if known is not None:
                return known
            for holder in around:
                key = keys_below(holder).get(id(module))
                if key is not None:
                    return self._name_tree(module, f"{self.adopt(holder)}.{key}")
            # Labels of freed modules are not reused: a report would merge two modules into one row.
            kind = type(module).__name__
            number = self._labels[kind] = self._labels.get(kind, 0) + 1
            label = kind if number == 1 else f"{kind}#{number}"
            return self._name_tree(module, label)

    def _name_tree(self, module: nn.Module, name: str) -> str:
        for key, found in walk(module, name):
            if id(found) not in self._names:
                held = _Held(found, self._forget)
                held.identity, held.name = id(found), key
                self._modules[key] = self._names[held.identity] = held
        return name

    def _forget(self, gone: _Held) -> None:
        # Another module was created at the same address.
        if self._modules.get(gone.name) is gone:
            del self._modules[gone.name]
        if self._names.get(gone.identity) is gone:
            del self._names[gone.identity]

    def owner(self, parameter: torch.Tensor) -> nn.Module | None:
        """Return the module that registers the parameter, or None."""
        owner = self._owners.get(parameter, self)
        if owner is self:
            self._index_parameters()
            owner = self._owners.setdefault(parameter, None)
        return None if owner is None else owner()

    def _index_parameters(self) -> None:
        # One walk for all parameters: a walk for each would be quadratic.
        for root in self.roots().values():
            for _, module in walk(root):
                for held in parameters_of(module).values():
                    if held is not None:
                        self._owners.setdefault(held, weakref.ref(module))

    def holders(self, module: nn.Module) -> Iterator[nn.Module]:
        """Yield the named modules above `module`, nearest first."""
        name = self.of(module) or ""
        while "." in name:
            name = name.rpartition(".")[0]
            holder = self.module(name)
            if holder is not None:
                yield holder
