"""The only place that patches `nn.Module.__call__`, or registers global forward hooks.

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

import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType, MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ._backward import Backward
from ._call_events import HookedCall, call_apart, call_with_events
from ._listeners import INTERNAL
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
            if listeners is None or listeners.slow_path or task != state.task:
                return call_apart(backward, state, path, outer, run, args, kwargs)
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

    return call


class GlobalHooks:
    """The other way: torch's global forward hooks instead of the patch.

    Slower, blind to keyword arguments, and what a module's own hooks do is charged to its caller.
    torch does not run these hooks after a KeyboardInterrupt or another exception that is not an
    `Exception`. A call left open in this way has ended when the frame that ran its hooks is not
    on the Python stack any more; it is closed when a module is entered, or the thread is asked
    where it is, whichever comes first.
    """

    active: bool

    def __init__(self, backward: Backward) -> None:
        self._backward, self._attribution = backward, backward.attribution
        self._handles: list[Any] = []
        self._attribution.settle = self.settle

    def install(self) -> None:
        """Register the two global hooks."""
        self.settle()
        self.active = True
        self._handles.append(register_module_forward_pre_hook(self._enter))
        self._handles.append(register_module_forward_hook(self._leave, always_call=True))

    def remove(self) -> None:
        """Remove the two global hooks, and close what is open in this thread."""
        self.active = False
        while self._handles:
            self._handles[-1].remove()
            self._handles.pop()
        self._close(0)

    def settle(self) -> None:
        """Close the calls of this thread that have ended without their hook."""
        if self._opened():
            self._close_ended(sys._getframe(1))

    def _opened(self) -> list[HookedCall]:
        local = self._attribution.local
        if not hasattr(local, "opened"):
            local.opened = []
        return local.opened

    def _close_ended(self, frame: FrameType | None) -> None:
        # Calls nest, so all inside the first that has ended have ended, too.
        running = set()
        while frame is not None:
            running.add(id(frame))
            frame = frame.f_back
        hooked_calls = self._opened()
        ended = (
            at for at, hooked_call in enumerate(hooked_calls) if hooked_call.frame not in running
        )
        self._close(next(ended, len(hooked_calls)))

    def _close(self, end: int) -> None:
        hooked_calls = self._opened()
        while len(hooked_calls) > end and not hooked_calls[-1].ending:
            self._end(hooked_calls, None, ended=False)

    def _end(self, hooked_calls: list[HookedCall], output: Any, *, ended: bool) -> None:
        hooked_call = hooked_calls[-1]
        state = hooked_call.state
        try:
            hooked_call.end(output, ended=ended)
        finally:
            state.call, state.task = hooked_call.before, hooked_call.before_task
            del hooked_calls[hooked_calls.index(hooked_call) :]

    def _enter(self, module: nn.Module, args: tuple) -> None:
        if torch.compiler.is_compiling() or not self.active:
            return
        frame = sys._getframe(1)
        # The frame itself may be where that of an ended call was.
        self._close_ended(frame.f_back)
        attribution = self._attribution
        state = attribution.state() or attribution.open_state()
        task = graph_task()
        outer = state.call if task == state.task else attribution.base_of(state, module, task)
        path = outer[0].children.get(id(module)) or attribution.add_path(state, outer, module)
        if path.listeners is not INTERNAL:
            hooked_call = HookedCall(
                self._backward, state, path, outer, module, args, frame=id(frame)
            )
            self._opened().append(hooked_call)
            hooked_call.begin()

    def _leave(self, module: nn.Module, args: tuple, output: Any) -> None:
        if torch.compiler.is_compiling() or not self.active:
            return
        hooked_calls, frame = self._opened(), id(sys._getframe(1))
        at = next(
            (at for at, hooked_call in enumerate(hooked_calls) if hooked_call.frame == frame), -1
        )
        if at >= 0 and hooked_calls[at].module is module:
            self._close(at + 1)
            self._end(hooked_calls, output, ended=True)
