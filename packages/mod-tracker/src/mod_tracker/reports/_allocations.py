"""Which module allocated and freed which bytes, through a dispatch mode.

Note [Storages]
A tensor's bytes are its storage's, and views share one. A storage counts when an operator returns
it that did not get it as an argument, and is freed when its last tensor is gone, which a weak
reference tells. What existed before the measurement is not counted.
A storage that is resized, as FSDP2 does to keep an empty one where a whole parameter was, is freed
and made again with its new size. No operator says so, so the method itself is followed.

Note [What was alive at the peak]
Only at the end is it known which moment was the peak. So each storage knows the number of its
allocation, and one that goes is kept in mind if it was alive at the highest peak so far. A higher
peak makes all of these forgotten.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from .._attribution import BACKWARD, Attribution
from .._edges import tensors_in
from .._errors import OptionError, StateError
from .._record import Call
from .._torch_compat import is_composite, is_higher_order, views_are_noted, without_torch_function
from ._causes import ACTIVATIONS, GRADIENTS, LOGITS, OPTIMIZER, LogitsAndLoss
from ._mode import MeasuringMode, has_own_way, measuring
from ._phase_totals import PhaseTotals

Stored = tuple[torch.Tensor, torch.UntypedStorage]
"""A tensor, and the storage whose bytes it occupies."""


class Ledger(Protocol):
    """Is told of every storage."""

    def add(self, made: Allocation, tensor: torch.Tensor, call: Call, phase: str) -> None:
        """A storage was made, for this tensor."""

    def renew(self, made: Allocation) -> None:
        """A storage has another size now."""

    def drop(self, key: int) -> None:
        """A storage is gone."""


class Allocation(weakref.ref[torch.UntypedStorage]):
    """A storage that an operator made, or that was given to one.

    Attributes:
        key: its `id`.
        size: its bytes; 0 for one that was there before.
        number: of the allocation; see Note [What was alive at the peak].
        cause: one of `CAUSES`, where it is known for sure; else "".
    """

    __slots__ = ("cause", "key", "number", "size")
    key: int
    size: int
    number: int
    cause: str


class AllocationMode(MeasuringMode):
    """Follows the storages that operators make.

    Attributes:
        live: bytes allocated since the start and not freed.
        peak: largest value of `live`.
        peaks: largest value of `live` while a module ran, by name.
        allocated: bytes by module and phase.
        freed: bytes by the module and phase in which they were freed.
        saw_any: whether any operator ran.
        optimizers: those that made a step.
        went_back: whether a backward ran since this was set to False.
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
        self.saw_any = self.went_back = False
        self.optimizers: list[torch.optim.Optimizer] = []
        self.logits = LogitsAndLoss()
        self._in_step = False
        self._changed, self._ledger = changed, ledger
        self._known: dict[int, Allocation] = {}
        self._number = self._peak_number = 0
        self._gone_since_peak: list[Allocation] = []
        self._plain: dict[Any, bool] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if types and has_own_way(types):
            return self.pass_on(func, types, args, kwargs)
        if types and self.is_tried_out(types):
            return func(*args, **kwargs)
        if self.attribution.attribute_op()[1] is BACKWARD:
            self.went_back = True
        plain = self._plain.get(func)
        if plain is None:
            self.saw_any = True
            plain = not is_higher_order(func) and not is_composite(func)
            self._plain[func] = plain
        if plain:
            output = func(*args, **kwargs)
        elif is_higher_order(func):
            output = self.call_inside(func, args, kwargs)
        else:
            with views_are_noted(func):
                output = func(*args, **kwargs)
        if type(output) is torch.Tensor and output.layout is torch.strided:
            if id(storage := output.untyped_storage()) not in self._known:
                self._add([(output, storage)], args, kwargs)
            return output
        made = [output] if isinstance(output, torch.Tensor) else tensors_in(output)
        new = [stored for stored in storages_of(made) if id(stored[1]) not in self._known]
        if new:
            self._add(new, args, kwargs)
        return output

    def _add(self, made: Iterable[Stored], args: tuple, kwargs: dict[str, Any]) -> None:
        given = {id(storage) for _, storage in storages_of(tensors_in((args, kwargs)))}
        call, phase = self.attribution.locate()
        for tensor, storage in made:
            key = id(storage)
            if key in self._known:
                continue
            size = 0 if key in given else storage.nbytes()
            found = self._note(storage, size, call, phase)
            if size and self._ledger is not None:
                self._ledger.add(found, tensor, call, phase)
        self._tell(call, phase)

    def _note(self, storage: torch.UntypedStorage, size: int, call: Call, phase: str) -> Allocation:
        found = Allocation(storage, self._forget)
        self._known[id(storage)] = found
        found.key, found.size = id(storage), size
        found.cause = OPTIMIZER if self._in_step else ""
        found.number = self._number = self._number + 1
        if size:
            self.live += size
            self.allocated.add(call[0], phase, size)
        return found

    def _tell(self, call: Call, phase: str) -> None:
        self.logits.allocates(self._number, call, phase)
        if self.live > self.peak:
            self.peak, self._peak_number = self.live, self._number
            self._gone_since_peak.clear()
        for path in call[0].chain():
            if self.live > self.peaks[path.name]:
                self.peaks[path.name] = self.live
        if self._changed is not None:
            self._changed(self.live)

    def _forget(self, gone: weakref.ref[torch.UntypedStorage]) -> None:
        assert isinstance(gone, Allocation)
        if self._known.get(gone.key) is not gone:
            return
        del self._known[gone.key]
        if self._ledger is not None:
            self._ledger.drop(gone.key)
        self._free(gone)

    def _free(self, gone: Allocation) -> None:
        if gone.size:
            if gone.number <= self._peak_number:
                self._gone_since_peak.append(gone)
            self.live -= gone.size
            call, phase = self.attribution.locate()
            self.freed.add(call[0], phase, gone.size)
            if self._changed is not None:
                self._changed(self.live)

    def resized(self, storage: torch.UntypedStorage, before: int, after: int) -> None:
        """Note that a storage that had so many bytes has others now."""
        known = self._known.get(id(storage))
        size = 0 if known is None else known.size
        if known is not None:
            self._free(known)
        call, phase = self.attribution.locate()
        found = self._note(storage, max(0, size + after - before), call, phase)
        if self._ledger is not None:
            self._ledger.renew(found)
        self._tell(call, phase)

    def mark(self, tensors: Iterable[torch.Tensor | None], cause: str) -> dict[int, int]:
        """Note what tensors are; return bytes by storage of those that were there before."""
        before = {}
        stored = storages_of(tensor for tensor in tensors if tensor is not None)
        for key, size in ((id(storage), storage.nbytes()) for _, storage in stored):
            found = self._known.get(key)
            if found is not None and found.size:
                found.cause = cause
            else:
                before[key] = size
        return before

    def at_peak(self) -> Counter[str]:
        """Return bytes that were alive at the peak, by cause."""
        alive = [found for found in self._known.values() if found.number <= self._peak_number]
        causes: Counter[str] = Counter()
        for found in [*alive, *self._gone_since_peak]:
            causes[found.cause or self._cause_of(found.number)] += found.size
        return causes

    def _cause_of(self, number: int) -> str:
        return LOGITS if self.logits.has(number) else ACTIVATIONS

    @contextmanager
    def following_optimizers(self) -> Iterator[None]:
        """Have every optimizer's steps tell what gradients and optimizer state are."""

        def before(optimizer: torch.optim.Optimizer, *step: Any) -> None:
            if not any(optimizer is known for known in self.optimizers):
                self.optimizers.append(optimizer)
            groups = optimizer.param_groups
            held = [each.grad for group in groups for each in group["params"]]
            self.mark(held, GRADIENTS)
            self._in_step = True

        def after(optimizer: torch.optim.Optimizer, *step: Any) -> None:
            self._in_step = False
            self.mark(tensors_in(dict(optimizer.state)), OPTIMIZER)

        handles = [
            register_optimizer_step_pre_hook(before),
            register_optimizer_step_post_hook(after),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


_following: list[AllocationMode] = []
_lock = threading.RLock()
_torchs_resize = torch.UntypedStorage.resize_
_is_inherited = "resize_" not in vars(torch.UntypedStorage)


def _resize_and_tell(storage: torch.UntypedStorage, size: int) -> Any:
    before = storage.nbytes()
    result = _torchs_resize(storage, size)
    for mode in list(_following):
        mode.resized(storage, before, storage.nbytes())
    return result


@contextmanager
def measuring_storages(
    mode: AllocationMode, hooks: AbstractContextManager[Any] | None = None
) -> Iterator[None]:
    """Measure inside of this, resized storages among them. See Note [Storages]."""
    kind: Any = torch.UntypedStorage
    try:
        with _lock:
            _following.append(mode)
            if kind.resize_ is _torchs_resize:
                kind.resize_ = _resize_and_tell
        with measuring(mode, hooks):
            yield
    finally:
        with _lock:
            if mode in _following:
                _following.remove(mode)
            if not _following and kind.resize_ is _resize_and_tell:
                if _is_inherited:
                    del kind.resize_
                else:
                    kind.resize_ = _torchs_resize


_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}
"""Methods that return what a sparse tensor is made of, by its layout."""

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def storages_of(tensors: Iterable[torch.Tensor]) -> list[Stored]:
    """Return tensors with the storage whose bytes each occupies.

    A tensor that is made of others has theirs: a `DTensor` that of this rank's part, a quantized
    one those of its numbers and scales, a sparse one those of its indices and values. Those of
    which it is not known what they are made of are left out.
    """
    found: list[Stored] = []
    for tensor in tensors:
        try:
            parts = None if type(tensor) in _PLAIN else _flattened(tensor)
            if parts is None:
                found.append((tensor, tensor.untyped_storage()))
            else:
                found += storages_of(parts)
        except Exception:  # of a class of anybody's
            found += _asked_as_tensor(tensor)
    return found


def _flattened(tensor: torch.Tensor) -> list[torch.Tensor] | None:
    """Return what a wrapper subclass holds, as it says itself; None for other tensors."""
    flatten = getattr(type(tensor), "__tensor_flatten__", None)
    if flatten is None or getattr(type(tensor), "__tensor_unflatten__", None) is None:
        return None
    with without_torch_function():
        names, _ = flatten(tensor)
        held = (getattr(tensor, name) for name in names)
        return [each for each in held if isinstance(each, torch.Tensor)]


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
