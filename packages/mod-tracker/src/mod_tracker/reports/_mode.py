"""The dispatch mode that the reports measure with.

Note [What a mode must not change]
Rule 1: torch.compile compiles what it would compile without the mode. So the mode is off while it
        does, and its own code is not compiled.
Rule 2: a higher-order operator such as `torch.cond` runs with the mode off. The functions it is
        given are wrapped, so that the mode is on again in them.
Rule 3: a tensor subclass that carries out operators itself gets those that the mode does not
        measure whole, with the mode on: then the operators inside are seen, in place of the one
        around them. Among them are questions about sizes and strides, which some C++ callers
        cannot bear to see fail.
Rule 4: a `DTensor` tries an operator out on stand-ins of the whole size, to learn the result's
        shape. What a rank does is not that, so stand-ins are not looked at inside a `DTensor`,
        unless those of the user are.
Rule 5: torch loads its compiler at the first operator that a mode sees. The frames that run then
        stay in its garbage with all they hold, such as what the model has just made. So it is
        loaded before, in a thread whose frames hold nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, wraps
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from .._attribution import Attribution
from .._torch_compat import (
    has_own_operators,
    in_fresh_thread,
    is_stand_in,
    leave_mode,
    leave_saved_hooks,
    makes_stand_ins,
)


class MeasuringMode(TorchDispatchMode):
    """A mode that looks at operators and changes nothing. See Note [What a mode must not change].

    A class derived from this one must define `__torch_dispatch__` itself, and not inherit it:
    torch.compile leaves out only what torch has wrapped, and it wraps only what it finds there.
    """

    supports_higher_order_operators = True

    def __init__(self, attribution: Attribution) -> None:
        super().__init__()
        self.attribution = attribution
        self._passing_on = False
        self._tried_out = 0
        _load_compiler()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Tell torch.compile to go on as if the mode were not there. See Rule 1."""
        return True

    def pass_on(self, func: Any, types: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Let tensor classes carry out an operator themselves. See Rules 3 and 4."""
        if not any(map(is_sharded, types)) or self._passing_on or makes_stand_ins():
            self._passing_on = False
            return NotImplemented
        self._passing_on = True
        self._tried_out += 1
        try:
            with self:
                return func(*args, **kwargs)  # comes to the lines above
        finally:
            self._tried_out -= 1
            self._passing_on = False

    def is_tried_out(self, types: Any) -> bool:
        """Whether an operator runs only to find out what it would return. See Rule 4."""
        return self._tried_out > 0 and any(map(is_stand_in, types))

    def call_inside(self, operator: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Call a higher-order operator. See Rule 2."""
        return operator(*(self._seen(arg) for arg in args), **kwargs)

    def _seen(self, value: Any) -> Any:
        if not callable(value) or isinstance(value, (type, torch.Tensor)):
            return value

        def call(*args: Any, **kwargs: Any) -> Any:
            with self:
                return value(*args, **kwargs)

        return wraps(value)(call) if hasattr(value, "__name__") else call


@cache
def _load_compiler() -> None:
    """See Rule 5."""
    in_fresh_thread(lambda: torch.compiler.disable(len))


def has_own_way(types: tuple[type, ...]) -> bool:
    """Whether one of the tensor types of a call carries out operators itself. See Rule 3."""
    return any(has_own_operators(kind) for kind in types)


def is_sharded(kind: type) -> bool:
    """Whether a tensor class is one of which a rank holds a part, as `DTensor` is."""
    return hasattr(kind, "to_local") and hasattr(kind, "placements")


@contextmanager
def measuring(mode: MeasuringMode, hooks: saved_tensors_hooks | None = None) -> Iterator[None]:
    """Measure inside of this; modes and hooks of others may be left in any order.

    Args:
        mode: the dispatch mode.
        hooks: for saved tensors.
    """
    with ExitStack() as stack:
        if hooks is not None:
            stack.callback(leave_saved_hooks, hooks)
            hooks.__enter__()
        stack.callback(leave_mode, mode)
        mode.__enter__()
        yield
