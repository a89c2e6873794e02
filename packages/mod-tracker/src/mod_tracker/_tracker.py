"""`ModTracker`, the public class: running modules, names, and hooks."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Literal

from torch import nn

from ._attribution import Attribution
from ._call_patch import CallPatch
from ._errors import HookSlotError, OptionError, check_callable, check_int
from ._events import Events, Listener
from ._record import DEFAULT_LIMIT, ModuleCall, describe
from ._torch_compat import (
    NO_TASK,
    add_recompute_callback,
    graph_task,
    remove_recompute_callback,
)

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
        >>> tracker = ModTracker()
        >>> tracker.register_user_hooks(pre_fw_hook=lambda module, args: print(tracker.current))
        >>> with tracker:
        ...     output = model(torch.ones(1, 2))
        Sequential
        Sequential.0
        Sequential.1
    """

    def __init__(self, *roots: nn.Module, history: int = DEFAULT_LIMIT // 2) -> None:
        check_int("ModTracker", "history", history, 1)
        self._attribution = Attribution(limit=2 * history + 1)
        self._events = Events(self._attribution)
        self._call_patch = CallPatch(self._events)
        self._lock = threading.Lock()
        self._entered = 0
        self._user_hooks: dict[str, Callable[[], None]] = {}
        # An interrupt before or after `__exit__` leaves an entered tracker.
        weakref.finalize(self, _leave, self._call_patch, self._attribution).atexit = False
        for root in roots:
            if not isinstance(root, nn.Module):
                raise OptionError(
                    f"mod_tracker: only modules are passed by position; got {type(root).__name__}. "
                    "Pass the model first, and options by keyword, such as optimizer=."
                )
            self._attribution.names.adopt(root)

    def __enter__(self) -> ModTracker:
        self._enter(1)
        return self

    def __exit__(self, *exc: object) -> None:
        self._enter(-1)

    def _enter(self, times: int) -> None:
        """Change how often the tracker is entered; an interrupt does not leave it half entered."""
        with self._lock:
            before, wanted = self._entered, max(0, self._entered + times)
            try:
                if wanted:
                    add_recompute_callback(self._attribution.recomputes)
                    self._call_patch.install()
                else:
                    _leave(self._call_patch, self._attribution)
                self._entered = wanted
            except BaseException:
                self._entered = min(before, wanted)
                if not self._entered:
                    _leave(self._call_patch, self._attribution)
                raise

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

        In a hook, `stack`, `call` and `phase` are those of the module that it is called for. An
        exception of a hook reaches the caller of the module or the backward.

        Args:
            pre_fw_hook: called with `(module, args)` before the forward.
            post_fw_hook: called with `(module, args, output)` after it; output None if it failed.
            pre_bw_hook: called with `(module, grads)` when the first gradient of an output
                arrives. The module is None if it no longer exists.
            post_bw_hook: called with `(module, grads)` when the gradients of the inputs have
                arrived, or at the end of the backward.

        Raises:
            HookSlotError: there is a hook of that kind already; no hook is registered then.
            OptionError: a hook is not callable.
        """
        hooks = {
            "pre_fw_hook": pre_fw_hook,
            "post_fw_hook": post_fw_hook,
            "pre_bw_hook": pre_bw_hook,
            "post_bw_hook": post_bw_hook,
        }
        given = [kind for kind, hook in hooks.items() if hook is not None]
        for kind in given:
            check_callable("register_user_hooks", kind, hooks[kind], "a function")
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
            self._user_hooks |= dict.fromkeys(given, self._events.add(listener))

    def clear_user_hooks(self) -> None:
        """Remove the hooks of `register_user_hooks`."""
        for remove in set(self._user_hooks.values()):
            remove()
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

        Raises:
            OptionError: a pattern is not a string.
        """
        check_patterns("in_module", patterns)
        return any(matches(name, patterns) for name in self.stack)

    # Names.

    def module(self, name: str) -> nn.Module | None:
        """Return the module with this name, or None if there is none or it no longer exists."""
        return self._attribution.names.module(name)

    @property
    def roots(self) -> dict[str, nn.Module]:
        """The roots seen so far, by label."""
        return self._attribution.names.roots()

    @contextmanager
    def _listening(self, listener: Listener) -> Iterator[None]:
        """Register a listener of a report for a `with` block."""
        remove = self._events.add(listener)
        try:
            yield
        finally:
            remove()


def _leave(call_patch: CallPatch, attribution: Attribution) -> None:
    """Stop tracking; a tracker that is not entered is left alone."""
    call_patch.remove()
    remove_recompute_callback(attribution.recomputes)


def check_patterns(function: str, patterns: tuple[str, ...]) -> None:
    """Raise an `OptionError` unless all patterns are strings."""
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise OptionError(
            f"mod_tracker.{function}: patterns must be strings such as 'layers.*'; got "
            f"{patterns!r}."
        )


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a pattern matches a module's name or its state_dict prefix below the root.

    Example:
        >>> matches("Encoder.layers.0", ["layers.*"]), matches("Encoder", ["layers.*"])
        (True, False)
    """
    key = name.partition(".")[2]
    return any(fnmatchcase(name, pattern) or fnmatchcase(key, pattern) for pattern in patterns)


def _without_keywords(hook: Hook | None) -> Hook | None:
    # torch's hooks get no keyword arguments.
    return (
        None
        if hook is None
        else (lambda module, args, kwargs, *output: hook(module, args, *output))
    )
