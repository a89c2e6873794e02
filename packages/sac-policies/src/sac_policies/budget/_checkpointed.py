"""A module's `forward` as a checkpointed region, put in its place and taken away again.

Rule 1. All that is changed is an attribute of the module, `forward`, or what has compiled that. Who
        took it and put something around it calls a region that steps aside once it is undone.
Rule 2. A second forward finds the buffers that the first one wrote to as the first one found them,
        and leaves them as it found them: running statistics count a batch once, and what was
        computed from a buffer is computed from the same numbers again.
Rule 3. A second forward runs with the hooks, modes and switches (plain attributes that are a bool
        or a str) that the modules had at the end of the first one, whatever has been removed or
        switched since.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import nn

from .._checkpoint import checkpoint, run_again
from .._tensors import tensors_in
from .._torch_compat import in_func_transform, set_versions
from .._torch_compat._module_calls import Switches, called_at, switches_of
from ..eager._moved import leaving
from ..policies._names import checkpoint_name
from ..policies._policies import Policy
from ._levels import INPUT

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


class Checkpointed:
    """A module's `forward` as a region.

    Attributes:
        module: whose it is.
        place: the attribute of the module that it belongs in.
        forward: what is called of the module without it.
        is_undone: whether it only calls that forward.
        compares: whether a second forward compares the bits that it saves with those of the first.

    Args:
        module: whose it is; what somebody else had put in the place of its class's is put back.
        policy: what it keeps; None for a second forward that keeps nothing. If it reads names, the
            inputs are named `INPUT`.
        wrote: names of the buffers that its forward writes to.
        rewrites: whether its forward writes to tensors that it is given.
        lag_bytes: by how much copies to host memory may fall behind while it runs.
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
        """Run the module's own forward, checkpointed until that is undone."""
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
        """Put it in its place."""
        setattr(self.module, self.place, self)

    def undo(self) -> None:
        """Take it away, or have it step aside where something else was put around it (Rule 1)."""
        self.is_undone = True
        _in_use.discard(self)
        if vars(self.module).get(self.place) is self:
            if self.was_replaced:
                setattr(self.module, self.place, self.forward)
            else:
                delattr(self.module, self.place)

    def _around(self) -> Contexts:
        """What the first forward and the second are in (Rules 2, 3); made before the first."""
        first, second = ExitStack(), _AsInForward(self.module, self.wrote)
        first.callback(second.note)
        return first, second


class _InputsNamed:
    """A forward whose inputs are named for the policy; a method of its module, as errors see it."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self.__self__, self._forward = module, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for each in inputs_among((args, kwargs)):
            checkpoint_name(each, INPUT)
        return self._forward(*args, **kwargs)


def inputs_among(given: Any) -> list[torch.Tensor]:
    """List the activations among arguments: no parameters, masks or tables."""
    return [each for each in tensors_in(given) if each.requires_grad and not each.is_leaf]


class _AsInForward(AbstractContextManager[None]):
    """In here, a module has the state of an earlier forward, and what is written to it is lost.

    Args:
        module: whose state it is.
        wrote: names of buffers that have their present values in here.
    """

    def __init__(self, module: nn.Module, wrote: tuple[str, ...]) -> None:
        self._module = module
        self._buffers = [module.get_buffer(name) for name in wrote]
        self._values = [buffer.clone() for buffer in self._buffers]
        self._switches: list[Switches] = []
        self._found: list[tuple[list[torch.Tensor], tuple[int, ...], list[dict[str, Any]]]] = []

    def note(self) -> None:
        """Note hooks and switches; called at the end of the forward."""
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
    """Return the region in the place of a module's forward; None if there is none."""
    found = (each for each in vars(module).values() if isinstance(each, Checkpointed))
    return next(found, None)


def is_checkpointed(module: nn.Module) -> bool:
    """Whether a region is in the place of its forward, or in what was put around that."""
    return region_of(module) is not None or any(region.module is module for region in _in_use)


def release(module: nn.Module) -> None:
    """Take the region away, if there is one (Rule 1)."""
    region = region_of(module)
    if region is not None:
        region.undo()


_in_use: weakref.WeakSet[Checkpointed] = weakref.WeakSet()
"""Regions of this process, but those of copies."""
