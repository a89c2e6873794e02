"""Edge: the only place that patches `nn.Module.__call__`, or registers global forward hooks.

Note [Owning the patch]
Rule 1: every tracker puts one layer around whatever is there when it is entered.
Rule 2: a tracker that leaves makes its layer inactive: it then passes calls on and nothing else.
        Inactive layers on top are taken off, so trackers may leave in any order and the last one
        brings back exactly the object that was there.
Rule 3: a layer below a foreign patch stays, inactive, for that patch may call it. If that patch
        goes by putting our layer back on top, the next call through the layer takes it off.
Rule 4: a layer that a foreign patch replaced, instead of wrapping it, is never put back.
Rule 5: while torch.compile traces, a layer is one branch that Dynamo folds away, so compiled code
        contains nothing of it and has no guard on it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ._engine import Engine
from ._observed import Visit, observe, tell
from ._torch_compat import SHORTCUT, graph_task, next_number

Proceed = Callable[..., Any]

_lock = threading.RLock()


class CallPatch:
    """A layer around `nn.Module.__call__`. See Note [Owning the patch]."""

    def __init__(self, engine: Engine) -> None:
        self.active = False
        self._engine = engine
        self._below: Proceed = nn.Module.__call__

    def install(self) -> None:
        """Put the layer on top."""
        with _lock:
            take_off_inactive()
            self.active = True
            self._below = nn.Module.__call__
            layer = tracked(self._below, self._engine, self)
            layer.mod_tracker_layer = self  # type: ignore[attr-defined]
            nn.Module.__call__ = layer  # type: ignore[method-assign]

    def remove(self) -> None:
        """Make the layer inactive, and take it off if it is on top."""
        with _lock:
            self.active = False
            take_off_inactive()

    @property
    def below(self) -> Proceed:
        """What the layer was put around."""
        return self._below


def take_off_inactive() -> None:
    """Take inactive layers off the top of `nn.Module.__call__`."""
    with _lock:
        layer = top_layer()
        while layer is not None and not layer.active:
            nn.Module.__call__ = layer.below  # type: ignore[method-assign]
            layer = top_layer()


def top_layer() -> CallPatch | None:
    """Return our layer on top of `nn.Module.__call__`; None if there is another function."""
    return getattr(nn.Module.__call__, "mod_tracker_layer", None)


def tracked(proceed: Proceed, engine: Engine, layer: CallPatch) -> Proceed:
    """Return a function to be called like `proceed` that keeps the engine's lanes up to date.

    The common case writes `Lane.push` and `Lane.pop` out: calling them would double the cost. So
    would torch's own `__call__`; the choice it makes is made here if `SHORTCUT` says so.
    """
    local, open_lane = engine.local, engine.open_lane
    is_compiling = torch.compiler.is_compiling
    shortcut, limit = proceed is SHORTCUT, engine.limit

    def call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return proceed(module, *args, **kwargs)
        if not layer.active:
            take_off_inactive()
            return proceed(module, *args, **kwargs)
        try:
            lane = local.lane
        except AttributeError:
            lane = open_lane()
        task, before = graph_task(), lane.call
        outer = before if task == lane.task else engine.base_of(lane, module, task)
        path = outer[0].children.get(id(module)) or engine.grow(lane, outer, module)
        watch = path.watch
        if watch is not None or task != lane.task:
            plain = shortcut and module._compiled_call_impl is None
            run = module._call_impl if plain else MethodType(proceed, module)
            if watch is None or watch.apart or task != lane.task:
                return observe(engine, lane, path, outer, run, args, kwargs)
        record = lane.record
        starts, calls = record.starts, record.calls
        inner = before
        try:
            number, start = next_number(), lane.number
            if number != start:
                if start >= 0 and len(starts) <= limit:
                    starts.append(start)
                    calls.append(before)
                    lane.number = number
                else:
                    lane.flush(number)
            index = path.last[1]
            path.last = lane.call = inner = (path, index + 1 if task < 0 else index, outer)
            if watch is not None:
                return tell(engine, lane, watch, path.module(), run, args, kwargs)
            if shortcut and module._compiled_call_impl is None:
                return module._call_impl(*args, **kwargs)
            return proceed(module, *args, **kwargs)
        finally:
            number, start = next_number(), lane.number
            if number != start:
                if start >= 0 and len(starts) <= limit:
                    starts.append(start)
                    calls.append(inner)
                    lane.number = number
                else:
                    lane.flush(number)
            lane.call = before

    return call


class GlobalHooks:
    """The fallback: torch's global forward hooks instead of the patch.

    Slower, blind to keyword arguments, and what a module's own hooks do is charged to its caller.
    torch does not run these hooks after a KeyboardInterrupt or another exception that is not an
    `Exception`. A call left open in this way is closed when a module is entered from a Python
    stack that is not deeper: a call around it would be below it on that stack.
    """

    def __init__(self, engine: Engine) -> None:
        self.active = False
        self._engine = engine
        self._handles: list[Any] = []

    def install(self) -> None:
        """Register the two global hooks."""
        self.active = True
        self._handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]

    def remove(self) -> None:
        """Remove the two global hooks, and close what is open in this thread."""
        self.active = False
        while self._handles:
            self._handles.pop().remove()
        self._close_from(0)

    def _opened(self) -> list[tuple[int, Visit]]:
        local = self._engine.local
        if not hasattr(local, "opened"):
            local.opened = []
        return local.opened

    def _close_from(self, depth: int) -> None:
        opened = self._opened()
        while opened and opened[-1][0] >= depth:
            opened.pop()[1].end(None, ended=False)

    def _enter(self, module: nn.Module, args: tuple) -> None:
        if torch.compiler.is_compiling() or not self.active:
            return
        engine, depth = self._engine, _python_depth()
        self._close_from(depth)
        lane = engine.lane() or engine.open_lane()
        task = graph_task()
        outer = lane.call if task == lane.task else engine.base_of(lane, module, task)
        path = outer[0].children.get(id(module)) or engine.grow(lane, outer, module)
        visit = Visit(engine, lane, path, outer, module, args)
        self._opened().append((depth, visit))
        visit.begin()

    def _leave(self, module: nn.Module, args: tuple, output: Any) -> None:
        if torch.compiler.is_compiling() or not self.active:
            return
        opened = self._opened()
        at = next((i for i in range(len(opened) - 1, -1, -1) if opened[i][1].module is module), -1)
        if at >= 0:
            self._close_from(opened[at][0] + 1)
            opened.pop()[1].end(output, ended=True)


def _python_depth() -> int:
    frame, depth = sys._getframe().f_back, 0
    while frame is not None:
        frame, depth = frame.f_back, depth + 1
    return depth
