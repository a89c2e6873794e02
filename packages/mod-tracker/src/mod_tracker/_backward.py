"""Backward events, through hooks on the gradient edges at module boundaries.

Note [Backward events]
A module is entered in backward when the gradient of one of its outputs is there, and left when
those of all its inputs are, or else at the end of that backward.
Rule 1: only a module that was entered is left, and both happen once in a backward.
Rule 2: at one edge, modules are entered first, in the order in which their calls ended; then
        modules are left, in the order in which their calls began. This is torch's order.
Rule 3: at the end of a backward, modules are left in the reverse order in which their calls began.
Rule 4: hooks sit on nodes, not on tensors: they go with the graph, and torch.autograd.grad for a
        leaf tensor, which does not run that leaf's node, works as ever.
Rule 5: one hook per edge, whatever number of modules meet there.
Rule 6: one tensor in and one out, each the first output of its node, is what most modules have.
        There `edges_of` is written out, and objects are made without an `__init__`: calling them
        would be a fifth of all that a call with hooks costs.
Rule 7: a leaf that a module returns, such as its parameter, was not made by it: the module has no
        backward through it, and is not entered. Nothing would end with the graph of that call.
Rule 8: a backward that fails leaves no module, and is forgotten when the engine drops its end, or
        when its thread is in forward again.
"""

from __future__ import annotations

import threading
from functools import partial
from itertools import count
from typing import Any, Union
from weakref import ref

from torch import Tensor

from ._attribution import BACKWARD, Attribution
from ._edges import edges_of
from ._record import Call
from ._thread_state import ThreadState
from ._torch_compat import (
    UNNUMBERED,
    at_backward_end,
    current_node,
    graph_task,
    hook_gradient,
    number_of,
)

KEPT_PASSES = 64
"""Backwards followed at once; an older one is one that failed."""

PRUNE_EVERY = 32
"""A node that outlives graphs, as a parameter's does, is rid of dead calls this often."""

KEPT_NUMBERS = 1 << 12
"""Nodes remembered to have a hook. Forgotten ones may be given a second, which tells no more."""

_next_serial = count().__next__

Crossing = Union["CallBackward", "ref[CallBackward]", tuple["ref[CallBackward]", int]]


class CallBackward:
    """The backward of one call. Alive as long as a node that made an output.

    Attributes:
        call: the call.
        inputs: how many gradient edges its inputs have.
        serial: position of the call's beginning among all calls.
    """

    __slots__ = ("__weakref__", "call", "inputs", "serial")
    call: Call
    inputs: int
    serial: int


class BackwardPass:
    """How far one backward has come.

    Attributes:
        thread: where it runs.
        entered: for each call that was entered, whether it was left, too.
        arrived: gradients of a call's inputs so far, by position.
        end: the callback with which torch ends it; None where torch has none.
    """

    __slots__ = ("arrived", "end", "entered", "thread")
    end: ref[Any] | None

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.entered: dict[CallBackward, bool] = {}
        self.arrived: dict[CallBackward, dict[int, Any]] = {}


class EdgeHook(list[Crossing]):
    """The hook of an edge, and what stands on it: outputs and inputs of modules.

    A call is there for an output: its backward begins here. For an input there is a weak reference
    to a call, since the node may outlive the graph of that call, with the position of the edge
    among the inputs if there are more than one. Spans are in the order in which calls ended,
    references in the order in which they began: the orders of Rule 2.

    Attributes:
        backward: whose edge hook this is.
    """

    __slots__ = ("backward",)
    backward: Backward

    def __call__(self, grad: Any) -> None:
        """Tell what is entered and left when the gradient of the edge is there."""
        backward = self.backward
        attribution, task = backward.attribution, graph_task()
        backward_pass = backward.passes.get(task) or backward.begin(task)
        try:
            state = attribution.local.state
        except AttributeError:
            state = attribution.open_state()
        shown = state.shown
        if self:
            self._cross(state, backward_pass, grad)
        if attribution.listeners.switched:
            node = current_node()
            number = number_of(node)
            if number < UNNUMBERED:
                call = shown or attribution.maker_of(state, task, node, number)
                for notify in attribution.listeners.switched:
                    notify(call, BACKWARD)

    def _cross(self, state: ThreadState, backward_pass: BackwardPass, grad: Any) -> None:
        # See Rules 1 and 2.
        backward, entered, shown = self.backward, backward_pass.entered, state.shown
        try:
            for entry in self:
                if isinstance(entry, CallBackward) and entry not in entered:
                    entered[entry] = False
                    state.shown = call = entry.call
                    path = call[0]
                    if path.listeners is not None:
                        for notify in path.listeners.pre_backward:
                            notify(path.module(), (grad,))
            for entry in self:
                if isinstance(entry, ref):
                    call_backward = entry()
                    if call_backward is not None and entered.get(call_backward) is False:
                        backward.leave(state, backward_pass, call_backward, (grad,))
                elif isinstance(entry, tuple):
                    alive, at = entry
                    call_backward = alive()
                    if call_backward is not None and not entered.get(call_backward):
                        backward.arrive(state, backward_pass, call_backward, at, grad)
        finally:
            state.shown = shown


