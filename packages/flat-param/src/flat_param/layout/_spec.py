"""A parameter without its values: name, shape, stride, dtype.

- A spec's stride is dense. A parameter with holes in memory (a column slice) or with several
  indices for one element (an expanded tensor) is packed, as `torch.clone` packs it.
- A tied parameter has one spec, with its first name in the module walk; others are aliases.
- Elements are numbered in memory order, whatever the stride.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .._errors import ParameterError


@dataclass(frozen=True)
class ParamSpec:
    """One parameter, without its values.

    Args:
        name: first qualified name in the module walk.
        shape: sizes; `()` for a scalar.
        dtype: any torch dtype.
        stride: elements; made dense if it is not.
        requires_grad: trainable or frozen.
        aliases: the other names of a tied parameter.

    Example:
        >>> ParamSpec("w", (3, 2), torch.float32).stride
        (2, 1)
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...] = ()
    requires_grad: bool = True
    aliases: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        object.__setattr__(self, "stride", dense_stride(self.shape, self.stride))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def names(self) -> tuple[str, ...]:
        """The name and its aliases."""
        return (self.name, *self.aliases)


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the row-major stride of a shape, in elements."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def dense_stride(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    """Keep a stride that fills memory without holes; otherwise pack it in the same order."""
    expanded = any(step == 0 and size > 1 for step, size in zip(stride, shape, strict=False))
    if len(stride) != len(shape) or expanded:
        return contiguous_stride(shape)
    if 0 in shape:
        return stride
    inner_first = sorted(range(len(shape)), key=lambda dim: (stride[dim], -dim))
    packed, step = list(stride), 1
    for dim in inner_first:
        if shape[dim] > 1:
            packed[dim] = step
            step *= shape[dim]
    return tuple(packed)


def collect_params(
    module: nn.Module, *, ignored: Iterable[Tensor] = ()
) -> tuple[tuple[ParamSpec, ...], tuple[nn.Parameter, ...]]:
    """List a module's parameters once each, in the order of the module walk.

    Args:
        module: the root; names are relative to it.
        ignored: parameters to leave out, such as those of a nested unit.

    Returns:
        Specs and parameters, of the same length; a tied parameter is there once.

    Example:
        >>> specs, params = collect_params(nn.Linear(2, 3))
        >>> [spec.name for spec in specs]
        ['weight', 'bias']
    """
    skip = {id(tensor) for tensor in ignored}
    names: dict[nn.Parameter, list[str]] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        if id(param) not in skip:
            names.setdefault(param, []).append(name)
    specs = []
    for param, (first, *aliases) in names.items():
        shape, stride, trainable = tuple(param.shape), param.stride(), param.requires_grad
        specs.append(ParamSpec(first, shape, param.dtype, stride, trainable, tuple(aliases)))
    return tuple(specs), tuple(names)


def place_of(module: nn.Module, name: str) -> tuple[str, nn.Module, str]:
    """Path of the owner, owner and attribute of a qualified name below a module."""
    path, _, attribute = name.rpartition(".")
    return path, module.get_submodule(path), attribute


def check_one_device(
    function: str, specs: Sequence[ParamSpec], devices: Sequence[torch.device]
) -> None:
    """Refuse parameters on different devices: a segment is one storage."""
    for spec, device in zip(specs, devices, strict=True):
        if device != devices[0]:
            raise ParameterError(
                f"flat_param.{function}: parameter '{spec.name}' is on {device} and "
                f"'{specs[0].name}' on {devices[0]}, but one flat tensor is on one device. "
                "Move the module first."
            )


def check_grads(specs: tuple[ParamSpec, ...], params: tuple[nn.Parameter, ...]) -> None:
    """Refuse a gradient of another shape than its parameter's, as adding to it would fail."""
    for spec, param in zip(specs, params, strict=True):
        grad = param.grad
        if grad is not None and tuple(grad.shape) != spec.shape:
            raise ParameterError(
                f"flat_param.flatten: parameter '{spec.name}' has shape {spec.shape} and a "
                f"gradient of shape {tuple(grad.shape)}, but they must match. Set its gradient to "
                "None after changing its shape."
            )
