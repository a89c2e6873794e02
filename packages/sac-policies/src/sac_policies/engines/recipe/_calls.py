"""Sees what calls are given and return that the graph does not hold.

`x + 1.0` saves nothing, and its node has no edge to the number. A product that the policy keeps,
and that no node saves, is gone when a replay could have read it. A torch function mode around the
region sees both.

Rule 1. The mode costs some microseconds a call, so it is entered only for functions whose first
        forward had use for it (`_run`), or under plans that were made with it, and what it saw is
        used for large values only: what the others are kept for would not pay.
Rule 2. A tensor is taken as it was: small ones are copied, others must not be written to. One that
        takes half of what it is to save, or more, is of no use.
Rule 3. Where autocast may change what an operator reads, only operators are heeded of which it
        changes nothing.
Rule 4. What the policy keeps is kept for a replay if it is smaller than what would be kept else,
        and the function did not write to it in its first forward, where that is only tried.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..._torch_compat import node_number, sequence_number
from .._guards import is_small
from .untracked import _call_table
from .untracked._seen_calls import Untracked, is_autocast

WORTH_BYTES, WORTH = 16384, 1 / 256
"""The mode is worth its time for so many bytes of a forward, or for such a share of them."""

Node = Any  # torch.autograd.graph.Node
_NUMBERS = (int, float, complex)


@dataclass(frozen=True, slots=True)
class Constant:
    """One operand that its node does not know.

    Attributes:
        given: what the user gave: a number, a tensor, or None where `made` needs none.
        version: how often a tensor was written to by then.
        made: from what was given to what the operator read; None where they are the same.
    """

    given: Any
    version: int = 0
    made: Callable[[Any], torch.Tensor] | None = None

    @classmethod
    def of(cls, given: Any, made: Callable[[Any], torch.Tensor] | None = None) -> Constant | None:
        """Take note of an operand; None for what a replay could not read."""
        if isinstance(given, torch.Tensor):
            plain = type(given) in (torch.Tensor, torch.nn.Parameter)
            return cls(given, given._version, made) if plain and not given.requires_grad else None
        return cls(given, 0, made) if given is None or isinstance(given, _NUMBERS) else None

    @property
    def tensor(self) -> torch.Tensor | None:
        """What was given, where that is a tensor."""
        return self.given if isinstance(self.given, torch.Tensor) else None

    def read(self, given: Any) -> Any:
        """Return what the operator read, from what was given."""
        return given if self.made is None else self.made(given)

    def pays(self, size_bytes: int) -> bool:
        """Whether to hold it in place of a value of this size, and whether it is as it was."""
        tensor, is_large = self.tensor, size_bytes >= _call_table.LEAST_BYTES
        if tensor is None or not is_large:
            return is_large
        if tensor._version != self.version:
            return False
        return is_small(tensor) or 2 * tensor.untyped_storage().nbytes() <= size_bytes


Found = Iterator[tuple[int, int, Constant | None]]
Reader = Callable[[Node, int, tuple[Any, ...], dict[str, Any]], Found]
"""From the node of a result, the first number of a node that the call made, and its arguments."""


class Calls:
    """What was seen in one forward, by node.

    Attributes:
        kept_nothing: whether there is neither a result nor a name that the policy keeps.
        operands: what was given, by number of the node and position among its operands.
        untracked: the calls whose results have no node.
    """

    def __init__(self) -> None:
        self.kept_nothing = True
        self.untracked = Untracked()
        self.operands: dict[tuple[int, int], Constant] = {}
        self._results: dict[int, tuple[torch.Tensor, int]] = {}
        self._named: dict[int, tuple[torch.Tensor, int]] = {}
        self._masks: list[tuple[int, Constant | None]] = []
        self._tried: list[tuple[torch.Tensor, int]] = []

    def note(self, found: Found) -> None:
        """Note what a call was given."""
        for number, at, constant in found:
            if constant is not None:
                self.operands[number, at] = constant

    def returned(self, tensor: torch.Tensor) -> None:
        """Note what a call returned that the policy keeps."""
        if type(tensor) is torch.Tensor and tensor.output_nr == 0:
            self.kept_nothing = False
            self._results[node_number(tensor.grad_fn)] = tensor, tensor._version

    def name(self, tensor: torch.Tensor) -> None:
        """Note what the policy keeps by name."""
        if type(tensor) is torch.Tensor and tensor.output_nr == 0:
            self.kept_nothing = False
            self._named[node_number(tensor.grad_fn)] = tensor, tensor._version

    def named(self, number: int) -> torch.Tensor | None:
        """Return what is kept by name of a node, as long as nobody wrote to it."""
        found, version = self._named.get(number, (None, 0))
        return None if found is None or found._version != version else found

    @contextmanager
    def attending(self, mask: Constant | None) -> Iterator[None]:
        """Know the mask of an attention that runs: it saves results before it returns."""
        self._masks.append((sequence_number(), mask))
        try:
            yield
        finally:
            self._masks.pop()

    def operand(self, node: Node, number: int, at: int) -> Constant | None:
        """Return an operand of a node with this number, None where it was not seen."""
        if self._masks and at == 1 and type(node).__name__ == "AddBackward0":
            first, mask = self._masks[-1]
            if number >= first:
                self.note(iter([(number, at, mask)]))  # for who asks when it has ended
                return mask
        return self.operands.get((number, at))

    def result(self, number: int, size_bytes: int) -> torch.Tensor | None:
        """Return what the policy keeps of a node, if it pays for a value of this size (Rule 4)."""
        found, version = self._results.get(number, (None, 0))
        if found is None or size_bytes < _call_table.LEAST_BYTES or found._version != version:
            return None
        return found if found.untyped_storage().nbytes() < size_bytes else None

    def has_result(self, number: int) -> bool:
        """Whether a call returned what the policy keeps of a node."""
        return number in self._results

    def try_result(self, tensor: torch.Tensor) -> None:
        """Note what a later forward of the function would keep."""
        self._tried.append((tensor, tensor._version))

    @property
    def are_rewritten(self) -> bool:
        """Whether one of those was written to since."""
        return any(tensor._version != version for tensor, version in self._tried)

    def clear(self) -> None:
        """Let go of all."""
        self.kept_nothing = True
        seen = self._tried, self.operands, self._results, self._named, self._masks, self.untracked
        for each in seen:
            each.clear()


class CallsMode(TorchFunctionMode):
    """Notes what calls are given and return, for the nodes that they make.

    Args:
        seen: where to.
        keeps: tells of a result whether the policy keeps it.
        names: of the functions that are heeded; all that are of use unless it is given.
    """

    def __init__(
        self,
        seen: Calls,
        keeps: Callable[[torch.Tensor], bool] | None = None,
        names: frozenset[str] | None = None,
    ) -> None:
        super().__init__()
        self._seen, self._keeps = seen, keeps
        self._heeded = _HEEDED if names is None else names
        only_given = names is not None and names <= GIVEN | PRODUCTS
        self._call = _call if only_given else seen.untracked.call

    def heed_all(self) -> None:
        """Heed from now on all functions that are of use."""
        self._heeded, self._call = _HEEDED, self._seen.untracked.call

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        name = getattr(func, "__name__", "")
        if name not in self._heeded or torch.compiler.is_compiling():
            return func(*args, **given)
        if name == _ATTENTION:
            with self._seen.attending(_mask(args, given)):
                return func(*args, **given)
        first = sequence_number()
        out = self._call(func, name, args, given)
        node = getattr(out, "grad_fn", None)
        if node is not None:
            reader = _READERS.get(name)
            if reader is not None:
                self._seen.note(reader(node, first, args, given))
            if name in PRODUCTS and self._keeps is not None and self._keeps(out):
                self._seen.returned(out)
        return out


def _call(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a call, and take no note of what it returns."""
    return func(*args, **kwargs)


