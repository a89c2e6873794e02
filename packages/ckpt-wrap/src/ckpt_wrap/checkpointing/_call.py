"""One call of a function, and all that is needed to make it again.

Rule 1. What is kept for the second run is kept when the first one has ended, and only if that one
        saved anything: a call in which nothing requires grad keeps nothing.
Rule 2. What was given to the call is given to the second run as it was before the first. A tensor
        that was changed in place by then cannot be, which is an error; other things can, see
        `_objects`, and `_module_state` for those of the module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ckpt_wrap._errors import RecomputeError, changed_input_message, is_in_place_error
from ckpt_wrap._phase import SecondRun
from ckpt_wrap._torch_compat import (
    Saved,
    never_compiled_inside,
    next_hook_number,
    save_tensor,
    version_of,
)
from ckpt_wrap._where import Where
from ckpt_wrap.checkpointing._ambient_state import AmbientState, replay
from ckpt_wrap.checkpointing._functional_call import replaced_weights
from ckpt_wrap.checkpointing._module_state import ModuleState
from ckpt_wrap.checkpointing._object_tensors import Refused
from ckpt_wrap.checkpointing._objects import Objects, warn_of_grown
from ckpt_wrap.checkpointing._registered import OnlyOnce, alias
from ckpt_wrap.checkpointing._tree import fill, flatten


class Arguments:
    """The arguments of a call, taken apart, and the weights that were put in for it."""

    __slots__ = ("args", "kwargs", "objects", "tensors", "weights")

    def __init__(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], module: nn.Module | None = None
    ) -> None:
        self.tensors: list[torch.Tensor] = []
        self.objects = Objects()
        refer = self.objects.refer
        self.args = [flatten(arg, self.tensors, refer) for arg in args]
        self.kwargs = {k: flatten(arg, self.tensors, refer) for k, arg in kwargs.items()}
        weights, self.weights = replaced_weights(module)
        self.tensors += weights

    def filled(
        self, tensors: Sequence[torch.Tensor], objects: Sequence[Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """The arguments with these tensors and objects in the places of their own."""
        args = [fill(template, tensors, objects) for template in self.args]
        return args, {k: fill(template, tensors, objects) for k, template in self.kwargs.items()}


@dataclass(slots=True)
class Call:
    """Everything needed to make the same call again."""

    function: Callable[..., Any]
    module: nn.Module | None
    where: Where
    arguments: Arguments
    ambient: AmbientState
    context: AbstractContextManager[Any]
    buffers: ModuleState
    hooks: range = range(0)  # numbers of the hooks the first run registered
    _live: list[torch.Tensor] | None = None  # the inputs while the first run lasts
    _versions: list[int] = field(default_factory=list)
    _saved: list[Saved | None] = field(default_factory=list)  # None for one changed meanwhile

    def begin(self) -> None:
        """Note the state of the inputs and buffers; the first run starts."""
        self._live = self.arguments.tensors
        self._versions = [version_of(tensor) for tensor in self._live]
        self.buffers.begin()
        start = next_hook_number()
        self.hooks = range(start, start)

    def end(self, *, keep: bool) -> None:
        """The first run has ended; have what the second one needs, or nothing: Rule 1.

        Raises:
            RecomputeError: the first run changed a tensor in an object.
        """
        tensors, self._live, self.arguments.tensors = self._live or [], None, []
        self.hooks = range(self.hooks.start, next_hook_number())
        self.buffers.end(keep=keep)
        if not keep:
            self.arguments = Arguments((), {})
            return
        once: dict[int, Saved | None] = {}
        for tensor, version in zip(tensors, self._versions, strict=True):
            if id(tensor) not in once:
                unchanged = version_of(tensor) == version
                once[id(tensor)] = save_tensor(tensor) if unchanged else None
            self._saved.append(once[id(tensor)])
        warn_of_grown(self._explained(self.arguments.objects.settle), self.where)

    @never_compiled_inside
    def again(self) -> Any:
        """Make the call, in the ambient state it had."""
        tensors = self._inputs()
        objects = self._explained(self.arguments.objects.values)
        once: AbstractContextManager[Any] = nullcontext()
        if self.hooks:
            once = OnlyOnce(self.module, self.hooks)
            tensors = _each_once(alias, tensors)
        args, kwargs = self.arguments.filled(tensors, objects)
        try:
            with (
                self.arguments.weights.put_in(tensors),
                self.buffers.put_in() as put_in,
                replay(self.ambient),
                self.context,
                SecondRun(put_in),
                once,
            ):
                return self.function(*args, **kwargs)
        except Refused as refused:
            raise refused_error(refused, self.where) from refused

    def _inputs(self) -> list[torch.Tensor]:
        if self._live is not None:  # a backward inside the first run
            return self._live
        return _each_once(self._unpack, self._saved)

    def _unpack(self, saved: Saved | None) -> torch.Tensor:
        try:
            if saved is not None:
                return saved.unpack()
            cause = None
        except RuntimeError as error:
            if not is_in_place_error(error):
                raise
            cause = error
        raise RecomputeError(changed_input_message(self.where)) from cause

    def _explained(self, step: Callable[[], Any]) -> Any:
        try:
            return step()
        except Refused as refused:
            raise refused_error(refused, self.where) from refused


def refused_error(refused: Refused, where: Where) -> RecomputeError:
    """The error that says what of which module is refused."""
    return RecomputeError(
        f"ckpt_wrap.{where.made_by}: {refused.what} of module {where} {refused.rule}"
    )


def _each_once(change: Callable[[Any], torch.Tensor], items: Sequence[Any]) -> list[torch.Tensor]:
    """The items changed, the same one always to the same."""
    if len(items) == 1:
        return [change(items[0])]
    changed: dict[int, torch.Tensor] = {}
    for item in items:
        if id(item) not in changed or item is None:
            changed[id(item)] = change(item)
    return [changed[id(item)] for item in items]
