"""What is known of a parameter before it is placed: name, shape, stride, dtype.

Rule 1: a spec's stride is dense. A parameter that leaves holes in memory (a column slice) or
maps several indices to one element (an expanded tensor) is packed, as `torch.clone` packs it.
Rule 2: a tied parameter has one spec. Its name is the first one met in the module walk; the
others are its aliases.
Rule 3: elements are numbered in memory order. "Element 5 of w" is the sixth element of w's
dense memory, whatever its stride.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .._errors import ParameterError


@dataclass(frozen=True)
class ParamSpec:
    """One parameter, without its values.

    Args:
        name: first qualified name in the module walk (Rule 2).
        shape: sizes; `()` for a scalar.
        dtype: any torch dtype.
        stride: elements; left out, or not dense (Rule 1), it is made dense.
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
    """The row-major stride of a shape, elements."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def dense_stride(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    """Keep a stride that fills memory without holes; otherwise pack it in the same order.

    Example:
        >>> dense_stride((4, 3), (1, 4)), dense_stride((4, 3), (6, 1))
        ((1, 4), (3, 1))
    """
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


def spec_of(name: str, tensor: Tensor, *, aliases: tuple[str, ...] = ()) -> ParamSpec:
    """Describe one tensor; reads no values, so a meta tensor will do."""
    return ParamSpec(
        name, tuple(tensor.shape), tensor.dtype, tensor.stride(), tensor.requires_grad, aliases
    )


def collect_params(
    module: nn.Module, *, ignored: Iterable[Tensor] = ()
) -> tuple[tuple[ParamSpec, ...], tuple[nn.Parameter, ...]]:
    """List a module's parameters once each, in the order of the module walk.

    Args:
        module: the root; names are relative to it.
        ignored: parameters to leave out, such as those of a nested unit.

    Returns:
        Specs and parameters, of the same length; a tied parameter is there once (Rule 2).

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
    specs = tuple(
        spec_of(first, param, aliases=tuple(others)) for param, (first, *others) in names.items()
    )
    return specs, tuple(names)


def place_of(module: nn.Module, name: str) -> tuple[str, nn.Module, str]:
    """Where a qualified name below a module leads: the path of its owner, the owner, the attribute.

    Example:
        >>> place_of(nn.Sequential(nn.Linear(2, 3)), "0.bias")
        ('0', Linear(in_features=2, out_features=3, bias=True), 'bias')
    """
    path, _, attribute = name.rpartition(".")
    return path, module.get_submodule(path), attribute


def check_one_device(specs: tuple[ParamSpec, ...], params: tuple[nn.Parameter, ...]) -> None:
    """Refuse parameters on different devices: a segment is one storage.

    Raises:
        ParameterError: names the first parameter of each of two devices.
    """
    for spec, param in zip(specs, params, strict=True):
        if param.device != params[0].device:
            raise ParameterError(
                f"flat_param.flatten: parameter '{spec.name}' is on {param.device} and "
                f"'{specs[0].name}' on {params[0].device}, but one flat tensor is on one device. "
                "Move the module first, or flatten its parts."
            )


def check_grads(specs: tuple[ParamSpec, ...], params: tuple[nn.Parameter, ...]) -> None:
    """Refuse a gradient of another shape than its parameter's, as adding to it would fail.

    Raises:
        ParameterError: names the parameter and both shapes.
    """
    for spec, param in zip(specs, params, strict=True):
        grad = param.grad
        if grad is not None and tuple(grad.shape) != spec.shape:
            raise ParameterError(
                f"flat_param.flatten: parameter '{spec.name}' has shape {spec.shape} and a "
                f"gradient of shape {tuple(grad.shape)}, but they must match. Set its gradient to "
                "None after changing its shape."
            )