def _operands(
    kinds: tuple[str, ...], operands: tuple[tuple[int, tuple[str, ...]], ...], casts: bool = False
) -> Reader:
    """Of calls that are one operator: its operands in the order of its rule.

    Args:
        kinds: nodes that the call may make.
        operands: by operand: where it stands among the arguments, and names it is given by.
        casts: whether autocast changes what the operator reads (Rule 3).
    """

    def read(node: Node, first: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Found:
        number = node_number(node)
        if number < first or type(node).__name__ not in kinds or (casts and is_autocast()):
            return
        edges = node.next_functions
        for at, (place, names) in enumerate(operands):
            if at < len(edges) and edges[at][0] is not None:
                continue
            named = (kwargs[name] for name in names if name in kwargs)
            value = args[place] if place < len(args) else next(named, None)
            if value is not None:
                yield number, at, Constant.of(value)

    return read


def _parts(kind: str) -> Reader:
    """Of calls that put a list of tensors together."""

    def read(node: Node, first: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Found:
        number = node_number(node)
        if number < first or type(node).__name__ != kind or is_autocast():
            return
        parts = args[0] if args else kwargs.get("tensors", ())
        edges = node.next_functions
        if len(parts) == len(edges):
            for at, (part, (maker, _)) in enumerate(zip(parts, edges, strict=True)):
                if maker is None:
                    yield number, at, Constant.of(part)

    return read


_RESHAPED = frozenset({"ViewBackward0", "UnsafeViewBackward0"})  # as `linear` does its product


def _linear(node: Node, first: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Found:
    """A bias without a gradient."""
    bias = args[2] if len(args) > 2 else kwargs.get("bias")
    if bias is None or bias.requires_grad or is_autocast():
        return
    while type(node).__name__ in _RESHAPED:
        node = node.next_functions[0][0]
    if type(node).__name__ == "AddmmBackward0" and node_number(node) >= first:
        yield node_number(node), 0, Constant.of(bias)


def _padded(node: Node, first: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Found:
    """What the edge is made of, zero unless it is given."""
    number = node_number(node)
    if number >= first and type(node).__name__ == "ConstantPadNdBackward0":
        value = args[3] if len(args) > 3 else kwargs.get("value")
        yield number, 1, Constant.of(0.0 if value is None else value)


_ATTENTION = "scaled_dot_product_attention"


def _mask(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Constant | None:
    """The mask that is added to scores, where attention runs as its parts."""
    named: Any = {**dict(zip(("query", "key", "value", "attn_mask"), args, strict=False)), **kwargs}
    query, key, mask = named.get("query"), named.get("key"), named.get("attn_mask")
    if is_autocast() or any(not isinstance(t, torch.Tensor) or t.is_nested for t in (query, key)):
        return None  # parts of nested ones have no mask in common
    lengths, dtype, device = (query.size(-2), key.size(-2)), query.dtype, query.device

    def made(allowed: torch.Tensor | None) -> torch.Tensor:
        if allowed is None:
            allowed = torch.ones(lengths, dtype=torch.bool, device=device).tril()
        elif allowed.dtype is not torch.bool:
            return allowed
        return torch.zeros_like(allowed, dtype=dtype).masked_fill_(~allowed, -math.inf)

    return Constant.of(mask, made)


_SUM = _operands(
    ("AddBackward0", "SubBackward0", "RsubBackward0", "RsubBackward1"),
    ((0, ("input",)), (1, ("other",))),
)
_WHERE = _operands(("WhereBackward0",), ((1, ("input", "self")), (2, ("other",))))
_FILLED = _operands(
    ("MaskedFillBackward0", "MaskedFillBackward1"), ((0, ("input",)), (2, ("value",)))
)
_ADDED = _operands(
    ("BaddbmmBackward0",),
    ((0, ("input",)), (1, ("batch1",)), (2, ("batch2",))),
    casts=True,
)
_PUT_TOGETHER = _parts("CatBackward0")

_READERS: dict[str, Reader] = {
    **dict.fromkeys(("add", "add_", "sub", "sub_", "subtract", "__rsub__", "rsub"), _SUM),
    **dict.fromkeys(("where",), _WHERE),
    **dict.fromkeys(("masked_fill", "masked_fill_"), _FILLED),
    **dict.fromkeys(("baddbmm", "baddbmm_"), _ADDED),
    **dict.fromkeys(("cat", "concat", "concatenate"), _PUT_TOGETHER),
    "stack": _parts("StackBackward0"),
    "linear": _linear,
    "pad": _padded,
}
"""By name of a function of torch."""

PRODUCTS = frozenset(
    {
        *("linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "baddbmm"),
        *("einsum", "conv1d", "conv2d", "conv3d"),
    }
)
"""Functions that return what policies mostly keep."""

GIVEN = frozenset({*_READERS, _ATTENTION})  # what their nodes do not know
_HEEDED = frozenset({*GIVEN, *PRODUCTS, *_call_table.HEEDED})
