"""Edge: backward events, through hooks on the gradient edges at module boundaries.

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
"""

from __future__ import annotations

import threading
from functools import partial
from itertools import count
from typing import Any, Union
from weakref import ref

from torch import Tensor

from ._edges import edges_of
from ._engine import Engine
from ._lane import Lane
from ._record import Call
from ._torch_compat import (
    UNNUMBERED,
    at_backward_end,
    current_node,
    graph_task,
    hook_gradient,
    number_of,
)

KEPT_RUNS = 64
"""Backwards followed at once; an older one is one that failed."""

PRUNE_EVERY = 32
"""A node that outlives graphs, as a parameter's does, is rid of dead spans this often."""

_next_serial = count().__next__

Entry = Union["Span", "ref[Span]", tuple["ref[Span]", int]]


class Span:
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


class Run:
    """How far one backward has come.

    Attributes:
        thread: where it runs.
        entered: for each span that was entered, whether it was left, too.
        arrived: gradients of a span's inputs so far, by position.
    """

    __slots__ = ("arrived", "entered", "thread")

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.entered: dict[Span, bool] = {}
        self.arrived: dict[Span, dict[int, Any]] = {}


class Boundary(list[Entry]):
    """The hook of an edge, and what stands on it: outputs and inputs of modules.

    A span is there for an output: its backward begins here. For an input there is a weak reference
    to a span, since the node may outlive the graph of that call, with the position of the edge
    among the inputs if there are more than one. Spans are in the order in which calls ended,
    references in the order in which they began: the orders of Rule 2.

    Attributes:
        backward: whose boundary this is.
    """

    __slots__ = ("backward",)
    backward: Backward

    def __call__(self, grad: Any) -> None:
        """Tell what is entered and left when the gradient of the edge is there."""
        backward = self.backward
        engine, task = backward.engine, graph_task()
        run = backward.runs.get(task) or backward.begin(task)
        try:
            lane = engine.local.lane
        except AttributeError:
            lane = engine.open_lane()
        entered, shown = run.entered, lane.shown
        try:
            for entry in self:
                if isinstance(entry, Span) and entry not in entered:
                    entered[entry] = False
                    lane.shown = call = entry.call
                    path = call[0]
                    if path.watch is not None:
                        for notify in path.watch.pre_backward:
                            notify(path.module(), (grad,))
            for entry in self:
                if isinstance(entry, ref):
                    span = entry()
                    if span is not None and entered.get(span) is False:
                        backward.leave(lane, run, span, (grad,))
                elif isinstance(entry, tuple):
                    alive, at = entry
                    span = alive()
                    if span is not None and not entered.get(span):
                        backward.arrive(lane, run, span, at, grad)
        finally:
            lane.shown = shown
        if engine.listeners.switched and number_of(current_node()) < UNNUMBERED:
            for notify in engine.listeners.switched:
                notify(*engine.locate())


