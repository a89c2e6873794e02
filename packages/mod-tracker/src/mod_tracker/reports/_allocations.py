"""Which module allocated and freed which bytes, through a dispatch mode.

Note [Storages]
A tensor's bytes are its storage's, and views share one. A storage counts when an operator returns
it that did not get it as an argument, and is freed when its last tensor is gone, which a weak
reference tells. What existed before the measurement is not counted.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch

from .._attribution import Attribution
from .._edges import tensors_in
from .._errors import OptionError, StateError
from .._record import Call
from .._torch_compat import is_higher_order, views_are_noted, without_torch_function
from ._mode import MeasuringMode, has_own_way
from ._phase_totals import PhaseTotals

Stored = tuple[torch.Tensor, torch.UntypedStorage]
"""A tensor, and the storage whose bytes it occupies."""


class Ledger(Protocol):
    """Is told of every storage."""

    def add(self, key: int, tensor: torch.Tensor, size: int, call: Call, phase: str) -> None:
        """A storage was made; `key` is its `id`."""

    def drop(self, key: int) -> None:
        """A storage is gone."""


class AllocationMode(MeasuringMode):
    """Follows the storages that operators make.

    Attributes:
        live: bytes allocated since the start and not freed.
        peak: largest value of `live`.
        peaks: largest value of `live` while a module ran, by name.
        allocated: bytes by module and phase.
        freed: bytes by the module and phase in which they were freed.
    """

    def __init__(
        self,
        attribution: Attribution,
        *,
        changed: Callable[[int], None] | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        super().__init__(attribution)
        self.live = self.peak = 0
        self.peaks: defaultdict[str, int] = defaultdict(int)
        self.allocated, self.freed = PhaseTotals(), PhaseTotals()
        self._changed, self._ledger = changed, ledger
        self._known: dict[int, weakref.ref] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if has_own_way(types):
            return NotImplemented
        kwargs = kwargs or {}
        self.attribution.attribute_op()
        if is_higher_order(func):
            output = self.call_inside(func, args, kwargs)
        else:
            with views_are_noted(func):
                output = func(*args, **kwargs)
        made = [output] if isinstance(output, torch.Tensor) else tensors_in(output)
        new = [stored for stored in storages_of(made) if id(stored[1]) not in self._known]
        if new:
            given = {id(storage) for _, storage in storages_of(tensors_in((args, kwargs)))}
            self._add(new, given)
        return output

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors as alive that were made while nobody looked; as allocated they do not."""
        for _, storage in storages_of(tensors):
            key, size = id(storage), storage.nbytes()
            if key not in self._known:
                self._known[key] = weakref.ref(storage, self._forget(key, size, charged=False))
                self.live += size
        self.peak = max(self.peak, self.live)

    def _add(self, made: Iterable[Stored], given: set[int]) -> None:
        call, phase = self.attribution.locate()
        for tensor, storage in made:
            key = id(storage)
            if key in self._known:
                continue
            size = 0 if key in given else storage.nbytes()
            self._known[key] = weakref.ref(storage, self._forget(key, size))
            if size:
                self.live += size
                self.allocated.add(call[0], phase, size)
                if self._ledger is not None:
                    self._ledger.add(key, tensor, size, call, phase)
        self.peak = max(self.peak, self.live)
        for path in call[0].chain():
            self.peaks[path.name] = max(self.peaks[path.name], self.live)
        if self._changed is not None:
            self._changed(self.live)

    def _forget(self, key: int, size: int, *, charged: bool = True) -> Callable[[Any], None]:
        def forget(gone: Any) -> None:
            if self._known.get(key) is gone:
                del self._known[key]
                if self._ledger is not None:
                    self._ledger.drop(key)
            if size:
                self.live -= size
            if size and charged:
                call, phase = self.attribution.locate()
                self.freed.add(call[0], phase, size)

        return forget


_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}
"""Methods that return what a sparse tensor is made of, by its layout."""


def storages_of(tensors: Iterable[torch.Tensor]) -> list[Stored]:
    """Return tensors with the storage whose bytes each occupies; of a sparse one, its parts.

    Those without a storage, of which it is not known what they are made of, are left out.
    """
    found: list[Stored] = []
    for tensor in tensors:
        try:
            found.append((tensor, tensor.untyped_storage()))
        except Exception:  # of a class of anybody's
            found += _asked_as_tensor(tensor)
    return found


def _asked_as_tensor(tensor: torch.Tensor) -> list[Stored]:
    """Do the same for a tensor whose class refused, or that has no storage of its own."""
    # Every tensor that Python holds may come here, one that has lost what it was, too.
    try:
        with without_torch_function():
            whole = tensor.detach()
            if whole.layout is torch.strided:
                return [(whole, whole.untyped_storage())]
            parts = [getattr(whole, part)() for part in _PARTS.get(whole.layout, ())]
            return [(part, part.untyped_storage()) for part in parts]
    except Exception:
        return []


def check_optimizer(optimizer: Any, function: str) -> None:
    """See that an optimizer has state, before a page is written that needs it.

    Raises:
        OptionError: it has none.
    """
    if optimizer is not None and not isinstance(getattr(optimizer, "state", None), Mapping):
        raise OptionError(
            f"mod_tracker.{function}: optimizer is a {type(optimizer).__name__}, but its `state` "
            "is read, by parameter. Give the optimizer itself."
        )


def apart(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that is saved for backward without its place in the graph.

    A node saves its own result, too: kept as it is, the two would hold each other, and what a
    forward made that nobody goes back through would stay until garbage is collected. When torch
    takes the tensor back it puts it in its place again.
    """
    return tensor if tensor.grad_fn is None else tensor.detach()


class KeptTensor:
    """A tensor kept for backward by hooks of a report. Its end is the end of the keeping.

    Attributes:
        keys: its storages, by `id`.
        tensor: the tensor, without its place in the graph.
    """

    __slots__ = ("_released", "_version", "keys", "tensor")

    def __init__(
        self, tensor: torch.Tensor, keys: list[int], released: Callable[[int], None]
    ) -> None:
        self.keys: list[int] = keys
        self._released, self._version = released, tensor._version
        self.tensor: torch.Tensor = apart(tensor)

    def __del__(self) -> None:
        if hasattr(self, "tensor"):  # an interrupt may have come before there was any
            for key in self.keys:
                self._released(key)

    def given_back(self, function: str) -> torch.Tensor:
        """Return the tensor, which must be as it was: under hooks torch does not look.

        Raises:
            StateError: it was changed in place.
        """
        tensor, version = self.tensor, self._version
        if tensor._version != version:
            raise StateError(
                f"mod_tracker.{function}: a tensor {tensor.dtype} {list(tensor.shape)} that was "
                f"saved for backward at version {version} is at {tensor._version}, but it must not "
                "be changed in place until then. Change a copy of it."
            )
        return tensor
