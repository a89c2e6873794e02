"""What autograd holds in place of a saved tensor, and how each is read back.

Rule 1. What is kept is kept detached: the output a node saves for itself would otherwise hold
        the node that holds it, a cycle that no collector sees.
Rule 2. autograd checks versions only without hooks, so every kept tensor carries the version it
        had, and reading it checks.
Rule 3. A recipe points from consumer to producer, as the graph does. What belongs to a producer
        (`_Cell`) lies in `node.metadata` and points to no node; nothing is keyed by identity.
Rule 4. A node that saves its own result is not held by the recipe for it (Rule 1): it is the one
        that runs when the recipe is read.
Rule 5. A node reads what it saved as it is now, as in plain autograd; a replay reads it as it was.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.weak import TensorWeakRef

from ..._errors import MutationError, RecomputeError
from ..._frames import user_line
from ..._torch_compat import Hooks, current_node, is_fake, node_number
from ...policies._policies import Policy
from .._engine_disabled import active, own_work
from .._error_context import error_context
from .._guards import Guard, fingerprint
from ._proof import proof_of, storage_of
from ._rebuilt import rebuilt
from ._replay import Node, Rule
from ._replay_entries import ReplayEntry
from ._replay_table import RULES
from ._shared_values import SharedValue, Unpacked, replays
from ._sources import living

Outers = dict[int, list[weakref.ref["Outer"]]]
"""Number after that of an autograd node to what it saved and its region did not make.

Weak: only the node holds what it saved, so that what no output needs any more goes with it.
"""
Reader = Callable[[Any], torch.Tensor]
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
        if type(held) is not tuple:
            return held.read()
        tensor, version, producer = held
        if tensor._version != version:
            raise _mutated(tensor, producer, policy)
        return tensor

    return read


class Outer:
    """A kept tensor that its region did not make: a parameter, an input, a view of one.

    Attributes:
        held: what is held of any other kept tensor.
        guard: the tensor as it was, once a recipe may read it (Rule 5).
    """

    __slots__ = ("__weakref__", "_policy", "_reader", "_tensor", "guard", "held")

    def __init__(
        self, held: Any, tensor: torch.Tensor, reader: Reader, policy: Policy | None
    ) -> None:
        self.held = held
        # What hooks moved away may go; what nobody has any more, nobody changes.
        self._tensor = None if type(held) is tuple else TensorWeakRef(tensor)
        self._reader = reader
        self._policy = policy
        self.guard: Guard | None = None

    def protect(self) -> None:
        """Note how the tensor is now: a recipe is made that reads it."""
        tensor = self.held[0] if self._tensor is None else self._tensor()
        if self.guard is None and tensor is not None:
            self.guard = Guard(tensor)

    def read(self) -> torch.Tensor:
        """Return the tensor: to a replay as it was, to its own node as it is."""
        if self.guard is None or not replays.depth:
            return self._reader(self.held)
        return self.guard.read(lambda: self._reader(self.held), self._changed)

    def _changed(self) -> MutationError:
        tensor = self.held[0] if type(self.held) is tuple else self._reader(self.held)
        return _unseen(tensor, _error_context(self._policy, None))


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
        geometry: (size, stride, offset) of a view of the node's output, None for the output.
        storage_bytes: size of the storage that the view lies in.
        sources: what is kept for the replay.
    """

    __slots__ = ("cell", "device", "entry", "geometry", "node", "sources", "storage_bytes")

    def __init__(
        self,
        tensor: torch.Tensor,
        outers: Outers,
        node: Node,
        entry: ReplayEntry,
        device: str,
        is_view: bool,
        cell: SharedValue,
    ) -> None:
        self.node, self.entry, self.device, self.cell = node, entry, device, cell
        self.geometry: Any = None
        self.sources = living(cell)
        if is_view or cell.through:
            self.geometry = (tensor.size(), tensor.stride(), tensor.storage_offset())
            self.storage_bytes = tensor.untyped_storage().nbytes()
        if not cell.protected:
            cell.protected = True
            if cell.through:
                cell.proof = proof_of(tensor)
            else:
                _protect(cell, tensor, outers, node, entry.rule)
        cell.readers += 1

    def read(self) -> torch.Tensor:
        """Return the value, replayed unless an earlier reader left it in the cell."""
        if not active.modes:
            return self._read()
        with own_work():
            return self._read()

    def _read(self) -> torch.Tensor:
        value = self.cell.get(self._replay)
        return value if self.geometry is None else self._view(value)

    def _replay(self) -> torch.Tensor:
        replays.depth += 1
        try:
            if not (torch.is_grad_enabled() or torch.is_autocast_enabled(self.device)):
                return self._rebuilt()
            with torch.no_grad(), torch.autocast(self.device, enabled=False):
                return self._rebuilt()
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

    def _rebuilt(self) -> torch.Tensor:
        return rebuilt(self._producer(), self.cell, self._unseen)

    def _producer(self) -> Node:
        return self.node

    def _view(self, value: torch.Tensor) -> torch.Tensor:
        if value.untyped_storage().nbytes() != self.storage_bytes:
            raise RecomputeError(
                f"sac_policies.checkpoint: replay of {self.entry.rule.op} gives "
                f"{value.untyped_storage().nbytes()} bytes, but the forward gave "
                f'{self.storage_bytes} ({self._error_context()}). Use engine="contexts" for this '
                "region."
            )
        return value.as_strided(*self.geometry)

    def _unseen(self, tensor: torch.Tensor | None) -> MutationError:
        if tensor is not None:
            return _unseen(tensor, self._error_context())
        size = tuple(self.geometry[0])
        return MutationError(
            f"sac_policies.checkpoint: replay of {self.entry.rule.op} for the saved tensor of "
            f"shape {size} gives other values than the forward, but what it reads must be as it "
            f"was: something wrote to it past autograd ({self._error_context()}). Write "
            "out-of-place, or change it after backward."
        )

    def _error_context(self) -> str:
        return _error_context(self.entry.policy, self.entry.rule)


