"""Functions whose calls are made again for results that no gradient flows to, by name.

They give the same bits for the same operands, draw nothing, and write to nothing.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch

from ...._torch_compat import is_fake
from ..._guards import unnoticed

LEAST_BYTES = 1024
"""Of a value that is made again with what a mode saw: for less it does not pay."""

Again = tuple[Any, tuple[Any, ...], dict[str, Any]]
"""What is called in place of a call, with which arguments."""


def _normed(
    x: torch.Tensor,
    normalized_shape: Any,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Any:
    """Run a layer norm with the statistics that it saves for its second and third result."""
    del cudnn_enable
    return torch.native_layer_norm(x, list(normalized_shape), weight, bias, eps)


def _batch_normed(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Again | None:
    """Make the statistics of a batch again, with its result; nothing is written to.

    On the CPU: elsewhere the operator is a library's, which saves more.
    """
    del function
    given = {**_BATCH_NORM, **dict(zip(_BATCH_NORM, args, strict=False)), **kwargs}
    x = given["input"]
    if not (given["training"] and _large((x,)) and x.is_cpu):
        return None
    own = (x, given["weight"], given["bias"], None, None, True, 0.0, given["eps"])
    return torch.native_batch_norm, own, {}


_BATCH_NORM = {
    **dict.fromkeys(("input", "running_mean", "running_var", "weight", "bias")),
    "training": False,
    "momentum": 0.1,
    "eps": 1e-5,
}
"""What `batch_norm` is given, in order."""


def _large(args: tuple[Any, ...]) -> bool:
    tensor = args[0] if args else None
    if not isinstance(tensor, torch.Tensor):
        return False
    return tensor.numel() * tensor.element_size() >= LEAST_BYTES


def _norm(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Again | None:
    """Make the statistics that a layer norm saves again, with its result."""
    del function
    return (_normed, args, kwargs) if _large(args) else None


def _chosen(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Again | None:
    """Make indices again."""
    return (function, args, kwargs) if _large(args) and args[0].is_cpu else None


def _dropout(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Again | None:
    """Draw a mask again from the state of the random numbers, where that is much smaller.

    On the CPU, where torch makes one.
    """
    del function
    x, p, training, *_ = (*args, *_DROPPED[len(args) :]) if len(args) < 4 else args
    p, training = kwargs.get("p", p), kwargs.get("training", training)
    if not (_large(args) and training and 0 < p < 1) or x.numel() < MASK_NUMEL or not x.is_cpu:
        return None
    if is_fake(x) or not (x.is_contiguous() or x.is_contiguous(memory_format=torch.channels_last)):
        return None
    state = unnoticed(RandomState, torch.default_generator.get_state())
    return partial(_drawn, state, x.size(), x.stride(), x.dtype, p), (), {}


class RandomState:
    """The state of the CPU's generator in half the bytes, where its words have 32 bits of use."""

    __slots__ = ("_halves", "_others")

    def __init__(self, state: torch.Tensor) -> None:
        halves = state.view(torch.int32).view(-1, 2)
        used = halves[:, 1].nonzero().flatten().tolist()
        self._others: dict[int, int] | None = None
        self._halves = halves
        if len(used) <= MOST_WHOLE_WORDS:
            self._others = {at: int(halves[at, 1]) for at in used}
            self._halves = halves[:, 0].clone()

    @property
    def nbytes(self) -> int:
        """What it takes."""
        return self._halves.untyped_storage().nbytes()

    def whole(self) -> torch.Tensor:
        """Return the state."""
        halves = self._halves
        if self._others is not None:
            halves = torch.stack((halves, torch.zeros_like(halves)), 1)
            for at, other in self._others.items():
                halves[at, 1] = other
        return halves.view(torch.uint8).flatten()


MOST_WHOLE_WORDS = 16
"""Words of a state that need 64 bits: the seed, a normal number that was left over."""


