"""The running module call and the phase of each thread.

Note [Where are we]
Let `task` be the id of the backward that runs in the thread, and `state.task` the id of the one
that ran when the innermost running module was entered.
- task == state.task, no backward runs: forward, or "outside" if no module runs.
- task == state.task, a backward runs: a module was entered inside that backward: recompute.
- task != state.task: autograd runs a node. The thread's record has the call that created it.
- A gradient accumulation node has no number. It belongs to the module that registers the
  parameter, on the first path on which that module ran. If that module never ran, it belongs to
  the nearest module above that did.
- Node numbers are per thread. A backward may run in another thread than its forward. The marks on
  outputs then give the thread whose nodes it runs. If only one thread ran modules, outputs carry
  no marks; the lookup uses this thread's state or, if it created no nodes, the other's.
- Known error: a device's backward thread that creates a graph reuses numbers of other threads. A
  second backward through those nodes is attributed to other modules.

Note [Recomputation]
Code that runs in a backward repeats the forward if
- it is inside a module call that began in this backward;
- the library that runs it says so, by `torch.autograd.graph.recompute_callbacks`. For torch's
  checkpoint, and what is built on it, `_torch_compat` does so;
- gradients are enabled inside a node, of a backward that creates no graph. Checkpoints of other
  libraries enable them, since autograd runs nodes with gradients disabled.
The library may name a node that the code created in the forward: then the code belongs to the call
that created it. Otherwise it belongs to the call around the modules that it calls, once one of them
has run for the same node. Before that, it belongs to the call whose node runs.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable
from itertools import chain
from typing import Any

from torch import is_grad_enabled, nn, no_grad

from ._names import Names, keys_below, module_at
from ._record import Call, Path, ThreadState, outside, recompute_base
from ._torch_compat import (
    NO_TASK,
    UNNUMBERED,
    at_backward_end,
    children_of,
    creates_graph,
    current_node,
    graph_task,
    is_compiled_graph,
    next_number,
    number_asking,
    number_of,
    unwrap,
)

FORWARD, RECOMPUTE, BACKWARD, OUTSIDE = "forward", "recompute", "backward", "outside"

KEPT_STATES = 64
"""States kept after their thread may have ended, so that its graphs can still be looked up."""

KEPT_TASKS = 64
"""Backwards whose starting thread state is kept; more never run at once."""

NOWHERE = outside()

Callback = Callable[..., object]


class PathGuard(weakref.ref[nn.Module]):
    """Removes the path of a dead module from the children of its parent; see `Path.guard`."""

    __slots__ = ("gone", "key", "siblings")
    gone: Counter[str]
    key: int
    siblings: dict[int, Path]


class Attribution:
    """Thread states and names of one tracker.

    Attributes:
        threaded: whether modules ran in several threads.
        has_events: whether module calls have events: there are listeners, or several threads, whose
            outputs are marked.
        switched: called with the call and phase whenever another call runs.
        gone_calls: number of calls of modules whose paths are removed, by name.
    """

    def __init__(self, *, limit: int) -> None:
        self.limit = limit
        self.names = Names()
        self.switched: tuple[Callback, ...] = ()
        self.local = threading.local()
        self.states: deque[ThreadState] = deque(maxlen=KEPT_STATES)
        self.threaded = self.has_events = False
        self.gone_calls: Counter[str] = Counter()
        self._task_states: dict[int, ThreadState] = {}

    def open_state(self) -> ThreadState:
        """Create the state of a new thread."""
        task = graph_task()
        if task != NO_TASK and self.states:
            self.claim(task, self._state_of(None, task))
        state = ThreadState(limit=self.limit, inner=task != NO_TASK)
        if self.states:
            self.threaded = self.has_events = True
        self.states.append(state)
        self.local.state = state
        return state

    def state(self) -> ThreadState | None:
        """Return the state of this thread, or None if no module ran in it."""
        return getattr(self.local, "state", None)

    def locate(self) -> tuple[Call, str]:
        """Return the running call and its phase. See Note [Where are we]."""
        state: ThreadState | None = getattr(self.local, "state", None)
        task = graph_task()
        if state is None:
            if task == NO_TASK:
                return NOWHERE, OUTSIDE
            return self._run_by(None, task), RECOMPUTE if _is_recomputing() else BACKWARD
        if state.shown is not None:
            return state.shown, BACKWARD
        if state.repeats and state.repeats[-1][1] is state.call:
            call = state.repeats[-1][0]
            if call is None and task != state.task:
                call = state.recomputed() or self._run_by(state, task)
            return call or state.call, RECOMPUTE
        if task != state.task:
            if _is_recomputing():
                return state.recomputed() or self._run_by(state, task), RECOMPUTE
            # A backward that a recomputed module calls, as for forces, is repeated, too.
            phase = BACKWARD if state.task == NO_TASK else RECOMPUTE
            return self._run_by(state, task), phase
        if task != NO_TASK:
            return state.call, RECOMPUTE
        return state.call, OUTSIDE if state.call[2] is None else FORWARD

    def recomputes(self, number: int | None) -> None:
        """Note that a library begins to recompute, or, with None, that it has ended.

        Args:
            number: autograd's number of a node that the code created in the forward; -1 if unknown.
        """
        state = self.state() or self.open_state()
        if number is not None:
            known = None if number < 0 else self._creator(state, graph_task(), number)
            state.repeats.append((known, state.call))
            self.tell_switch()
        elif state.repeats:
            state.repeats.pop()
            with no_grad():  # a checkpoint enables gradients until a little later
                self.tell_switch()

    def attribute_op(self) -> tuple[Call, str]:
        """`locate` for an operator. Also attributes nodes that a backward creates."""
        call, phase = self.locate()
        state = self.state()
        if state is not None:
            if (state.owner is not None or call is not state.call) and is_grad_enabled():
                state.explain(call)
            else:
                state.seen = next_number()
        return call, phase

    def tell_switch(self) -> None:
        """Notify `switched` that another call is running."""
        if self.switched:
            call, phase = self.locate()
            for notify in self.switched:
                notify(call, phase)

    def resting_place(self, task: int) -> tuple[Call, str]:
        """Return the call and phase of a backward's caller, which continue after the backward."""
        state = self.state()
        if state is None or state.inner:
            state = self._state_of(None, task)
        if state is None or state.call[2] is None:
            return NOWHERE, OUTSIDE
        return state.call, FORWARD

    def base_of(self, state: ThreadState, module: nn.Module, task: int) -> Call:
        """Return the call around a module that is recomputed in a backward."""
        at_backward_end(state.resume)
        state.asked = number_asking()
        call = self._run_by(state, task)
        # Each thread has a root path of its own.
        return recompute_base(state.base if call[2] is None else call, id(module))

    def add_path(self, state: ThreadState, outer: Call, module: nn.Module) -> Path:
        """Create the path of a module that is called from `outer` for the first time."""
        parent, key = outer[0], id(module)
        target = unwrap(module)
        guard = PathGuard(module, _drop)
        guard.siblings, guard.key, guard.gone = parent.children, key, self.gone_calls
        alive = guard if target is module else weakref.ref(target)
        if self._is_internal(target, parent):
            path = Path(alive, parent=parent)
            path.internal = True
        else:
            name = self.names.of(target) or self.names.adopt(target, around=parent.modules())
            called_as = self._called_as(parent, target, name)
            path = Path(alive, parent=parent, name=name, called_as=called_as)
            first = state.paths.get(id(target))
            if first is None or first.module() is not target:  # of a dead module at this address
                state.paths[id(target)] = path
        if graph_task() != NO_TASK:
            path.last, path.uncounted = (path, 0, None), 1
        path.guard = guard
        parent.children[key] = path
        return path

    def claim(self, task: int, state: ThreadState | None) -> None:
        """Record that backward `task` runs nodes created in `state`."""
        if state is None or task in self._task_states:
            return
        while len(self._task_states) >= KEPT_TASKS:
            self._task_states.pop(next(iter(self._task_states)), None)
        self._task_states[task] = state

    def _run_by(self, state: ThreadState | None, task: int) -> Call:
        node = current_node()
        return NOWHERE if node is None else self.maker_of(state, task, node, number_of(node))

    def maker_of(self, state: ThreadState | None, task: int, node: Any, number: int) -> Call:
        """Return the call that created the node `number`, for the running backward `task`."""
        if number < UNNUMBERED:
            return self._creator(state, task, number)
        owner = self._owner_of(state, task)
        return NOWHERE if owner is None else self._accumulates(owner, node)

    def creator_of(self, node: Any) -> Call:
        """Return the call that created a node in forward; the outside for a leaf's node."""
        number = number_of(node)
        known = number < UNNUMBERED
        return self._creator(self.state(), graph_task(), number) if known else NOWHERE

    def _creator(self, state: ThreadState | None, task: int, number: int) -> Call:
        owner = self._owner_of(state, task)
        return NOWHERE if owner is None else owner.find(number)

    def _owner_of(self, state: ThreadState | None, task: int) -> ThreadState | None:
        known = state is not None and not self.threaded
        return state if known else self._state_of(state, task)

    def _accumulates(self, state: ThreadState, node: Any) -> Call:
        # A gradient accumulation node: it has no number.
        variable = getattr(node, "variable", None)
        module = None if variable is None else self.names.owner(variable)
        if module is None:
            return NOWHERE
        for holder in chain((module,), self.names.holders(module)):
            path = state.paths.get(id(holder))
            if path is not None and path.module() is holder:
                return path.last
        return NOWHERE

    def _state_of(self, state: ThreadState | None, task: int) -> ThreadState | None:
        # Numbers are per thread, so find the thread that created the node.
        claimed = self._task_states.get(task)
        if claimed is not None:
            return claimed
        if state is not None and not self.threaded:
            return state  # only one thread ran modules
        made = [known for known in self.states if not known.inner and len(known.record)]
        return state if state in made or not made else made[-1]

    def _is_internal(self, module: nn.Module, parent: Path) -> bool:
        if is_compiled_graph(module):
            return True
        if type(module).__name__ != "GraphModule" or self.names.of(module) is not None:
            return False
        around = list(parent.modules())
        inside = around and all(id(module) not in keys_below(holder) for holder in around)
        return bool(inside) or graph_task() != NO_TASK

    def _called_as(self, parent: Path, module: nn.Module, name: str) -> str:
        holder = parent.module()
        if holder is None:
            return name
        # Most modules are called by the module that registers them and gives them their name.
        key = name[len(parent.name) + 1 :]
        if not (name.startswith(parent.name) and children_of(holder).get(key) is module):
            found = parent.keys.get(id(module), "")
            if not found or module_at(holder, found) is not module:
                parent.keys = keys_below(holder)
                found = parent.keys.get(id(module), "")
            key = found
        return f"{parent.called_as}.{key}" if key else name


def _is_recomputing() -> bool:
    """Whether a node of the running backward runs forward code. See Note [Recomputation]."""
    return is_grad_enabled() and not creates_graph(graph_task())


def _drop(guard: PathGuard) -> None:
    # The callback runs before the address can be reused, so the entry is the dead module's.
    path = guard.siblings.pop(guard.key, None)
    for gone in [] if path is None else list(path.walk()):
        guard.gone[gone.name] += gone.calls
        gone.children.clear()  # their guards find nothing, so nothing counts twice
