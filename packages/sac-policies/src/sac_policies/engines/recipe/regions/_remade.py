"""What a region keeps of a value without a gradient: calls that make it again, and what they read.

Rule 1. An operand is a number, what another such call makes, a parameter, or a value that the
        region keeps. One that nobody keeps costs its bytes: it is copied where it is small, and of
        no use where it takes half of what it is to save, or more.
Rule 2. What the policy saves of the operators of a call is not made again by it; it is read where
        it is. Nor is what a region around or inside this one called: they have policies of their
        own.
Rule 3. An operand that is to be rebuilt is read by a node that was made of it, and by no other:
        another backward may end before that one begins, and free what is read.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch

from ...._torch_compat import lies_in_storage
from ...._torch_compat._nested import shape_of
from ....policies._policies import Policy
from ....policies._views import Operator
from ..._guards import copied, is_small
from .._edges import Follower
from .._filled import LEAST_BYTES, LEAST_BYTES_OF_INTEGERS, Filled, Narrowed, filling_of, narrowed
from .._masks import Flags, Mask, bits_of, flags_of
from .._recipes import Reader, Reconsidered, mutated
from .._replay import Node
from .._replay_entries import Why
from .._shared_values import Source
from .._sources import Edges
from .._spans import SpanOutput, SpanValue, mapped
from .._stand_ins import StandIn
from ..untracked import _call_table
from ..untracked._call_table import operators_of
from ..untracked._seen_calls import Code, Given, Maker, Operand, Remade, SeenCall, part_of


class Keeper(Protocol):
    """What is asked here of a region."""

    edges: Edges
    outers: Any
    keep: Any
    read: Callable[[Any], torch.Tensor]

    def packed(self, tensor: torch.Tensor, number: int) -> Any:
        """What is held of a tensor that no node of the graph saves, for number 0."""

    def stuck(self, tensor: torch.Tensor) -> Why | None:
        """Why a tensor would be kept; None where it would not."""

    def saves(self, op: Operator, number: int) -> bool:
        """Whether the policy saves, or may save, what an operator made when this was next."""


def instead(
    region: Keeper, follow: Follower, tensor: torch.Tensor, number: int, policy: Policy | None
) -> StandIn | None:
    """What is held of a tensor without a gradient that need not be kept whole, None for others.

    Args:
        region: that would keep it.
        follow: keeps operands of what is made again.
        tensor: what is saved.
        number: that after the node that saves it.
        policy: what decided, for messages; None where a plan did.
    """
    made = remade(region, follow, tensor, number, policy)
    calls = region.edges.calls.untracked
    if made is not None:
        follow.used_bytes += made.saves_bytes
        # In its place among what the node saved of the region's own, for who leaves results out.
        region.outers.setdefault(number, []).append(weakref.ref(made))
        return made
    return shortened(tensor, region.keep, region.read, policy, is_own=calls.makes(tensor))


def shortened(
    tensor: torch.Tensor,
    keep: Callable[[torch.Tensor, Node], Any],
    read: Reader,
    policy: Policy | None,
    is_own: bool,
) -> StandIn | None:
    """Keep a tensor without a gradient as less than it is, where its values allow it.

    Args:
        tensor: that is saved.
        keep: keeps what stands for it.
        read: reads that.
        policy: what decided, for messages; None where a plan did.
        is_own: whether the region is known to have made it.
    """
    least = LEAST_BYTES if tensor.is_floating_point() else LEAST_BYTES_OF_INTEGERS
    if tensor.numel() * tensor.element_size() < least:
        return None
    changed = partial(mutated, shape_of(tensor), type(None), policy)
    try:
        bits = bits_of(tensor)
        if bits is not None:
            return Mask(tensor, bits[1], keep(bits[0], None), read)
        kind: type[Filled | Narrowed | Flags] = Filled
        less = filling_of(tensor)
        if less is None and tensor.dtype is torch.bool:
            kind, less = Flags, flags_of(tensor)
        elif less is None and is_own:
            kind, less = Narrowed, narrowed(tensor)
    except RuntimeError:
        if lies_in_storage(tensor):  # asked only here, for most do
            raise
        return None
    return None if less is None else kind(tensor, keep(less, None), read, changed)


def remade(
    region: Keeper, follow: Follower, tensor: torch.Tensor, number: int, policy: Policy | None
) -> Remade | None:
    """What is held of a tensor that calls make again, None for all others: as for `instead`."""
    calls = region.edges.calls.untracked
    maker = calls.saved(tensor, number)
    if maker is None or not lies_in_storage(tensor):
        return None
    made = _Resolve(region, follow).remade(tensor, maker, policy)
    if made is not None:
        calls.used.append(maker)
    return made


def _makes(maker: Maker) -> bool:
    """Whether a value lies in memory of its own, and not in that of what a call was given."""
    call: SeenCall = maker[0]
    while call.viewed is not None:
        before = call.viewed.maker
        if before is None:
            return False
        call = before[0]
    return True


def _stays(held: Any) -> bool:
    """Whether what is held of a value is the value, also when the forward has ended."""
    if isinstance(held, Reconsidered):
        return held.is_result  # then its source has it stay
    return not isinstance(held, (SpanOutput, SpanValue))


class NotToBeHadError(Exception):
    """An operand is not there when the call is made again."""


class Operands(ABC):
    """Finds operands, for one value."""

    _size_bytes, _is_result, _is_bound = 0, False, False

    def remade(self, tensor: torch.Tensor, maker: Maker, policy: Policy | None) -> Remade | None:
        """What is held of a tensor that calls make again; None where they cannot, or may not.

        Args:
            tensor: what is saved.
            maker: the call that made it.
            policy: what decided, for messages; None where a plan did.
        """
        self._size_bytes = tensor.untyped_storage().nbytes()
        call = maker[0]
        if self._size_bytes < _call_table.LEAST_BYTES or not (_makes(maker) and self.repeats(call)):
            return None
        self._is_result = bool(call.results)
        try:
            code = self.code(call)
        except NotToBeHadError:
            return None
        return Remade(tensor, code, maker, partial(mutated, tensor.shape, type(None), policy))

    @abstractmethod
    def repeats(self, call: SeenCall) -> bool:
        """Whether the region may make a call again (Rule 2)."""

    @abstractmethod
    def tracked(self, tensor: torch.Tensor) -> tuple[Source | None, bool]:
        """What is read of a value that a node made, and whether that stays as it is.

        None where it is not to be had, or where another node might free it (Rule 3).
        """

    @abstractmethod
    def kept(self, tensor: torch.Tensor) -> Source:
        """Keep another value, to be read."""

    def code(self, call: SeenCall) -> Code:
        """What makes a call's results again; the same for all who ask."""
        if call.code is None:
            if call.function is None:
                raise NotToBeHadError
            given = mapped(call.given, self._operand, Given)
            call.code = Code(call.function, given, self._is_bound)
        return call.code

    def _operand(self, given: Given) -> Operand:
        call, at = given.maker or (None, 0)
        if call is not None and self.repeats(call):
            return part_of(self._nested(call), at)
        tensor = given.tensor
        if tensor is None:
            raise NotToBeHadError
        return Operand(self._source(tensor))

    def _nested(self, call: SeenCall) -> Code:
        before, self._is_result = self._is_result, False
        code = self.code(call)
        self._is_result = before
        if code.is_bound:
            raise NotToBeHadError
        return code

    def _source(self, tensor: torch.Tensor) -> Source:
        if tensor.requires_grad and not tensor.is_leaf:
            source, stays = self.tracked(tensor)
            self._is_bound = self._is_bound or not stays
            if source is None or not (stays or self._is_result):
                raise NotToBeHadError
            return source
        if not tensor.requires_grad:
            small = is_small(tensor)
            size = tensor.nbytes if small else tensor.untyped_storage().nbytes()
            if 2 * size > self._size_bytes:
                raise NotToBeHadError
            if small:
                tensor = copied(tensor)
        return self.kept(tensor)


class _Resolve(Operands):
    """Finds operands for a region that decides."""

    def __init__(self, region: Keeper, follow: Follower) -> None:
        self._region, self._follow = region, follow

    def repeats(self, call: SeenCall) -> bool:
        """Whether the region may make a call again (Rule 2)."""
        region, first = self._region, call.first
        if self._follow.is_before(None, first) or region.edges.is_inside(first):
            return False
        return not any(region.saves(op, first) for op in operators_of(call.name))

    def tracked(self, tensor: torch.Tensor) -> tuple[Source | None, bool]:
        """What is kept of it, or else a recipe."""
        region, edges = self._region, self._region.edges
        key = tensor.grad_fn, tensor.output_nr
        edges.calls.untracked.read.add(key)
        held = edges.held(*key)
        # What another node reads is not to depend on what a plan keeps.
        stays = edges.is_held(*key) and _stays(held)
        if held is not None and (self._is_result or stays):
            return edges.source(*key, held, region.read), stays
        if self._is_result and region.stuck(tensor) is None:
            return Source(region.packed(tensor, 0), region.read), False
        return None, stays

    def kept(self, tensor: torch.Tensor) -> Source:
        """Keep another value, to be read."""
        return Source(self._follow.keep(tensor, None), self._region.read)
