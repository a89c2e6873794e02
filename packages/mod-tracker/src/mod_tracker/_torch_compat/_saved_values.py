"""What the nodes of autograd graphs keep for backward: tensors, and what hooks made of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch

from ._look_up import look_up

_CHECKPOINTS: tuple[type, ...] = tuple(
    kind
    for dotted in (
        "utils.checkpoint.CheckpointFunction",
        "utils.checkpoint._NoopSaveInputs",
    )
    if (kind := look_up(dotted)) is not None
)
"""Functions whose nodes keep the inputs of a region that runs again."""


SAVED: Any = look_up("_C._autograd.SavedTensor")
"""Type of what keeps a tensor for backward, in a node or, by torch's checkpoint, outside of one."""


class SavedValue(NamedTuple):
    """What a node, or torch's checkpoint, keeps of one tensor.

    Attributes:
        data: the tensor, or what the hooks that were on have made of it.
        hook: the one that makes the tensor again; None if there were no hooks.
        of_checkpoint: whether the node is one by which torch's checkpoint keeps inputs.
    """

    data: Any
    hook: Any
    of_checkpoint: bool


def saved_values(tensors: Iterable[torch.Tensor]) -> Iterator[SavedValue]:
    """Return what is kept by all nodes that the gradients of these tensors go through.

    Nothing where torch does not show what a node keeps. What a backward has used is kept no more.
    """
    waiting = [_node_of(tensor) for tensor in tensors]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [reached for reached, _ in node.next_functions]
        of_checkpoint = issubclass(getattr(node, "_forward_cls", object), _CHECKPOINTS)
        kind: Any = type(node)
        for name in _fields(kind):
            for saved in _saved_in(node, name):
                yield from value_in(saved, of_checkpoint=of_checkpoint)


def value_in(saved: Any, *, of_checkpoint: bool) -> Iterator[SavedValue]:
    """Return what is in an instance of `SAVED`; nothing where torch does not show it."""
    data = getattr(saved, "data", None)
    if data is not None:
        yield SavedValue(data, getattr(saved, "unpack_hook", None), of_checkpoint)


def _node_of(tensor: torch.Tensor) -> Any:
    try:
        return tensor.grad_fn
    except Exception:  # of a class of anybody's
        return None


@cache
def _fields(kind: Any) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def _saved_in(node: Any, name: str) -> Iterable[Any]:
    try:
        found = getattr(node, name)
    except RuntimeError:  # a backward has used it
        return ()
    return found if isinstance(found, (list, tuple)) else (found,)
