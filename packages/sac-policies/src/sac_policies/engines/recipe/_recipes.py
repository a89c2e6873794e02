"""What autograd holds in place of a saved tensor, and how each is read back.

Rule 1. What is kept is kept detached: the output a node saves for itself would otherwise hold
        the node that holds it, a cycle that no collector sees.
Rule 2. autograd checks versions only without hooks, so every kept tensor carries the version it
        had, and reading it checks.
Rule 3. A recipe points from consumer to producer, as the graph does. What belongs to a producer
        (`_Cell`) lies in `node.metadata` and points to no node; nothing is keyed by identity.
Rule 4. A node that saves its own result is not held by the recipe for it (Rule 1): it is the one
        that runs when the recipe is read.
Rule 5. A node reads what it saved as it is now, as in plain autograd; a replay reads it as it was,
        where that is small. Of every value that a recipe stands for a proof is kept, and what is
        rebuilt is held against it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.weak import TensorWeakRef

from ..._errors import MutationError, RecomputeError
from ..._frames import user_line
from ..._torch_compat import Hooks, current_node, is_freed, modes_entered, node_number
from ..._torch_compat._nested import shape_of
from ...policies._policies import Policy
from .._engine_disabled import own_work
from .._error_context import error_context
from .._guards import small_copy
from ._formats import TO_COPY, row_major_strides
from ._own_rules import rule_of, rules_behind
from ._proof import Proof, agree
from ._rebuilt import freed, rebuilt
from ._replay import Node, Rule, output_facts
from ._replay_entries import ReplayEntry
from ._shared_values import SharedValue, Unpacked, replays
from ._sources import living

Outers = dict[int, list[weakref.ref["Outer"]]]
"""Number after that of an autograd node to what it saved and its region did not make.

Weak: only the node holds what it saved, so that what no output needs any more goes with it.
"""
Reader = Callable[[Any], torch.Tensor]
Found = tuple[Node, ReplayEntry, str, bool, int]
"""A producer: its node, entry and device type, whether a view of what it made, its number."""
Kept = tuple[torch.Tensor, int, type]
"""A kept tensor, its version when it was saved, the type of the node that made it.

A plain tuple: most saved tensors are kept, and an object would double what that costs.
"""


def keep(tensor: torch.Tensor, node: Node) -> Kept:
    """Hold a tensor itself; a leaf stays itself, it holds no node."""
    kept = tensor if node is None else tensor.detach()
    return kept, tensor._version, type(node)


def reader(policy: Policy | None) -> Reader:
    """Make what returns the saved tensor behind what autograd holds.

    It raises MutationError where the tensor was changed in place since it was saved, and
    RecomputeError where its replay is not possible any more, or gives something else.

    Args:
        policy: what decided, for messages; None where a plan did.
    """

    def read(held: Any) -> torch.Tensor:
        kind = type(held)
        if kind is Outer:  # of most of what is kept: read here, for it costs a call less
            if held.copy is not None and replays.depth:
                return held.copy
            held = held.held
            kind = type(held)
        if kind is not tuple:
            return held.read()
        tensor, version, producer = held
        if tensor._version != version:
            raise mutated(shape_of(tensor), producer, policy)
        if replays.depth and is_freed(tensor):
            raise freed(tensor)
        return tensor

    return read


class Reconsidered:
    """A kept tensor that a recipe may take the place of when its forward has ended.

    Attributes:
        held: what is held of it, in the end.
        number: that after the node that saves it.
        is_result: whether that node made it.
        version: how often the tensor was written to when it was saved.
    """

    __slots__ = ("_reader", "held", "is_result", "number", "version")

    def __init__(
        self, held: Any, number: int, is_result: bool, version: int, reader: Reader
    ) -> None:
        self.held, self._reader = held, reader
        self.number, self.is_result, self.version = number, is_result, version

    def read(self) -> torch.Tensor:
        """Return the tensor."""
        return self._reader(self.held)


class Outer:
    """A kept tensor that its region did not make: a parameter, an input, a view of one.

    Attributes:
        held: what is held of any other kept tensor.
        copy: the tensor as it was, where it is small and a recipe may read it (Rule 5).
    """

    __slots__ = ("__weakref__", "_reader", "_tensor", "copy", "held")

    def __init__(self, held: Any, tensor: torch.Tensor, reader: Reader) -> None:
        self.held = held
        # What hooks moved away may go; what nobody has any more, nobody changes.
        self._tensor = None if type(held) is tuple else TensorWeakRef(tensor)
        self._reader = reader
        self.copy: torch.Tensor | None = None

    def protect(self) -> None:
        """Copy the tensor where it is small: a recipe is made that reads it."""
        tensor = self.held[0] if self._tensor is None else self._tensor()
        if self.copy is None and tensor is not None:
            self.copy = small_copy(tensor)

    @property
    def is_freed(self) -> bool:
        """Whether the tensor's memory was freed since it was saved."""
        tensor = self.held[0] if self._tensor is None else self._tensor()
        return tensor is not None and is_freed(tensor)

    def read(self) -> torch.Tensor:
        """Return the tensor: to a replay as it was if copied, to its own node as it is."""
        return self._reader(self)


