"""The state of a module that recomputation reads: buffers, tensor attributes and parameters.

In recomputation, buffers and tensor attributes have their values before forward, even if this or
another forward wrote to them. Afterwards the module has its previous tensors, unchanged. So
buffers advance once.

Before forward, small tensors and the floating-point buffers of modules in training mode are copied.
Copies of small ones are always kept, because operators such as batch normalization write without
changing the version counter. Copies of large ones are kept if the version changed. If forward wrote
to a tensor in place and there is no copy, recomputation raises an error.

Parameters are not copied: one that was written in place or replaced is an error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ckpt_wrap._errors import ModuleError, RecomputeError, path_of
from ckpt_wrap._surroundings import Surroundings
from ckpt_wrap._torch_compat import counter_owner, unseen_by_modes, version_of, versions_of

_SMALL = 1 << 16  # numel; no batch normalization has so many features
_ABSENT = object()


@dataclass(slots=True, eq=False)
class _Entry:
    """One buffer or tensor attribute before forward.

    Attributes:
        place: the dict of the module that holds it.
        tensor: the tensor before forward, or None if the buffer was None.
        copied: its contents before forward, if they were copied.
        before: its version before forward.
        value: the tensor for recomputation, or `_ABSENT` without a copy.
        version: of `value`.
    """

    module: nn.Module
    place: dict[str, Any]
    name: str
    tensor: torch.Tensor | None
    copied: torch.Tensor | None = None
    before: int = 0
    value: Any = None
    version: int = 0

    @property
    def is_buffer(self) -> bool:
        return self.place is self.module._buffers

    def note(self, copies: dict[int, torch.Tensor]) -> None:
        """Record the version before forward, and copy tensors that it may write."""
        tensor = self.value = self.tensor
        if tensor is None:
            return
        self.before = self.version = version_of(tensor)
        is_state = self.is_buffer and self.module.training and tensor.is_floating_point()
        if tensor.grad_fn is None and (is_state or tensor.numel() <= _SMALL):
            # A tensor that is in two places gets one copy.
            if id(tensor) not in copies:
                copies[id(tensor)] = _copy(tensor)
            self.copied = copies[id(tensor)]

    def settle(self) -> None:
        """Choose the value for recomputation, at the end of forward or for a backward inside it."""
        tensor, copied = self.tensor, self.copied
        if tensor is None:
            return
        if version_of(tensor) != self.before:
            self.value = _ABSENT if copied is None else copied
        elif copied is not None and tensor.numel() <= _SMALL and not tensor.requires_grad:
            self.value = copied
        if self.value is not _ABSENT:
            self.version = version_of(self.value)

    def put(self, fresh: dict[int, torch.Tensor]) -> None:
        """Set the value for recomputation; a tensor that is in two places gets one value."""
        tensor = self.value
        if tensor is not self.tensor:  # a copy that recomputation may write to
            if id(tensor) not in fresh:
                fresh[id(tensor)] = _copy(tensor)
            tensor = fresh[id(tensor)]
        self.place[self.name] = tensor


class ModuleState:
    """State of one called module, in one call and its recomputation.

    Args:
        module: the called module, or None for a function.
        where: the module, for messages.
        own_hooks: whether the hooks of the module itself run in recomputation.
    """

    def __init__(self, module: nn.Module | None, where: str, *, own_hooks: bool = False) -> None:
        self.module = module
        self._where = where
        self._ended = False
        self._entries: list[_Entry] = []
        self._parameters: list[tuple[nn.Module, str, torch.Tensor]] = []
        self._versions: list[int] = []
        self._given: list[tuple[dict[str, Any], str]] = []
        self._surroundings = Surroundings(module, where, own_hooks=own_hooks)

    def begin(self) -> list[torch.Tensor]:
        """Record the state before forward.

        Returns:
            Weights that were set for this call, as by `torch.func.functional_call`: tensors instead
            of parameters. They are inputs of the call; see `put_in`.

        Raises:
            ModuleError: a module below has lazy parameters or buffers.
        """
        weights: list[torch.Tensor] = []
        copies: dict[int, torch.Tensor] = {}  # by id of the tensor
        modules = below(self.module)
        for module in modules:
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                self._require_values(parameter)
                if isinstance(parameter, nn.Parameter):
                    self._parameters.append((module, name, parameter))
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
        buffers, attributes = module._buffers, vars(module)
        if buffers and isinstance(buffers, dict):  # TorchScript keeps them elsewhere
            for name, tensor in buffers.items():
                if tensor is None or isinstance(tensor, torch.Tensor):
                    self._require_values(tensor)
                    self._entries.append(_Entry(module, buffers, name, tensor))
        for name, value in attributes.items():
            # Tensors that require grad, and views, are weights: sharding replaces them at any time.
            if (
                isinstance(value, torch.Tensor)
                and not value.requires_grad
                and counter_owner(value) is value
            ):
                self._entries.append(_Entry(module, attributes, name, value))

    def _require_values(self, tensor: Any) -> None:
        if is_lazy(tensor):
            raise ModuleError(
                f"ckpt_wrap.checkpoint_: module {self._where} contains a lazy module without "
                "values, which its first forward makes. Run one forward under torch.no_grad() "
                "first."
            )

    def end(self, *, keep: bool) -> None:
        """Keep the state for recomputation after forward, or nothing."""
        self._ended = True
        for entry in self._entries:
            entry.settle()
            entry.copied = None  # kept in `value` if recomputation needs it
        if keep:
            self._surroundings.end()
        else:
            self._entries, self._parameters, self._versions, self._given = [], [], [], []

    @contextlib.contextmanager
    def put_in(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """Context with the state before forward; restores the present one.

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
        places = [(entry.place, entry.name) for entry in self._entries] + self._given
        before = [place.get(name, _ABSENT) for place, name in places]
        fresh: dict[int, torch.Tensor] = {}
        try:
            for entry in self._entries:
                entry.put(fresh)
            for (place, name), weight in weights:
                place[name] = weight
            yield
        finally:
            for (place, name), tensor in zip(places, before, strict=True):
                if tensor is _ABSENT:
                    place.pop(name, None)
                else:
                    place[name] = tensor
            self._surroundings.end_again()

    def _require(self, entry: _Entry) -> None:
        if entry.value is _ABSENT:
            when, advice = "by its own forward", "Register the tensor as a buffer."
            if entry.is_buffer:
                advice = (
                    "Large buffers are copied before forward only if they hold floating-point "
                    "numbers and training is True. Leave this module out of checkpointing."
                )
        elif entry.value is not None and version_of(entry.value) != entry.version:
            when = "since its forward"
            advice = "Change a clone of it, or change it after backward."
        else:
            return
        kind = "buffer" if entry.is_buffer else "attribute"
        name = self._name(entry.module, entry.name)
        raise RecomputeError(
            f"ckpt_wrap.checkpoint_: {kind} {name!r} of module {self._where} was changed in place "
            f"{when}, and recomputation needs it as it was before. {advice}"
        )

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

    def _name(self, module: nn.Module, name: str) -> str:
        prefix = path_of(module, self.module)
        return f"{prefix}.{name}" if prefix else name


def below(module: nn.Module | None) -> list[nn.Module]:
    """Yield a module and all modules below it, each once."""
    found = {} if module is None else {module: None}
    todo = list(found)
    for one in todo:
        for child in one._modules.values():
            if child is not None and child not in found:
                found[child] = None
                todo.append(child)
    return todo


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    with unseen_by_modes(tensor):
        if tensor.requires_grad:
            return tensor.detach().clone().requires_grad_()
        return tensor.clone()