class Result(Recipe):
    """The recipe for a result that its own node saves (Rule 4)."""

    __slots__ = ("number",)

    def __init__(self, tensor: torch.Tensor, outers: Outers, node: Node, *found: Any) -> None:
        super().__init__(tensor, outers, node, *found)
        self.node = None
        self.number = node_number(node)

    def _producer(self) -> Node:
        node = current_node()
        if type(node).__name__ != self.entry.rule.node or node_number(node) != self.number:
            raise RecomputeError(
                f"sac_policies.checkpoint: the result of {self.entry.rule.op} is read outside of "
                f"its own backward, but only there its node is known ({self._error_context()}). "
                "Read the operator's output itself."
            )
        return node


def _protect(
    cell: SharedValue, tensor: torch.Tensor, outers: Outers, node: Node, rule: Rule
) -> None:
    """Note how all is that a replay of `node` reads and the region did not make (Rule 5)."""
    read = outers.get(node_number(node) + 1, ())
    for reference in read[: len(read) - rule.results]:
        outer = reference()
        if outer is not None:
            outer.protect()
    leaf = rule.leaf_of(node)
    if leaf is None:
        return
    if rule.gathers:
        if not is_fake(tensor):
            cell.sums = fingerprint(storage_of(tensor))
    else:
        cell.leaf = Guard(leaf)


def _error_context(policy: Policy | None, rule: Rule | None) -> str:
    if policy is None:
        return f"at {user_line()}; rule of a budget plan"
    return error_context(policy, None if rule is None else rule.op)


def _mutated(tensor: torch.Tensor, producer: type, policy: Policy | None) -> MutationError:
    made = "" if producer is type(None) else f" made by {producer.__name__[: -len('Backward0')]}"
    return MutationError(
        f"sac_policies.checkpoint: saved tensor of shape {tuple(tensor.shape)}{made} was changed "
        "in place after it was saved, but backward needs it as it was (read "
        f"{_error_context(policy, RULES.get(producer.__name__))}). "
        "Use the out-of-place operator, or change it after backward."
    )


def _unseen(tensor: torch.Tensor, blamed: str) -> MutationError:
    return MutationError(
        f"sac_policies.checkpoint: tensor of shape {tuple(tensor.shape)} was changed after the "
        f"region read it, but a replay reads it as it was (read {blamed}). Change it after "
        "backward."
    )
