"""Compiled modules in a region: each runs again as a whole, as in torch's checkpoint.

The tape does not see the operators of a compiled module. Without this file, its graph would save
the values that the compiler chose for backward, regardless of the policy.

A forward that wrote to a parameter, a buffer or an argument is not run again: it would write twice,
and read other values. Such a forward keeps what the compiler chose.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from .._torch_compat import hide_from_dynamo, pop_hooks, push_hooks, saved_tensor_hooks
from .._torch_compat._dispatch import HOOKS_PASSED_BY, leave_checkpoints, unseen_alias
from .._torch_compat._module_calls import called_at
from ..policies._functions import is_selective, selective
from ..policies._modules import ModulePath
from ..policies._names import NAME_OP
from ..policies._policies import Policy
from ..policies._views import OpView
from ._parted import parted
from ._values import changed, version_of


class _Around(NamedTuple):
    """The policy of an open region, and its running module if the policy reads modules."""

    policy: Policy
    path: ModulePath | None


class _CompiledCall:
    """Replaces what a compiled module runs while regions around it are open."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.place = module, called_at(module)
        self.inner: Callable[..., Any] = getattr(module, self.place)
        self.was_there = self.place in vars(module)
        self.regions: defaultdict[int, list[_Around]] = defaultdict(list)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module under the innermost region of this thread."""
        regions = self.regions.get(threading.get_ident())
        if not regions:
            return self.inner(*args, **kwargs)
        with ExitStack() as until:
            for each in regions:
                if each.path is not None:
                    until.enter_context(each.path.inside_compiled(self.module))
            return _run(self.module, self.inner, args, kwargs, regions[-1])

    def restore(self) -> None:
        with _lock:
            if any(self.regions.values()) or vars(self.module).get(self.place) is not self:
                return
            if self.was_there:
                setattr(self.module, self.place, self.inner)
            else:
                delattr(self.module, self.place)


_lock = threading.Lock()


def follow_compiled(
    modules: list[nn.Module], policy: Policy, path: ModulePath | None, until: ExitStack
) -> None:
    """Make compiled modules run again in backward if they are called in a region.

    Args:
        modules: none inside another.
        policy: of the open region.
        path: its running module, if the policy reads modules.
        until: closed when the region ends. If closing is interrupted, the replaced calls remain,
            without a region.
    """
    for module in modules:
        with _lock:
            call = _call_of(module)
            regions = call.regions[threading.get_ident()]
            regions.append(_Around(policy, path))
        until.callback(call.restore)
        until.callback(regions.pop)


def _call_of(module: nn.Module) -> _CompiledCall:
    call = getattr(module, called_at(module))
    if not isinstance(call, _CompiledCall):
        call = _CompiledCall(module)
        setattr(module, call.place, call)
    return call


def _run(
    module: nn.Module,
    inner: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    region: _Around,
) -> Any:
    """Run a compiled module, and again in backward unless the policy keeps all of its results."""
    call = parted(inner, args, kwargs)
    if call is None or _keeps_all(region):
        return inner(*args, **kwargs)
    options: dict[str, Any] = {}
    if is_selective(region.policy):
        ask = selective(region.policy)
        options["context_fn"] = partial(create_selective_checkpoint_contexts, ask)
        options |= HOOKS_PASSED_BY
    first = _FirstRun(call[0], module)
    try:
        return checkpoint(first, *call[1], use_reentrant=False, **options)
    except BaseException as error:  # the region's function may catch it and go on
        leave_checkpoints(error)
        raise


class _Saved:
    """A tensor that a compiled module saves.

    Attributes:
        tensor: the tensor; None if the module runs again in backward.
        version: its version.
        packed: what torch's checkpoint holds in its place.
    """

    __slots__ = ("__weakref__", "packed", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, packed: Any) -> None:
        self.tensor: torch.Tensor | None = unseen_alias(tensor)
        self.version, self.packed = version_of(tensor), packed


class _FirstRun:
    """The function given to torch's checkpoint; keeps what its first run saves if that run wrote.

    Until the run has ended nothing tells whether it writes, so the tensors are held that long.
    """

    def __init__(self, call: Callable[..., Any], module: nn.Module) -> None:
        self._call, self._module, self._has_run = call, module, False
        self._pack: Callable[[torch.Tensor], Any] | None = None
        self._saved: list[ref[_Saved]] = []

    def __call__(self, *tensors: torch.Tensor) -> Any:
        hooks = saved_tensor_hooks()
        if self._has_run or hooks is None:
            return self._call(*tensors)
        self._has_run = True
        self._pack, unpack = hooks
        before = self._state(tensors)
        push_hooks(self._packed, partial(_unpacked, unpack))
        try:
            out = self._call(*tensors)
        finally:
            pop_hooks()
        if self._state(tensors) == before:
            for saved in (each() for each in self._saved):
                if saved is not None:
                    saved.tensor = None
        self._pack = None
        self._saved.clear()
        return out

    def _state(self, tensors: tuple[torch.Tensor, ...]) -> list[tuple[int, int]]:
        """List what a write or an exchange of a tensor would change."""
        state = (*self._module.parameters(), *self._module.buffers(), *tensors)
        return [(id(each), version_of(each)) for each in state]

    def _packed(self, tensor: torch.Tensor) -> _Saved:
        assert self._pack is not None, "the first run is open"
        saved = _Saved(tensor, self._pack(tensor))
        self._saved.append(ref(saved))
        return saved


def _unpacked(unpack: Callable[[Any], torch.Tensor], saved: _Saved) -> torch.Tensor:
    tensor = saved.tensor
    if tensor is None:
        return unpack(saved.packed)
    if version_of(tensor) != saved.version:
        raise changed(tensor)
    return tensor


hide_from_dynamo(_FirstRun._packed, _unpacked)  # a compiled module calls them


def _keeps_all(region: _Around) -> bool:
    """Whether the policy also keeps operators that it does not name."""
    module = "" if region.path is None else region.path.now
    answer = region.policy.decide(OpView(NAME_OP, 0, module=module))
    return answer is not None and answer.keeps
