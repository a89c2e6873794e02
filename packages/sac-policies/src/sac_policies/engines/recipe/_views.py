"""Views taken again: from the node that knows how, and its input's value, to its output.

A view that autograd saved itself is laid over the rebuilt storage as it lay before. These are
for views on the way to an operand that nobody saved.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ._replay import Node, output_facts

Take = Callable[[Node, torch.Tensor, int], torch.Tensor]

_MOST = 2**62
"""Above it an end is that of the dimension."""


def signed(word: int) -> int:
    """Read an int64 that the node's getter returns without its sign."""
    return word - 2**64 if word >= 2**63 else word


def optional(word: int | None) -> int | None:
    """Do the same; None stays, for what C++ has left out."""
    return None if word is None else signed(word)


def signed_all(words: tuple[int, ...] | None) -> list[int]:
    """Do the same for each of several."""
    return [] if words is None else [signed(each) for each in words]


def _viewed(node: Node, value: torch.Tensor, output: int) -> torch.Tensor:
    return value.view(output_facts(node, output).shape)


def _expanded(node: Node, value: torch.Tensor, output: int) -> torch.Tensor:
    return value.expand(output_facts(node, output).shape)


def _sliced(node: Node, value: torch.Tensor, output: int) -> torch.Tensor:
    start, end = optional(node._saved_start), optional(node._saved_end)
    end = None if end is None else min(end, _MOST)
    return torch.ops.aten.slice(value, signed(node._saved_dim), start, end, node._saved_step)


def _strided(node: Node, value: torch.Tensor, output: int) -> torch.Tensor:
    offset = node._saved_storage_offset
    return torch.as_strided(value, node._saved_size, signed_all(node._saved_stride), offset)


_TAKES: dict[str, Take] = {
    "Alias": lambda n, v, at: v,
    "AsStrided": _strided,
    "Diagonal": lambda n, v, at: v.diagonal(
        signed(n._saved_offset), signed(n._saved_dim1), signed(n._saved_dim2)
    ),
    "Expand": _expanded,
    "Permute": lambda n, v, at: v.permute(signed_all(n._saved_dims)),
    "ReshapeAlias": _viewed,
    "Select": lambda n, v, at: v.select(signed(n._saved_dim), signed(n._saved_index)),
    "Slice": _sliced,
    "Split": lambda n, v, at: v.split(n._saved_split_size, signed(n._saved_dim))[at],
    "SplitWithSizes": lambda n, v, at: v.split(
        signed_all(n._saved_split_sizes), signed(n._saved_dim)
    )[at],
    "Squeeze": lambda n, v, at: v.squeeze(),
    "T": lambda n, v, at: v.t(),
    "Transpose": lambda n, v, at: v.transpose(signed(n._saved_dim0), signed(n._saved_dim1)),
    "Unbind": lambda n, v, at: v.unbind(signed(n._saved_dim))[at],
    "UnsafeSplit": lambda n, v, at: v.split(n._saved_split_size, signed(n._saved_dim))[at],
    "UnsafeView": _viewed,
    "Unsqueeze": lambda n, v, at: v.unsqueeze(signed(n._saved_dim)),
    "View": _viewed,
}

TAKES = {f"{name}Backward0": take for name, take in _TAKES.items()} | {
    "SqueezeBackward1": lambda n, v, at: v.squeeze(signed(n._saved_dim)),
    "SqueezeBackward2": lambda n, v, at: v.squeeze(tuple(signed_all(n._saved_dim))),
}
"""Name of a view's node to what takes the view again."""

VIEWS = frozenset(TAKES)
"""Nodes whose output shares the storage of their first input, at other sizes or strides."""

ROW_MAJOR = frozenset({"ViewBackward0", "UnsafeViewBackward0", "UnsqueezeBackward0"})
"""Views that keep the order of elements: such a view is contiguous where its base is."""
