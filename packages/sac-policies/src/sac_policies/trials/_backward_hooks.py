"""Turn off what changes parameters: hooks on accumulated gradients, and steps of optimizers.

Such a hook may step an optimizer, so it must not run in a trial. If it does, it also frees the
gradient; a hook from which no optimizer can be reached is assumed to keep it. Code of the step
itself may step optimizers: then a copy of the optimizer without parameters steps instead.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .._torch_compat._gradients import (
    optimizers_in_backward,
    post_accumulate_hooks,
    set_optimizers_in_backward,
    set_post_accumulate_hooks,
)
from . import _functions as functions

_DEPTH = 4
"""Objects between a hook and an optimizer, such as closures and dicts."""


class HooksOff:
    """Hooks of parameters that do not run; gradients that they would free are dropped."""

    def __init__(self) -> None:
        self._off: dict[int, tuple[torch.Tensor, Any, Any]] = {}

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Turn off the hooks of those tensors that are parameters."""
        for each in tensors:
            hooks, optimizers = post_accumulate_hooks(each), optimizers_in_backward(each)
            is_known = id(each) in self._off or not isinstance(each, nn.Parameter)
            if is_known or not (hooks or optimizers):
                continue
            self._off[id(each)] = each, hooks, optimizers
            if hooks:
                frees = any(map(_reaches_optimizer, hooks.values()))
                set_post_accumulate_hooks(each, OrderedDict({0: _drop} if frees else {}))
            if optimizers:  # the function that steps them drops the gradient
                set_optimizers_in_backward(each, [])

    def put_back(self) -> None:
        """Turn the hooks on again."""
        for each, hooks, optimizers in self._off.values():
            if hooks:
                set_post_accumulate_hooks(each, hooks)
            if optimizers:
                set_optimizers_in_backward(each, optimizers)


def _drop(parameter: torch.Tensor) -> None:
    parameter.grad = None


def _reaches_optimizer(hook: Any) -> bool:
    """Whether a hook refers to an optimizer, by closures, arguments, globals or containers."""
    waiting, seen = [(hook, 0)], set[int]()
    while waiting:
        value, depth = waiting.pop()
        if isinstance(value, Optimizer):
            return True
        if id(value) not in seen and depth < _DEPTH:
            seen.add(id(value))
            waiting += [(each, depth + 1) for each in _behind(value)]
    return False


def _behind(value: Any) -> Iterable[Any]:
    if isinstance(value, partial):
        return value.func, *value.args, *value.keywords.values()
    if isinstance(value, MethodType):
        return value.__func__, value.__self__, *getattr(value.__self__, "__dict__", {}).values()
    if isinstance(value, FunctionType):
        return functions.reads(value)
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, (list, tuple, set)) else ()


@contextmanager
def no_optimizer_steps(stepped: list[Optimizer]) -> Iterator[None]:
    """Let optimizers of this thread, and of a backward that it waits for, step without parameters.

    Closures, hooks and the step's result are those of a real step.

    Args:
        stepped: gets each optimizer that steps.
    """
    here = threading.get_ident()

    def without_parameters(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        # Threads of autograd are not made by Python.
        is_autograds = isinstance(threading.current_thread(), threading._DummyThread)
        if threading.get_ident() != here and not is_autograds:
            return None
        if all(each is not optimizer for each in stepped):
            stepped.append(optimizer)
        return (_without_parameters(optimizer), *args[1:]), kwargs

    handle = register_optimizer_step_pre_hook(without_parameters)
    try:
        yield
    finally:
        handle.remove()


def _without_parameters(optimizer: Optimizer) -> Optimizer:
    kind = type(optimizer)
    alike = kind.__new__(kind)
    groups = [{**group, "params": []} for group in optimizer.param_groups]
    vars(alike).update(vars(optimizer), param_groups=groups, state=defaultdict(dict))
    return alike
