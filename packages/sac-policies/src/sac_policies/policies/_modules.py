"""Track the running module with torch's global forward hooks.

The hooks also run for modules of other threads, which they ignore.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from .._errors import PolicyError


def root_of(function: object) -> nn.Module | None:
    """Return the module if `function` is one, is a method of one, or a partial of those."""
    while isinstance(function, functools.partial):
        function = function.func
    if not isinstance(function, nn.Module):
        function = getattr(function, "__self__", None)
    return function if isinstance(function, nn.Module) else None


class ModulePath:
    """Path, below `root`, of the innermost running module; "" for `root` itself.

    Attributes:
        known: every path below `root`.
    """

    def __init__(self, root: nn.Module | None) -> None:
        if root is None:
            raise PolicyError(
                "sac_policies.checkpoint: policy names modules, whose paths begin at a module, but "
                "the function is neither a module nor a module's method. Checkpoint the module "
                "itself."
            )
        self._names = {id(module): path for path, module in root.named_modules()}
        self._running = [""]
        self.known = frozenset(self._names.values())
        self._hooks = ExitStack()
        self._thread = threading.get_ident()

    @property
    def now(self) -> str:
        """Path of the innermost running module."""
        return self._running[-1]

    def follow(self, until: ExitStack) -> None:
        """Track modules until the result is closed, without code of this package in the modules."""
        until.enter_context(self._hooks)
        self._listen()

    @contextmanager
    def inside_compiled(self, module: nn.Module) -> Iterator[None]:
        """Do not track modules inside a compiled one, which would be compiled again."""
        self._hooks.close()
        self._start(module, None)
        try:
            yield
        finally:
            self._running.pop()
            self._listen()

    def _listen(self) -> None:
        self._hooks.enter_context(register_module_forward_pre_hook(self._start))
        self._hooks.enter_context(register_module_forward_hook(self._stop, always_call=True))

    def _start(self, module: nn.Module, args: Any) -> None:
        del args
        if threading.get_ident() == self._thread:
            self._running.append(self._names.get(id(module), self._running[-1]))

    def _stop(self, module: nn.Module, args: Any, output: Any) -> None:
        del module, args, output
        if threading.get_ident() == self._thread:
            self._running.pop()