class Backward:
    """Attaches edge hooks in forward, and turns their firing into events in backward.

    Attributes:
        attribution: whose thread states and listeners these are.
        runs: the backwards that run, by id.
    """

    def __init__(self, attribution: Attribution) -> None:
        self.attribution = attribution
        self.passes: dict[int, BackwardPass] = {}
        self._key = f"mod_tracker.{id(attribution)}"
        self._switch = EdgeHook()
        self._switch.backward = self

    def open(self, state: ThreadState, args: tuple, kwargs: dict[str, Any]) -> CallBackward:
        """Watch the inputs of the call that begins, before they can be changed in place."""
        call_backward = CallBackward()
        call_backward.call, call_backward.serial = state.call, _next_serial()
        tensor: Any = args[0] if len(args) == 1 and not kwargs else None
        node: Any = tensor.grad_fn if type(tensor) is Tensor else None
        if node is not None and tensor.output_nr == 0:  # see Rule 6
            call_backward.inputs = 1
            edge_hook = node.metadata.get(self._key)
            if edge_hook is None:
                edge_hook = self._edge_hook(node, 0, state)
            elif len(edge_hook) >= PRUNE_EVERY:
                _prune(edge_hook)
            edge_hook.append(ref(call_backward))
            return call_backward
        edges = edges_of((*args, *kwargs.values()), state.leaves)
        call_backward.inputs = len(edges)
        for at, (node, output) in enumerate(edges):
            edge_hook = self._edge_hook(node, output, state)
            _prune(edge_hook)
            edge_hook.append(ref(call_backward) if len(edges) == 1 else (ref(call_backward), at))
        return call_backward

    def close(self, call_backward: CallBackward, state: ThreadState, output: Any) -> None:
        """Watch the outputs of a call that has returned."""
        node: Any = output.grad_fn if type(output) is Tensor else None
        if node is not None and output.output_nr == 0:  # see Rule 6
            edge_hook = node.metadata.get(self._key)
            if edge_hook is None:
                edge_hook = self._edge_hook(node, 0, state)
            edge_hook.append(call_backward)
            return
        # A plain tuple is opened here: searching containers costs several times as much.
        outputs = output if type(output) is tuple else (output,)
        for node, position in edges_of(outputs, None):  # see Rule 7
            self._edge_hook(node, position, state).append(call_backward)

    def watch(self, state: ThreadState, values: Any) -> None:
        """Have changes of the running call told at the edges of a call's inputs or outputs.

        All that is needed where nobody asks when a module is entered and left: at an edge one node
        has run and another one is next, whichever modules end and begin there. A node has one such
        hook, by its number, which it shares with no other as long as one thread runs modules.
        """
        kind = type(values)
        if kind is Tensor:
            node: Any = values.grad_fn
            if node is None:
                return  # leaves have no node that a module made
            if values.output_nr == 0 and not self.attribution.threaded:
                number, watched = number_of(node), state.watched
                if number not in watched:
                    if len(watched) >= KEPT_NUMBERS:
                        watched.clear()
                    hook_gradient(node, 0, state.carrier, self._switch)
                    watched.add(number)
                return
        elif kind is tuple and len(values) == 1:
            self.watch(state, values[0])
            return
        for node, position in edges_of(values if kind is tuple else (values,), None):
            self._edge_hook(node, position, state)

    def mark_origin(self, state: ThreadState, output: Any) -> None:
        """Let a backward through `output` be looked up in `state`, whatever thread runs it."""
        attribution = self.attribution

        def claim(grads: tuple) -> None:
            attribution.claim(graph_task(), state)

        for node, _ in edges_of((output,), {}):
            node.register_prehook(claim)

    def begin(self, task: int) -> BackwardPass:
        """Follow a backward that is seen for the first time."""
        while len(self.passes) >= KEPT_PASSES:
            self.passes.pop(next(iter(self.passes)), None)
        backward_pass = self.passes[task] = BackwardPass()
        end = partial(self._finish, task)
        # The engine holds it; of a backward that fails it drops it, and tells nobody (Rule 8).
        failed = partial(_forget_one_failed, ref(self), task)
        backward_pass.end = ref(end, failed) if at_backward_end(end) else None
        return backward_pass

    def arrive(
        self,
        state: ThreadState,
        backward_pass: BackwardPass,
        call_backward: CallBackward,
        at: int,
        grad: Any,
    ) -> None:
        """Note a gradient of one of several inputs; the last one leaves the module."""
        arrived = backward_pass.arrived.setdefault(call_backward, {})
        arrived[at] = grad
        if len(arrived) == call_backward.inputs and call_backward in backward_pass.entered:
            grads = _in_order(call_backward, backward_pass.arrived.pop(call_backward))
            self.leave(state, backward_pass, call_backward, grads)

    def leave(
        self,
        state: ThreadState,
        backward_pass: BackwardPass,
        call_backward: CallBackward,
        grads: tuple,
    ) -> None:
        """Tell that a module is left."""
        backward_pass.entered[call_backward] = True
        state.shown = call_backward.call
        path = call_backward.call[0]
        if path.listeners is not None:
            for notify in path.listeners.post_backward:
                notify(path.module(), grads)

    def forget_failed(self, thread: int) -> None:
        """Drop the backwards of a thread that is in forward again: they ended with an error."""
        for task, backward_pass in list(self.passes.items()):
            if backward_pass.thread == thread:
                del self.passes[task]

    def _edge_hook(self, node: Any, output: int, state: ThreadState) -> EdgeHook:
        """Return the edge hook at an output of a node, made if there is none."""
        key = self._key if output == 0 else f"{self._key}.{output}"
        edge_hook: EdgeHook | None = node.metadata.get(key)
        if edge_hook is None:
            edge_hook = node.metadata[key] = EdgeHook()
            edge_hook.backward = self
            hook_gradient(node, output, state.carrier, edge_hook)
        return edge_hook

    def _finish(self, task: int) -> None:
        # See Rule 3.
        backward_pass = self.passes.pop(task, None)
        if backward_pass is None:
            return
        attribution = self.attribution
        state = attribution.state() or attribution.open_state()
        still_in = [each for each, left in backward_pass.entered.items() if not left]
        shown = state.shown
        try:
            for call_backward in sorted(still_in, key=lambda each: -each.serial):
                arrived = backward_pass.arrived.get(call_backward, {})
                self.leave(state, backward_pass, call_backward, _in_order(call_backward, arrived))
        finally:
            state.shown = shown
        self._rest(backward_pass.thread)

    def _rest(self, thread: int) -> None:
        """Tell where the running thread rests after a backward, unless it is inside another."""
        if not any(other.thread == thread for other in self.passes.values()):
            for notify in self.attribution.listeners.switched:
                notify(*self.attribution.resting_place())


def _forget_one_failed(backward: ref[Backward], task: int, _: object) -> None:
    found, here = backward(), threading.get_ident()
    dropped = None if found is None else found.passes.pop(task, None)
    if found is None or dropped is None:
        return
    # What a device's thread has run is dropped by whoever called backward, and goes on from here;
    # if that thread drops what another one ran, it does not know where the caller is by then.
    state = found.attribution.state()
    if dropped.thread == here or (state is not None and not state.inner):
        found._rest(here)


def _in_order(call_backward: CallBackward, arrived: dict[int, Any]) -> tuple:
    return tuple([arrived.get(at) for at in range(call_backward.inputs)])


def _prune(edge_hook: EdgeHook) -> None:
    # Only now and then, so that a node many modules share is not searched for each of them.
    if edge_hook and len(edge_hook) % PRUNE_EVERY == 0:
        edge_hook[:] = [entry for entry in edge_hook if not _is_dead(entry)]


def _is_dead(entry: Crossing) -> bool:
    if isinstance(entry, CallBackward):
        return False
    alive = entry[0] if isinstance(entry, tuple) else entry
    return alive() is None
