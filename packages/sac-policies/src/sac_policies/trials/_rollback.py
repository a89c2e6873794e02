"""The one context for steps that leave no trace.

Invariants:
- Before each trial and at the end, memory, gradients, attributes and generators are as they were
  when the context was entered.
- Memory is copied when it is first written to, by the first trial. Later trials write to the same.
- Between trials no gradient exists: those from before are held, and set again at the end.
- Hooks that work on accumulated gradients are off, and optimizers step without parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from .._torch_compat import set_versions
from .._torch_compat._gradients import around_backwards, graph_leaves
from .._torch_compat._module_calls import compiled_in
from ._backward_hooks import HooksOff, no_optimizer_steps
from ._generators import Generators
from ._objects import Objects
from ._writes import Writes


class Rollback:
    """Puts back what trials change: memory, gradients, attributes, hooks, random numbers.

    Args:
        roots: modules, functions and containers whose attributes and elements are put back.
        tensors: tensors that trials are given.

    Attributes:
        optimizers: those that trials have stepped, without parameters.
    """

    def __init__(self, *roots: Any, tensors: Iterable[torch.Tensor] = ()) -> None:
        self._roots, self._given = roots, list(tensors)
        self.optimizers: list[torch.optim.Optimizer] = []
        self._is_inside, self._until = False, ExitStack()

    @contextmanager
    def entered(self) -> Iterator[Rollback]:
        """Put everything back at the end, also what an interrupt has left half done."""
        try:
            self._begin()
            yield self
        finally:
            try:
                self._end()
            except BaseException:  # also Ctrl-C, once
                self._end()
                raise

    def _begin(self) -> None:
        self._has_watched = self._has_graph = False
        own = (getattr(each, "__self__", each) for each in self._roots)  # of a bound forward
        modules = [each for each in own if isinstance(each, nn.Module)]
        self._parameters = [p for module in modules for p in module.parameters()]
        buffers = (b for module in modules for b in module.buffers())
        tensors = [*self._parameters, *buffers, *self._given]
        self._tensors = [_Tensor(each) for each in tensors]
        self._grads: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self._writes, self._hooks = Writes(), HooksOff()
        with torch.no_grad():
            for module in (each for one in modules for each in compiled_in(one)):
                self._writes.copy(_of(module))
        self._generators, self._objects = Generators(), Objects(self._roots)
        self._is_inside = True
        self._until.enter_context(no_optimizer_steps(self.optimizers))
        self._until.enter_context(torch.enable_grad())
        self._hold(self._parameters)

    def _end(self) -> None:
        self._until.close()
        if self._is_inside:
            self._put_back()
            self._is_inside = False
            # Copies of memory would stay alive with this object.
            self._parameters, self._tensors, self._grads = [], [], {}
            self._writes, self._hooks = Writes(), HooksOff()
            del self._objects, self._generators

    def restore(self) -> None:
        """Put everything back, except for gradients and hooks; called before each trial."""
        for each, _ in self._grads.values():
            each.grad = None
        with torch.no_grad():
            for tensor in self._tensors:
                tensor.put_back()
            self._writes.put_back()
        self._objects.put_back()
        self._generators.put_back()
        torch.clear_autocast_cache()

    @contextmanager
    def watching(self, begins: Callable[[], None] | None = None) -> Iterator[None]:
        """Copy the memory that a trial writes to, until one with a backward has ended.

        Entered around each trial. Later trials write to the same memory. Before each backward, the
        gradients and hooks of all leaves of its graph are held, also outside of the model.

        Args:
            begins: called before each backward.
        """

        def before_backward(roots: list[Any]) -> None:
            self._has_graph = True
            if not self._has_watched:
                self._hold(graph_leaves(*roots))
            if begins is not None:
                begins()

        with around_backwards(before_backward):
            if self._has_watched:
                yield
                return
            with self._writes:
                yield
        with torch.no_grad():
            self._writes.forget_unchanged()
        self._has_watched = self._has_graph

    def _hold(self, leaves: Iterable[torch.Tensor]) -> None:
        leaves = [each for each in leaves if id(each) not in self._grads]
        self._hooks.add(leaves)
        for each in leaves:
            self._grads[id(each)] = each, each.grad
            if each.grad is not None:
                self._tensors.append(_Tensor(each.grad))
            each.grad = None

    def _put_back(self) -> None:
        self.restore()
        for tensor in self._tensors:
            tensor.put_back_version()
        for each, grad in self._grads.values():
            each.grad = grad
        self._hooks.put_back()


class _Tensor:
    """A parameter, buffer or gradient: its memory, version, and whether it requires grad."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._memory = tensor, tensor.detach()
        self._version = -1 if tensor.is_inference() else tensor._version
        self._requires_grad = tensor.requires_grad

    def put_back(self) -> None:
        now, before = self._tensor, self._memory
        if type(before) is torch.Tensor and not _are_same(now, before):
            now.data = before
        if now.is_leaf and now.requires_grad != self._requires_grad:
            now.requires_grad_(self._requires_grad)

    def put_back_version(self) -> None:
        """Put back the version, since the bits are those of that version."""
        if 0 <= self._version != self._tensor._version:
            set_versions((self._tensor,), (self._version,))


def _are_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are the same view of the same memory."""
    try:
        return one.is_set_to(other)
    except (RuntimeError, NotImplementedError):  # sparse, or without memory
        return True


def _of(module: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the tensors that a module and those below it hold."""
    for each in module.modules():
        values = (*each._parameters.values(), *each._buffers.values(), *vars(each).values())
        yield from (value for value in values if isinstance(value, torch.Tensor))
