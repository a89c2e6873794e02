"""What is known of the forward or backward pass that runs.

Note [Passes]
    What belongs to one pass is in one object. A unit keeps nothing of a pass, so whoever drops the
    object has ended the pass for all units.

    state     `forward`  `backward`  a forward begins   its outermost ends  a gradient comes
    idle      None       None        -> forward                             -> backward
    forward   a pass     None        one more inside    -> idle             -> backward, inside
    backward  None       a pass      recomputes         still backward      one more

    An exception takes a forward back to idle on its way out. torch does not call back when one
    stops a backward. Whatever is called next, outside of a backward, `settle` finds that none runs,
    and the tree goes to idle before anything else happens.

    The pass also holds a weak reference to the callback with which the engine would have ended it.
    The engine drops the callback with its work: the next backward finds the reference dead.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from .._errors import StateError
from .._torch_compat import backward_is_running
from ..comm._comm import Pending

U = TypeVar("U")
"""A unit; nothing of one is asked here."""


@dataclass
class ForwardPass(Generic[U]):
    """An outermost forward and what runs inside it.

    Attributes:
        running: units whose forwards run, one within the other.
        order: units in the order in which they began.
        ahead: units gathered ahead of their turn.
        chain: units that backward may come back to, in order; value: whether it was freed.
        incomplete: units of several modules that wait for the others, and which were called.
    """

    running: list[U] = field(default_factory=list)
    order: list[U] = field(default_factory=list)
    ahead: list[U] = field(default_factory=list)
    chain: dict[U, bool] = field(default_factory=dict)
    incomplete: dict[U, set[int]] = field(default_factory=dict)

    def waits(self, unit: U, module: object, count: int) -> bool:
        """Whether some of the `count` modules of a unit have not been called, after this one."""
        called = self.incomplete.setdefault(unit, set())
        called.add(id(module))
        if len(called) < count:
            return True
        del self.incomplete[unit]
        return False


@dataclass
class BackwardPass(Generic[U]):
    """A backward pass through the tree.

    Attributes:
        sync: whether it sums gradients over ranks.
        callback: dead when the engine is no longer at it.
        to_gather: units that will be gathered, in order (Rule 1).
        to_reduce: units whose gradients will be summed, in order (Rule 1).
        units: where each unit stands.
        is_differentiated: whether it makes a graph, so that a later one may read parameters.
        ending: whether only the summing and handing out is left.
        failed: whether that raised, or the whole backward did.
    """

    sync: bool
    callback: weakref.ref[Callable[[], None]]
    to_gather: list[U]
    to_reduce: list[U]
    units: dict[U, UnitBackward]
    is_differentiated: bool = False
    ready: set[U] = field(default_factory=set)
    reducing: list[Pending] = field(default_factory=list)
    reduced: list[U] = field(default_factory=list)
    ending: bool = False
    failed: bool = False

    @property
    def was_dropped(self) -> bool:
        """Whether the engine will not end it any more; see Note [Passes]."""
        return self.failed or self.callback() is None

    @property
    def was_stopped(self) -> bool:
        """Whether an exception has ended it, as far as this thread can know."""
        return self.was_dropped or not (self.ending or backward_is_running())


@dataclass
class UnitBackward:
    """Where a unit stands in one backward pass.

    Attributes:
        expected: leaves that will get a gradient.
        inner: units that ran inside this one's forward and wait for such a leaf (Rule 1).
        begun: whether an output has its gradient.
        arrived: leaves that have their gradient.
        inputs_arrived: inputs that have theirs.
        freed: whether its whole parameters are.
        summed: whether its gradients are, or are about to be.
    """

    expected: int
    inner: int = 0
    begun: bool = False
    arrived: int = 0
    inputs_arrived: int = 0
    freed: bool = False
    summed: bool = False

    @property
    def has_grads(self) -> bool:
        """Whether every leaf that will get a gradient has it."""
        return self.begun and self.arrived >= self.expected


def outdated() -> StateError:
    """Of a gradient of what the module computes with no more."""
    return StateError(
        "flat_param.fully_shard: this backward belongs to a forward before .to() or an interrupted "
        "step, but full parameters have had other memory since then. Run the forward again."
    )


def has_old_grad(unit: str, name: str) -> StateError:
    """Of a second backward after one that was stopped.

    Args:
        unit: name of the unit; empty for the outermost.
        name: of the parameter in it.
    """
    return StateError(
        f"flat_param.fully_shard: parameter '{f'{unit}.{name}' if unit else name}' still has the "
        "gradient from before a backward that an exception stopped. Call zero_grad() of the "
        "optimizer before this second backward, or run the forward again."
    )


def too_late(name: str) -> StateError:
    """Of a gradient that another backward brings, inside the one that has summed those of a unit.

    Args:
        name: of the unit; empty for the outermost.
    """
    return StateError(
        f"flat_param.fully_shard: {f'unit {name!r}' if name else 'the outermost unit'} has another "
        "gradient, of a backward inside the one that runs, but its gradients are summed already. "
        "Call that backward before or after this one, and checkpoint with use_reentrant=False."
    )


def inner_first(order: Iterable[U], around: Callable[[U], Container[U]]) -> list[U]:
    """Units in the order in which backward has all their gradients.

    A unit that begins in forward with an embedding, and ends with a head, has its last gradient
    when those of all units inside it are there.

    Args:
        order: the reverse of the one in which their forwards ended: each before those inside it.
        around: in whose forwards a unit has run.

    Example:
        >>> inner_first(["model", "second", "first"], lambda unit: {"model"} - {unit})
        ['second', 'first', 'model']
    """
    found: list[U] = []
    begun: list[U] = []
    for unit in order:
        while begun and begun[-1] not in around(unit):
            found.append(begun.pop())
        begun.append(unit)
    return found + begun[::-1]
