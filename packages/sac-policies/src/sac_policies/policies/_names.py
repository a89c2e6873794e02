"""Names for tensors, registered as an operator so that compiled graphs carry them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .._errors import PolicyError, shown

Listener = Callable[[torch.Tensor, str], None]


class _Listeners(threading.local):
    def __init__(self) -> None:
        self.stack: list[Listener] = []


_listeners = _Listeners()

_library = torch.library.Library("sac_policies", "DEF")
_library.define("named(Tensor x, str label) -> Tensor")


def _copy(x: torch.Tensor, label: str) -> torch.Tensor:
    del label
    return x.clone()


def _pass_through(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
    del ctx
    return grad, None


_library.impl("named", _copy, "CompositeExplicitAutograd")
torch.library.register_autograd("sac_policies::named", _pass_through, lib=_library)

NAME_OP = torch.ops.sac_policies.named.default
"""The operator of `checkpoint_name` in views, reports and compiled graphs."""


def checkpoint_name(tensor: torch.Tensor, label: str) -> torch.Tensor:
    """Name a tensor, so that `save_named` can refer to it.

    In eager code returns `tensor` itself, and does nothing outside a checkpointed region. Under
    `torch.compile` returns a copy, because a graph can carry a name only on an operator.

    Args:
        tensor: the value to name; keeping it keeps the whole storage it is a view of.
        label: any text; several tensors may share it.

    Raises:
        PolicyError: `tensor` is not a tensor, or `label` not text.

    Example:
        >>> checkpoint_name(torch.ones(2), "hidden")
        tensor([1., 1.])
    """
    if not isinstance(tensor, torch.Tensor):
        raise PolicyError(
            f"sac_policies.checkpoint_name: tensor {shown(tensor)} is a "
            f"{type(tensor).__name__}, but only a tensor can be named. Name the tensors inside it "
            "one by one."
        )
    if not isinstance(label, str):
        raise PolicyError(
            f"sac_policies.checkpoint_name: label {shown(label)} is a {type(label).__name__}, "
            "but a name is text. Write for example checkpoint_name(tensor, 'hidden')."
        )
    if torch.compiler.is_compiling():
        return NAME_OP(tensor, label)
    for listener in _listeners.stack:
        listener(tensor, label)
    return tensor


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Call `listener` for each `checkpoint_name` of this thread inside the block."""
    _listeners.stack.append(listener)
    try:
        yield
    finally:
        _listeners.stack.remove(listener)
