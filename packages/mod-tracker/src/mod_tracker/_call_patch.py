"""The only place that patches `nn.Module.__call__`.

Note [Owning the patch]
Rule 1: every time a tracker is entered it puts a new layer around whatever is there. A layer is
        never used again: while it is somewhere in the chain, putting it on top would close a ring.
Rule 2: a tracker that leaves makes its layer inactive: it then passes calls on and nothing else.
        Inactive layers on top, or between layers of ours, are taken out, so trackers may leave in
        any order and the last one brings back exactly the object that was there.
Rule 3: a layer below a foreign patch stays, inactive, for that patch may call it. If that patch
        goes by putting our layer back on top, the next call through the layer takes it off.
Rule 4: a layer that a foreign patch replaced, instead of wrapping it, is never put back.
Rule 5: while torch.compile traces, a layer is one branch that Dynamo folds away, so compiled code
        contains nothing of it and has no guard on it.
Rule 6: a foreign patch may carry the attributes of the layer it wraps, as `functools.wraps` has
        it. A function is our layer only if the layer says so, too.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn

from ._attribution import FORWARD, OUTSIDE
from ._backward import Backward
from ._call_events import call_slow_path, call_switched, call_with_events
from ._torch_compat import SHORTCUT, graph_task, next_number

Proceed = Callable[..., Any]

_lock = threading.RLock()


class Layer:
    """One function around `nn.Module.__call__`.

    Attributes:
        active: whether its tracker is entered.
        below: what calls are passed on to.
        function: refers to the function, weakly: it holds the layer.
        rebind: tells the function of a new `below`.
    """

    __slots__ = ("active", "below", "function", "rebind")
    function: weakref.ref[Proceed]
    rebind: Callable[[Proceed], None]

    def __init__(self, below: Proceed) -> None:
        self.active = True
        self.below = below

    def rest_on(self, below: Proceed) -> None:
        """Leave out an inactive layer below this one."""
        self.below = below
        self.rebind(below)


class CallPatch:
    """Puts layers around `nn.Module.__call__`. See Note [Owning the patch]."""

    def __init__(self, backward: Backward) -> None:
        self._backward = backward
        self._layer: Layer | None = None

    def install(self) -> None:
        """Put a layer on top."""
        with _lock:
            take_out_inactive()
            self._layer = layer = Layer(nn.Module.__call__)
            function = tracked(layer, self._backward)
            function.mod_tracker_layer = layer  # type: ignore[attr-defined]
            layer.function = weakref.ref(function)
            nn.Module.__call__ = function  # type: ignore[method-assign]

    def remove(self) -> None:
        """Make the layer inactive, and take it out if it can be."""
        with _lock:
            if self._layer is not None:
                self._layer.active = False
                self._layer = None
            take_out_inactive()


def take_out_inactive() -> None:
    """Take inactive layers off the top of `nn.Module.__call__`, and from between active ones."""
    with _lock:
        layer = layer_of(nn.Module.__call__)
        while layer is not None and not layer.active:
            nn.Module.__call__ = layer.below  # type: ignore[method-assign]
            layer = layer_of(layer.below)
        while layer is not None:
            below = layer_of(layer.below)
            if below is not None and not below.active:
                layer.rest_on(below.below)
            else:
                layer = below


def layer_of(function: Proceed) -> Layer | None:
    """Return the layer whose function this is; None if it is not one of ours. See Rule 6."""
    layer: Layer | None = getattr(function, "mod_tracker_layer", None)
    return layer if layer is not None and layer.function() is function else None


def tracked(layer: Layer, backward: Backward) -> Proceed:
    """Return a function to be called like `layer.below` that keeps the thread states up to date.

    The common case writes `ThreadState.push` and `ThreadState.pop` out: calling them would double
    the cost. So would torch's own `__call__`; the choice it makes is made here if `SHORTCUT` says
    so.
    """
    proceed = layer.below
    attribution = backward.attribution
    local, open_state = attribution.local, attribution.open_state
    is_compiling = torch.compiler.is_compiling
    shortcut, limit = proceed is SHORTCUT, attribution.limit

    def rebind(below: Proceed) -> None:
        nonlocal proceed, shortcut
        proceed = below
        shortcut = below is SHORTCUT

    layer.rebind = rebind

    def call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return proceed(module, *args, **kwargs)
        if not layer.active:
            take_out_inactive()
            return proceed(module, *args, **kwargs)
        try:
            state = local.state
        except AttributeError:
            state = open_state()
        task, before = graph_task(), state.call
        outer = before if task == state.task else attribution.base_of(state, module, task)
        path = outer[0].children.get(id(module)) or attribution.add_path(state, outer, module)
        listeners = path.listeners
        if listeners is not None or task != state.task:
            plain = shortcut and module._compiled_call_impl is None
            run = module._call_impl if plain else MethodType(proceed, module)
            if (
                listeners is None
                or listeners.slow_path
                or task != state.task
                or (listeners.switches and (task >= 0 or state.shown is not None))
            ):
                return call_slow_path(backward, state, path, outer, run, args, kwargs)
        record = state.record
        starts, calls = record.starts, record.calls
        inner = before
        try:
            number, start = next_number(), state.number
            if number != start:
                if start >= 0 and len(starts) <= limit:
                    starts.append(start)
                    calls.append(before)
                    state.number = number
                else:
                    state.flush(number, before)
            index = path.last[1]
            path.last = state.call = inner = (path, index + 1 if task < 0 else index, outer)
            if listeners is not None:
                if listeners.switches:
                    return call_switched(backward, state, listeners, inner, run, args, kwargs)
                return call_with_events(
                    backward, state, listeners, path.module(), run, args, kwargs
                )
            if shortcut and module._compiled_call_impl is None:
                return module._call_impl(*args, **kwargs)
            return proceed(module, *args, **kwargs)
        finally:
            # First, so that an interrupt in what follows leaves the thread state clean.
            state.call = before
            number, start = next_number(), state.number
            if number != start:
                if start >= 0 and len(starts) <= limit:
                    starts.append(start)
                    calls.append(inner)
                    state.number = number
                else:
                    state.flush(number, inner)
            if listeners is not None and listeners.switches:
                for notify in listeners.switched:
                    notify(before, OUTSIDE if before[2] is None else FORWARD)

    return call
