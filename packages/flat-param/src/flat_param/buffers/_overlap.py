"""Tensors that share memory without being the same object.

Moving one such tensor into a buffer would silently separate it from the others. Two columns of one
matrix count as sharing, too: their elements alternate in one stretch of memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import itemgetter, mul

import torch
from torch import Tensor, nn

from .._errors import ParameterError
from ._dtensors import local_of


def check_apart(caller: str, module: nn.Module, params: Sequence[nn.Parameter]) -> None:
    """Refuse parameters that share memory with another parameter or with a buffer.

    Args:
        caller: the public function, for the message.
        module: the module with the names and buffers.
        params: parameters to move; one object under two names is tied, not shared.

    Raises:
        ParameterError: names both.
    """
    moving = {id(local_of(param)) for param in params}
    tensors: list[tuple[str, Tensor]] = [
        (f"parameter '{name}'", local_of(param)) for name, param in module.named_parameters()
    ]
    tensors += [(f"buffer '{name}'", local_of(each)) for name, each in module.named_buffers()]
    for (*_, first, one), (*_, second, other) in _overlapping(tensors):
        if id(one) in moving or id(other) in moving:
            raise ParameterError(
                f"flat_param.{caller}: {first} and {second} share memory, but a flat buffer has "
                "one place for each parameter. Register one Parameter object under both names, or "
                "clone one."
            )


def _overlapping(named: Sequence[tuple[str, Tensor]]) -> Iterator[tuple[_Span, _Span]]:
    """Pairs that overlap, found by one walk through memory."""
    spans = [_span(*pair) for pair in named if _has_memory(pair[1])]
    open_: list[_Span] = []
    for span in sorted(spans, key=itemgetter(0)):
        open_ = [other for other in open_ if other[1] > span[0]]
        for other in open_:
            yield other, span
        open_.append(span)


def _has_memory(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and tensor.numel() > 0 and tensor.device.type != "meta"


_Span = tuple[int, int, str, Tensor]
"""A tensor's first byte, the byte after its last, its name, and the tensor."""


def _span(name: str, tensor: Tensor) -> _Span:
    strides = tensor.stride()
    reach = sum(map(mul, tensor.shape, strides)) - sum(strides) + 1
    start = tensor.data_ptr()
    return start, start + reach * tensor.itemsize, name, tensor
