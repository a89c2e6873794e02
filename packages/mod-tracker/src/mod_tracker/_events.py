"""Events of module calls, and the listeners that get them.

Forward events come from the call itself, backward events from hooks on the gradient edges at module
boundaries. A tracker without listeners does no work for events.

Note [Forward events]
An exception of the module or of a listener reaches the caller of the module, and the thread's state
is restored. Listeners that were called on entry are called on exit, with output None if the call
failed.

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
  callback the hook only reports changes of the running call.
- A leaf that a module returns, such as its parameter, was not computed by the module. The module
  is not entered through it.
- A backward that fails leaves no module. Its state is freed when the engine drops its callback.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, Union
from weakref import ref

from torch import is_grad_enabled, nn

from ._attribution import BACKWARD, FORWARD, RECOMPUTE, Attribution, Callback
from ._edges import edges_of
from ._record import Call, ThreadState
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


@dataclass(frozen=True)
class Listener:
    """Callbacks of one listener.

    Each gets the module, or None if the module was freed, and: pre_forward `(args, kwargs)`,
    post_forward `(args, kwargs, output)`, pre_backward and post_backward `(grads,)`. During the
    callback `Attribution.locate` returns the call. `switched` gets `(call, phase)` whenever another
    call runs.
    """

    pre_forward: Callback | None = None
    post_forward: Callback | None = None
    pre_backward: Callback | None = None
    post_backward: Callback | None = None
    switched: Callback | None = None


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

    __slots__ = ("events",)

    def __init__(self, events: Events) -> None:
        super().__init__()
        self.events = events

    def __call__(self, grad: Any) -> None:
        attribution, task = self.events.attribution, graph_task()
        state = attribution.state() or attribution.open_state()
        backward_pass = self.events.passes.get(task) or self.events.begin(task)
        shown = state.shown
        if self:
            try:
                self._cross(state, backward_pass, grad)
            finally:
                state.shown = shown
        if attribution.switched:
            node = current_node()
            number = number_of(node)
            if number < UNNUMBERED:
                call = shown or attribution.maker_of(state, task, node, number)
                for notify in attribution.switched:
                    notify(call, BACKWARD)

    def _cross(self, state: ThreadState, backward_pass: BackwardPass, grad: Any) -> None:
        # Enter modules first, then leave modules; a module that was not entered is not left.
        entered = backward_pass.entered
        for entry in self:
            if isinstance(entry, CallBackward) and entry not in entered:
                entered[entry] = False
                state.shown = entry.call
                for notify in self.events.pre_backward:
                    notify(entry.call[0].module(), (grad,))
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
                self.events.leave(state, backward_pass, call_backward)

    def add_input(self, call_backward: CallBackward, at: int) -> None:
        if self and len(self) % PRUNE_EVERY == 0:
            self[:] = [entry for entry in self if not isinstance(entry, tuple) or entry[0]()]
        self.append((ref(call_backward), at))


class Events:
    """The listeners of a tracker. Tells them of calls, and attaches edge hooks for backward.

    Attributes:
        forward: pairs of `pre_forward` and `post_forward`, in order of registration. If a
            `pre_forward` raises, the `post_forward` callbacks of the pairs before it are called.
        passes: running backwards by id.
    """

    def __init__(self, attribution: Attribution) -> None:
        self.attribution = attribution
        self.passes: dict[int, BackwardPass] = {}
        self._key = f"mod_tracker.{id(attribution)}"
        self._set(())

    def add(self, listener: Listener) -> Callable[[], None]:
        """Register a listener and return a function that removes it."""
        self._set((*self._listeners, listener))
        return lambda: self._set(kept for kept in self._listeners if kept is not listener)

    def _set(self, listeners: Iterable[Listener]) -> None:
        self._listeners = tuple(listeners)

        def those(kind: str) -> tuple[Callback, ...]:
            found = (getattr(listener, kind) for listener in self._listeners)
            return tuple(callback for callback in found if callback is not None)

        pairs = ((each.pre_forward, each.post_forward) for each in self._listeners)
        self.forward = tuple(pair for pair in pairs if pair != (None, None))
        self.pre_backward, self.post_backward = those("pre_backward"), those("post_backward")
        attribution = self.attribution
        attribution.switched = those("switched")
        attribution.has_events = attribution.threaded or bool(self._listeners)

    def call(
        self,
        state: ThreadState,
        below: Callable[..., Any],
        module: nn.Module,
        args: tuple,
        kwargs: dict[str, Any],
    ) -> Any:
        """Call a module and the listeners. See Note [Forward events].

        The caller has made this call the running one.
        """
        for notify in self.attribution.switched:
            notify(state.call, FORWARD if state.task == NO_TASK else RECOMPUTE)
        outermost, seen = not state.leaves, state.call[0].module()
        told: list[Callback] = []
        output = None
        try:
            call_backward = self._open(state, args, kwargs)
            for entered, left in self.forward:
                if entered is not None:
                    entered(seen, args, kwargs)
                if left is not None:
                    told.append(left)
            output = below(module, *args, **kwargs)
        finally:
            try:
                for notify in told:
                    notify(seen, args, kwargs, output)
            finally:
                if outermost:
                    state.leaves.clear()
        self._close(state, call_backward, output)
        return output

    def _open(self, state: ThreadState, args: tuple, kwargs: dict[str, Any]) -> CallBackward | None:
        """Hook the inputs of a call that begins, before they can be changed in place."""
        told = self.pre_backward or self.post_backward
        if not (told or self.attribution.switched) or not is_grad_enabled():
            return None
        values = (*args, *kwargs.values()) if kwargs else args
        if not told:
            self._watch(state, values)
            return None
        # Only post_backward needs the edges of inputs.
        edges = edges_of(values, state.leaves) if self.post_backward else ()
        call_backward = CallBackward(state.call, len(edges))
        for at, (node, output) in enumerate(edges):
            self._edge_hook(node, output, state).add_input(call_backward, at)
        return call_backward

    def _close(self, state: ThreadState, call_backward: CallBackward | None, output: Any) -> None:
        """Hook the outputs of a call that ends."""
        attribution, call = self.attribution, state.call
        # A plain tuple is unpacked here: searching containers costs several times as much.
        outputs = output if type(output) is tuple else (output,)
        if call_backward is not None:
            for node, position in edges_of(outputs, None):  # without leaves
                self._edge_hook(node, position, state).append(call_backward)
        elif attribution.switched and is_grad_enabled():
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
        for notify in self.post_backward:
            notify(call_backward.call[0].module(), grads)

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
            for notify in self.attribution.switched:
                notify(*self.attribution.resting_place(task))


def _forget_one_failed(events: ref[Events], task: int, _: object) -> None:
    # Runs in the thread that drops the backward last: the caller's or a device's. A device's thread
    # may run this after the caller has continued.
    found = events()
    dropped = None if found is None else found.passes.pop(task, None)
    if found is not None and dropped is not None:
        found.rest(dropped, task)
