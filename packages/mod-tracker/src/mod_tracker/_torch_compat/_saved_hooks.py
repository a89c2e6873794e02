"""Hooks for saved tensors that are no obstacle to `torch.func`.

Note [Stepping aside]
`torch.func.grad`, `vjp` and what is made of them refuse to run where hooks for saved tensors are
on, whoever put them there. A report must not stop the model that it is about, so its hooks are
taken off while such a function runs; what is saved in there is not counted.
Rule 1: only hooks of ours are taken off, from the top down to the first of somebody else's. Where
        one of those is left, torch refuses as it would without a report.
Rule 2: while hooks of ours are on in any thread, torch's function that refuses runs a generator of
        ours around its own. The function stays the one that Dynamo knows, so what is compiled
        meanwhile is compiled as ever.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from types import CellType
from typing import Any, cast

from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks

from ._dispatcher import says_saved_hooks, top_saved_hooks


def _only_cell(function: Any) -> CellType | None:
    cells = getattr(function, "__closure__", None)
    own = getattr(function, "__wrapped__", None)
    if own is None or cells is None or [cell.cell_contents for cell in cells] != [own]:
        return None
    return cast("CellType", cells[0])


DISABLING: CellType | None = _only_cell(disable_saved_tensors_hooks)
"""Holds the generator that `torch.autograd.graph.disable_saved_tensors_hooks` runs; None if it is
not of `contextlib`'s making. The function itself stays as it is: Dynamo knows it by identity."""

_lock = threading.RLock()
_on: list[SavedHooks] = []
_torchs: Callable[[str], Generator[None]]


class SavedHooks:
    """A context like `torch.autograd.graph.saved_tensors_hooks`. See Note [Stepping aside].

    Args:
        pack: called with a tensor that is saved; what it returns is kept.
        unpack: called with that; returns the tensor.
    """

    def __init__(self, pack: Callable[[Any], Any], unpack: Callable[[Any], Any]) -> None:
        self.pack = pack
        self._hooks = saved_tensors_hooks(pack, unpack)
        self._left = True

    def __enter__(self) -> None:
        global _torchs
        with _lock:
            _on.append(self)
            if DISABLING is not None and DISABLING.cell_contents is not _aside:
                _torchs = DISABLING.cell_contents
                DISABLING.cell_contents = _aside
        self._hooks.__enter__()
        self._left = False

    def __exit__(self, *exc: object) -> None:
        # May be called again where an interrupt kept it from all of this.
        hooks = top_saved_hooks()
        if not self._left or (hooks is not None and hooks[0] == self.pack):
            _leave(self._hooks)
            self._left = True
        with _lock:
            if self in _on:
                _on.remove(self)
            if not _on and DISABLING is not None and DISABLING.cell_contents is _aside:
                DISABLING.cell_contents = _torchs


def _leave(own: saved_tensors_hooks) -> None:
    # Left by themselves, hooks take off whichever are on top. Nothing happens a second time.
    taken: list[saved_tensors_hooks] = []
    try:
        while (hooks := top_saved_hooks()) is not None and hooks[0] != own.pack_hook:
            taken.append(saved_tensors_hooks(*hooks))
            taken[-1].__exit__()
        if hooks is not None or not says_saved_hooks():
            own.__exit__()
    finally:
        while taken:
            taken.pop().__enter__()


def _aside(error_message: str) -> Generator[None]:
    taken: list[saved_tensors_hooks] = []
    try:
        while (hooks := top_saved_hooks()) is not None and _is_ours(hooks[0]):
            taken.append(saved_tensors_hooks(*hooks))
            taken[-1].__exit__()
        yield from _torchs(error_message)
    finally:
        while taken:
            taken.pop().__enter__()


def _is_ours(pack: Any) -> bool:
    return any(pack == known.pack for known in list(_on))
