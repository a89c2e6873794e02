"""Buffers that a forward writes, given to its second run as the first one found them.

Rule 1. A buffer of the called module that its first run wrote in place or replaced is, in the
        second run, what it was before the first. After the second run, however it ends, the module
        has the very tensors it had before it, unchanged: so buffers advance once.
Rule 2. To be there again, a value has to be copied before it is written over. Small buffers always
        are, and the copies are kept: operators such as batch normalization write without counting
        a version. Large ones are if a run of their module is known to have written them. In the
        first run that a module makes in training, and in evaluation, all are, and are compared by
        content too; what was not written is dropped.
Rule 3. A buffer that was written without a copy is an error in the second run, and copied from
        then on.
Rule 4. A forward that guards a write to a buffer of its own module with `is_recomputing()` does
        not repeat it. Such a buffer becomes what it was after the first run when the second one
        asks what the first asked last before writing it.

What is known of a buffer is known of the module that has it, whichever call it was found in: the
module may be called in several ways, and be below several others.

The parameters, which nobody may change between the runs, are in `_parameters`.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ckpt_wrap._torch_compat import unseen_by_modes, version_of
from ckpt_wrap.checkpointing._object_tensors import Refused
from ckpt_wrap.checkpointing._parameters import Parameters

_SMALL = 4096  # numel; copying so many costs hardly more than copying one
_ABSENT = object()
_LAZY = -1  # in the place of the version of a tensor that has no shape yet

State = dict[str, tuple[torch.Tensor | None, int]]  # buffers of a module by name, with versions
_NO_BUFFER = (None, None)


class _Habit:
    """What is known of the buffers of one module."""

    __slots__ = ("modes", "written")

    def __init__(self) -> None:
        self.modes: set[bool] = set()  # values of `training` that it has run with
        self.written: set[str] = set()


_habits: weakref.WeakKeyDictionary[nn.Module, _Habit] = weakref.WeakKeyDictionary()


class _Noted:
    """One module with buffers, as the first run found it."""

    __slots__ = ("asked", "before", "first", "habit", "module", "training")

    def __init__(self, module: nn.Module) -> None:
        habit = _habits.get(module)
        if habit is None:
            habit = _habits[module] = _Habit()
        self.module = module
        self.habit = habit
        self.training = module.training
        self.first = module.training not in habit.modes
        self.before = _state(module)
        self.asked: list[State] = []  # Rule 4

    def must_copy(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether there has to be a copy, in case the run writes the buffer: Rule 2."""
        return self.first or tensor.numel() <= _SMALL or name in self.habit.written

    def question_before_write(self, name: str) -> int | None:
        """The number of the last question that the run asked before it last wrote the buffer."""
        now, version = _state(self.module).get(name, _NO_BUFFER)
        for number in reversed(range(len(self.asked))):
            then, version_then = self.asked[number].get(name, _NO_BUFFER)
            if then is not now or version_then != version:
                return number
        return None


class _Kept:
    """What the second run is to have as one buffer."""

    __slots__ = ("later", "module", "name", "question", "value", "version")

    def __init__(self, module: nn.Module, name: str, value: Any) -> None:
        self.module = module
        self.name = name
        self.value = value  # _ABSENT where there is no copy: Rule 3
        self.version = _version(value)
        self.question: int | None = None  # from which on it is `later`
        self.later: torch.Tensor | None = None

    def is_there(self) -> bool:
        """Whether the second run can have it."""
        return self.value is not _ABSENT and _version(self.value) == self.version