class Hooked:
    """What the hooks around the region made of a kept tensor.

    Their unpacking may be costly, or allowed only once: a replay that reads the tensor before
    its own node does leaves it for that node. A node that saves its result leaves it for the
    replay of that.
    """

    __slots__ = ("cell", "held", "unpack")

    def __init__(self, tensor: torch.Tensor, node: Node, hooks: Hooks) -> None:
        self.held = hooks[0](keep(tensor, node)[0])
        self.unpack = hooks[1]
        self.cell = Unpacked(readers=1)

    def read(self) -> torch.Tensor:
        """Return the tensor, unpacked unless a replay left it."""
        return self.cell.get(self._unpacked)

    def _unpacked(self) -> torch.Tensor:
        return self.unpack(self.held)


class Recipe:
    """How to rebuild one saved tensor: its producer, and what the value was.

    Attributes:
        node: the producer; None where it is the one that saves the tensor (Rule 4).
        proof: what the bits were when it was saved.
        geometry: (size, stride, offset) of the tensor.
        is_part: whether the tensor may be a view of what a replay gives.
        storage_bytes: size of the storage that the view lies in; None where the proof tells.
        sources: what is kept for the replay.
    """

    __slots__ = (
        *("cell", "device", "entry", "geometry", "is_part"),
        *("node", "proof", "sources", "storage_bytes"),
    )

    def __init__(self, tensor: torch.Tensor, found: Found, cell: SharedValue, proof: Proof) -> None:
        self.node, self.entry, self.device, is_view, _ = found
        self.cell, self.proof = cell, proof
        self.geometry = (tensor.size(), tensor.stride(), tensor.storage_offset())
        self.is_part = is_part = is_view or cell.through
        self.sources = living(cell) if cell.sources else ()
        if cell.through and not is_view:
            cell.stride = self.geometry[1]
        elif is_view and proof is None and self.entry.rule.node == TO_COPY:
            cell.stride = row_major_strides(output_facts(self.node).shape)  # `may_lie_otherwise`
        if is_part:
            is_told = proof is not None and type(proof[0]) is int
            self.storage_bytes = None if is_told else tensor.untyped_storage().nbytes()

    def read(self, is_unseen: bool = False) -> torch.Tensor:
        """Return the value, replayed unless an earlier reader left it in the cell.

        Args:
            is_unseen: whether modes are looking away already.
        """
        if not is_unseen and modes_entered():
            with own_work():
                return self.read(is_unseen=True)
        cell = self.cell
        if cell.written is not None:
            return cell.written.as_strided(*self.geometry)
        value = cell.get(self._replay)
        if self.proof is not cell.proof:
            agree(cell.proof, self.proof, self._unseen)
        if not self.is_part:
            return value
        size = self.storage_bytes
        if size is not None and value.untyped_storage().nbytes() != size:
            raise self._other_size(value)
        return value.as_strided(*self.geometry)

    def _replay(self, node: Node = None) -> torch.Tensor:
        if node is None:
            node = self.node
        replays.depth += 1
        try:
            if not (torch.is_grad_enabled() or torch.is_autocast_enabled(self.device)):
                return rebuilt(node, self.cell, self._unseen)
            with torch.no_grad(), torch.autocast(self.device, enabled=False):
                return rebuilt(node, self.cell, self._unseen)
        except RuntimeError as error:
            if "after they have already been freed" not in str(error):
                raise
            raise RecomputeError(
                f"sac_policies.checkpoint: operator {self.entry.rule.op} is to be replayed, but an "
                f"earlier backward freed what it reads ({self._error_context()}). Pass "
                "retain_graph=True to that backward."
            ) from error
        finally:
            replays.depth -= 1

    def _other_size(self, value: torch.Tensor) -> RecomputeError:
        return RecomputeError(
            f"sac_policies.checkpoint: replay of {self.entry.rule.op} gives "
            f"{value.untyped_storage().nbytes()} bytes, but the forward gave {self.storage_bytes} "
            f'({self._error_context()}). Use engine="contexts" for this region.'
        )

    def _unseen(self) -> MutationError:
        rules = ", ".join(rules_behind(self.node or current_node()))
        doubted = rules and f", or what rebuilds {rules} gives something else now"
        return MutationError(
            f"sac_policies.checkpoint: replay of {self.entry.rule.op} for the saved tensor of "
            f"shape {tuple(self.geometry[0])} gives other values than the forward, but it must "
            "have the same: something wrote past autograd to the tensor, or to what the operator "
            f"reads{doubted} ({self._error_context()}). Change it after backward; if the region "
            'itself writes to it, write out-of-place or use engine="contexts".'
        )

    def _error_context(self) -> str:
        return _error_context(self.entry.policy, self.entry.rule)


