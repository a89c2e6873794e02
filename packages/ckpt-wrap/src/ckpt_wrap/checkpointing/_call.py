"""One call of a function, with everything needed to make the same call again.

Inputs are saved after forward returns, and only if forward saved something for backward. They are
saved as autograd saves tensors: version-checked, and visible to outer hooks on saved tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ckpt_wrap._errors import RecomputeError, changed_input_message, is_in_place_error
from ckpt_wrap._phase import SecondRun
from ckpt_wrap._torch_compat import (
    Saved,
    never_compiled_inside,
    next_hook_number,
    remove_hooks,
    save_tensor,
    version_of,
)
from ckpt_wrap._where import Where
from ckpt_wrap.checkpointing._ambient_state import AmbientState, replay
from ckpt_wrap.checkpointing._arguments import Arguments
from ckpt_wrap.checkpointing._module_state import ModuleState


@dataclass(slots=True)
class Call:
    """Everything needed to make the same call again."""

    function: Callable[..., Any]
    module: nn.Module | None
    where: Where
    arguments: Arguments
    ambient: AmbientState
    context: AbstractContextManager[Any]
    state: ModuleState
    _live: list[torch.Tensor] | None = None  # the inputs while forward runs
    _versions: list[int] = field(default_factory=list)
    _saved: list[Saved | None] = field(default_factory=list)  # None: changed by forward

    def begin(self) -> None:
        """Forward starts: note the state of the inputs and of the module."""
        self._live = self.arguments.tensors + self.state.begin()
        self._versions = [version_of(tensor) for tensor in self._live]

    def end(self, *, keep: bool) -> None:
        """Forward has ended: keep what recomputation needs, or nothing."""
        tensors, self._live, self.arguments.tensors = self._live or [], None, []
        self.state.end(keep=keep)
        if not keep:
            self.arguments = Arguments((), {})
            return
        once: dict[int, Saved | None] = {}
        for tensor, version in zip(tensors, self._versions, strict=True):
            if id(tensor) not in once:
                unchanged = version_of(tensor) == version
                once[id(tensor)] = save_tensor(tensor) if unchanged else None
            self._saved.append(once[id(tensor)])
        self.arguments.end(tensors, self.where)

    @never_compiled_inside
    def again(self) -> Any:
        """Make the call, in the ambient state it had."""
        tensors = self._inputs()
        args, kwargs = self.arguments.filled(tensors, self.where)
        first_hook = next_hook_number()
        try:
            with self.state.put_in(tensors), replay(self.ambient), self.context, SecondRun():
                return self.function(*args, **kwargs)
        finally:
            # Forward has registered its hooks already. Ended early, recomputation cannot have
            # removed them itself.
            remove_hooks(range(first_hook, next_hook_number()), tensors, self.module)

    def _inputs(self) -> list[torch.Tensor]:
        if self._live is not None:  # a backward inside forward
            return self._live
        unpacked: dict[int, torch.Tensor] = {}
        return [self._unpack(saved, unpacked) for saved in self._saved]

    def _unpack(self, saved: Saved | None, unpacked: dict[int, torch.Tensor]) -> torch.Tensor:
        cause = None
        try:
            if saved is not None:
                if id(saved) not in unpacked:
                    unpacked[id(saved)] = saved.unpack()
                return unpacked[id(saved)]
        except RuntimeError as error:
            if not is_in_place_error(error):
                raise
            cause = error
        raise RecomputeError(changed_input_message(self.where)) from cause
