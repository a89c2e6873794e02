"""The state of the forward or backward pass that runs.

All state of a pass is in one object. Units have no state of a pass, so dropping the object ends the
pass for all units.

    state     `forward`  `backward`  a forward begins   its outermost ends  a gradient comes
    idle      None       None        -> forward                             -> backward
    forward   a pass     None        one more inside    -> idle             -> backward, inside
    backward  None       a pass      recomputes         still backward      one more

An exception in forward resets the state to idle. torch runs no callback when an exception stops a
backward. The next call outside of a backward begins with `Schedule.settle`, which finds that no
backward runs and goes to idle. The pass holds a weak reference to the callback that ends it. The
engine drops the callback when a backward fails, so a dead reference means that the backward was
stopped.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from .._errors import StateError
from .._torch_compat import backward_is_running
from ..comm._comm import Pending
from ._unit_params import UnitParams

U = TypeVar("U")


@dataclass
class ForwardPass:
    """An outermost forward and the forwards inside it.

    Attributes:
        running: units whose forwards run, one within the other.
        order: units in the order in which they began.
        ahead: units that were prefetched.
        chain: units that backward may reach, in order; the value says whether the unit was
            resharded.
        incomplete: units of several modules, of which only the listed modules were called.
    """

    running: list[UnitParams] = field(default_factory=list)
    order: list[UnitParams] = field(default_factory=list)
    ahead: list[UnitParams] = field(default_factory=list)
    chain: dict[UnitParams, bool] = field(default_factory=dict)
    incomplete: dict[UnitParams, set[int]] = field(default_factory=dict)

    def waits(self, unit: UnitParams, module: object, count: int) -> bool:
        """Record a call of `module`; return whether its unit has uncalled modules."""
        called = self.incomplete.setdefault(unit, set())
        called.add(id(module))
        if len(called) < count:
            return True
        del self.incomplete[unit]
        return False


@dataclass
class BackwardPass:
    """A backward pass through the tree.

    Attributes:
        sync: whether it reduces gradients over ranks.
        callback: dead when the engine has dropped the backward.
        to_gather: units that will be unsharded, in order.
        to_reduce: units whose gradients will be reduced, in order.
        units: the state of each unit.
        is_differentiated: whether `create_graph` is set, so that a later backward may read
            parameters.
        ready: units that have all their gradients.
        reducing: reductions in flight.
        reduced: units whose reduction has begun or is finished.
        ending: whether only the finalize step is left.
        failed: whether the finalize step or the backward raised an error.
    """

    sync: bool
    callback: weakref.ref[Callable[[], None]]
    to_gather: list[UnitParams]
    to_reduce: list[UnitParams]
    units: dict[UnitParams, UnitBackward]
    is_differentiated: bool = False
    ready: set[UnitParams] = field(default_factory=set)
    reducing: list[Pending] = field(default_factory=list)
    reduced: list[UnitParams] = field(default_factory=list)
    ending: bool = False
    failed: bool = False

    @property
    def was_dropped(self) -> bool:
        """Whether the engine has dropped the callback that would end it."""
        return self.failed or self.callback() is None

    @property
    def was_stopped(self) -> bool:
        """Whether an exception has ended it, judged from this thread."""
        return self.was_dropped or not (self.ending or backward_is_running())


@dataclass
class UnitBackward:
    """The state of a unit in one backward pass.

    Attributes:
        expected: leaves that will get a gradient.
        inner: units that ran inside this unit's forward and still expect a leaf's gradient.
        begun: whether an output has its gradient.
        arrived: leaves that have their gradient.
        inputs_arrived: inputs that have their gradient.
        freed: whether it was resharded.
        summed: whether the reduction of its gradients has begun.
    """

    expected: int
    inner: int = 0
    begun: bool = False
    arrived: int = 0
    inputs_arrived: int = 0
    freed: bool = False
    summed: bool = False


def has_old_grad(unit: str, name: str) -> StateError:
    """The error for a second backward after a stopped one.

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
    """The error for a gradient from a nested backward, after the unit's gradients were reduced.

    Args:
        name: of the unit; empty for the outermost.
    """
    return StateError(
        f"flat_param.fully_shard: {f'unit {name!r}' if name else 'the outermost unit'} has another "
        "gradient, of a backward inside the one that runs, but its gradients are summed already. "
        "Call that backward before or after this one, and checkpoint with use_reentrant=False."
    )


def inner_first(order: Iterable[U], around: Callable[[U], Container[U]]) -> list[U]:
    """Return units in the order in which backward completes their gradients.

    A unit that begins in forward with an embedding, and ends with a head, gets its last gradient
    after all units inside it.

    Args:
        order: the reverse of the order in which forwards ended, so outer units come before inner
            ones.
        around: returns the units in whose forwards a unit ran.

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
