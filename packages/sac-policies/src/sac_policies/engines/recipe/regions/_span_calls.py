"""Calls of spans in a forward: what of a span's values its code is to make again.

Rule 1. The code makes what the policy recomputes and no rule rebuilds: what nodes in the span save,
        known by its place among all that is saved there, and what the span returns.
Rule 2. So it does for what is made without a gradient (statistics, masks, indices), where that is
        large, or the code is to run anyway. What outlives the span is kept: others have it, too.
Rule 3. Where the policy saves what runs in the span, its code makes nothing again.
Rule 4. What is saved after a region inside has begun is kept: that region has hooks of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.utils.weak import TensorWeakRef

from ...._tensors import tensors_in
from ...._torch_compat import is_fake, node_number, sequence_number
from .. import _calls
from .._replay import Node
from .._replay_entries import Why
from .._sources import Edges
from .._spans import Input, Slot, SpanCode, SpanOutput, SpanValue, mapped
from .._views import VIEWS
from ._conditions import Conditions

MADE_AGAIN = frozenset(
    {
        Why.NO_RULE,
        Why.FUNCTION,
        Why.OTHER_OUTPUT,
        Why.WRITTEN,
        Why.NOT_SAVED,
        Why.OPERAND,
        Why.FORMAT,
        Why.UNFIT,
    }
    | {Why.TOO_FAR, Why.RESULT, Why.RULE_IS_OFF}
)
"""For what reasons a value is kept that the code of its span can make again."""


class Keeper(Protocol):
    """What is asked here of the region that a span is called in.

    Attributes:
        spans: its calls of spans that are running, innermost last.
        keep: keeps a tensor, with the node that made it.
        note: is told the number after that of each node that saves something, before it does.
    """

    edges: Edges
    spans: list[SpanCall]
    note: Callable[[int], None]
    keep: Any
    read: Callable[[Any], torch.Tensor]

    def packed(self, tensor: torch.Tensor, number: int) -> Any:
        """What is held in place of a tensor that no node of the graph saves, for number 0."""

    def stuck(self, tensor: torch.Tensor) -> Why | None:
        """Why a tensor would be kept; None where it would not."""


def run_span(
    region: Keeper,
    label: str,
    run: Callable[..., Any],
    given: tuple[tuple[Any, ...], dict[str, Any]],
    is_saved: bool,
) -> Any:
    """Call a span's code, and have what nothing else rebuilds of it made by it again.

    Args:
        region: the innermost region that the span is called in.
        label: of the span.
        run: its code.
        given: its arguments.
        is_saved: whether the policy saves what runs in it (Rule 3).
    """
    call = SpanCall(region, label, run, given, is_saved)
    region.spans.append(call)
    before, region.note = region.note, call.note
    try:
        out = run(*given[0], **given[1])
        call.ended(out)
    finally:
        region.note = before
        region.spans.remove(call)
    return out


def made_by_span(
    region: Keeper, tensor: torch.Tensor, node: Node, number: int, why: Why
) -> SpanValue | None:
    """What is held of a tensor that a span's code makes again, None for all others.

    Args:
        region: that would keep it.
        tensor: what is saved.
        node: that made it.
        number: that after the node that saves it, 0 without one.
        why: for what reason it would be kept.
    """
    value = None
    for call in reversed(region.spans if number else ()):
        value = call.value(tensor, node, why)
        if value is not None or call.is_saved:
            break
    if value is None and why in MADE_AGAIN and why is not Why.WRITTEN:
        value = _of_returned(region.edges, tensor)
    if value is not None:
        region.edges.note_made(tensor, value.cell)
        if number:  # a replay of the node reads it as well
            region.edges.cells.setdefault(number, []).append(value.cell)
        if node is not None and why is not Why.WRITTEN:
            region.edges.outputs(why)[node, tensor.output_nr] = value
    return value


def _of_returned(edges: Edges, tensor: torch.Tensor) -> SpanValue | None:
    """The same for what a span returned, or a view of it."""
    node: Node = tensor.grad_fn
    output = tensor.output_nr
    while True:
        held = edges.held(node, output)
        if isinstance(held, SpanOutput):
            return held.value(tensor)
        if type(node).__name__ not in VIEWS:
            return None
        node, output = node.next_functions[0]


class SpanCall:
    """One call of a span, while it runs.

    Args:
        region: the innermost region that it is called in.
        label: of the span.
        run: its code.
        given: its arguments.
        is_saved: whether the policy saves what runs in it.

    Attributes:
        is_saved: the same.
        stopped: whether its code makes nothing again that is saved from now on.
    """

    def __init__(
        self,
        region: Keeper,
        label: str,
        run: Callable[..., Any],
        given: tuple[Any, Any],
        is_saved: bool,
    ) -> None:
        self.is_saved = is_saved
        self._region, self._label, self._run = region, label, run
        self._note = region.note
        self._first = sequence_number()
        self._saved = -1
        self._code: SpanCode | None = None
        self._ungraded: list[tuple[SpanValue, TensorWeakRef]] = []
        self._inputs: list[tuple[torch.Tensor, int]] = []
        self.stopped = is_saved or any(map(is_fake, tensors_in(given)))
        try:
            self._given = mapped(given, self._slot, torch.Tensor)
        except TypeError:  # what may change as it runs
            self.stopped = True
        if not self.stopped:
            self._conditions = Conditions([each for each, _ in self._inputs])

    def _slot(self, tensor: torch.Tensor) -> Slot:
        self._inputs.append((tensor, tensor._version))
        return Slot(len(self._inputs) - 1)

    def note(self, number: int) -> None:
        """Count what a node saves, then note the node."""
        self._saved += 1
        self._note(number)

    def value(self, tensor: torch.Tensor, node: Node, why: Why) -> SpanValue | None:
        """What a node in the span is to save in place of a tensor; None where that is kept."""
        if self.stopped:
            return None
        if node is None:
            return self._without_gradient(tensor)
        if why not in MADE_AGAIN or not self._is_own(node):
            return None
        code = self._to_run()
        return None if code is None else SpanValue(code, ("saved", self._saved), tensor)

    def _is_own(self, node: Node) -> bool:
        if any(each.grad_fn is node for each, _ in self._inputs):
            return False  # of another thread, perhaps, with numbers of its own
        return node_number(node) >= self._first

    def _without_gradient(self, tensor: torch.Tensor) -> SpanValue | None:
        if tensor.requires_grad or type(tensor) is not torch.Tensor or is_fake(tensor):
            return None
        if any(tensor.untyped_storage() is each.untyped_storage() for each, _ in self._inputs):
            return None
        large = tensor.numel() * tensor.element_size() >= _calls.WORTH_BYTES
        code = self._to_run() if large else self._code
        if code is None:
            return None
        value = SpanValue(code, ("saved", self._saved), tensor)
        self._ungraded.append((value, TensorWeakRef(tensor)))
        return value

    def _to_run(self) -> SpanCode | None:
        """The code, with what it was given kept or to be rebuilt; None once that was written to."""
        if self._code is None and not self.stopped:
            if any(each._version != version for each, version in self._inputs):
                self.stopped = True
                return None
            inputs = [self._input(each) for each, _ in self._inputs]
            given = self._label, self._run, self._given, inputs, self._conditions
            self._code = SpanCode(*given)
        return self._code

    def _input(self, tensor: torch.Tensor) -> Input:
        held = self._region.packed(tensor, 0)
        return held, self._region.read, tensor.requires_grad

    def ended(self, out: Any) -> None:
        """Take note of what the span returned."""
        written = any(each._version != version for each, version in self._inputs)
        if not (self.stopped or written):
            self._returned(out)
        if self._code is not None:
            self._code.writes_inputs = written
            self._conditions.settle()
        for value, reference in self._ungraded:  # Rule 2
            tensor = reference()
            if tensor is not None:
                value.keep(self._region.keep(tensor, None), self._region.read)

    def _returned(self, out: Any) -> None:
        for at, tensor in enumerate(tensors_in(out)):
            node = tensor.grad_fn
            if node is None or not self._is_own(node):
                continue
            if self._region.stuck(tensor) in MADE_AGAIN and (code := self._to_run()) is not None:
                self._region.edges.keep(tensor, SpanOutput(code, at, tensor))
                self._region.edges.spans_returned = True