class Backward:
    """Attaches boundaries in forward, and turns their firing into events in backward.

    Attributes:
        engine: whose lanes and listeners these are.
        runs: the backwards that run, by id.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.runs: dict[int, Run] = {}
        self._key = f"mod_tracker.{id(engine)}"

    def open(self, lane: Lane, args: tuple, kwargs: dict[str, Any]) -> Span:
        """Watch the inputs of the call that begins, before they can be changed in place."""
        span = Span()
        span.call, span.serial = lane.call, _next_serial()
        tensor: Any = args[0] if len(args) == 1 and not kwargs else None
        node: Any = tensor.grad_fn if type(tensor) is Tensor else None
        if node is not None and tensor.output_nr == 0:  # see Rule 6
            span.inputs = 1
            boundary = node.metadata.get(self._key)
            if boundary is None:
                boundary = self._boundary(node, 0, lane)
            elif len(boundary) >= PRUNE_EVERY:
                _prune(boundary)
            boundary.append(ref(span))
            return span
        edges = edges_of((*args, *kwargs.values()), lane.leaves)
        span.inputs = len(edges)
        for at, (node, output) in enumerate(edges):
            boundary = self._boundary(node, output, lane)
            _prune(boundary)
            boundary.append(ref(span) if len(edges) == 1 else (ref(span), at))
        return span

    def close(self, span: Span, lane: Lane, output: Any) -> None:
        """Watch the outputs of a call that has returned."""
        node: Any = output.grad_fn if type(output) is Tensor else None
        if node is not None and output.output_nr == 0:  # see Rule 6
            boundary = node.metadata.get(self._key)
            if boundary is None:
                boundary = self._boundary(node, 0, lane)
            boundary.append(span)
            return
        # A plain tuple is opened here: searching containers costs several times as much.
        outputs = output if type(output) is tuple else (output,)
        for node, position in edges_of(outputs, None):  # see Rule 7
            self._boundary(node, position, lane).append(span)

    def mark_origin(self, lane: Lane, output: Any) -> None:
        """Let a backward through `output` be looked up in `lane`, whatever thread runs it."""
        engine = self.engine

        def claim(grads: tuple) -> None:
            engine.claim(graph_task(), lane)

        for node, _ in edges_of((output,), {}):
            node.register_prehook(claim)

    def begin(self, task: int) -> Run:
        """Follow a backward that is seen for the first time."""
        while len(self.runs) >= KEPT_RUNS:
            self.runs.pop(next(iter(self.runs)), None)
        run = self.runs[task] = Run()
        at_backward_end(partial(self._finish, task))
        return run

    def arrive(self, lane: Lane, run: Run, span: Span, at: int, grad: Any) -> None:
        """Note a gradient of one of several inputs; the last one leaves the module."""
        arrived = run.arrived.setdefault(span, {})
        arrived[at] = grad
        if len(arrived) == span.inputs and span in run.entered:
            self.leave(lane, run, span, _in_order(span, run.arrived.pop(span)))

    def leave(self, lane: Lane, run: Run, span: Span, grads: tuple) -> None:
        """Tell that a module is left."""
        run.entered[span] = True
        lane.shown = span.call
        path = span.call[0]
        if path.watch is not None:
            for notify in path.watch.post_backward:
                notify(path.module(), grads)

    def forget_failed(self, thread: int) -> None:
        """Drop the backwards of a thread that is in forward again: they ended with an error."""
        for task, run in list(self.runs.items()):
            if run.thread == thread:
                del self.runs[task]

    def _boundary(self, node: Any, output: int, lane: Lane) -> Boundary:
        """Return the boundary at an output of a node, made if there is none."""
        key = self._key if output == 0 else f"{self._key}.{output}"
        boundary: Boundary | None = node.metadata.get(key)
        if boundary is None:
            boundary = node.metadata[key] = Boundary()
            boundary.backward = self
            hook_gradient(node, output, lane.carrier, boundary)
        return boundary

    def _finish(self, task: int) -> None:
        # See Rule 3.
        run = self.runs.pop(task, None)
        if run is None:
            return
        engine = self.engine
        lane = engine.lane() or engine.open_lane()
        still_in = [span for span, left in run.entered.items() if not left]
        shown = lane.shown
        try:
            for span in sorted(still_in, key=lambda span: -span.serial):
                self.leave(lane, run, span, _in_order(span, run.arrived.get(span, {})))
        finally:
            lane.shown = shown
        if not any(other.thread == run.thread for other in self.runs.values()):
            for notify in engine.listeners.switched:
                notify(*engine.resting_place())


def _in_order(span: Span, arrived: dict[int, Any]) -> tuple:
    return tuple([arrived.get(at) for at in range(span.inputs)])


def _prune(boundary: Boundary) -> None:
    # Only now and then, so that a node many modules share is not searched for each of them.
    if boundary and len(boundary) % PRUNE_EVERY == 0:
        boundary[:] = [entry for entry in boundary if not _is_dead(entry)]


def _is_dead(entry: Entry) -> bool:
    if isinstance(entry, Span):
        return False
    alive = entry[0] if isinstance(entry, tuple) else entry
    return alive() is None
