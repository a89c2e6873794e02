"""The state of a module that recomputation reads: buffers, tensor attributes and parameters.

Buffers and tensor attributes have in recomputation the values that forward found, also where
forward, or another forward since, has written to them. After recomputation the module has the
tensors it had before, unchanged. So buffers advance once.

A value must be copied before a write in place. Small buffers are always copied, because operators
such as batch normalization write without changing the version counter. Large buffers are copied in
the first forward of their module, and later if a forward is known to write them. A buffer that was
written without a copy is an error in recomputation, and copied from then on.

Parameters are not copied: one that was written in place or replaced is an error.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ckpt_wrap._errors import RecomputeError
from ckpt_wrap._torch_compat import counter_owner, unseen_by_modes, version_of, versions_of
from ckpt_wrap._where import Where
from ckpt_wrap.checkpointing._surroundings import Surroundings

_SMALL = 4096  # numel; copying that many costs little more than copying one
_ABSENT = object()


class _Habit:
    """What earlier forwards of a module have shown: its values of `training`, buffers it writes."""

    __slots__ = ("modes", "written")

    def __init__(self) -> None:
        self.modes: set[bool] = set()
        self.written: set[str] = set()


_habits: weakref.WeakKeyDictionary[nn.Module, _Habit] = weakref.WeakKeyDictionary()


@dataclass(slots=True, eq=False)
class _Entry:
    """One buffer or tensor attribute, as forward found it.

    Attributes:
        place: the dict of the module that holds it.
        habit: of the module, for a buffer.
        first: whether this is the first forward in this value of `training`.
        tensor: the tensor that forward found, or None where the buffer was None.
        copied: its contents before forward, if they were copied.
        before: its version before forward; -1 if it was lazy.
        value: the tensor for recomputation, or `_ABSENT` where no copy was made.
        version: of `value`.
        written: whether forward has written or replaced it.
        put_in: tensor and version that the running recomputation started from.
    """

    module: nn.Module
    place: dict[str, Any]
    name: str
    habit: _Habit | None
    first: bool
    tensor: torch.Tensor | None
    copied: torch.Tensor | None = None
    before: int = 0
    value: Any = None
    version: int = 0
    written: bool = False
    put_in: tuple[torch.Tensor, int] | None = None

    def note(self, copies: dict[int, torch.Tensor]) -> None:
        """Forward starts: note the version, and copy what it may write."""
        tensor = self.value = self.tensor
        if tensor is None:
            return
        if is_lazy(tensor):
            self.before = self.version = -1
            self.value = _ABSENT
            return
        self.before = self.version = version_of(tensor)
        known = self.habit is not None and (self.first or self.name in self.habit.written)
        if tensor.grad_fn is None and (known or tensor.numel() <= _SMALL):
            # One tensor in two places stays one tensor.
            if id(tensor) not in copies:
                copies[id(tensor)] = _copy(tensor)
            self.copied = copies[id(tensor)]

    def settle(self) -> None:
        """Choose the value for recomputation; forward has ended, or recomputes inside itself."""
        tensor, copied = self.tensor, self.copied
        if tensor is None:
            self.written = self.place.get(self.name) is not None
            return
        if self.before < 0:  # it had no values; only a write makes a difference
            self.written = not is_lazy(tensor)
            return
        in_place = version_of(tensor) != self.before
        if self.first and copied is not None and not _same_bits(tensor, copied):
            in_place = True
        if in_place and self.habit is not None:
            self.habit.written.add(self.name)
        self.written = in_place or self.place.get(self.name, _ABSENT) is not tensor
        if in_place:
            self.value = _ABSENT if copied is None else copied
        elif copied is not None and tensor.numel() <= _SMALL and not tensor.requires_grad:
            self.value = copied
        if self.value is not _ABSENT:
            self.version = version_of(self.value)

    def put(self, fresh: dict[int, torch.Tensor]) -> None:
        """Have the value in its place; one tensor in two places stays one tensor."""
        tensor = self.value
        if tensor is _ABSENT or tensor is None:
            if tensor is None:
                self.place[self.name] = None
            return
        if tensor is not self.tensor:  # a copy, for recomputation to write to
            if id(tensor) not in fresh:
                fresh[id(tensor)] = _copy(tensor)
            tensor = fresh[id(tensor)]
        self.place[self.name] = tensor
        self.put_in = tensor, version_of(tensor)

    def was_written_again(self) -> bool:
        """Recomputation has ended: whether it wrote the value that was put in."""
        put, self.put_in = self.put_in, None
        if put is None:
            return True
        return self.place.get(self.name) is not put[0] or version_of(put[0]) != put[1]


class ModuleState:
    """State of one called module, in one call and its recomputation.

    Args:
        module: the called module, or None for a function.
        where: the module, for messages.
        own_hooks: whether the hooks of the module itself run in recomputation.
    """

    def __init__(self, module: nn.Module | None, where: Where, *, own_hooks: bool = False) -> None:
        self.asked = False  # whether forward has called `is_recomputing()`
        self.module = module
        self._where = where
        self._ended = False
        self._entries: list[_Entry] = []
        self._modes: list[tuple[_Habit, bool]] = []
        self._parameters: list[tuple[dict[str, Any], str, torch.Tensor]] = []
        self._versions: list[int] = []
        self._given: list[tuple[dict[str, Any], str]] = []
        self._surroundings = Surroundings(module, where, own_hooks=own_hooks)

    def begin(self) -> list[torch.Tensor]:
        """Note the state before forward.

        Returns:
            Weights that were put in for this call, as `torch.func.functional_call` does: tensors
            in the place of parameters. They are inputs of the call; see `put_in`.
        """
        weights: list[torch.Tensor] = []
        copies: dict[int, torch.Tensor] = {}  # by id of the tensor
        modules = below(self.module)
        for module in modules:
            for name, parameter in module._parameters.items():
                if parameter is None or is_lazy(parameter):
                    continue
                if isinstance(parameter, nn.Parameter):
                    self._parameters.append((module._parameters, name, parameter))
                else:
                    self._given.append((module._parameters, name))
                    weights.append(parameter)
            self._find_tensors(module)
        for entry in self._entries:
            entry.note(copies)
        self._versions = versions_of([tensor for _, _, tensor in self._parameters])
        self._surroundings.begin(modules)
        return weights

    def _find_tensors(self, module: nn.Module) -> None:
        buffers = module._buffers
        if buffers and isinstance(buffers, dict):  # TorchScript keeps them elsewhere
            habit = _habits.get(module)
            if habit is None:
                habit = _habits[module] = _Habit()
            first = module.training not in habit.modes
            self._modes.append((habit, module.training))
            for name, tensor in buffers.items():
                if tensor is None or isinstance(tensor, torch.Tensor):
                    self._entries.append(_Entry(module, buffers, name, habit, first, tensor))
        attributes = vars(module)
        for name, value in attributes.items():
            # Tensors that require grad, and views, are weights: sharding replaces them at will.
            if (
                isinstance(value, torch.Tensor)
                and not value.requires_grad
                and counter_owner(value) is value
            ):
                self._entries.append(_Entry(module, attributes, name, None, False, value))

    def end(self, *, keep: bool) -> None:
        """Forward has ended; keep what recomputation needs, or nothing."""
        self._ended = True
        for entry in self._entries:
            entry.settle()
            entry.copied = None  # kept in `value` where recomputation needs it
        for habit, training in self._modes:
            habit.modes.add(training)
        if keep:
            self._surroundings.end()
        else:
            self._entries, self._parameters, self._versions, self._given = [], [], [], []

    @contextlib.contextmanager
    def put_in(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """Have the state as forward found it, and in the end the present one again.

        Args:
            tensors: inputs of the call; the weights that `begin` returned are the last of them.

        Raises:
            RecomputeError: the state cannot be restored, or recomputation would not run the same
                code.
        """
        self._surroundings.require_unchanged()
        if self._ended:
            self._require_parameters()
        else:  # a backward inside forward
            for entry in self._entries:
                entry.settle()
        for entry in self._entries:
            self._require(entry)
        weights = zip(self._given, tensors[len(tensors) - len(self._given) :], strict=True)
        places = [(e.place, e.name) for e in self._entries if e.value is not _ABSENT] + self._given
        before = [place.get(name, _ABSENT) for place, name in places]
        fresh: dict[int, torch.Tensor] = {}
        try:
            for entry in self._entries:
                entry.put(fresh)
            for (place, name), weight in weights:
                place[name] = weight
            yield
            self._require_no_guard()
        finally:
            for (place, name), tensor in zip(places, before, strict=True):
                if tensor is _ABSENT:
                    place.pop(name, None)
                else:
                    place[name] = tensor
            self._surroundings.end_again()

    def _require(self, entry: _Entry) -> None:
        kind = "buffer" if entry.place is entry.module._buffers else "attribute"
        name, where = self._name(entry.module, entry.name), self._where
        if entry.value is _ABSENT:
            if not entry.written:
                return
            advice = (
                "Run one forward under torch.no_grad() first."
                if entry.before < 0
                else "Run the step again: the next forward copies a buffer first."
                if kind == "buffer"
                else "Register the tensor as a buffer."
            )
            raise RecomputeError(
                f"ckpt_wrap.{where.made_by}: {kind} {name!r} of module {where} was changed in "
                "place by its own forward, and recomputation needs it as it was before. " + advice
            )
        if entry.value is not None and version_of(entry.value) != entry.version:
            if entry.habit is not None:
                entry.habit.written.add(entry.name)
            raise RecomputeError(
                f"ckpt_wrap.{where.made_by}: {kind} {name!r} of module {where} was changed in "
                "place since its forward, and recomputation needs it as it was before. Change a "
                "clone of it, or change it after backward."
            )

    def _require_parameters(self) -> None:
        where = self._where
        now = versions_of([tensor for _, _, tensor in self._parameters])
        found = zip(self._parameters, self._versions, now, strict=True)
        for (place, name, tensor), then, count in found:
            present = _lookup(place, name)
            if present is not tensor:
                # Sharding puts other types into the places of parameters.
                if type(present) is nn.Parameter and type(tensor) is nn.Parameter:
                    name = self._parameter_name(place, name)
                    raise RecomputeError(
                        f"ckpt_wrap.{where.made_by}: parameter {name!r} of module {where} was "
                        "replaced since the forward, and recomputation with other values gives "
                        "another gradient. Replace parameters after backward."
                    )
            elif then != count:
                name = self._parameter_name(place, name)
                raise RecomputeError(
                    f"ckpt_wrap.{where.made_by}: parameter {name!r} of module {where} was changed "
                    "in place since its forward started, and recomputation with other values gives "
                    "another gradient. Step the optimizer after backward, and do not checkpoint a "
                    "module whose forward writes its parameters, such as nn.Embedding with "
                    "max_norm."
                )

    def _require_no_guard(self) -> None:
        for entry in self._entries:
            if not entry.was_written_again() and entry.written and self.asked:
                name = self._name(entry.module, entry.name)
                raise RecomputeError(
                    f"ckpt_wrap.{self._where.made_by}: buffer {name!r} of module {self._where} was "
                    "written by forward and not by recomputation, after forward called "
                    "is_recomputing(). Write the buffer in both: the write in recomputation is "
                    "dropped."
                )

    def _parameter_name(self, place: dict[str, Any], name: str) -> str:
        owners = (module for module in below(self.module) if module._parameters is place)
        return next((self._name(owner, name) for owner in owners), name)

    def _name(self, module: nn.Module, name: str) -> str:
        named = () if self.module is None else self.module.named_modules()
        prefix = next((name for name, candidate in named if candidate is module), "")
        return f"{prefix}.{name}" if prefix else name


def below(module: nn.Module | None) -> list[nn.Module]:
    """A module and all modules below it, each once."""
    found = {} if module is None else {module: None}
    todo = list(found)
    for one in todo:
        for child in one._modules.values():
            if child is not None and child not in found:
                found[child] = None
                todo.append(child)
    return todo


def _lookup(place: Any, name: str) -> Any:
    """An entry, or None; TorchScript's tables have no `get`."""
    try:
        return place[name]
    except KeyError:
        return None


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    with unseen_by_modes(tensor):
        if tensor.requires_grad:
            return tensor.detach().clone().requires_grad_()
        return tensor.clone()


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the contents are equal, as far as they can be read; NaN equals NaN."""
    if type(one) not in (torch.Tensor, nn.Parameter) or one.layout is not torch.strided:
        return True
    if one.is_meta or one.is_conj() or one.is_quantized:
        return True
    if one.dtype != other.dtype or one.device != other.device:
        return True
    with unseen_by_modes(one):
        return torch.equal(*(t.detach().reshape(-1).view(torch.uint8) for t in (one, other)))
