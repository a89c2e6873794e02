"""`ModTracker`, the public class: running modules, names, and subscriptions."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Literal

from torch import nn

from ._attribution import Attribution
from ._backward import Backward
from ._call_patch import CallPatch
from ._errors import HookSlotError, OptionError, check_callable, check_int
from ._listeners import Listener, Subscription, matches
from ._record import DEFAULT_LIMIT, ModuleCall, describe
from ._torch_compat import NO_TASK, add_recompute_callback, graph_task

GLOBAL = "Global"

Hook = Callable[..., object]

Phase = Literal["forward", "recompute", "backward", "outside"]


class ModTracker:
    """Tracks which module is running, in forward, recompute and backward.

    A drop-in for `torch.distributed._tools.mod_tracker.ModTracker` with more properties. Every
    module call in the `with` block is tracked; backward is attributed as long as the tracker lives.
    A tracker may be entered several times, and trackers may be nested and left in any order.
    Modules that already run when the first tracker is entered are not seen.

    Args:
        roots: models to name before they are called. Otherwise a model is named when it is first
            called, and a part that is called earlier is named as a model itself.
        history: module calls per thread that backward can be attributed to; older ones are dropped.

    Raises:
        OptionError: `history` is not positive, or a root is not a module.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        >>> with ModTracker() as tracker:
        ...     with tracker.subscribe(pre_forward=lambda call, *_: print(call.name)):
        ...         output = model(torch.ones(1, 2))
        Sequential
        Sequential.0
        Sequential.1
    """

    def __init__(self, *roots: nn.Module, history: int = DEFAULT_LIMIT // 2) -> None:
        check_int("ModTracker", "history", history, 1)
        self._attribution = Attribution(limit=2 * history + 1)
        self._backward = Backward(self._attribution)
        self._call_patch = CallPatch(self._backward)
        self._lock = threading.Lock()
        self._entered = 0
        self._user_hooks: dict[str, Subscription] = {}
        for root in roots:
            if not isinstance(root, nn.Module):
                raise OptionError(
                    f"mod_tracker: only modules are passed by position; got {type(root).__name__}. "
                    "Pass the model first, and options by keyword, such as optimizer=."
                )
            self._attribution.names.adopt(root)

    def __enter__(self) -> ModTracker:
        with self._lock:
            if self._entered == 0:
                self._end_recomputes = add_recompute_callback(self._attribution.recomputes)
                self._call_patch.install()
            self._entered += 1
        return self

    def __exit__(self, *exc: object) -> None:
        with self._lock:
            if self._entered == 1:
                self._call_patch.remove()
                self._end_recomputes()
            self._entered = max(0, self._entered - 1)

    # The drop-in interface.

    @property
    def parents(self) -> set[str]:
        """Names of the modules that are running, in forward or in backward, and "Global"."""
        return {GLOBAL, *self.stack}

    @property
    def is_bw(self) -> bool:
        """Whether a backward runs in this thread."""
        return graph_task() != NO_TASK

    def get_known_fqn(self, mod: nn.Module) -> str | None:
        """Return the name of a module, or None if it was not seen."""
        return self._attribution.names.of(mod)

    def register_user_hooks(
        self,
        pre_fw_hook: Hook | None = None,
        post_fw_hook: Hook | None = None,
        pre_bw_hook: Hook | None = None,
        post_bw_hook: Hook | None = None,
    ) -> None:
        """Register at most one hook of each kind; hooks that are left out stay registered.

        Args:
            pre_fw_hook: called with `(module, args)` before the forward.
            post_fw_hook: called with `(module, args, output)` after it; output None if it failed.
            pre_bw_hook: called with `(module, grads)` when the first gradient of an output
                arrives. The module is None if it no longer exists.
            post_bw_hook: called with `(module, grads)` when the gradients of the inputs have
                arrived, or at the end of the backward.

        Raises:
            HookSlotError: there is a hook of that kind already; no hook is registered then.

        An exception of a hook reaches the caller of the module or the backward, as with torch's
        tracker.
        """
        hooks = {
            "pre_fw_hook": pre_fw_hook,
            "post_fw_hook": post_fw_hook,
            "pre_bw_hook": pre_bw_hook,
            "post_bw_hook": post_bw_hook,
        }
        given = [kind for kind, hook in hooks.items() if hook is not None]
        for kind in given:
            if kind in self._user_hooks:
                raise HookSlotError(
                    f"mod_tracker.register_user_hooks: Only one {kind} can be registered at a "
                    "time Clear the existing hook by calling ``clear_user_hooks`` before "
                    "registering a new one"
                )
        if given:
            listener = Listener(
                pre_forward=_without_keywords(pre_fw_hook),
                post_forward=_without_keywords(post_fw_hook),
                pre_backward=pre_bw_hook,
                post_backward=post_bw_hook,
            )
            self._user_hooks |= dict.fromkeys(given, self._listen(listener))

    def clear_user_hooks(self) -> None:
        """Remove the hooks of `register_user_hooks`."""
        for registered in set(self._user_hooks.values()):
            registered.remove()
        self._user_hooks = {}

    # The running call.

    @property
    def stack(self) -> tuple[str, ...]:
        """Names of the modules that are running, the root first; () outside all modules."""
        return self._attribution.locate()[0][0].stack

    @property
    def current(self) -> str | None:
        """Name of the innermost module that is running, or None."""
        return self._attribution.locate()[0][0].name or None

    @property
    def call(self) -> ModuleCall | None:
        """The innermost running module call; in backward, the call of the running node."""
        return describe(self._attribution.locate()[0])

    @property
    def phase(self) -> Phase:
        """The current phase: "forward", "recompute", "backward" or "outside"."""
        return self._attribution.locate()[1]  # type: ignore[return-value]

    @property
    def called_as(self) -> str | None:
        """Name of the innermost running module by the path of this call, or None."""
        return self._attribution.locate()[0][0].called_as or None

    @property
    def call_index(self) -> int | None:
        """Number of earlier calls of the current path in this thread, or None."""
        call = self.call
        return None if call is None else call.call_index

    @property
    def iteration(self) -> int | None:
        """Number of earlier calls of the current root in this thread, or None."""
        call = self.call
        return None if call is None else call.iteration

    def in_module(self, *patterns: str) -> bool:
        """Whether a running module's name, or state_dict prefix, matches one of the patterns.

        Args:
            patterns: shell patterns such as "layers.*" or "Encoder.layers.?".
        """
        return any(matches(name, patterns) for name in self.stack)

    # Names.

    def module(self, name: str) -> nn.Module | None:
        """Return the module with this name, or None if there is none or it no longer exists."""
        return self._attribution.names.module(name)

    @property
    def roots(self) -> dict[str, nn.Module]:
        """The roots seen so far, by label."""
        return self._attribution.names.roots()

    # Subscriptions.

    def subscribe(
        self,
        *,
        pre_forward: Hook | None = None,
        post_forward: Hook | None = None,
        pre_backward: Hook | None = None,
        post_backward: Hook | None = None,
        switched: Hook | None = None,
        include: str | tuple[str, ...] = (),
        exclude: str | tuple[str, ...] = (),
        max_depth: int | None = None,
        types: type | tuple[type, ...] = (),
    ) -> Subscription:
        """Listen to module calls. Any number of subscriptions may exist.

        An `Exception` of a callback does not reach the model: it is logged and stored in
        `Subscription.error`, and the callback is not called again.

        Args:
            pre_forward: called with `(call, args, kwargs)`; `call` is a `ModuleCall`.
            post_forward: called with `(call, args, kwargs, output)`; output None if it failed.
            pre_backward: called with `(call, grads)`.
            post_backward: called with `(call, grads)`.
            switched: called with `(call, phase)` whenever another call runs, in forward and in
                backward; `call` is None outside of all modules. The filters below do not apply to
                it. In backward a change is seen at the nodes that made a module's input or output.
            include: only modules whose name or state_dict prefix matches one of these patterns.
            exclude: leave out modules that match one of these patterns.
            max_depth: only modules with at most this many modules on the path, itself included.
            types: only instances of these classes.

        Raises:
            OptionError: a callback is not callable, or a pattern, a class or `max_depth` is not
                valid.
        """
        check_int("subscribe", "max_depth", max_depth, 1, or_none="any depth")
        subscription, locate = Subscription(), self._attribution.locate

        def notified(name: str, callback: Hook | None) -> Hook | None:
            if callback is None:
                return None
            check_callable("subscribe", name, callback, "a function")
            return subscription._guard(lambda _, *rest: callback(describe(locate()[0]), *rest))

        def told(callback: Hook) -> Hook:
            check_callable("subscribe", "switched", callback, "a function")
            return subscription._guard(lambda call, phase: callback(describe(call), phase))

        listener = Listener(
            pre_forward=notified("pre_forward", pre_forward),
            post_forward=notified("post_forward", post_forward),
            pre_backward=notified("pre_backward", pre_backward),
            post_backward=notified("post_backward", post_backward),
            switched=None if switched is None else told(switched),
            include=_tuple("include", include, str),
            exclude=_tuple("exclude", exclude, str),
            max_depth=max_depth,
            types=_tuple("types", types, type),
        )
        return self._listen(listener, subscription)

    def _listen(self, listener: Listener, subscription: Subscription | None = None) -> Subscription:
        attribution, subscription = self._attribution, subscription or Subscription()
        take_out = attribution.listeners.add(listener)

        def remove() -> None:
            take_out()
            attribution.update_listeners()

        subscription._remove = remove
        attribution.update_listeners()
        return subscription


def _without_keywords(hook: Hook | None) -> Hook | None:
    # torch's hooks get no keyword arguments.
    return (
        None
        if hook is None
        else (lambda module, args, kwargs, *output: hook(module, args, *output))
    )


def _tuple(name: str, value: Any, kind: type) -> tuple:
    found = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    if not all(isinstance(each, kind) for each in found):
        what = "patterns such as 'layers.*'" if kind is str else "classes such as nn.Linear"
        raise OptionError(f"mod_tracker.subscribe: {name} must be {what}; got {value!r}.")
    return found
