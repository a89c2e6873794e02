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
Rule 5: nothing is attached where nothing can flow back: no output requires a gradient.
"""

from __future__ import annotations

import threading
import weakref
from bisect import insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from ._record import Call
from ._torch_compat import UNNUMBERED, at_backward_end, current_node, graph_task, number_of

if TYPE_CHECKING:
    from ._engine import Engine
    from ._lane import Lane

KEPT_RUNS = 64
"""Backwards followed at once; an older one is one that failed."""

Edge = tuple[Any, int]  # autograd node, and which of its outputs

SCALARS = (bool, int, float, str)

MAX_NESTING = 8
"""Containers inside containers that are searched for tensors."""

PRUNE_EVERY = 32
"""A node that outlives graphs, as a parameter's does, is rid of dead spans this often."""

serials = count()
"""Numbers the beginnings of calls."""


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in nested tuples, lists, sets, mappings and dataclasses."""
    found: list[Tensor] = []
    _collect((value,), found, MAX_NESTING)
    return found


def _collect(values: Iterable[Any], found: list[Tensor], levels: int) -> None:
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif value is None or levels == 0 or isinstance(value, SCALARS):
            continue
        elif isinstance(value, (tuple, list, set, frozenset)):
            _collect(value, found, levels - 1)
        elif isinstance(value, Mapping):
            _collect(value.values(), found, levels - 1)
        elif is_dataclass(value):
            parts = [getattr(value, item.name, None) for item in fields(value)]
            _collect(parts, found, levels - 1)


def edges_of(values: Iterable[Any]) -> Sequence[Edge]:
    """Return the gradient edges of the tensors in `values` that require a gradient, each once."""
    edges: list[Edge] = []
    for value in values:
        if isinstance(value, Tensor):
            _add_edge(value, edges)
        elif value is not None and not isinstance(value, SCALARS):
            for tensor in tensors_in(value):
                _add_edge(tensor, edges)
    return edges if len(edges) < 2 else list(dict.fromkeys(edges))


def _add_edge(tensor: Tensor, edges: list[Edge]) -> None:
    if not tensor.requires_grad:
        return
    node = tensor.grad_fn
    if node is None:
        leaf = get_gradient_edge(tensor)
        edges.append((leaf.node, leaf.output_nr))
    else:
        edges.append((node, tensor.output_nr))


class Span:
    """The backward of one call. Alive as long as a node that made an output.

    Attributes:
        call: the call.
        inputs: how many gradient edges its inputs have.
        serial: position of the call's beginning among all calls.
    """

    __slots__ = ("__weakref__", "call", "inputs", "serial")

    def __init__(self, call: Call, inputs: int, serial: int) -> None:
        self.call = call
        self.inputs = inputs
        self.serial = serial


Enter = tuple[Span, int]  # span, which output of the node
# Serial of the span, position among its inputs, output of the node, span. Calls end inside out
# but are told of in the order in which they began, so a list of these is kept sorted. See Rule 2.
Leave = tuple[int, int, int, "weakref.ref[Span]"]


# What to tell when a node that made an output or an input of modules begins to run.
Boundary = tuple[list[Enter], list[Leave]]


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


class Backward:
    """Attaches boundaries in forward, and turns their firing into events in backward."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._key = f"mod_tracker.{id(engine)}"
        self.runs: dict[int, Run] = {}

    def attach(self, call: Call, inputs: Sequence[Edge], output: Any, serial: int) -> None:
        """Watch the backward of a call that just ended. See Rule 5.

        Args:
            call: the call.
            inputs: gradient edges of its inputs, taken before they could be changed in place.
            output: what the module returned.
            serial: position of the call's beginning among all calls.
        """
        outputs = edges_of((output,))
        if not outputs:
            return
        span = Span(call, len(inputs), serial)
        for node, position in outputs:
            self._boundary(node)[0].append((span, position))
        gone = weakref.ref(span)
        for at, (node, position) in enumerate(inputs):
            leaves = self._boundary(node)[1]
            if len(leaves) >= PRUNE_EVERY:
                _prune(leaves)
            insort(leaves, (serial, at, position, gone))

    def mark_origin(self, lane: Lane, output: Any) -> None:
        """Let a backward through `output` be looked up in `lane`, whatever thread runs it."""
        engine = self._engine

        def claim(grads: tuple) -> None:
            engine.claim(graph_task(), lane)

        for node, _ in edges_of((output,)):
            node.register_prehook(claim)

    def cross(self, boundary: Boundary, grads: tuple) -> None:
        """Tell what is entered and left at a node that begins to run. See Rules 1 and 2."""
        engine, task = self._engine, graph_task()
        run = self.runs.get(task) or self._begin(task)
        lane = engine.lane() or engine.open_lane()
        entered, shown = run.entered, lane.shown
        try:
            for span, position in boundary[0]:
                if span not in entered:
                    entered[span] = False
                    self._enter(lane, span, (grads[position],))
            for _, at, position, gone in boundary[1]:
                ending = gone()
                if ending is None or entered.get(ending):
                    continue
                if ending.inputs > 1:
                    self._arrive(lane, run, ending, at, grads[position])
                elif ending in entered:
                    self._leave(lane, run, ending, (grads[position],))
        finally:
            lane.shown = shown
        if engine.listeners.switched and number_of(current_node()) < UNNUMBERED:
            for notify in engine.listeners.switched:
                notify(*engine.locate())

    def forget_failed(self, thread: int) -> None:
        """Drop the backwards of a thread that is in forward again: they ended with an error."""
        for task, run in list(self.runs.items()):
            if run.thread == thread:
                del self.runs[task]

    def _boundary(self, node: Any) -> Boundary:
        metadata = node.metadata
        boundary: Boundary | None = metadata.get(self._key)
        if boundary is None:
            boundary = metadata[self._key] = ([], [])
            node.register_prehook(partial(self.cross, boundary))
        return boundary

    def _begin(self, task: int) -> Run:
        while len(self.runs) >= KEPT_RUNS:
            self.runs.pop(next(iter(self.runs)), None)
        run = self.runs[task] = Run()
        at_backward_end(partial(self._finish, task))
        return run

    def _arrive(self, lane: Lane, run: Run, span: Span, at: int, grad: Any) -> None:
        arrived = run.arrived.setdefault(span, {})
        arrived[at] = grad
        if len(arrived) == span.inputs and span in run.entered:
            self._leave(lane, run, span, _in_order(span, run.arrived.pop(span)))

    def _enter(self, lane: Lane, span: Span, grads: tuple) -> None:
        call = lane.shown = span.call
        path = call[0]
        if path.watch is not None:
            for notify in path.watch.pre_backward:
                notify(call, path.module(), grads)

    def _leave(self, lane: Lane, run: Run, span: Span, grads: tuple) -> None:
        run.entered[span] = True
        call = lane.shown = span.call
        path = call[0]
        if path.watch is not None:
            for notify in path.watch.post_backward:
                notify(call, path.module(), grads)

    def _finish(self, task: int) -> None:
        # See Rule 3.
        run = self.runs.pop(task, None)
        if run is None:
            return
        engine = self._engine
        lane = engine.lane() or engine.open_lane()
        still_in = [span for span, left in run.entered.items() if not left]
        shown = lane.shown
        try:
            for span in sorted(still_in, key=lambda span: -span.serial):
                self._leave(lane, run, span, _in_order(span, run.arrived.get(span, {})))
        finally:
            lane.shown = shown
        if not any(other.thread == run.thread for other in self.runs.values()):
            for notify in engine.listeners.switched:
                notify(*engine.resting_place())


def _in_order(span: Span, arrived: dict[int, Any]) -> tuple:
    return tuple([arrived.get(at) for at in range(span.inputs)])


def _prune(leaves: list[Leave]) -> None:
    # Only now and then, so that a node many modules share is not searched for each of them.
    if len(leaves) % PRUNE_EVERY == 0:
        leaves[:] = [leave for leave in leaves if leave[3]() is not None]
