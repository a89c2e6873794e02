"""Replace a module's `forward` by a checkpointed region, and undo that.

- The only change is an attribute of the module: `forward`, or the compiled call. If a user has
  wrapped the region, it stays inside the wrapper after undo and only calls the original forward.
- The second forward reads buffers with their values from before the first one, and its writes are
  dropped, so running statistics count a batch once.
- The second forward runs with the hooks, modes and switches (bool and str attributes) from the end
  of the first one.
- For a compiled block that keeps matmuls, the region is inside of the compiled code. The compiler
  compares functions, so the forward is a method of one class, and equal blocks share their code.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from types import MethodType
from typing import Any

import torch
from torch import nn

from .._checkpoint import checkpoint, run_again
from .._tensors import tensors_in
from .._torch_compat import in_func_transform, set_versions
from .._torch_compat._module_calls import Switches, called_at, original, switches_of
from ..eager._moved import leaving
from ..policies._names import checkpoint_name
from ..policies._policies import Policy
from ._levels import COSTLY, INPUT

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


class Checkpointed:
    """A module's `forward` as a region.

    Attributes:
        module: the module.
        place: name of the attribute that a call of the module runs.
        forward: the original value of that attribute.
        is_undone: whether the region only calls the original forward.
        compares: whether a second forward compares the bits that it saves with those of the first.

    Args:
        module: the module; `undo` restores a `forward` that is not its class's.
        policy: the policy; None for a second forward that keeps nothing. If the policy reads names,
            inputs are named `INPUT`.
        wrote: names of the buffers that its forward writes to.
        rewrites: whether its forward writes to its arguments.
        lag_bytes: most bytes of running copies to host memory while the region runs.
    """

    is_undone = False
    compares = False

    def __init__(
        self,
        module: nn.Module,
        *,
        policy: Policy | None,
        wrote: tuple[str, ...] = (),
        rewrites: bool = False,
        lag_bytes: int = 0,
    ) -> None:
        self.module, self.place = module, called_at(module)
        self.forward = getattr(module, self.place)
        self._lag_bytes = lag_bytes
        self.policy, self.wrote = policy, wrote
        self.rewrites = rewrites
        self.was_replaced = self.place in vars(module)
        _in_use.add(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward, checkpointed unless undone."""
        if self.is_undone or in_func_transform():
            return self.forward(*args, **kwargs)
        if self.policy is None:
            return run_again(self.forward, args, kwargs, self._around, self.rewrites, self.compares)
        if not self.policy.reads_names:
            return checkpoint(self.forward, *args, policy=self.policy, **kwargs)
        named = _InputsNamed(self.module, self.forward)
        with leaving.lagging(self._lag_bytes):
            return checkpoint(named, *args, policy=self.policy, **kwargs)

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

    def _replacement(self) -> Callable[..., Any]:
        return self

    def _around(self) -> Contexts:
        """Return contexts for the first forward and the second; called before the first."""
        first, second = ExitStack(), _AsInForward(self.module, self.wrote)
        first.callback(second.note)
        return first, second


class Tagged(Checkpointed):
    """The forward of a compiled module, tagged for the compiler to keep matmuls.

    Args:
        module: the compiled module, whose forward is its class's.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(original(module), policy=COSTLY)
        self.place, self.was_replaced = "forward", False
        self.forward = type(self.module).forward

    def tagged(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward as a region, unless undone."""
        if self.is_undone:
            return self.forward(self.module, *args, **kwargs)
        return checkpoint(self.forward, self.module, *args, policy=COSTLY, **kwargs)

    def _replacement(self) -> Callable[..., Any]:
        return self.tagged


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


class _AsInForward(AbstractContextManager[None]):
    """Gives a module the state of an earlier forward, and drops writes to its buffers.

    Args:
        module: the module.
        wrote: names of buffers whose current values are restored.
    """

    def __init__(self, module: nn.Module, wrote: tuple[str, ...]) -> None:
        self._module = module
        self._buffers = [module.get_buffer(name) for name in wrote]
        self._values = [buffer.clone() for buffer in self._buffers]
        self._switches: list[Switches] = []
        self._found: list[tuple[list[torch.Tensor], tuple[int, ...], list[dict[str, Any]]]] = []

    def note(self) -> None:
        """Record hooks and switches; called at the end of the forward."""
        self._switches = list(map(switches_of, self._module.modules()))

    def __enter__(self) -> None:
        versions = tuple(buffer._version for buffer in self._buffers)
        values = [buffer.clone() for buffer in self._buffers]
        self._found.append((values, versions, [each.put() for each in self._switches]))
        _copy(self._values, self._buffers)

    def __exit__(self, *error: object) -> None:
        values, versions, replaced = self._found.pop()
        for each, attributes in zip(self._switches, replaced, strict=True):
            each.attributes.update(attributes)
        _copy(values, self._buffers)
        set_versions(tuple(self._buffers), versions)


@torch.no_grad()
def _copy(values: list[torch.Tensor], buffers: list[torch.Tensor]) -> None:
    for value, buffer in zip(values, buffers, strict=True):
        buffer.copy_(value)


def region_of(module: nn.Module) -> Checkpointed | None:
    """Return the region that replaces a module's forward; None if there is none."""
    for each in (*vars(module).values(), vars(original(module)).get("forward")):
        region = each.__self__ if isinstance(each, MethodType) else each
        if isinstance(region, Checkpointed):
            return region
    return None


def is_checkpointed(module: nn.Module) -> bool:
    """Whether a region replaces its forward, wrapped or not."""
    return region_of(module) is not None or any(region.module is module for region in _in_use)


def release(module: nn.Module) -> None:
    """Undo the region of a module, if there is one."""
    region = region_of(module)
    if region is not None:
        region.undo()


_in_use: weakref.WeakSet[Checkpointed] = weakref.WeakSet()
"""Regions of this process, without those of copied modules."""
