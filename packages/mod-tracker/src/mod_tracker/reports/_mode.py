"""The dispatch mode of the reports.

Note [What a mode must not change]
- torch.compile must compile the same code as without the mode. So the mode is off while it
  compiles, and the mode's own code is not compiled.
- A higher-order operator such as `torch.cond` runs with the mode off. Its functions are wrapped so
  that the mode is on inside them.
- A tensor subclass with a `__torch_dispatch__` runs operators that are not measured as a whole
  with the mode on, so that the mode sees its inner operators. Queries of sizes and strides also
  go to the subclass, since some C++ callers do not handle their failure.
- A `DTensor` first runs an operator on fake tensors of the global shape. This rank does not
  compute that, so fake tensors are ignored inside a `DTensor`, unless the user's own
  `FakeTensorMode` is on.
- torch imports its compiler at the first operator that a mode sees. Stack frames of that import
  stay in reference cycles and keep tensors of the model alive. So the compiler is imported
  earlier, in a thread without such frames.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .._attribution import Attribution
from .._torch_compat import (
    has_own_operators,
    in_fresh_thread,
    is_on,
    is_stand_in,
    leave_mode,
    makes_stand_ins,
    on_compiled_code,
)
from ._report import ran_compiled
from ._rows import OUTSIDE_NAME


class MeasuringMode(TorchDispatchMode):
    """A mode that observes operators. See Note [What a mode must not change].

    Attributes:
        compiled_in: names of modules that called compiled functions, in order. Compiled modules
            are not among them.

    A subclass must define `__torch_dispatch__` itself: torch wraps it in the class that defines
    it, and torch.compile skips only wrapped ones.
    """

    supports_higher_order_operators = True

    def __init__(self, attribution: Attribution) -> None:
        super().__init__()
        self.attribution = attribution
        self._passing_on = False
        self._tried_out = 0
        self.compiled_in: dict[str, None] = {}
        _load_compiler()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Make torch.compile ignore the mode."""
        return True

    def pass_on(self, func: Any, types: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Let tensor subclasses run an operator themselves."""
        if not any(map(is_sharded, types)) or self._passing_on or makes_stand_ins():
            self._passing_on = False
            return NotImplemented
        self._passing_on = True
        self._tried_out += 1
        try:
            with self:
                return func(*args, **kwargs)  # calls this function again
        finally:
            self._tried_out -= 1
            self._passing_on = False

    def compiled_code_runs(self) -> None:
        """Note the module that calls a compiled function."""
        if is_on(self):
            path = self.attribution.locate()[0][0]
            if not any(map(ran_compiled, path.chain())):
                self.compiled_in[path.name or OUTSIDE_NAME] = None

    def is_tried_out(self, types: Any) -> bool:
        """Whether an operator runs only to compute the shape of its result, inside a `DTensor`."""
        return self._tried_out > 0 and any(map(is_stand_in, types))

    def call_inside(self, operator: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Call a higher-order operator with the mode off, and its functions with the mode on."""
        return operator(*(self._seen(arg) for arg in args), **kwargs)

    def _seen(self, value: Any) -> Any:
        if not callable(value) or isinstance(value, (type, torch.Tensor)):
            return value

        def call(*args: Any, **kwargs: Any) -> Any:
            with self:
                return value(*args, **kwargs)

        return wraps(value)(call) if hasattr(value, "__name__") else call


@cache
def writes_results(operator: Any) -> bool:
    """Whether an operator has arguments for its results."""
    schema = getattr(operator, "_schema", None)
    return schema is not None and any(argument.is_out for argument in schema.arguments)


@cache
def _load_compiler() -> None:
    """Import torch's compiler in a thread whose frames hold no tensors."""
    in_fresh_thread(lambda: torch.compiler.disable(len))


def has_own_way(types: tuple[type, ...]) -> bool:
    """Whether one of the tensor types of a call has its own `__torch_dispatch__`."""
    return any(has_own_operators(kind) for kind in types)


def is_sharded(kind: type) -> bool:
    """Whether each rank holds a part of tensors of this class, as of `DTensor`."""
    return hasattr(kind, "to_local") and hasattr(kind, "placements")


@contextmanager
def measuring(mode: MeasuringMode) -> Iterator[None]:
    """Enter a mode; others may be entered and left in any order."""
    end_noting = on_compiled_code(mode.compiled_code_runs)
    try:
        mode.__enter__()
        yield
    finally:
        try:
            leave_mode(mode)
        except BaseException:  # an interrupt
            leave_mode(mode)
            raise
        finally:
            end_noting()
