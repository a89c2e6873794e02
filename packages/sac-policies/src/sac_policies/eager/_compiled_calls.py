"""Compiled modules in a region: each runs again as a whole, as in torch's checkpoint.

The tape does not see the operators of a compiled module. Without this file, its graph would save
the values that the compiler chose for backward, regardless of the policy.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, Protocol

from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from .._torch_compat._dispatch import HOOKS_PASSED_BY, leave_checkpoints
from .._torch_compat._module_calls import called_at
from ..policies._functions import is_selective, selective
from ..policies._modules import ModulePath
from ..policies._names import NAME_OP
from ..policies._policies import Policy
from ..policies._views import OpView
from ._parted import parted


class Region(Protocol):
    policy: Policy
    path: ModulePath | None


class _Call:
    """Replaces what a compiled module runs while regions around it are open."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.place = module, called_at(module)
        self.inner: Callable[..., Any] = getattr(module, self.place)
        self.was_there = self.place in vars(module)
        self.regions: defaultdict[int, list[Region]] = defaultdict(list)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module under the innermost region of this thread."""
        regions = self.regions.get(threading.get_ident())
        if not regions:
            return self.inner(*args, **kwargs)
        with ExitStack() as until:
            for each in regions:
                if each.path is not None:
                    until.enter_context(each.path.inside_compiled(self.module))
            return _run(self.inner, args, kwargs, regions[-1])

    def restore(self) -> None:
        with _lock:
            if any(self.regions.values()) or vars(self.module).get(self.place) is not self:
                return
            if self.was_there:
                setattr(self.module, self.place, self.inner)
            else:
                delattr(self.module, self.place)


_lock = threading.Lock()


def follow_compiled(modules: list[nn.Module], region: Region, until: ExitStack) -> None:
    """Make compiled modules run again in backward if they are called in a region.

    Args:
        modules: none inside another.
        region: the open region.
        until: closed when the region ends. If closing is interrupted, the replaced calls remain,
            without a region.
    """
    for module in modules:
        with _lock:
            call = _call_of(module)
            regions = call.regions[threading.get_ident()]
            regions.append(region)
        until.callback(call.restore)
        until.callback(regions.pop)


def _call_of(module: nn.Module) -> _Call:
    call = getattr(module, called_at(module))
    if not isinstance(call, _Call):
        call = _Call(module)
        setattr(module, call.place, call)
    return call


def _run(
    inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], region: Region
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
    try:
        return checkpoint(call[0], *call[1], use_reentrant=False, **options)
    except BaseException as error:  # the region's function may catch it and go on
        leave_checkpoints(error)
        raise


def _keeps_all(region: Region) -> bool:
    """Whether the policy also keeps operators that it does not name."""
    module = "" if region.path is None else region.path.now
    answer = region.policy.decide(OpView(NAME_OP, 0, module=module))
    return answer is not None and answer.keeps
