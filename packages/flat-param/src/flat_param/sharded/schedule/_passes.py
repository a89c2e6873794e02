"""The state of one pass: the forwards since the last backward, and the backwards through them.

All state of a pass is in one `Pass`. Units have no state of a pass, so a new object ends the pass
for all units. The first outermost forward after a backward makes it.

    state     `forward`  `backward`  a forward begins   its outermost ends  a gradient comes
    idle      None       None        -> forward                             -> backward
    forward   a pass     None        one more inside    -> idle             -> backward, inside
    backward  None       a pass      recomputes         still backward      one more

An exception in forward resets the state to idle. torch runs no callback when an exception stops a
backward. The next call outside of a backward begins with `Schedule.settle`, which finds that no
backward runs and goes to idle. The pass holds a weak reference to the callback that ends it. The
engine drops the callback when a backward fails, so a dead reference means that the backward was
stopped.

Forwards whose graph is dropped are part of the pass, too: ranks may drop graphs at other times, so
the order of collectives must not depend on it. Only when a unit is freed does.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ..._torch_compat import backward_is_running
from ...comm._comm import Pending
from ..unit._segment import ShardedSegment
from ..unit._unit import Unit


@dataclass(eq=False)
class UnitForward:
    """One forward of a unit.

    Hooks on its outputs and inputs refer to it, so it lives as long as their graph.

    Attributes:
        unit: the unit, weakly, as leaves may outlive it.
        versions: of the unit's leaves when it began.
        inputs: number of its inputs that may get a gradient.
    """

    unit: weakref.ref[Unit]
    versions: Sequence[int] = ()
    inputs: int = 0


@dataclass
class UnitInputs:
    """The inputs of a unit's forwards in a pass, with hooks on their gradients.

    Leaves, such as parameters that the unit ignores, outlive graphs, so they have one hook each.

    Attributes:
        forwards: the forwards, weakly: the graph of one may be dropped.
        leaves: all leaves among the inputs, as the inputs of one forward.
        known: each of these leaves by its `id`, and its hook.
    """

    leaves: UnitForward
    forwards: list[weakref.ref[UnitForward]] = field(default_factory=list)
    known: dict[int, tuple[weakref.ref[Tensor], RemovableHandle]] = field(default_factory=dict)


@dataclass
class Pass:
    """The forwards since the last backward, and the backwards through them.

    Attributes:
        forward: the forward that runs.
        backward: the backward that runs, or was stopped.
        chain: units that backward may reach, in order; the value says whether the unit was
            resharded.
        around: for each unit, those in whose forward it ran.
        inputs: of each unit.
        is_spent: whether a backward has begun, so that the next outermost forward begins a pass.
    """

    forward: ForwardPass | None = None
    backward: BackwardPass | None = None
    chain: dict[Unit, bool] = field(default_factory=dict)
    around: defaultdict[Unit, set[Unit]] = field(default_factory=partial(defaultdict, set))
    inputs: dict[Unit, UnitInputs] = field(default_factory=dict)
    is_spent: bool = False


@dataclass
class ForwardPass:
    """An outermost forward and the forwards inside it.

    Attributes:
        units: units whose forwards run, one within the other.
        begun: their forwards.
        order: units in the order in which they began.
        ahead: units that were prefetched.
        incomplete: units of several modules, of which only the listed modules were called.
    """

    units: list[Unit] = field(default_factory=list)
    begun: list[UnitForward] = field(default_factory=list)
    order: list[Unit] = field(default_factory=list)
    ahead: list[Unit] = field(default_factory=list)
    incomplete: dict[Unit, set[int]] = field(default_factory=dict)


@dataclass
class BackwardPass:
    """A backward pass through the tree.

    Attributes:
        sync: whether it reduces gradients over ranks.
        callback: dead when the engine has dropped the backward.
        to_gather: units that are unsharded, in order.
        places: their positions in it.
        to_reduce: units whose gradients will be reduced, in order.
        units: the state of each unit.
        is_differentiated: whether `create_graph` is set, so that a later backward may read
            parameters.
        gathered: number of gathers that have begun.
        ready: units that have all their gradients.
        reducing: reductions in flight.
        summing: reductions over replicas in flight.
        reduced: units whose reduction has begun or is finished.
        ending: whether only the finalize step is left.
        failed: whether the finalize step or the backward raised an error.
    """

    sync: bool
    callback: weakref.ref[Callable[[], None]]
    to_gather: list[Unit]
    places: dict[Unit, int]
    to_reduce: list[Unit]
    units: dict[Unit, UnitBackward]
    is_differentiated: bool
    gathered: int = 0
    ready: set[Unit] = field(default_factory=set)
    reducing: list[tuple[Unit, ShardedSegment, Pending]] = field(default_factory=list)
    summing: list[tuple[Unit, ShardedSegment, Pending]] = field(default_factory=list)
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
        inputs_arrived: for each forward, inputs that have their gradient.
        freed: whether it was resharded.
        summed: whether the reduction of its gradients has begun.
    """

    expected: int
    inner: int = 0
    begun: bool = False
    arrived: int = 0
    inputs_arrived: dict[UnitForward, int] = field(default_factory=dict)
    freed: bool = False
    summed: bool = False