def _drawn(
    state: RandomState, size: torch.Size, stride: Any, dtype: torch.dtype, p: float
) -> torch.Tensor:
    generator = torch.Generator()
    generator.set_state(state.whole())
    mask = torch.empty_strided(size, stride, dtype=dtype)
    return mask.bernoulli_(1 - p, generator=generator).div_(1 - p)


_DROPPED = (None, 0.5, True, False)
MASK_NUMEL = 1 << 16
"""Elements of a mask that takes thrice the 2,528 bytes of a state, as bits."""

SAVED = {
    "layer_norm": ((1, 2), _norm, 1),
    "batch_norm": ((1, 2), _batch_normed, 1),
    "topk": ((1,), _chosen, 1),
    "sort": ((1,), _chosen, 1),
    "dropout": ((-1,), _dropout, 32),
}
"""Functions that save results without a gradient while they run: which, in order (-1 for what is no
tuple); what makes them again; what part of their bytes would else be kept, as a divisor."""

ON_CPU = frozenset({"sort", "topk", "argsort", "cumsum", "histc", "bincount"})
"""Functions that may give another of several right answers elsewhere, or other sums."""

WRITTEN_LATER = frozenset({"empty_like", "new_empty", "empty", "zeros_like"})
"""Functions whose result is there to be written to: it is known as the region's own."""

AGAIN = frozenset(
    {
        *("add", "sub", "mul", "div", "true_divide", "floor_divide", "remainder", "pow", "neg"),
        *("__floordiv__", "__rsub__", "__rtruediv__", "__rfloordiv__", "__mod__", "__rpow__"),
        *("exp", "log", "sin", "cos", "sqrt", "rsqrt", "reciprocal", "abs", "floor", "ceil"),
        *("round", "clamp", "where", "masked_fill", "outer", "triu", "tril", "one_hot"),
        *("eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not"),
        *("__and__", "__or__", "__invert__", "__eq__", "__ne__", "__lt__", "__gt__"),
        *("float", "double", "half", "bfloat16", "int", "long", "bool", "to", "type"),
        *("__getitem__", "reshape", "view", "flatten", "unsqueeze", "squeeze", "expand"),
        *("expand_as", "transpose", "permute", "t", "repeat", "contiguous", "clone", "detach"),
        *("cat", "concat", "stack", "chunk", "split", "unbind", "flip", "roll", "gather"),
        *("index_select", "arange", "sum", "mean", "amax", "amin", "argmax"),
        *ON_CPU,
        *WRITTEN_LATER,
    }
)
"""Functions that are called again, where no gradient flows to what they return."""

_OPERATORS = {
    "layer_norm": ("native_layer_norm",),
    "batch_norm": ("native_batch_norm",),
    "dropout": ("bernoulli_", "native_dropout", "dropout"),
    "__floordiv__": ("floor_divide", "div"),
    "__rfloordiv__": ("floor_divide", "div"),
    "__rtruediv__": ("reciprocal", "div"),
    "__rsub__": ("rsub",),
    "__rpow__": ("pow",),
    "__mod__": ("remainder",),
    "__invert__": ("bitwise_not",),
    "__getitem__": ("index", "select", "slice"),
    "true_divide": ("div",),
    "concat": ("cat",),
    **dict.fromkeys(("float", "double", "half", "bfloat16", "int", "long", "bool"), ("_to_copy",)),
    **dict.fromkeys(("to", "type"), ("_to_copy",)),
    **dict.fromkeys(("reshape", "flatten", "contiguous"), ("clone",)),
}


@cache
def operators_of(name: str) -> tuple[Any, ...]:
    """The operators that a function of this name may run, as policies know them."""
    names = _OPERATORS.get(name, (name.strip("_"), name))
    found = [getattr(torch.ops.aten, each, None) for each in names]
    packets = [each for each in found if isinstance(each, torch._ops.OpOverloadPacket)]
    return tuple(getattr(packet, each) for packet in packets for each in packet.overloads())


HEEDED = frozenset({*SAVED, *AGAIN})
"""All whose calls are noted."""
