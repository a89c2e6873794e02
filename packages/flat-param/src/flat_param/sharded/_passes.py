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
from collections.abc import Callable
from dataclasses import dataclass, field

from .._torch_compat import backward_is_running
from ..comm._comm import Pending
from ._unit import Unit


@dataclass
class ForwardPass:
    """An outermost forward and the forwards inside it.

    Attributes:
        running: units whose forwards run, one within the other.
        order: units in the order in which they began.
        ahead: units that were prefetched.
        incomplete: units of several modules, of which only the listed modules were called.
    """

    running: list[Unit] = field(default_factory=list)
    order: list[Unit] = field(default_factory=list)
    ahead: list[Unit] = field(default_factory=list)
    incomplete: dict[Unit, set[int]] = field(default_factory=dict)


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
    to_gather: list[Unit]
    to_reduce: list[Unit]
    units: dict[Unit, UnitBackward]
    is_differentiated: bool
    ready: set[Unit] = field(default_factory=set)
    reducing: list[Pending] = field(default_factory=list)
    reduced: list[Unit] = field(default_factory=list)
    ending: bool = False
    failed: bool = False

    @property
    def was_stopped(self) -> bool:
        """Whether an exception has ended it, judged from this thread."""
        if self.failed or self.callback() is None:
            return True
        return not (self.ending or backward_is_running())


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
