"""Edge: backward events, through pre-hooks on the autograd nodes at module boundaries.

Note [Backward events]
A module is entered in backward when the first node that made one of its outputs runs, and left
when all nodes that made its inputs have begun to run, or else at the end of that backward.
Rule 1: only a module that was entered is left, and both happen once in a backward.
Rule 2: at one node, modules are entered first, in the order in which their calls ended; then
        modules are left, in the order in which their calls began. This is torch's order.
Rule 3: at the end of a backward, modules are left in the reverse order in which their calls began.
Rule 4: hooks sit on nodes, not on tensors: they go with the graph, and torch.autograd.grad for a
        leaf tensor, which does not run that leaf's node, works as ever.
Rule 5: one hook per node, whatever number of modules meet there.
Rule 6: one tensor in and one out is what most modules have. There `edges_of` is written out, since
        calling it would be a tenth of all that a call with hooks costs.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ._edges import Edge, edges_of
from ._record import Call
from ._torch_compat import UNNUMBERED, at_backward_end, current_node, graph_task, number_of

if TYPE_CHECKING:
    from ._engine import Engine
    from ._lane import Lane

KEPT_RUNS = 64
"""Backwards followed at once; an older one is one that failed."""

PRUNE_EVERY = 32
"""A node that outlives graphs, as a parameter's does, is rid of dead spans this often."""

_serials = count()


class Span:
    """The backward of one call. Alive as long as a node that made an output.

    Attributes:
        call: the call.
        inputs: how many gradient edges its inputs have.
        serial: position of the call's beginning among all calls.
    """

    __slots__ = ("__weakref__", "call", "inputs", "serial")

    def __init__(self, call: Call, inputs: int) -> None:
        self.call = call
        self.inputs = inputs
        self.serial = next(_serials)


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


class Boundary:
    """The pre-hook of a node that made an output or an input of modules.

    Attributes:
        enter: whose backward begins here, and which output of the node is theirs.
        leave: whose inputs come from here, at which position among them, and from which output
            of the node. Appended when calls begin, so in the order of Rule 2. Weak, because the
            node may outlive the graphs of these calls.
    """

    __slots__ = ("backward", "enter", "leave")

    def __init__(self, backward: Backward) -> None:
        self.backward = backward
        self.enter: list[tuple[Span, int]] = []
        self.leave: list[tuple[weakref.ref[Span], int, int]] = []

    def __call__(self, grads: tuple) -> None:
        """Tell what is entered and left at a node that begins to run. See Rules 1 and 2."""
        backward = self.backward
        engine, task = backward.engine, graph_task()
        run = backward.runs.get(task) or backward.begin(task)
        try:
            lane = engine.local.lane
        except AttributeError:
            lane = engine.open_lane()
        entered, shown = run.entered, lane.shown
        try:
            for span, output in self.enter:
                if span not in entered:
                    entered[span] = False
                    lane.shown = span.call
                    path = span.call[0]
                    if path.watch is not None:
                        for notify in path.watch.pre_backward:
                            notify(path.module(), (grads[output],))
            for alive, at, output in self.leave:
                ending = alive()
                if ending is None or entered.get(ending):
                    continue
                if ending.inputs > 1:
                    backward.arrive(lane, run, ending, at, grads[output])
                elif ending in entered:  # `Backward.leave`, written out
                    entered[ending] = True
                    lane.shown = ending.call
                    path = ending.call[0]
                    if path.watch is not None:
                        for notify in path.watch.post_backward:
                            notify(path.module(), (grads[output],))
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
        tensor = args[0] if len(args) == 1 and not kwargs else None
        if type(tensor) is Tensor and (node := tensor.grad_fn) is not None:
            edges: Sequence[Edge] = ((node, tensor.output_nr),)  # see Rule 6
        else:
            edges = edges_of((*args, *kwargs.values()), lane.leaves)
        span = Span(lane.call, len(edges))
        alive = weakref.ref(span)
        for at, (node, output) in enumerate(edges):
            leave = (node.metadata.get(self._key) or self._boundary(node)).leave
            if len(leave) >= PRUNE_EVERY:
                _prune(leave)
            leave.append((alive, at, output))
        return span

    def close(self, span: Span, lane: Lane, output: Any) -> None:
        """Watch the outputs of a call that has returned."""
        node: Any = output.grad_fn if type(output) is Tensor else None
        if node is not None:
            boundary = node.metadata.get(self._key) or self._boundary(node)  # see Rule 6
            boundary.enter.append((span, output.output_nr))
            return
        # A plain tuple is opened here: searching containers costs several times as much.
        outputs = output if type(output) is tuple else (output,)
        for node, position in edges_of(outputs, lane.leaves or {}):
            (node.metadata.get(self._key) or self._boundary(node)).enter.append((span, position))

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

    def _boundary(self, node: Any) -> Boundary:
        """Make the boundary of a node that has none; looking is left to the caller, for speed."""
        boundary = node.metadata[self._key] = Boundary(self)
        node.register_prehook(boundary)
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


def _prune(leave: list[tuple[weakref.ref[Span], int, int]]) -> None:
    # Only now and then, so that a node many modules share is not searched for each of them.
    if len(leave) % PRUNE_EVERY == 0:
        leave[:] = [entry for entry in leave if entry[0]() is not None]
