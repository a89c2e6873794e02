"""A batch for each trial: a copy that shares tensors, or what the user's function makes."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from .._errors import BudgetError, shown

Layout = list[tuple[torch.Size, torch.dtype, torch.device]]
_SHARED = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, nn.Module)


class Batches:
    """Makes the batch of each trial.

    A copy shares its tensors with the batch, since trials put memory back. Tensors of a graph are
    detached, so that each trial can run backward.

    Args:
        batch: a tuple of arguments, a mapping of keyword arguments, or one argument.
        make: makes a batch instead; None to copy `batch`.

    Attributes:
        batch: the batch of the current trial.

    Raises:
        BudgetError: the batch cannot be copied. Raised by `next`: `make` raises, or makes tensors
            of other shapes than before.
    """

    def __init__(self, batch: Any, make: Callable[[], Any] | None = None) -> None:
        self._given, self._make = batch, make
        self.batch: Any = None
        self._layout: Layout | None = None
        if make is None:
            self.next()

    def next(self) -> None:
        """Make the batch of the next trial."""
        self.batch = self._copied() if self._make is None else self._made(self._make)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors of the current batch."""
        return tensors_behind(self.batch)

    def _copied(self) -> Any:
        shared: dict[int, Any]
        behind = _behind(self._given)
        shared = {id(each): each for each in behind if isinstance(each, _SHARED)}
        shared |= {id(each): _leaf(each) for each in behind if isinstance(each, torch.Tensor)}
        try:
            return copy.deepcopy(self._given, shared)
        except Exception as error:
            raise BudgetError(
                f"sac_policies.fit_: batch {shown(self._given)} cannot be copied "
                f"({type(error).__name__}: {error}), but each measured step needs its own. Pass "
                "make_batch=, a function that makes it."
            ) from error

    def _made(self, make: Callable[[], Any]) -> Any:
        try:
            batch = make()
        except Exception as error:
            raise BudgetError(
                f"sac_policies.fit_: make_batch raised {type(error).__name__}: {error}. It is "
                "called without arguments before each measured step; pass a function that returns "
                "a batch."
            ) from error
        layout = [(each.shape, each.dtype, each.device) for each in tensors_behind(batch)]
        if self._layout is not None and layout != self._layout:
            raise BudgetError(
                f"sac_policies.fit_: make_batch returned tensors {_told(self._layout)} first and "
                f"{_told(layout)} now, but steps are compared. Make batches of one shape, such as "
                "the largest."
            )
        self._layout = layout
        return batch


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_leaf:
        return tensor
    return tensor.detach().requires_grad_()


def _told(layout: Layout) -> str:
    return str([(tuple(shape), str(dtype).removeprefix("torch.")) for shape, dtype, _ in layout])


def tensors_behind(value: Any) -> list[torch.Tensor]:
    """List the tensors that an object holds, in containers and attributes.

    Example:
        >>> class Data: ...
        >>> data = Data()
        >>> data.x = torch.ones(2)
        >>> sorted(len(each) for each in tensors_behind([data, torch.ones(3)]))
        [2, 3]
    """
    return [each for each in _behind(value) if isinstance(each, torch.Tensor)]


def _behind(value: Any) -> list[Any]:
    """List the objects that an object holds; modules, functions and tensors are not entered."""
    found, waiting, seen = list[Any](), [value], set[int]()
    while waiting:
        each = waiting.pop(0)
        if id(each) in seen:
            continue
        seen.add(id(each))
        found.append(each)
        if not isinstance(each, (*_SHARED, torch.Tensor)):
            waiting += gc.get_referents(each)
    return found
