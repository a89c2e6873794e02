"""Replace a module's `forward` by a checkpointed region, and undo that.

- The only change is an attribute of the module: `forward`, or the compiled call. If a user has
  wrapped the region, it stays inside the wrapper after undo and only calls the original forward.
- For a compiled block, the region is inside of the compiled code. The compiler compares functions,
  so the forward is a method of one class, and equal blocks share their code.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn

from .._checkpoint import checkpoint
from .._tensors import tensors_in
from .._torch_compat import in_func_transform
from .._torch_compat._module_calls import CALL_PLACES, called_at, original
from ..eager._moved import leaving
from ..policies._names import checkpoint_name
from ..policies._policies import Policy
from ..policies._rules import RECOMPUTE_ALL
from ._elsewhere import is_recomputed_too, warn_of_both
from ._levels import COSTLY, INPUT


class ReplacedForward:
    """A replacement of a module's `forward`.

    Attributes:
        module: the module.
        place: name of the attribute that a call of the module runs.
        forward: the original value of that attribute.
        is_undone: whether the replacement only calls the original forward.
        has_warned: whether it was told that other code recomputes the module, too.

    Args:
        module: the module; `undo` restores a `forward` that is not its class's.
    """

    is_undone = has_warned = False

    def __init__(self, module: nn.Module) -> None:
        self.module, self.place = module, called_at(module)
        self.forward = getattr(module, self.place)
        self.was_replaced = self.place in vars(module)
        _in_use.add(self)

    def put(self) -> None:
        """Replace the module's forward."""
        setattr(self.module, self.place, self._replacement())

    def undo(self) -> None:
        """Restore the module's forward; inside a wrapper, only call it from now on."""
        self.is_undone = True
        _in_use.discard(self)
        if vars(self.module).get(self.place) == self._replacement():
            if self.was_replaced:
                setattr(self.module, self.place, self.forward)
            else:
                delattr(self.module, self.place)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward; subclasses run it in another way unless undone."""
        return self.forward(*args, **kwargs)

    def _replacement(self) -> Callable[..., Any]:
        return self


class Forwards:
    """What calls of a model's modules run at one time."""

    def __init__(self, model: nn.Module) -> None:
        self._held = {
            module: {place: vars(module)[place] for place in CALL_PLACES & vars(module).keys()}
            for module in model.modules()
        }

    def put_back(self) -> None:
        """Undo all replacements since, also those that an interrupt left half made."""
        for each in list(_in_use):
            if each.module in self._held:
                each.undo()
        for module, held in self._held.items():
            for place in CALL_PLACES - held.keys():
                vars(module).pop(place, None)
            vars(module).update(held)


class Checkpointed(ReplacedForward):
    """A module's `forward` as a region.

    Args:
        module: the module; `undo` restores a `forward` that is not its class's.
        policy: the policy. If it reads names, inputs are named `INPUT`.
        lag_bytes: most bytes of running copies to host memory while the region runs.
    """

    def __init__(self, module: nn.Module, *, policy: Policy, lag_bytes: int = 0) -> None:
        super().__init__(module)
        self.policy, self._lag_bytes = policy, lag_bytes

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward, checkpointed unless undone."""
        if self.is_undone or in_func_transform():
            return self.forward(*args, **kwargs)
        if (
            not torch.compiler.is_compiling()
            and not self.has_warned
            and is_recomputed_too(self.module)
        ):
            for region in _in_use:
                region.has_warned = True
            warn_of_both(self.module)
        if not self.policy.reads_names:
            return checkpoint(self.forward, *args, policy=self.policy, **kwargs)
        named = _InputsNamed(self.module, self.forward)
        with leaving.lagging(self._lag_bytes):
            return checkpoint(named, *args, policy=self.policy, **kwargs)


class Tagged(Checkpointed):
    """The forward of a compiled module, with tags that tell the compiler what to keep.

    Args:
        module: the compiled module, whose forward is its class's.
        policy: `COSTLY` or `RECOMPUTE_ALL`: compiled code depends on the object.
    """

    def __init__(self, module: nn.Module, *, policy: Policy) -> None:
        super().__init__(original(module), policy=policy)
        self.place, self.was_replaced = "forward", False
        self.forward = type(self.module).forward

    def keeping_matmuls(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward as a region that keeps matmuls, unless undone."""
        if self.is_undone:
            return self.forward(self.module, *args, **kwargs)
        return checkpoint(self.forward, self.module, *args, policy=COSTLY, **kwargs)

    def keeping_nothing(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward as a region that recomputes everything, unless undone."""
        if self.is_undone:
            return self.forward(self.module, *args, **kwargs)
        return checkpoint(self.forward, self.module, *args, policy=RECOMPUTE_ALL, **kwargs)

    def _replacement(self) -> Callable[..., Any]:
        return self.keeping_matmuls if self.policy is COSTLY else self.keeping_nothing


class _InputsNamed:
    """A forward that names its inputs for the policy; bound to its module for messages."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self.__self__, self._forward = module, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for each in inputs_among((args, kwargs)):
            checkpoint_name(each, INPUT)
        return self._forward(*args, **kwargs)


def inputs_among(given: Any) -> list[torch.Tensor]:
    """List the activations among the arguments, leaving out parameters, masks and tables."""
    return [each for each in tensors_in(given) if each.requires_grad and not each.is_leaf]


def replacement_of(module: nn.Module) -> ReplacedForward | None:
    """Return what replaces a module's forward; None if nothing does."""
    for each in (*vars(module).values(), vars(original(module)).get("forward")):
        found = each.__self__ if isinstance(each, MethodType) else each
        if isinstance(found, ReplacedForward):
            return found
    return None


def is_checkpointed(module: nn.Module) -> bool:
    """Whether a replacement is in use for the module's forward, wrapped or not."""
    return replacement_of(module) is not None or any(each.module is module for each in _in_use)


def release(module: nn.Module) -> None:
    """Undo the replacement of a module's forward, if there is one."""
    found = replacement_of(module)
    if found is not None:
        found.undo()


def release_copied(module: nn.Module) -> None:
    """Undo what was copied or loaded with its module: no result of `fit_` is for it."""
    found = replacement_of(module)
    if found is not None and found not in _in_use:
        found.undo()


_in_use: weakref.WeakSet[ReplacedForward] = weakref.WeakSet()
"""Replacements of this process, without those of copied modules."""
