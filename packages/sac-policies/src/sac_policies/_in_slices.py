"""Run a function over slices of its arguments, and each slice again in backward.

Intermediate results, such as logits over a vocabulary, exist for one slice at a time, in forward
and in backward. Only the arguments, of which slices are views, and the results are kept for
backward.

The gradients of a sliced argument are combined in one node, for any number of slices: slices are
made by one split.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import add
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from ._errors import SlicesError, shown

T = TypeVar("T")
_M = TypeVar("_M", bound=nn.Module)


def in_slices(function: Callable[..., T], chunks: int, dim: int = 0) -> Callable[..., T]:
    """Make a function that runs `function` on one slice of its tensors after the other.

    The slices run again in backward, so at most one slice's intermediates are alive. Results equal
    those of the whole function up to rounding: sums over slices, also gradients of weights, are
    added in another order.

    Args:
        function: called with slices of the positional tensors, and all other arguments unchanged.
            It returns a sum over its slice, as a tensor without dimensions; or a tensor with the
            slice's size in dimension `dim`, which is concatenated over all slices;
            or a tuple of such tensors. Tensors without dimensions are added, so means of slices are
            refused: return the sum and the count, and divide.
        chunks: number of slices; their sizes differ by at most one.
        dim: dimension of the positional tensors that is cut. All must have the same size there.

    Returns:
        A function with the arguments of `function`: positional tensors are cut, other positional
        arguments and keyword arguments are passed whole to each slice.

    Raises:
        SlicesError: `chunks` or `dim` is invalid. Raised by the call: there is no positional
            tensor, sizes differ, or a result is a mean, or neither a sum nor as long as its slice.

    Example:
        >>> head, hidden = torch.nn.Linear(4, 1000), torch.randn(6, 4, requires_grad=True)
        >>> labels = torch.tensor([1, 2, -100, 4, 5, 6])
        >>> def loss_of(hidden, labels):
        ...     sums = torch.nn.functional.cross_entropy(head(hidden), labels, reduction="sum")
        ...     return sums, (labels != -100).sum()
        >>> loss, count = in_slices(loss_of, 3)(hidden, labels)
        >>> (loss / count).backward()
        >>> hidden.grad.shape, int(count)
        (torch.Size([6, 4]), 5)
    """
    if not callable(function):
        raise SlicesError(
            f"sac_policies.in_slices: function is {shown(function)}, but it must be callable. "
            "Pass the function first, then the number of slices."
        )
    _check_number("chunks", chunks, least=1)
    _check_number("dim", dim)

    return _InSlices(function, chunks, dim)


def in_slices_(module: _M, chunks: int, dim: int = 0) -> _M:
    """Run a module in slices of its input, in place.

    Its forward is replaced by `in_slices(forward, chunks, dim)`. Copies, pickled modules and those
    of `torch.save` run in slices of their own weights. `state_dict` and names do not change.

    Args:
        module: works on each slice by itself, such as the MLP of a transformer layer.
        chunks: number of slices; 1 restores the plain forward.
        dim: dimension of the positional tensors that is cut.

    Returns:
        The module.

    Raises:
        SlicesError: `module` is not a module, or `chunks` or `dim` is invalid.

    Example:
        >>> mlp = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Linear(16, 4))
        >>> in_slices_(mlp, 3)(torch.randn(6, 4)).shape
        torch.Size([6, 4])
    """
    if not isinstance(module, nn.Module):
        raise SlicesError(
            f"sac_policies.in_slices_: module is {shown(module)}, but its forward is replaced in "
            "place, so it must be an nn.Module. For a function use in_slices(function, chunks)."
        )
    forward: Any = module.forward
    plain = forward.function if isinstance(forward, _InSlices) else forward
    sliced = in_slices(plain, chunks, dim)
    if chunks > 1:
        module.forward = sliced
    elif isinstance(forward, _InSlices):
        del module.forward
        if module.forward != plain:  # it was replaced before, too
            module.forward = plain
    return module


class _InSlices:
    """A function in slices. A copy of a module copies it, with the bound method inside."""

    def __init__(self, function: Callable[..., Any], chunks: int, dim: int) -> None:
        self.function, self.chunks, self.dim = function, chunks, dim

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        sizes, parts = _cut(args, self.chunks, self.dim)
        results = [_run_slice(self.function, part, kwargs) for part in parts]
        lengths = {len(each) if isinstance(each, tuple) else -1 for each in results}
        if len(lengths) == 1 and isinstance(results[0], tuple):
            columns = zip(*results, strict=True)
            return tuple(_joined(list(column), sizes, self.dim) for column in columns)
        return _joined(results, sizes, self.dim)


def _check_number(name: str, value: object, least: int | None = None) -> None:
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if not is_int or (least is not None and value < least):  # type: ignore[operator]  # an int
        wanted = "an int" if least is None else f"an int of at least {least}"
        raise SlicesError(
            f"sac_policies.in_slices: {name} is {shown(value)}, but it must be {wanted}. "
            f"Pass for example {name}={least or 0}."
        )


def _cut(args: tuple[Any, ...], chunks: int, dim: int) -> tuple[list[int], list[tuple[Any, ...]]]:
    """Return the sizes of the slices, and the positional arguments of each."""
    tensors = [(at, each) for at, each in enumerate(args) if isinstance(each, torch.Tensor)]
    if not tensors:
        raise SlicesError(
            "sac_policies.in_slices: no positional argument is a tensor, but those are cut into "
            "slices. Pass them by position, and what belongs to all slices by keyword."
        )
    whole: dict[int, int] = {}
    for at, each in tensors:
        if not -each.dim() <= dim < each.dim():
            raise SlicesError(
                f"sac_policies.in_slices: argument {at} has shape {tuple(each.shape)}, which has "
                f"no dimension {dim} to cut. Pass it by keyword if it belongs to all slices."
            )
        whole[at] = each.shape[dim]
    if len(set(whole.values())) > 1:
        told = ", ".join(f"argument {at} has {size}" for at, size in whole.items())
        raise SlicesError(
            f"sac_policies.in_slices: sizes in dimension {dim} differ: {told}. They must be equal; "
            "pass by keyword what belongs to all slices."
        )
    size = next(iter(whole.values()))
    count = max(1, min(chunks, size))
    sizes = [size // count + (at < size % count) for at in range(count)]
    cut = {at: each.split(sizes, dim) for at, each in tensors}
    parts = [
        tuple(cut[at][number] if at in cut else each for at, each in enumerate(args))
        for number in range(count)
    ]
    return sizes, parts


def _run_slice(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)

    def call(*given: Any) -> Any:
        return function(*given, **kwargs)

    return torch_checkpoint(call, *args, use_reentrant=False)


def _joined(results: list[Any], sizes: list[int], dim: int) -> Any:
    """Add up sums, or concatenate tensors that are as long as their slice."""
    if all(isinstance(each, (int, float)) for each in results):
        return sum(results)
    if all(isinstance(each, torch.Tensor) for each in results):
        if all(each.dim() == 0 for each in results):
            if len(results) > 1 and _is_mean(results[0]):
                raise SlicesError(
                    "sac_policies.in_slices: the function returns a mean, but results of slices "
                    'are added. Return the sum (reduction="sum") and the count, and divide.'
                )
            return reduce(add, results)
        if all(_length(each, dim) == size for each, size in zip(results, sizes, strict=True)):
            return torch.cat(results, dim)
    found = [tuple(r.shape) if isinstance(r, torch.Tensor) else type(r).__name__ for r in results]
    raise SlicesError(
        f"sac_policies.in_slices: for slices of sizes {shown(sizes)} the function returned "
        f"{shown(found)}, but each result must be a sum (a tensor without dimensions, or a number) "
        f"or have its slice's size in dimension {dim}."
    )


_MEAN = 1
"""The value of `reduction` in nodes of losses."""


def _is_mean(result: torch.Tensor) -> bool:
    """Whether a scalar is a mean, or a multiple of one, by the nodes of its graph."""
    node = None if torch.compiler.is_compiling() else result.grad_fn
    while node is not None:
        if type(node).__name__.startswith("MeanBackward"):
            return True
        if hasattr(node, "_saved_reduction"):
            return bool(node._saved_reduction == _MEAN)
        above = [each for each, _ in node.next_functions if each is not None]
        is_linear = type(node).__name__.startswith(("Mul", "Div", "Neg", "ToCopy", "Alias"))
        node = above[0] if is_linear and len(above) == 1 else None
    return False


def _length(tensor: torch.Tensor, dim: int) -> int:
    return tensor.shape[dim] if -tensor.dim() <= dim < tensor.dim() else -1
