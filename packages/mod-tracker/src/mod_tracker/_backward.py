"""Backward events, from hooks on the gradient edges at module boundaries.

Note [Backward events]
A module is entered in backward when the gradient of one of its outputs is available. It is left
when the gradients of all its inputs are available, or at the end of that backward.
- Only an entered module is left. Each happens once per backward.
- At one edge, modules are first entered, in the order in which their calls ended; then modules are
  left, in the order in which their calls began. torch's tracker has the same order.
- At the end of a backward, the remaining modules are left in reverse order of their calls.
- Hooks sit on nodes, not on tensors. They are freed with the graph. torch.autograd.grad for a leaf
  does not run the leaf's node, so it behaves as without hooks.
- An edge has one hook for all modules that meet there. Without a pre_backward or post_backward
  listener the hook only reports changes of the running call.
- A leaf that a module returns, such as its parameter, was not computed by the module. The module
  is not entered through it.
- A backward that fails leaves no module. Its state is freed when the engine drops its callback.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from functools import partial
from itertools import count
from typing import Any, Union
from weakref import ref

from torch import is_grad_enabled

from ._attribution import BACKWARD, Attribution
from ._edges import edges_of
from ._listeners import NOTHING, PathListeners
from ._record import Call, Path, ThreadState
from ._torch_compat import (
    NO_TASK,
    UNNUMBERED,
    at_backward_end,
    current_node,
    graph_task,
    hook_gradient,
    number_of,
)

KEPT_PASSES = 64
"""Backwards followed at once; older ones have failed."""

PRUNE_EVERY = 32
"""Inputs added to a hook between two removals of dead calls: a parameter's node outlives graphs."""

_next_serial = count().__next__

Crossing = Union["CallBackward", tuple["ref[CallBackward]", int]]


class CallBackward:
    """The backward of one call. Lives as long as a node that created an output.

    Attributes:
        inputs: number of gradient edges of the call's inputs.
        serial: position of the call's beginning among all calls.
    """

    __slots__ = ("__weakref__", "call", "inputs", "serial")

    def __init__(self, call: Call, inputs: int) -> None:
        self.call, self.inputs, self.serial = call, inputs, _next_serial()


class BackwardPass:
    """Progress of one backward.

    Attributes:
        thread: the thread that called it.
        entered: for each entered call, whether it was left.
        arrived: gradients of a call's inputs so far, by position.
        end: callback that torch calls when the backward ends; None if torch has no such callback.
    """

    __slots__ = ("arrived", "end", "entered", "thread")
    end: ref[Any] | None

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.entered: dict[CallBackward, bool] = {}
        self.arrived: dict[CallBackward, dict[int, Any]] = {}


class EdgeHook(list[Crossing]):
    """The hook of an edge, with the calls whose outputs and inputs meet there.

    An output is a `CallBackward`: its backward begins here. An input is a weak reference to a
    `CallBackward`, since the node may outlive the graph of that call, with the position of the edge
    among the inputs. Outputs are in the order in which their calls ended, inputs in the order in
    which their calls began: the order of events in Note [Backward events].
    """

    __slots__ = ("backward",)

    def __init__(self, backward: Backward) -> None:
        super().__init__()
        self.backward = backward

    def __call__(self, grad: Any) -> None:
        attribution, task = self.backward.attribution, graph_task()
        state = attribution.state() or attribution.open_state()
        backward_pass = self.backward.passes.get(task) or self.backward.begin(task)
        shown = state.shown
        if self:
            try:
                self._cross(state, backward_pass, grad)
            finally:
                state.shown = shown
        if attribution.listeners.switched:
            node = current_node()
            number = number_of(node)
            if number < UNNUMBERED:
                call = shown or attribution.maker_of(state, task, node, number)
                for notify in attribution.listeners.switched:
                    notify(call, BACKWARD)

    def _cross(self, state: ThreadState, backward_pass: BackwardPass, grad: Any) -> None:
        # Enter modules first, then leave modules; a module that was not entered is not left.
        entered = backward_pass.entered
        for entry in self:
            if isinstance(entry, CallBackward) and entry not in entered:
                entered[entry] = False
                state.shown = entry.call
                path = entry.call[0]
                for notify in _listeners_of(path).pre_backward:
                    notify(path.module(), (grad,))
        for entry in self:
            if isinstance(entry, CallBackward):
                continue
            alive, at = entry
            call_backward = alive()
            # A gradient is stored if others of the call are missing, or if the module was entered.
            if call_backward is None or entered.get(call_backward, call_backward.inputs == 1):
                continue
            arrived = backward_pass.arrived.setdefault(call_backward, {})
            arrived[at] = grad
            if len(arrived) == call_backward.inputs and call_backward in entered:
                self.backward.leave(state, backward_pass, call_backward)

    def add_input(self, call_backward: CallBackward, at: int) -> None:
        if self and len(self) % PRUNE_EVERY == 0:
            self[:] = [entry for entry in self if not isinstance(entry, tuple) or entry[0]()]
        self.append((ref(call_backward), at))


