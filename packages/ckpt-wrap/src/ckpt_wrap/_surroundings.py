"""Notice changes of a module between forward and recomputation.

Recomputation runs with the attributes, hooks and submodules that the module has in backward. If
other code changed them since the forward, recomputation would compute something else: adapters
were switched, hooks removed, `train()` or `eval()` called. Changes by forwards themselves, such as
a counter, are not errors: a model may run forward twice before one backward.

To tell the two apart, the state of each module is noted at the end of each run. A difference
between that note and the state at the start of the next run was made by other code.

Tensors are not looked at here, see `_module_state`.

Each run looks at every module two or three times, so that loop calls no Python function for the
attributes that most modules have.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch
from torch import nn

from ckpt_wrap._errors import RecomputeError, path_of

Look = dict[str, Any]  # marks by name of attribute; equal marks mean an unchanged attribute

_HOOKS = {
    "_forward_hooks": "the forward hooks",
    "_forward_pre_hooks": "the forward pre-hooks",
}
_TABLES = frozenset({"_modules", *_HOOKS})
_NOT_READ = (frozenset(vars(nn.Module())) | {"_ckpt_wrap"}) - _TABLES - {"training"}
_ATOMS = frozenset({int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device})
_MISSING = object()


class _Ledger:
    """The state of one module at the end of the last run, and when other code changed it."""

    def __init__(self, module: nn.Module, last: Look) -> None:
        key = id(module)
        self.ref = weakref.ref(module, lambda _: _ledgers.pop(key, None))
        self.last = last
        self.changed: dict[str, int] = {}  # when each attribute was changed, by name


_ledgers: dict[int, _Ledger] = {}  # by id of the module
_time = itertools.count(1)
_pending: weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet[Surroundings]] = (
    weakref.WeakKeyDictionary()
)


class Surroundings:
    """The state of a called module and of those below it, at the end of one forward.

    Args:
        module: the called module, or None for a function.
        where: the module, for messages.
        own_hooks: whether the hooks of the module itself run in recomputation.
    """

    def __init__(self, module: nn.Module | None, where: str, *, own_hooks: bool) -> None:
        self._module = module
        self._where = where
        self._own_hooks = own_hooks
        self._modules: list[nn.Module] = []
        self._looks: list[Look] | None = None
        self._end = 0

    def begin(self, modules: list[nn.Module]) -> None:
        """Start a forward; record changes by other code if an earlier one awaits its backward."""
        self._modules = modules
        if self._module is not None and _pending.get(self._module):
            self._note_changes(self._look())

    def end(self) -> None:
        """End a forward that backward will recompute."""
        if self._module is None:
            return
        self._looks = self._note()
        self._end = next(_time)
        _pending.setdefault(self._module, weakref.WeakSet()).add(self)

    def require_unchanged(self) -> None:
        """Check at the start of a recomputation.

        Raises:
            RecomputeError: other code has changed something since the forward ended.
        """
        if self._looks is None:
            return
        now = self._look()
        if now == self._looks:
            return
        self._note_changes(now)
        for module, then, look in zip(self._modules, self._looks, now, strict=True):
            changed = _ledgers[id(module)].changed
            for name in _differences(then, look):
                if changed.get(name, 0) > self._end:
                    raise self._error(module, name, then, look)

    def end_again(self) -> None:
        """End a recomputation."""
        if self._looks is not None:
            self._note()

    def _note(self) -> list[Look]:
        looks = self._look()
        for index, module in enumerate(self._modules):
            key = id(module)
            ledger = _ledgers.get(key)
            if ledger is None:
                _ledgers[key] = _Ledger(module, looks[index])
            elif ledger.last == looks[index]:
                looks[index] = ledger.last  # calls share one dict
            else:
                ledger.last = looks[index]
        return looks

    def _note_changes(self, looks: list[Look]) -> None:
        for module, look in zip(self._modules, looks, strict=True):
            ledger = _ledgers.get(id(module))
            if ledger is not None and ledger.last != look:
                for name in _differences(ledger.last, look):
                    ledger.changed[name] = next(_time)
                ledger.last = look

    def _look(self) -> list[Look]:
        looks: list[Look] = []
        for module in self._modules:
            look: Look = {}
            for name, value in vars(module).items():
                if name in _NOT_READ:
                    continue
                if type(value) in _ATOMS:
                    look[name] = value
                elif name in _TABLES and isinstance(value, dict):
                    look[name] = (*value, *map(id, value.values()))
                else:
                    look[name] = _mark(value)
            if module is self._module and not self._own_hooks:
                for name in _HOOKS:
                    look.pop(name, None)
            looks.append(look)
        return looks

    def _error(self, module: nn.Module, name: str, then: Look, now: Look) -> RecomputeError:
        path = path_of(module, self._module)
        inside = f"submodule {path!r} ({type(module).__name__}) of " if path else ""
        what = {"_modules": "the submodules", **_HOOKS}.get(name, f"attribute {name!r}")
        values = [look.get(name, _MISSING) for look in (then, now)]
        change = ""
        if all(type(value) in _ATOMS for value in values):
            change = f" from {values[0]!r} to {values[1]!r}"
        return RecomputeError(
            f"ckpt_wrap.checkpoint_: {what} of {inside}module {self._where} changed"
            f"{change} between forward and backward, so recomputation would not repeat the "
            "forward. Run backward before changing the module, or change it back first."
        )


def _differences(then: Look, now: Look) -> list[str]:
    names = then.keys() | now.keys()
    return [name for name in names if then.get(name, _MISSING) != now.get(name, _MISSING)]


def _mark(value: Any) -> Any:
    """A value that stays equal as long as the attribute is the same object with the same items."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return None
    if isinstance(value, dict) and len(value) <= 256:
        return (dict, *map(_shallow, value.keys()), *map(_shallow, value.values()))
    if kind in (list, tuple, set) and len(value) <= 256:
        return (kind, *map(_shallow, value))
    return id(value)


def _shallow(value: Any) -> Any:
    return value if type(value) in _ATOMS else id(value)
