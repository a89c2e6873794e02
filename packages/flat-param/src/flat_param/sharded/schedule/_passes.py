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
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ..._torch_compat import backward_is_running
from ...comm._comm import Pending
from ..tensor._nested import tensors_in
from ..unit._unit import Unit

InputHook = Callable[[weakref.ref[Unit], "UnitForward", Tensor], None]


@dataclass(eq=False)
class UnitForward:
    """One forward of a unit.

    Hooks on its outputs and inputs refer to it, so it lives as long as their graph.

    Attributes:
        unit: the unit, weakly, as leaves may outlive it.
        inputs: number of its inputs that may get a gradient.
        handles: of the hooks on them.
        versions: of the unit's leaves when it began.
    """

    unit: weakref.ref[Unit]
    versions: Sequence[int] = ()
    inputs: int = 0
    handles: list[RemovableHandle] = field(default_factory=list)

    def hook(self, tensor: Tensor, function: InputHook) -> None:
        """Call a function with the unit and this forward at the gradient of an input."""
        self.handles.append(tensor.register_hook(partial(function, self.unit, self)))
        self.inputs += 1


class UnitInputs:
    """The inputs of a unit's forwards in a pass, with hooks on their gradients."""

    def __init__(self, unit: Unit) -> None:
        self._forwards: list[weakref.ref[UnitForward]] = []
        # Leaves, such as parameters that the unit ignores, outlive graphs, so they have one hook.
        self._leaves = UnitForward(weakref.ref(unit))
        self._known: dict[int, weakref.ref[Tensor]] = {}

    def hook(self, forward: UnitForward, inputs: Any, function: InputHook) -> None:
        """Hook the inputs of a forward, each once."""
        self._forwards = [each for each in self._forwards if each() is not None]
        self._forwards.append(weakref.ref(forward))
        hooked: set[int] = set()
        for tensor in tensors_in(inputs):
            if not tensor.requires_grad or id(tensor) in hooked:
                continue
            hooked.add(id(tensor))
            if not tensor.is_leaf:
                forward.hook(tensor, function)
                continue
            known = self._known.get(id(tensor))
            if known is None or known() is not tensor:
                self._leaves.hook(tensor, function)
                self._known[id(tensor)] = weakref.ref(tensor)

    def _alive(self) -> list[UnitForward]:
        """The forwards whose graph exists, and one for all leaves."""
        found = [each() for each in self._forwards]
        return [self._leaves, *[forward for forward in found if forward is not None]]

    def count(self, arrived: Counter[UnitForward]) -> tuple[int, int]:
        """Number of inputs that may get a gradient, and of those without one."""
        forwards = self._alive()
        inputs = sum([each.inputs for each in forwards])
        return inputs, inputs - sum([arrived[each] for each in forwards])

    def end(self) -> None:
        """Remove the hooks: no backward will reach them."""
        for forward in self._alive():
            for handle in forward.handles:
                handle.remove()


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
    around: defaultdict[Unit, set[Unit]] = field(default_factory=lambda: defaultdict(set))
    inputs: dict[Unit, UnitInputs] = field(default_factory=dict)
    is_spent: bool = False

    def end(self) -> None:
        """Remove the hooks on inputs: no backward will reach them."""
        for each in self.inputs.values():
            each.end()


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
        to_gather: units that will be unsharded, in order.
        to_reduce: units whose gradients will be reduced, in order.
        units: the state of each unit.
        is_differentiated: whether `create_graph` is set, so that a later backward may read
            parameters.
        ready: units that have all their gradients.
        reducing: reductions in flight, and functions that begin those over replicas.
        summing: reductions over replicas in flight.
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
    reducing: list[tuple[Pending, Callable[[], Pending]]] = field(default_factory=list)
    summing: list[Pending] = field(default_factory=list)
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
    inputs_arrived: Counter[UnitForward] = field(default_factory=Counter)
    freed: bool = False
    summed: bool = False
