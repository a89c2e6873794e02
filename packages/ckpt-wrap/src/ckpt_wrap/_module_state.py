"""The state of a module: recomputation gets it as forward found it, and leaves it as it was.

Before forward, the entries of each dict that holds state are recorded: the attributes of every
module, its buffers, submodules and hooks. Recomputation runs with these entries; afterwards the
present ones are put back. So a counter advances once, and changes since forward do not matter.

- Lists, dicts and sets in attributes are copied, up to `_LONG` items. Other objects are not: they
  may be services with a life of their own, such as the units of a sharded model.
- Small tensors are copied, because operators such as batch normalization write without changing
  the version counter. Larger ones are copied if an earlier forward wrote to them.
- If forward writes to a larger tensor for the first time, the call keeps what it saves, like a
  plain module, because recomputation could not repeat it; see `may_keep_all`.
- Parameters are not copied: one that was written in place or replaced is an error.
- Submodules in a long list are recorded when forward reads them from the list, so experts that do
  not run cost nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ckpt_wrap._arguments import ATOMS, BUILTIN, Copier
from ckpt_wrap._errors import ModuleError, RecomputeError, describe, path_of
from ckpt_wrap._random import Source, source_of
from ckpt_wrap._torch_compat import (
    is_compiled,
    is_parameter_view,
    unseen_by_modes,
    version_of,
    versions_of,
)

_SMALL = 1 << 16  # numel; no batch normalization has so many features
_LONG = 256  # items of a container
_MANY = 8  # submodules of a list that is recorded as it is read
_MISSING: Any = object()
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_HOOK_OPTIONS = (
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
)
_NOT_ATTRIBUTES = (frozenset(vars(nn.Module())) | {"_ckpt_wrap"}) - {"training"}


class _Kept:
    """A tensor of a module, as forward found it.

    Args:
        module: the module that holds it.
        name: of the buffer or attribute.
        tensor: the tensor before forward.
        copies: whether to copy it.

    Attributes:
        value: the tensor for recomputation; None if forward wrote to it and there is no copy.
        has_graph: whether it was a result of differentiable operators.
    """

    __slots__ = (
        "_before",
        "_copy",
        "_is_copy",
        "_version",
        "has_graph",
        "module",
        "name",
        "tensor",
        "value",
    )

    def __init__(self, module: nn.Module, name: str, tensor: torch.Tensor, copies: bool) -> None:
        self.module = module
        self.name = name
        self.tensor: torch.Tensor | None = tensor
        self.value: torch.Tensor | None = tensor
        self._before = self._version = version_of(tensor)
        self._copy = _clone(tensor) if copies else None
        self._is_copy = False
        self.has_graph = tensor.grad_fn is not None

    @property
    def may_be_lost(self) -> bool:
        """Whether forward may write to it and there is no copy."""
        return self._copy is None and not self.has_graph

    def settle(self) -> None:
        """Choose the value, at the end of forward or for a backward inside it."""
        tensor, copied = self.tensor, self._copy
        assert tensor is not None
        written = version_of(tensor) != self._before
        if written:
            _written.setdefault(self.module, set()).add(self.name)
        fits = tensor.numel() <= _SMALL and not tensor.requires_grad
        self._is_copy = copied is not None and (written or fits)
        self.value = copied if self._is_copy or written else tensor
        if self.value is not None:
            self._version = version_of(self.value)

    def end(self) -> None:
        """Keep the value alone."""
        self.settle()
        if self.value is not None and self.value.grad_fn is not None:
            # A graph that forward did not read would stay in memory, and so would the regions
            # in that graph, and what they hold.
            with unseen_by_modes(self.value):
                self.value = self.value.detach().requires_grad_()
        self.tensor = self._copy = None

    def for_recomputation(self, fresh: dict[int, torch.Tensor]) -> Any:
        """Return the value, or a copy that one recomputation may write to."""
        if not self._is_copy or self.value is None:
            return self.value
        if id(self) not in fresh:
            with unseen_by_modes(self.value):
                # A tensor with a graph may be written in place, and a leaf may not.
                made = self.value.clone() if self.has_graph else _clone(self.value)
            fresh[id(self)] = made
        return fresh[id(self)]

    @property
    def lost(self) -> str:
        """When the value was lost, or "" if it was not."""
        if self.value is None:
            return "by its own forward"
        return "" if version_of(self.value) == self._version else "since its forward"


# Names of the buffers and attributes of modules that a forward has written to.
_written: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()


class _Place:
    """The recorded entries of one dict.

    Args:
        table: the dict.
        entries: its entries before forward.
        vary: names of entries that have another value in each recomputation.
        skip: names that are not state.
    """

    __slots__ = ("_others", "entries", "skip", "table", "vary")

    def __init__(
        self,
        table: dict[str, Any],
        entries: dict[str, Any],
        vary: Sequence[str] = (),
        skip: frozenset[str] = frozenset(),
    ) -> None:
        self.table = table
        self.entries = entries
        self.vary = vary
        self.skip = skip
        self._others = len(table) - len(entries) if skip else 0

    def put(self, entries: dict[str, Any]) -> dict[str, Any]:
        """Make these the entries of the dict; return those that it had."""
        table = self.table
        if len(table) == len(entries) + self._others:
            for name, value in entries.items():
                if table.get(name, _MISSING) is not value:
                    break
            else:
                return entries
        skip = self.skip
        before = {n: v for n, v in table.items() if n not in skip and not _is_weight(v)}
        if not skip and list(table) != list(entries):  # the order of hooks matters
            table.clear()
            table.update(entries)
            return before
        for name in before.keys() - entries.keys():
            del table[name]
        for name, value in entries.items():
            # Weights that sharding has set stay.
            if name in before or name not in table:
                table[name] = value
        return before


class _WatchedChildren(dict[str, Any]):
    """The submodules of a long list while forward runs; records those that are read."""

    def __init__(self, under: dict[str, Any], read: Callable[[Iterable[Any]], None]) -> None:
        super().__init__(under)
        self.under = under
        self.thread = threading.get_ident()
        self._read = read

    def _note(self, children: Iterable[Any]) -> None:
        if isinstance(self.under, _WatchedChildren):
            self.under._note(children)
        self._read(children)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)

    def __getitem__(self, name: str) -> Any:
        child = super().__getitem__(name)
        self._note((child,))
        return child

    def get(self, name: str, default: Any = None) -> Any:
        """The submodule of this name."""
        child = super().get(name, default)
        self._note((child,) if name in self else ())
        return child

    def pop(self, name: str, *default: Any) -> Any:
        """Remove the submodule of this name."""
        self._note(super().values())
        return super().pop(name, *default)

    def values(self) -> Any:
        """All submodules."""
        self._note(super().values())
        return super().values()

    def items(self) -> Any:
        """Names and submodules."""
        self._note(super().values())
        return super().items()

    def copy(self) -> Any:
        """A dict with all submodules."""
        return dict(self.items())

    def remove_from(self, attributes: dict[str, Any]) -> None:
        """Give the module its dict back, with changes that forward made."""
        if attributes.get("_modules") is not self:
            return
        under = self.under
        if len(self) != len(under) or not all(map(is_, super().values(), dict.values(under))):
            under.clear()
            dict.update(under, zip(super().keys(), super().values(), strict=True))
        attributes["_modules"] = under


class ModuleState:
    """State of one called module, in one call and its recomputation.

    Args:
        module: the called module, or None for a function.
        name: its qualified name, if known.
        own_hooks: whether the hooks of the module itself run in recomputation.
        random: whether to record random number generators that modules hold.

    Attributes:
        weights: those that were set for this call, as by `torch.func.functional_call`: tensors
            instead of parameters. They are inputs of the call; see `put_in`.
        may_keep_all: whether forward may write to a tensor without a copy. Then the call must keep
            what it saves until forward ends.
    """

    def __init__(
        self, module: nn.Module | None, name: str, *, own_hooks: bool, random: bool
    ) -> None:
        self.module = module
        self.weights: list[torch.Tensor] = []
        self.may_keep_all = False
        self._module_name = name
        self._own_hooks = own_hooks
        self._random = random
        self._phase = "start"  # then "forward", "end"
        self._found: set[int] = set()  # ids of the modules
        self._places: list[_Place] = []
        self._empty: list[dict[str, Any]] = []  # dicts without entries
        self._kept: dict[int, _Kept] = {}  # by id of the tensor
        self._parameters: list[tuple[nn.Module, str, torch.Tensor]] = []
        self._versions: list[int] = []
        self._given: list[tuple[dict[str, Any], str]] = []
        self._sources: dict[int, tuple[Source, Any]] = {}  # by id of the generator
        self._has_compiled = False
        self._watched: list[tuple[dict[str, Any], _WatchedChildren]] = []
        self._copier = Copier(self._leaf, _is_data)
        self._holder: tuple[nn.Module, str] | None = None  # of the container that is being copied

    def begin(self) -> None:
        """Record the state before forward.

        Raises:
            ModuleError: a module below has lazy parameters or buffers.
        """
        if self.module is not None:
            self._read((self.module,))
        self.may_keep_all = any(kept.may_be_lost for kept in self._kept.values())
        self._phase = "forward"

    @property
    def graph_tensors(self) -> set[int]:
        """Ids of tensors that have a graph in forward, but not in recomputation."""
        kept = self._kept
        return {key for key, one in kept.items() if one.has_graph} if kept else set()

    def _read(self, modules: Iterable[nn.Module | None]) -> None:
        """Record modules and those below them, unless they are recorded already."""
        if self._phase == "end":
            return
        todo = [m for m in modules if m is not None and id(m) not in self._found]
        for module in todo:
            if id(module) not in self._found:
                self._found.add(id(module))
                parameters = module._parameters
                if parameters:
                    self._record_parameters(module, parameters)
                todo.extend(self._record(module))
        new = self._parameters[len(self._versions) :]
        self._versions += versions_of([parameter for _, _, parameter in new])

    def _record(self, module: nn.Module) -> Iterable[nn.Module]:
        """Record attributes, buffers, hooks and submodules; return submodules to record next."""
        if isinstance(module, torch.jit.ScriptModule):  # it keeps its state elsewhere
            return [child for child in module._modules.values() if child is not None]
        attributes = vars(module)
        self._record_attributes(module, attributes)
        buffers = attributes["_buffers"]
        if buffers:
            self._record_buffers(module, buffers)
        else:
            self._empty.append(buffers)
        if module is not self.module or self._own_hooks:
            for name in _HOOKS:
                hooks = attributes[name]
                if hooks:
                    self._places.append(_Place(hooks, dict(hooks)))
                    for option in _HOOK_OPTIONS:
                        self._places.append(_Place(attributes[option], dict(attributes[option])))
                else:
                    self._empty.append(hooks)
        children = attributes["_modules"]
        if children:
            return self._record_children(module, attributes, children)
        self._empty.append(children)
        return ()

    def _record_attributes(self, module: nn.Module, attributes: dict[str, Any]) -> None:
        entries: dict[str, Any] = {}
        vary: list[str] = []
        for name, value in attributes.items():
            if name in _NOT_ATTRIBUTES:
                continue
            kind: Any = type(value)
            if kind not in ATOMS:
                if isinstance(value, torch.Tensor):
                    if _is_weight(value):  # sharding replaces these at any time
                        continue
                    value = self._keep(module, name, value)
                    vary.append(name)
                elif _is_data(kind):
                    if kind in BUILTIN and len(value) > _LONG:
                        continue
                    self._holder = (module, name)
                    made = self._copier(value)
                    if made is not value:
                        value = made
                        vary.append(name)
                else:
                    self._record_source(value)
            entries[name] = value
        self._places.append(_Place(attributes, entries, vary, _NOT_ATTRIBUTES))

    def _record_buffers(self, module: nn.Module, buffers: dict[str, Any]) -> None:
        entries: dict[str, Any] = {}
        for name, buffer in buffers.items():
            if is_lazy(buffer):
                self._refuse_lazy()
            is_tensor = isinstance(buffer, torch.Tensor)
            entries[name] = self._keep(module, name, buffer) if is_tensor else buffer
        self._places.append(_Place(buffers, entries, list(entries)))

    def _record_children(
        self, module: nn.Module, attributes: dict[str, Any], children: dict[str, Any]
    ) -> Iterable[nn.Module]:
        self._has_compiled |= is_compiled(module)
        entries = dict(children)
        self._places.append(_Place(children, entries))
        if self._can_watch(module, children):
            attributes["_modules"] = watched = _WatchedChildren(children, self._read)
            self._watched.append((attributes, watched))
            return ()
        return [child for child in entries.values() if child is not None]

    def _can_watch(self, module: nn.Module, children: dict[str, Any]) -> bool:
        if len(children) < _MANY or not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            return False
        if self._has_compiled:  # the compiler expects a plain dict
            return False
        if isinstance(children, _WatchedChildren):
            return children.thread == threading.get_ident()
        return type(children) is dict

    def _record_parameters(self, module: nn.Module, parameters: dict[str, Any]) -> None:
        for name, parameter in parameters.items():
            if type(parameter) is nn.Parameter or isinstance(parameter, nn.Parameter):
                if type(parameter) is not nn.Parameter and is_lazy(parameter):
                    self._refuse_lazy()
                self._parameters.append((module, name, parameter))
            elif parameter is not None:
                self._given.append((parameters, name))
                self.weights.append(parameter)

    def _keep(self, module: nn.Module, name: str, tensor: torch.Tensor) -> _Kept:
        kept = self._kept.get(id(tensor))
        if kept is None:
            copies = (
                tensor.numel() <= _SMALL
                or name in _written.get(module, ())
                or (self._phase == "forward" and not self.may_keep_all)
            )
            kept = self._kept[id(tensor)] = _Kept(module, name, tensor, copies)
        return kept

    def _leaf(self, value: Any) -> Any:
        """The recorded form of a value in a container."""
        if isinstance(value, torch.Tensor) and not is_parameter_view(value):
            assert self._holder is not None
            return self._keep(*self._holder, value)
        self._record_source(value)
        return value

    def _record_source(self, value: Any) -> None:
        if self._random:
            source = source_of(value)
            if source is not None and id(value) not in self._sources:
                self._sources[id(value)] = (source, source.state())

    def _refuse_lazy(self) -> None:
        raise ModuleError(
            f"ckpt_wrap.checkpoint_: module {self._where} contains a lazy module without values, "
            "which its first forward makes. Run one forward under torch.no_grad() first."
        )

    def stop_watching(self) -> None:
        """Forward has ended, also by an error."""
        for attributes, watched in reversed(self._watched):
            watched.remove_from(attributes)
        self._watched = []

    def settle(self) -> bool:
        """Choose tensors at the end of forward; return whether recomputation can repeat it."""
        self._phase = "end"
        can_repeat = True
        for kept in self._kept.values():
            kept.end()
            can_repeat &= kept.value is not None
        return can_repeat

    def drop(self) -> None:
        """Forget everything: nothing will be recomputed."""
        self._places, self._empty, self._parameters, self._given = [], [], [], []
        self._versions, self._kept, self._sources, self.weights = [], {}, {}, []
        self._copier = Copier(self._leaf, _is_data)

    @contextlib.contextmanager
    def put_in(self, weights: Sequence[torch.Tensor]) -> Iterator[None]:
        """Context with the state before forward; restores the present one.

        Args:
            weights: the values for `weights`.

        Raises:
            RecomputeError: the state cannot be restored.
        """
        if self._phase == "end":
            self._require_parameters()
        else:  # a backward inside forward
            for kept in self._kept.values():
                kept.settle()
        for kept in self._kept.values():
            if kept.lost:
                raise self._changed_tensor(kept)
        fresh: dict[int, torch.Tensor] = {}
        fill = Copier(lambda leaf: _value(leaf, fresh), _is_data)
        filled = list(filter(None, self._empty))  # by other code, since forward
        places = [*self._places, *map(_Place, filled, itertools.repeat({}))]
        before: list[tuple[_Place, dict[str, Any]]] = []
        given = [table[name] for table, name in self._given]
        states = [(source, source.state()) for source, _ in self._sources.values()]
        try:
            for source, state in self._sources.values():
                source.set_state(state)
            for place in places:
                entries = place.entries
                if place.vary:
                    entries = {**entries, **{name: fill(entries[name]) for name in place.vary}}
                before.append((place, place.put(entries)))
            for (table, name), weight in zip(self._given, weights, strict=True):
                table[name] = weight
            yield
        finally:
            for (table, name), tensor in zip(self._given, given, strict=True):
                table[name] = tensor
            for table in self._empty:
                if table and not any(table is place for place in filled):  # by recomputation
                    table.clear()
            for place, entries in before:
                place.put(entries)
            for source, state in states:
                source.set_state(state)

    def _require_parameters(self) -> None:
        now = versions_of([tensor for _, _, tensor in self._parameters])
        found = zip(self._parameters, self._versions, now, strict=True)
        for (module, name, tensor), then, count in found:
            # Not by `get`, which the tables of TorchScript do not have.
            present = module._parameters[name] if name in module._parameters else None  # noqa: SIM401
            # Sharding replaces parameters by other types.
            replaced = present is not tensor
            if replaced and type(present) is nn.Parameter and type(tensor) is nn.Parameter:
                what = "replaced since the forward"
                advice = "Replace parameters after backward."
            elif not replaced and then != count:
                what = "changed in place since its forward started"
                advice = (
                    "Step the optimizer after backward, and do not checkpoint a module whose "
                    "forward writes its parameters, such as nn.Embedding with max_norm."
                )
            else:
                continue
            raise RecomputeError(
                f"ckpt_wrap.checkpoint_: parameter {self._name(module, name)!r} of "
                f"module {self._where} was {what}, and recomputation with other values gives "
                f"another gradient. {advice}"
            )

    def _changed_tensor(self, kept: _Kept) -> RecomputeError:
        kind = "buffer" if kept.name in kept.module._buffers else "attribute"
        return RecomputeError(
            f"ckpt_wrap.checkpoint_: {kind} {self._name(kept.module, kept.name)!r} of module "
            f"{self._where} was changed in place {kept.lost}, and recomputation needs it as it was "
            "before. Change a clone of it, or change it after backward."
        )

    @property
    def _where(self) -> str:
        """The called module, for messages."""
        assert self.module is not None  # there is no state to complain about without one
        return describe(self.module, self._module_name)

    def _name(self, module: nn.Module, name: str) -> str:
        prefix = path_of(module, self.module)
        return f"{prefix}.{name}" if prefix else name


def _value(leaf: Any, fresh: dict[int, torch.Tensor]) -> Any:
    return leaf.for_recomputation(fresh) if type(leaf) is _Kept else leaf


def _is_data(kind: Any) -> bool:
    """Whether to copy attributes of this class."""
    return kind in BUILTIN or issubclass(kind, tuple)


def _is_weight(value: Any) -> bool:
    """Whether a value is a parameter or a view of one."""
    return isinstance(value, torch.Tensor) and is_parameter_view(value)


def _clone(tensor: torch.Tensor) -> torch.Tensor:
    with unseen_by_modes(tensor):
        if tensor.requires_grad:
            return tensor.detach().clone().requires_grad_()
        return tensor.clone()
