"""Values that wait for backward: aliases, values in the user's hooks, offloaded ones.

Rule 1. A kept tensor is a detached alias; it shares the version counter of the original, so an
        in-place change from outside the region is noticed when the value is read.
Rule 2. A change from inside the region is not the user's mistake: the value is cloned before
        the operator that would overwrite it (`leave`).
Rule 3. An offloaded tensor is moved beside other work (`_moved`). Under the user's saved-tensor
        hooks the host waits: they are host code, and are given bytes that have arrived, and what
        they give back is copied before it can change.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ..._torch_compat import Hooks, alias, storage_key
from ...policies._policies import Policy
from ...policies._views import Operator
from .._engine_disabled import own_work
from .._error_context import saved_changed
from ._moved import MovedTensor, takes
from ._moved_stats import counters


class KeptTensor:
    """One tensor, kept until backward reads it.

    Attributes:
        held: the alias, or what the offload and the hooks made of it.
        home: device to bring it back to, None where it stayed.
        hooks: the user's pack and unpack functions, None without.
        version: of `held` when it was kept, None where the hooks hold something else.
        drawn: the region's count of random draws when it was made, 0 for other operators.
    """

    __slots__ = ("drawn", "held", "home", "hooks", "version")

    def __init__(
        self, tensor: torch.Tensor, hooks: Hooks | None, offload: bool, drawn: int
    ) -> None:
        self.drawn = drawn
        self.hooks = hooks
        self.home = tensor.device if offload else None
        kept = _to_host(tensor) if offload and tensor.device.type != "cpu" else alias(tensor)
        if hooks is None:
            self.held: Any = kept
            self.version: int | None = kept._version
        else:
            self._pack(kept)

    def read(self, op: Operator, policy: Policy, *, last: bool) -> torch.Tensor:
        """Return the value; a fresh alias of it unless this is the `last` reading."""
        if self.version is not None and self.held._version != self.version:
            raise saved_changed(op, policy)
        tensor = self._unpack()
        if self.home is not None:
            with own_work():
                return tensor.to(self.home, copy=not last)
        return tensor if last else alias(tensor)

    def expect_write(self) -> None:
        """Allow one more version: the operator that is being kept wrote to this tensor.

        Autograd counts an in-place operator only after it has run.
        """
        if self.version is not None:
            self.version += 1

    def leave(self, storages: set[int]) -> None:
        """Clone a value that lies in one of `storages`, which is about to be overwritten."""
        tensor = self._unpack()
        if storage_key(tensor) in storages:
            with own_work():
                self._pack(tensor.clone())

    def start_back(self) -> None:
        """Nothing can be asked for ahead of its reading."""

    def resident(self) -> Iterator[torch.Tensor]:
        """Yield the tensor, unless offload or hooks moved it away."""
        if self.home is None and isinstance(self.held, torch.Tensor):
            yield self.held

    def _pack(self, tensor: torch.Tensor) -> None:
        if self.hooks is None:
            self.held = tensor
        else:
            with own_work():
                self.held = self.hooks[0](tensor)
        self.version = tensor._version if self.held is tensor else None

    def _unpack(self) -> torch.Tensor:
        if self.hooks is None:
            return self.held
        with own_work():
            return self.hooks[1](self.held)


class Offloaded(MovedTensor):
    """One tensor whose bytes are on the host, or on their way."""

    __slots__ = ()

    def read(self, op: Operator, policy: Policy, *, last: bool) -> torch.Tensor:
        """Return the value; each reading is given a tensor of its own."""
        del last
        if self.is_changed():
            raise saved_changed(op, policy)
        return self.value()

    def resident(self) -> Iterator[torch.Tensor]:
        """Yield no tensor: what is still here is leaving."""
        yield from ()


class KeptTuple:
    """Several outputs of one operator, with whatever else stands between them."""

    __slots__ = ("drawn", "items", "kind")

    def __init__(self, value: Any, hooks: Hooks | None, offload: bool, drawn: int) -> None:
        self.drawn = drawn
        self.kind = type(value)
        self.items = [keep(each, hooks, offload, drawn) for each in value]

    def read(self, op: Operator, policy: Policy, *, last: bool) -> Any:
        """Return the outputs in their places."""
        return self.kind([each.read(op, policy, last=last) for each in self.items])

    def leave(self, storages: set[int]) -> None:
        """Clone the outputs that lie in one of `storages`."""
        for each in self.items:
            each.leave(storages)

    def start_back(self) -> None:
        """Ask for those that were moved away."""
        for each in self.items:
            each.start_back()

    def resident(self) -> Iterator[torch.Tensor]:
        """Yield the tensors that were not moved away."""
        for each in self.items:
            yield from each.resident()


class KeptOther:
    """A number, None, or anything else that is no tensor."""

    __slots__ = ("drawn", "value")

    def __init__(self, value: Any, drawn: int) -> None:
        self.value = value
        self.drawn = drawn

    def read(self, op: Operator, policy: Policy, *, last: bool) -> Any:
        """Return the value; it is nothing that could have changed."""
        del op, policy, last
        return self.value

    def leave(self, storages: set[int]) -> None:
        """Nothing writes to it."""

    def start_back(self) -> None:
        """It was never away."""

    def resident(self) -> Iterator[torch.Tensor]:
        """Yield no tensor: there is none in it."""
        yield from ()


Kept = KeptTensor | Offloaded | KeptTuple | KeptOther


def keep(value: Any, hooks: Hooks | None, offload: bool, drawn: int) -> Kept:
    """Keep what an operator returned."""
    if isinstance(value, torch.Tensor):
        moves = offload and value.device.type != "cpu" and counters.has_room(value.nbytes)
        if moves and hooks is None and takes(value):
            return Offloaded(value, drawn)
        stays = offload and value.device.type != "cpu" and not moves
        return KeptTensor(value, hooks, offload and not stays, drawn)
    if isinstance(value, (tuple, list)):
        return KeptTuple(value, hooks, offload, drawn)
    return KeptOther(value, drawn)


def storages_of(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Addresses of the tensors' storages."""
    return {storage_key(each) for each in tensors}


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Copy to pinned host memory; the bytes are there when it returns (Rule 3)."""
    with own_work():
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        return host.copy_(tensor)
