"""Tensors that share memory without being the same object.

Moving one such tensor into a buffer would silently separate it from the others. Two columns of one
matrix count as sharing, too: their elements alternate in one stretch of memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

import torch
from torch import nn

from .._errors import ParameterError
from ._dtensors import local_of


def check_apart(caller: str, module: nn.Module, params: Sequence[nn.Parameter]) -> None:
    """Refuse `params` of a module that share memory with another parameter or with a buffer."""
    moving = {id(local_of(param)) for param in params}
    named = [(f"parameter '{name}'", local_of(param)) for name, param in module.named_parameters()]
    named += [(f"buffer '{name}'", local_of(each)) for name, each in module.named_buffers()]
    spans = []
    for name, tensor in named:
        if tensor.layout == torch.strided and tensor.numel() and tensor.device.type != "meta":
            steps = zip(tensor.shape, tensor.stride(), strict=True)
            reach = 1 + sum((size - 1) * stride for size, stride in steps)
            spans.append((tensor.data_ptr(), reach * tensor.itemsize, name, tensor))
    spans.sort(key=itemgetter(0))
    for index, (start, nbytes, first, one) in enumerate(spans):
        for at in range(index + 1, len(spans)):
            other_start, _, second, other = spans[at]
            if other_start >= start + nbytes:
                break
            if id(one) in moving or id(other) in moving:
                raise ParameterError(
                    f"flat_param.{caller}: {first} and {second} share memory, but a flat buffer "
                    "has one place for each parameter. Register one Parameter object under both "
                    "names, or clone one."
                )