class ModuleState:
    """The buffers and parameters of one called module, in its first run and in its second.

    Args:
        module: what is called, if it is a module.
    """

    __slots__ = ("_copies", "_kept", "_module", "_noted", "_parameters")

    def __init__(self, module: nn.Module | None) -> None:
        self._module = module
        self._noted: dict[int, _Noted] = {}  # by module, while the first run lasts
        self._copies: dict[int, torch.Tensor] = {}  # by tensor
        self._kept: list[_Kept] = []
        self._parameters = Parameters(module)

    def begin(self) -> None:
        """Note what the buffers and parameters are; the first run starts."""
        modules = _modules(self._module)
        self._parameters.begin(modules)
        for module in _with_buffers(modules):
            noted = self._noted[id(module)] = _Noted(module)
            for name, (tensor, version) in noted.before.items():
                if (
                    tensor is not None
                    and version != _LAZY
                    and id(tensor) not in self._copies
                    and noted.must_copy(name, tensor)
                ):
                    self._copies[id(tensor)] = _copy(tensor)

    def asked(self, module: nn.Module) -> None:
        """In a forward of `module`, the first run has asked whether it is the second."""
        noted = self._noted.get(id(module))
        if noted is not None:
            noted.asked.append(_state(module))

    def end(self, *, keep: bool) -> None:
        """The first run has ended; have what the second one needs, or nothing."""
        kept = self._to_keep()
        for noted in self._noted.values():
            noted.habit.modes.add(noted.training)
        self._noted, self._copies = {}, {}
        self._kept = kept if keep else []
        self._parameters.end(keep=keep)

    def _to_keep(self) -> list[_Kept]:
        found: list[_Kept] = []
        for noted in self._noted.values():
            for name, before in noted.before.items():
                value = self._value(noted, name, *before)
                if value is not noted.module._buffers.get(name, _ABSENT):
                    kept = _Kept(noted.module, name, value)
                    kept.question = noted.question_before_write(name)
                    now = noted.module._buffers.get(name)
                    if kept.question is not None and now is not None:
                        kept.later = _copy(now)
                    found.append(kept)
        return found

    def _value(self, noted: _Noted, name: str, tensor: torch.Tensor | None, version: int) -> Any:
        """The buffer as it was: itself, a copy, or `_ABSENT`."""
        if tensor is None:
            return None
        if version == _LAZY:  # there was nothing to read
            return tensor if is_lazy(tensor) else _copy(tensor)
        copy = self._copies.get(id(tensor))
        if version_of(tensor) != version or (
            noted.first and copy is not None and not _same_bits(tensor, copy)
        ):
            noted.habit.written.add(name)
        if name in noted.habit.written:
            return _ABSENT if copy is None else copy
        if copy is None or tensor.numel() > _SMALL or _is_converted(tensor, copy):
            return tensor
        return tensor if tensor.requires_grad else copy  # one that does may be an input of the call

    @contextlib.contextmanager
    def put_in(self) -> Iterator[_PutIn]:
        """Have the buffers as they were, and in the end what is there now: Rule 1.

        Raises:
            Refused: one was written without a copy, or a parameter was changed since.
        """
        self._parameters.begin_again()
        kept = self._to_keep() if self._noted else self._kept  # a backward inside the first run
        for item in kept:
            if not item.is_there():
                self._refuse(item)
        # One tensor at two places stays one.
        fresh = {id(value): _fresh(value) for value in [item.value for item in kept]}
        own: list[Any] = [item.module._buffers.get(item.name, _ABSENT) for item in kept]
        try:
            for item in kept:
                item.module._buffers[item.name] = fresh[id(item.value)]
            yield _PutIn(kept)
        finally:
            self._parameters.end_again()
            for item, tensor in zip(kept, own, strict=True):
                if tensor is _ABSENT:
                    item.module._buffers.pop(item.name, None)
                else:
                    item.module._buffers[item.name] = tensor

    def _refuse(self, item: _Kept) -> None:
        _habits[item.module].written.add(item.name)
        named = self._module.named_modules() if self._module is not None else ()
        names = {id(module): name for name, module in named}
        at = names.get(id(item.module))
        raise Refused(
            f"buffer {f'{at}.{item.name}' if at else item.name!r}",
            "was changed in place by its own forward for the first time, but recomputation needs "
            "it as it was before. Run the step again: from now on it is copied before each "
            "forward.",
        )


class _PutIn:
    """Has what a guard does not write again written when it is asked: Rule 4."""

    __slots__ = ("_kept", "_questions")

    def __init__(self, kept: list[_Kept]) -> None:
        self._kept = [item for item in kept if item.question is not None]
        self._questions: Counter[int] = Counter()

    def asked(self, module: nn.Module) -> None:
        """In a forward of `module`, the second run has asked whether it is that."""
        number = self._questions[id(module)]
        self._questions[id(module)] += 1
        for item in self._kept:
            if item.module is module and item.question == number:
                module._buffers[item.name] = _fresh(item.later)


def _modules(module: nn.Module | None) -> list[nn.Module]:
    """A module and those below it, each once."""
    found = {} if module is None else {module: None}
    todo = list(found)
    for below in todo:
        for child in below._modules.values():
            if child is not None and child not in found:
                found[child] = None
                todo.append(child)
    return todo


def _with_buffers(modules: list[nn.Module]) -> list[nn.Module]:
    """Those that have buffers; those of TorchScript keep them elsewhere."""
    return [module for module in modules if module._buffers and isinstance(module._buffers, dict)]


def _state(module: nn.Module) -> State:
    return {
        name: (tensor, _version(tensor))
        for name, tensor in module._buffers.items()
        if tensor is None or isinstance(tensor, torch.Tensor)
    }


def _version(value: Any) -> int:
    if not isinstance(value, torch.Tensor):
        return 0
    return _LAZY if is_lazy(value) else version_of(value)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    with unseen_by_modes(tensor):
        if tensor.requires_grad:
            return tensor.detach().clone().requires_grad_()
        return tensor.clone()


def _fresh(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """A copy, except of what belongs to a graph: that is replaced, and never written."""
    return tensor if tensor is None or tensor.grad_fn is not None else _copy(tensor)


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the contents are the same, as far as they can be read; NaN is the same as NaN."""
    if type(one) not in (torch.Tensor, nn.Parameter) or one.layout is not torch.strided:
        return True
    if one.is_meta or one.is_conj() or one.is_quantized:
        return True
    if _is_converted(one, other):
        return True
    with unseen_by_modes(one):
        return torch.equal(_bytes(one), _bytes(other))


def _is_converted(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether a tensor was given another type or device, which is no write."""
    return one.dtype != other.dtype or one.device != other.device


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)