class Backward:
    """Attaches edge hooks in forward and turns their calls into events in backward.

    Attributes:
        passes: running backwards by id.
    """

    def __init__(self, attribution: Attribution) -> None:
        self.attribution = attribution
        self.passes: dict[int, BackwardPass] = {}
        self._key = f"mod_tracker.{id(attribution)}"

    def open(
        self, state: ThreadState, listeners: PathListeners, args: tuple, kwargs: dict[str, Any]
    ) -> CallBackward | None:
        """Hook the inputs of a call that begins, before they can be changed in place."""
        told = listeners.pre_backward or listeners.post_backward
        if not (told or listeners.switched) or not is_grad_enabled():
            return None
        values = (*args, *kwargs.values()) if kwargs else args
        if not told:
            self._watch(state, values)
            return None
        # Only post_backward needs the edges of inputs.
        edges = edges_of(values, state.leaves) if listeners.post_backward else ()
        call_backward = CallBackward(state.call, len(edges))
        for at, (node, output) in enumerate(edges):
            self._edge_hook(node, output, state).add_input(call_backward, at)
        return call_backward

    def close(self, state: ThreadState, call_backward: CallBackward | None, output: Any) -> None:
        """Hook the outputs of a call that ends."""
        attribution, call = self.attribution, state.call
        # A plain tuple is unpacked here: searching containers costs several times as much.
        outputs = output if type(output) is tuple else (output,)
        if call_backward is not None:
            for node, position in edges_of(outputs, None):  # without leaves
                self._edge_hook(node, position, state).append(call_backward)
        elif attribution.listeners.switched and is_grad_enabled():
            self._watch(state, outputs)
        if attribution.threaded and (call[2] is state.base or graph_task() != NO_TASK):
            # Mark the output, so that a backward in any thread finds this state.
            for node, _ in edges_of((output,), {}):
                node.register_prehook(lambda grads: attribution.claim(graph_task(), state))

    def _watch(self, state: ThreadState, values: Iterable[Any]) -> None:
        for node, position in edges_of(values, None):
            self._edge_hook(node, position, state)

    def begin(self, task: int) -> BackwardPass:
        while len(self.passes) >= KEPT_PASSES:
            self.passes.pop(next(iter(self.passes)), None)
        backward_pass = self.passes[task] = BackwardPass()
        end = partial(self._finish, task)
        # If the backward fails, the engine drops this callback without calling it.
        failed = partial(_forget_one_failed, ref(self), task)
        backward_pass.end = ref(end, failed) if at_backward_end(end) else None
        return backward_pass

    def leave(
        self, state: ThreadState, backward_pass: BackwardPass, call_backward: CallBackward
    ) -> None:
        backward_pass.entered[call_backward] = True
        arrived = backward_pass.arrived.pop(call_backward, {})
        grads = tuple(map(arrived.get, range(call_backward.inputs)))
        state.shown = call_backward.call
        path = call_backward.call[0]
        for notify in _listeners_of(path).post_backward:
            notify(path.module(), grads)

    def _edge_hook(self, node: Any, output: int, state: ThreadState) -> EdgeHook:
        key = self._key if output == 0 else f"{self._key}.{output}"
        edge_hook: EdgeHook | None = node.metadata.get(key)
        if edge_hook is None:
            edge_hook = node.metadata[key] = EdgeHook(self)
            hook_gradient(node, output, state.carrier, edge_hook)
        return edge_hook

    def _finish(self, task: int) -> None:
        # The remaining modules are left in reverse order of their calls.
        backward_pass = self.passes.pop(task, None)
        if backward_pass is None:
            return
        state = self.attribution.state() or self.attribution.open_state()
        still_in = [each for each, left in backward_pass.entered.items() if not left]
        shown = state.shown
        try:
            for call_backward in sorted(still_in, key=lambda each: -each.serial):
                self.leave(state, backward_pass, call_backward)
        finally:
            state.shown = shown
        self.rest(backward_pass, task)

    def rest(self, ended: BackwardPass, task: int) -> None:
        """Report the call that runs after a backward, unless the caller is a backward itself."""
        if not any(other.thread == ended.thread for other in self.passes.values()):
            for notify in self.attribution.listeners.switched:
                notify(*self.attribution.resting_place(task))


def _forget_one_failed(backward: ref[Backward], task: int, _: object) -> None:
    # Runs in the thread that drops the backward last: the caller's or a device's. A device's thread
    # may run this after the caller has continued.
    found = backward()
    dropped = None if found is None else found.passes.pop(task, None)
    if found is not None and dropped is not None:
        found.rest(dropped, task)


def _listeners_of(path: Path) -> PathListeners:
    return path.listeners or NOTHING