class Result(Recipe):
    """The recipe for a result that its own node saves (Rule 4)."""

    __slots__ = ("number",)

    def __init__(self, tensor: torch.Tensor, found: Found, cell: SharedValue, proof: Proof) -> None:
        super().__init__(tensor, found, cell, proof)
        self.node, self.number = None, found[-1]

    def _replay(self, node: Node = None) -> torch.Tensor:
        node = current_node()
        if type(node).__name__ != self.entry.rule.node or node_number(node) != self.number:
            raise RecomputeError(
                f"sac_policies.checkpoint: the result of {self.entry.rule.op} is read outside of "
                f"its own backward, but its node is known only there ({self._error_context()}). "
                "Read the operator's output itself."
            )
        return super()._replay(node)


def reads_freed(outers: Outers, found: Found) -> bool:
    """Whether a replay of a node reads a parameter whose memory was freed since.

    A unit of FSDP inside a region frees its parameters when its own forward ends. They are there
    again when backward reaches the unit, and a replay for what follows it comes before that.
    """
    node, entry, _, _, number = found
    rule, read = entry.rule, outers.get(number + 1)
    for reference in read[: len(read) - rule.results] if read else ():
        outer = reference()
        if type(outer) is Outer and outer.is_freed:
            return True
    leaf = None if rule.leaf is None else rule.leaf_of(node)
    return leaf is not None and is_freed(leaf)


def protect(cell: SharedValue, proof: Proof, outers: Outers | None, found: Found) -> None:
    """Note what a value was, once a recipe is made for it.

    What a replay of its node alone reads and the region did not make is copied, where it is small,
    unless nothing is compared: `outers` is None then.
    """
    cell.protected, cell.proof = True, proof
    if cell.through or outers is None:
        return
    node, entry, _, _, number = found
    rule, read = entry.rule, outers.get(number + 1)
    for reference in read[: len(read) - rule.results] if read else ():
        outer = reference()
        if outer is not None:
            outer.protect()
    leaf = None if rule.leaf is None else rule.leaf_of(node)
    if leaf is not None:
        cell.leaf = small_copy(leaf)


def _error_context(policy: Policy | None, rule: Rule | None) -> str:
    if policy is None:
        return f"at {user_line()}; rule of a budget plan"
    return error_context(policy, None if rule is None else rule.op)


def mutated(shape: tuple[int, ...], producer: type, policy: Policy | None) -> MutationError:
    """Make the error for a kept tensor that was written to.

    Args:
        shape: of the tensor.
        producer: type of the node that made it.
        policy: what decided to keep it; None where a plan did.
    """
    made = "" if producer is type(None) else f" made by {producer.__name__[: -len('Backward0')]}"
    return MutationError(
        f"sac_policies.checkpoint: saved tensor of shape {tuple(shape)}{made} was changed "
        "in place after it was saved, but backward needs it as it was (read "
        f"{_error_context(policy, rule_of(producer))}). "
        "Use the out-of-place operator, or change it after backward."
    )
