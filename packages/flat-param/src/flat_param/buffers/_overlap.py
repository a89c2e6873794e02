"""Tensors that share memory without being the same object.

Moving one of them into a buffer would separate it from the other silently.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from .._errors import ParameterError
from ._dtensors import local_of


def check_apart(caller: str, module: nn.Module, params: Sequence[nn.Parameter]) -> None:
    """Refuse parameters that share memory with another parameter or with a buffer.

    Args:
        caller: the public function, for the message.
        module: whose names and buffers count.
        params: parameters to move; one object under two names is tied, not shared.

    Raises:
        ParameterError: names both.
    """
    moving = {id(local_of(param)) for param in params}
    tensors: list[tuple[str, Tensor]] = [
        (f"parameter '{name}'", local_of(param)) for name, param in module.named_parameters()
    ]
    tensors += [(f"buffer '{name}'", local_of(each)) for name, each in module.named_buffers()]
    for (first, one), (second, other) in _overlapping(tensors):
        if id(one) in moving or id(other) in moving:
            raise ParameterError(
                f"flat_param.{caller}: {first} and {second} share memory, but a flat buffer has "
                "one place for each parameter. Register one Parameter object under both names, or "
                "clone one."
            )


def _overlapping(
    named: Sequence[tuple[str, Tensor]],
) -> Iterator[tuple[tuple[str, Tensor], tuple[str, Tensor]]]:
    """Pairs that overlap, found by one walk through memory."""
    with_memory = [pair for pair in named if _has_memory(pair[1])]
    open_: list[tuple[str, Tensor]] = []
    for pair in sorted(with_memory, key=lambda pair: pair[1].data_ptr()):
        start, _ = _span(pair[1])
        open_ = [other for other in open_ if _span(other[1])[1] > start]
        yield from ((other, pair) for other in open_ if _overlap(other[1], pair[1]))
        open_.append(pair)


def _overlap(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors whose spans overlap share an element; two columns of a matrix do not."""
    (start, stop), (other_start, other_stop) = _span(first), _span(second)
    origin, size = min(start, other_start), first.itemsize
    apart = (start - other_start) % size or size != second.itemsize
    if apart or (_dense(first) and _dense(second)):
        return True
    # One has holes: mark the elements of the first, and look at those of the second.
    marks = torch.zeros((max(stop, other_stop) - origin) // size, dtype=torch.bool)
    for tensor in (first, second):
        places = marks.as_strided(
            tensor.shape, tensor.stride(), (tensor.data_ptr() - origin) // size
        )
        if places.any():
            return True
        places.fill_(True)
    return False


def _has_memory(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and tensor.numel() > 0 and tensor.device.type != "meta"


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return a tensor's first byte, and the byte after its last."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    reach = sum((size - 1) * step for size, step in pairs) + 1
    return tensor.data_ptr(), tensor.data_ptr() + reach * tensor.itemsize


def _dense(tensor: Tensor) -> bool:
    start, stop = _span(tensor)
    return stop - start <= tensor.numel() * tensor.itemsize
