"""The patch of `nn.Module.__call__`, and the path of one module call.

A module call passes `tracked` below: it finds the thread's state and the call's path, makes the
call the running one, calls the module, and restores the caller. With listeners, `Events.call` calls
the module.

Note [Owning the patch]
- Entering a tracker puts a new layer around the current `nn.Module.__call__`. A layer is never
  reused: added again while still in the chain, it would call itself.
- Leaving a tracker makes its layer inactive: the layer then only passes calls on. Inactive layers
  on top, or between our layers, are removed. So trackers may be left in any order, and the last
  one restores the original method.
- A layer below a foreign patch stays, inactive, since that patch may call it. If the foreign patch
  is removed by restoring our layer, the next call removes that layer.
- A layer that a foreign patch replaced, instead of wrapping it, is never restored.
- While torch.compile traces, a layer is one branch that Dynamo folds away: compiled code contains
  nothing of it and has no guard on it.
- A foreign patch may copy the attributes of the layer it wraps, as `functools.wraps` does. So a
  function counts as a layer's only if the layer refers to that function.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ._events import Events
from ._torch_compat import NO_TASK, graph_task, next_number

Proceed = Callable[..., Any]

_lock = threading.RLock()


class Layer:
    """One function around `nn.Module.__call__`.

    Attributes:
        active: whether its tracker is entered.
        below: the callable that gets the calls.
        function: weak reference to the layer's function, which holds the layer.
    """

    __slots__ = ("active", "below", "function")
    function: weakref.ref[Proceed]

    def __init__(self, below: Proceed) -> None:
        self.active = True
        self.below = below


class CallPatch:
    """Puts layers around `nn.Module.__call__`. See Note [Owning the patch]."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._layer: Layer | None = None

    def install(self) -> None:
        with _lock:
            if self._layer is not None:
                return
            take_out_inactive()
            self._layer = layer = Layer(nn.Module.__call__)
            function = tracked(layer, self._events)
            function.mod_tracker_layer = layer  # type: ignore[attr-defined]
            layer.function = weakref.ref(function)
            nn.Module.__call__ = function  # type: ignore[method-assign]

    def remove(self) -> None:
        with _lock:
            if self._layer is not None:
                self._layer.active = False
                self._layer = None
            take_out_inactive()


def take_out_inactive() -> None:
    """Remove inactive layers on top of `nn.Module.__call__` and between active ones."""
    with _lock:
        layer = layer_of(nn.Module.__call__)
        while layer is not None and not layer.active:
            nn.Module.__call__ = layer.below  # type: ignore[method-assign]
            layer = layer_of(layer.below)
        while layer is not None:
            below = layer_of(layer.below)
            if below is not None and not below.active:
                layer.below = below.below
            else:
                layer = below


def layer_of(function: Proceed) -> Layer | None:
    """Return the layer of a function; None if the function is not one of ours."""
    layer: Layer | None = getattr(function, "mod_tracker_layer", None)
    return layer if layer is not None and layer.function() is function else None


def tracked(layer: Layer, events: Events) -> Proceed:
    """Return the function of a layer: it updates the thread's state and calls `layer.below`."""
    attribution = events.attribution
    local, open_state = attribution.local, attribution.open_state
    is_compiling = torch.compiler.is_dynamo_compiling

    def call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return layer.below(module, *args, **kwargs)
        if not layer.active:
            take_out_inactive()
            return layer.below(module, *args, **kwargs)
        try:
            state = local.state
        except AttributeError:
            state = open_state()
        task, before, before_task = graph_task(), state.call, state.task
        outer = before if task == before_task else attribution.base_of(state, module, task)
        path = outer[0].children.get(id(module)) or attribution.add_path(state, outer, module)
        if path.internal:
            return layer.below(module, *args, **kwargs)
        number = next_number()
        if number != state.number:
            state.flush(number, before)
        # A recompute has the index of the call that it repeats.
        index = path.last[1] + 1 if task == NO_TASK else path.last[1]
        inner = path.last = state.call = (path, index, outer)
        state.task = task
        try:
            if not attribution.has_events:
                return layer.below(module, *args, **kwargs)
            return events.call(state, layer.below, module, args, kwargs)
        finally:
            state.call, state.task = before, before_task
            number = next_number()
            if number != state.number:
                state.flush(number, inner)
            if outer is not before:
                state.borrow(outer, number)
            if attribution.switched:
                attribution.tell_switch()

    return call
