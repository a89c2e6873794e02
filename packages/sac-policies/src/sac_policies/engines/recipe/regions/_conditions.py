"""What the code of a span runs with when it runs again, and leaves as it was.

Rule 1. Random numbers and autocast are those of the forward. What others draw goes on from there
        as if the code had run once.
Rule 2. What the code writes to and did not make (running statistics, a codebook) is afterwards as
        it was before, with its version. The code itself finds it as the forward left it: what it
        makes of that is held to a proof.
Rule 3. It registers no hooks a second time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from ...._tensors import tensors_in
from ...._torch_compat import set_versions, storage_key
from ...._watching_mode import WatchingMode
from ....policies._operators import facts_of, written_statistics
from ..._ambient_state import AmbientState


class Conditions:
    """What code is to find, and to leave, when it runs again.

    Args:
        inputs: tensors that it is given, for their devices.
    """

    def __init__(self, inputs: list[torch.Tensor]) -> None:
        self._ambient = AmbientState(inputs)
        self.settle = self._ambient.settle

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Have them as they were, then again as they are."""
        undone = Undone()
        with ExitStack() as until:
            until.callback(undone.undo)
            until.enter_context(undone)
            until.enter_context(_WithoutHooks())
            until.enter_context(self._ambient.restored())
            yield


class _WithoutHooks(TorchFunctionMode):
    """Registers no hooks of tensors: the forward did, and no gradient flows here (Rule 3)."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return (
            RemovableHandle(OrderedDict()) if func in _REGISTER else func(*args, **(kwargs or {}))
        )


_REGISTER = (torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook)


class Undone(WatchingMode):
    """Watches for writes to what was not made meanwhile, to undo them (Rule 2)."""

    def __init__(self) -> None:
        super().__init__()
        self._made: set[int] = set()
        self._before: dict[Any, tuple[torch.Tensor, torch.Tensor, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        facts = facts_of(func)
        for tensor in facts.written(args, given):
            self._copy(tensor)
        for tensor in tensors_in(written_statistics(func, args)):
            self._copy(tensor)
        out = func(*args, **given)
        if not (facts.is_view or facts.writes):
            self._made.update(map(storage_key, tensors_in(out)))
        return out

    def _copy(self, tensor: torch.Tensor) -> None:
        key = (storage_key(tensor), tensor.storage_offset(), tensor.shape, tensor.stride())
        if key[0] not in self._made and key not in self._before:
            self._before[key] = tensor, tensor.detach().clone(), tensor._version

    def undo(self) -> None:
        """Write back what was there; nobody who saved it is to hear of that."""
        before = tuple(reversed(self._before.values()))  # parts of one storage may overlap
        with torch.no_grad():
            for tensor, value, _ in before:
                tensor.detach().copy_(value)
        set_versions(
            tuple(tensor for tensor, _, _ in before), tuple(version for _, _, version in before)
        )
