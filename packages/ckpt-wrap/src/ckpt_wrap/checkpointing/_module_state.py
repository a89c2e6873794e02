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


class _Entry:
    """One buffer or tensor attribute, as forward found it.

    Attributes:
        place: the dict of the module that holds it.
        value: the tensor for recomputation, or `_ABSENT` where no copy was made.
        written: whether forward has written or replaced it.
    """

    __slots__ = (
        "_before",
        "_copy",
        "_put",
        "_tensor",
        "_training",
        "first",
        "habit",
        "module",
        "name",
        "place",
        "value",
        "version",
        "written",
    )

    def __init__(
        self,
        module: nn.Module,
        place: dict[str, Any],
        name: str,
        copies: dict[int, torch.Tensor],
        habit: _Habit | None = None,
        first: bool = False,
    ) -> None:
        self.module = module
        self.place = place
        self.name = name
        self.first = first
        self.written = False
        self.habit = habit
        self._training = module.training
        self._put: tuple[torch.Tensor, int] | None = None  # by the recomputation that runs
        self._tensor: torch.Tensor | None = place[name]
        self.value: Any = self._tensor
        self._copy: torch.Tensor | None = None
        self._before = self.version = 0  # version of the tensor, and of the value
        if self._tensor is None:
            return
        if is_lazy(self._tensor):
            self.version = -1
            self.value = _ABSENT
            return
        self._before = self.version = version_of(self._tensor)
        known = habit is not None and (first or name in habit.written)
        if self._tensor.grad_fn is None and (known or self._tensor.numel() <= _SMALL):
            # One tensor in two places stays one tensor.
            if id(self._tensor) not in copies:
                copies[id(self._tensor)] = _copy(self._tensor)
            self._copy = copies[id(self._tensor)]

    def settle(self) -> None:
        """Choose the value for recomputation; forward has ended, or recomputes inside itself."""
        if self._tensor is None:
            self.written = self.place.get(self.name) is not None
            return
        if self.version < 0:  # it had no values; only a write makes a difference
            self.written = not is_lazy(self._tensor)
            return
        tensor, copied = self._tensor, self._copy
        in_place = version_of(tensor) != self._before
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

    def end(self) -> None:
        """Let go of a copy that recomputation does not need."""
        self.settle()
        self._copy = None
        if self.habit is not None:
            self.habit.modes.add(self._training)

    def put(self, fresh: dict[int, torch.Tensor]) -> None:
        """Have the value in its place; one tensor in two places stays one tensor."""
        if self.value is _ABSENT:
            return
        tensor = self.value
        if tensor is None:
            self.place[self.name] = None
            return
        if tensor is not self._tensor:  # a copy, for recomputation to write to
            if id(tensor) not in fresh:
                fresh[id(tensor)] = _copy(tensor)
            tensor = fresh[id(tensor)]
        self.place[self.name] = tensor
        self._put = tensor, version_of(tensor)

    def was_written_again(self) -> bool:
        """Recomputation has ended: whether it wrote the value that was put in."""
        put, self._put = self._put, None
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

    __slots__ = (
        "_ended",
        "_entries",
        "_given",
        "_parameters",
        "_surroundings",
        "_versions",
        "_where",
        "asked",
        "module",
    )

    def __init__(self, module: nn.Module | None, where: Where, *, own_hooks: bool = False) -> None:
        self.asked = False  # whether forward has called `is_recomputing()`
        self.module = module
        self._where = where
        self._ended = False
        self._entries: list[_Entry] = []
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
            self._note_tensors(module, copies)
        self._versions = versions_of([tensor for _, _, tensor in self._parameters])
        self._surroundings.begin(modules)
        return weights

    def _note_tensors(self, module: nn.Module, copies: dict[int, torch.Tensor]) -> None:
        buffers = module._buffers
        if buffers and isinstance(buffers, dict):  # TorchScript keeps them elsewhere
            habit = _habits.get(module)
            if habit is None:
                habit = _habits[module] = _Habit()
            first = module.training not in habit.modes
            for name, tensor in buffers.items():
                if tensor is None or isinstance(tensor, torch.Tensor):
                    self._entries.append(_Entry(module, buffers, name, copies, habit, first))
        attributes = vars(module)
        for name, value in attributes.items():
            # Tensors that require grad, and views, are weights: sharding replaces them at will.
            if (
                isinstance(value, torch.Tensor)
                and not value.requires_grad
                and counter_owner(value) is value
            ):
                self._entries.append(_Entry(module, attributes, name, copies))

    def end(self, *, keep: bool) -> None:
        """Forward has ended; keep what recomputation needs, or nothing."""
        self._ended = True
        for entry in self._entries:
            entry.end()
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
        if entry.value is _ABSENT:
            if not entry.written:
                return
            what, advice = (
                "by its own forward",
                (
                    "Run the step again: the next forward copies a buffer first."
                    if entry.place is entry.module._buffers
                    else "Register the tensor as a buffer."
                ),
            )
            if entry.version < 0:
                advice = "Run one forward under torch.no_grad() first."
        elif entry.value is None or version_of(entry.value) == entry.version:
            return
        else:
            what, advice = "since its forward", "Change a clone of it, or change it after backward."
            if entry.habit is not None:
                entry.habit.written.add(entry.name)
        kind = "buffer" if entry.place is entry.module._buffers else "attribute"
        raise self._error(
            f"{kind} {self._name(entry.module, entry.name)!r}",
            f"was changed in place {what}, and recomputation needs it as it was before. {advice}",
        )

    def _require_parameters(self) -> None:
        now = versions_of([tensor for _, _, tensor in self._parameters])
        found = zip(self._parameters, self._versions, now, strict=True)
        for (place, name, tensor), then, count in found:
            present = _lookup(place, name)
            if present is not tensor:
                # Sharding puts other types into the places of parameters.
                if type(present) is nn.Parameter and type(tensor) is nn.Parameter:
                    raise self._error(
                        f"parameter {self._parameter_name(place, name)!r}",
                        "was replaced since the forward, and recomputation with other values gives "
                        "another gradient. Replace parameters after backward.",
                    )
            elif then != count:
                raise self._error(
                    f"parameter {self._parameter_name(place, name)!r}",
                    "was changed in place since its forward started, and recomputation with other "
                    "values gives another gradient. Step the optimizer after backward, and do not "
                    "checkpoint a module whose forward writes its parameters, such as "
                    "nn.Embedding with max_norm.",
                )

    def _require_no_guard(self) -> None:
        for entry in self._entries:
            if not entry.was_written_again() and entry.written and self.asked:
                raise self._error(
                    f"buffer {self._name(entry.module, entry.name)!r}",
                    "was written by forward and not by recomputation, after forward called "
                    "is_recomputing(). Write the buffer in both: the write in recomputation is "
                    "dropped.",
                )

    def _parameter_name(self, place: dict[str, Any], name: str) -> str:
        owners = (module for module in below(self.module) if module._parameters is place)
        return next((self._name(owner, name) for owner in owners), name)

    def _name(self, module: nn.Module, name: str) -> str:
        named = () if self.module is None else self.module.named_modules()
        prefix = next((name for name, candidate in named if candidate is module), "")
        return f"{prefix}.{name}" if prefix else name

    def _error(self, what: str, rule: str) -> RecomputeError:
        return RecomputeError(
            f"ckpt_wrap.{self._where.made_by}: {what} of module {self._where} {rule}"
        )


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
