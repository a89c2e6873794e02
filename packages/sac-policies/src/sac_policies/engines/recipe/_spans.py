"""Values that are made again by running the code of the span that they were made in.

Rule 1. The code runs at most once in a backward, for all its values that are still to be read,
        and stops where the last of these is saved.
Rule 2. It runs on what it was given, each input kept or a recipe, with the random numbers and
        the autocast of the forward, and saves what it saved there, in the same order.
Rule 3. Each value is held against the proof of what it was, before anyone reads it.
Rule 4. Nothing here holds a node that the span made: what nodes save leads here.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch.autograd.graph import saved_tensors_hooks

from ..._errors import MutationError, RecomputeError
from ..._tensors import tensors_in
from ..._torch_compat import backward_id, packs_for_a_node
from .._engine_disabled import own_work
from .._guards import unnoticed
from ._proof import Proof, check, proof_of
from ._shared_values import SharedValue, replays

Kept = tuple[Any, Callable[[Any], torch.Tensor]]
Input = tuple[Any, Callable[[Any], torch.Tensor], bool]
"""What is held of an input, what reads that, and whether a gradient flows to it."""


class Conditions(Protocol):
    """What code is run again with."""

    def restored(self) -> AbstractContextManager[None]:
        """Have random numbers and autocast as they were, then again as they are."""


class SpanCode:
    """The code of one call of a span, to be run again.

    Args:
        label: the span's.
        function: what it runs.
        given: its arguments, positional ones and those by name, with each tensor's number among
            `inputs` in its place.
        inputs: by number.
        conditions: what it ran with.

    Attributes:
        writes_inputs: whether it was seen to write to what it was given.
    """

    def __init__(
        self,
        label: str,
        function: Callable[..., Any],
        given: tuple[Any, Any],
        inputs: list[Input],
        conditions: Conditions,
    ) -> None:
        self.label = label
        self.writes_inputs = False
        self._function, self._given, self._inputs = function, given, inputs
        self._conditions = conditions
        self._cells: dict[tuple[str, int], weakref.ref[SharedValue]] = {}

    def cell(self, key: tuple[str, int]) -> SharedValue:
        """Return what the readers of one value share.

        Args:
            key: "saved" and which of those that nodes save, or "out" and which output.
        """
        reference = self._cells.get(key)
        cell = None if reference is None else reference()
        if cell is None:
            cell = SharedValue()
            self._cells[key] = weakref.ref(cell)
        return cell

    def forget(self, key: tuple[str, int]) -> None:
        """Have nobody read a value."""
        self._cells.pop(key, None)

    def made(self, key: tuple[str, int]) -> torch.Tensor:
        """Run the code for a value, and leave the others for their readers (Rule 1)."""
        cells = {at: cell for at, ref in self._cells.items() if (cell := ref()) is not None}
        with own_work():
            values = self._run(set(cells))
        missing = [at for at in cells if at not in values]
        if missing:
            raise self.other("saves or returns less")
        backward = backward_id()
        for at, cell in cells.items():
            if at != key and backward >= 0 and cell.value is None and cell.read < cell.readers:
                replays.hold(cell, values[at], backward)
        return values[key]

    def _run(self, wanted: set[tuple[str, int]]) -> dict[tuple[str, int], torch.Tensor]:
        saving = Saving({at for what, at in wanted if what == "saved"})
        outputs = [at for what, at in wanted if what == "out"]
        saving.stops = not outputs
        tensors = [self._input(*each) for each in self._inputs]
        args, kwargs = (mapped(each, lambda at: tensors[at], Slot) for each in self._given)
        try:
            with (
                torch.enable_grad(),
                self._conditions.restored(),
                saved_tensors_hooks(saving.pack, _unread),
            ):
                out = self._function(*args, **kwargs)
        except _LastWasSaved:
            out = None
        returned = tensors_in(out)
        if outputs and max(outputs) >= len(returned):
            raise self.other("returns fewer tensors")
        found = {("saved", at): tensor for at, tensor in saving.found.items()}
        return found | {("out", at): returned[at].detach() for at in outputs}

    def _input(self, held: Any, read: Callable[[Any], torch.Tensor], needs: bool) -> torch.Tensor:
        tensor = read(held)
        if tensor.is_leaf and tensor.requires_grad:
            return tensor
        tensor = tensor.detach().requires_grad_(needs)
        with torch.enable_grad():  # what is no leaf may be written to
            return tensor.clone() if self.writes_inputs else tensor

    def other(self, what: str) -> RecomputeError:
        """Make the error for code that does not do what it did."""
        return RecomputeError(
            f"sac_policies.checkpoint: span {self.label!r} {what} when it is run again than in the "
            "forward, but it must do the same. Pass it all that it depends on as arguments, or "
            "name it in a policy that keeps it, as save_modules(...) does."
        )

    def changed(self, shape: tuple[int, ...]) -> MutationError:
        """Make the error for a value that is not what it was."""
        return MutationError(
            f"sac_policies.checkpoint: span {self.label!r} gives other values for the saved tensor "
            f"of shape {shape} than in the forward, but they must be the same: something changed "
            "what the span reads, or its code does not do the same twice. Change it after "
            "backward, or keep the span by save_modules(...)."
        )


class Saving:
    """Takes what the code of a span saves, in order; `stops` it after the last that is wanted."""

    stops = False

    def __init__(self, wanted: set[int]) -> None:
        self._wanted = wanted
        self._count = 0
        self.found: dict[int, torch.Tensor] = {}

    def pack(self, tensor: torch.Tensor) -> None:
        """Note the next tensor; autograd is to hold nothing."""
        if not packs_for_a_node(depth=1):
            return
        at, self._count = self._count, self._count + 1
        if at in self._wanted:
            self.found[at] = tensor.detach()
            if self.stops and len(self.found) == len(self._wanted):
                raise _LastWasSaved


def _unread(held: None) -> torch.Tensor:
    raise RecomputeError(
        "sac_policies.checkpoint: a gradient is taken inside a span whose code runs again, but "
        "that run only makes what the span saves. Take it outside the span."
    )


class _LastWasSaved(BaseException):
    """Ends the code of a span (Rule 1)."""


class SpanValue:
    """A value that the code of a span makes again.

    Attributes:
        cell: what its readers share.
    """

    __slots__ = ("_code", "_geometry", "_kept", "_key", "_proof", "_storage_bytes", "cell")

    def __init__(self, code: SpanCode, key: tuple[str, int], tensor: torch.Tensor) -> None:
        self._code, self._key = code, key
        self._geometry = (tensor.size(), tensor.stride(), tensor.storage_offset())
        self._storage_bytes = tensor.untyped_storage().nbytes()
        self._proof = _proof_of(tensor)
        self._kept: Kept | None = None
        self.cell = code.cell(key)
        self.cell.readers += 1

    def keep(self, held: Any, read: Callable[[Any], torch.Tensor]) -> None:
        """Keep the value after all."""
        self._kept = held, read
        self._code.forget(self._key)

    def read(self) -> torch.Tensor:
        """Return the value, made unless an earlier reader left it."""
        if self._kept is not None:
            held, read = self._kept
            return read(held)
        if self.cell.written is not None:
            return self.cell.written.as_strided(*self._geometry)
        made = self.cell.get(lambda: self._code.made(self._key))
        if made.untyped_storage().nbytes() != self._storage_bytes:
            raise self._code.other("makes a value of another size")
        value = made.as_strided(*self._geometry)
        _check(self._proof, value, lambda: self._code.changed(tuple(value.shape)))
        return value


class SpanOutput:
    """What a span returned, as replays read it at edges; what they make of it is held to a proof.

    Attributes:
        cell: what its readers share.
    """

    __slots__ = ("_key", "_version", "cell", "code")

    def __init__(self, code: SpanCode, at: int, tensor: torch.Tensor) -> None:
        self.code, self._key = code, ("out", at)
        self._version = tensor._version
        self.cell = code.cell(self._key)

    def value(self, tensor: torch.Tensor) -> SpanValue | None:
        """What autograd is to hold of the output or a view of it; None if it was written to."""
        if tensor._version != self._version:
            return None
        return SpanValue(self.code, self._key, tensor)

    def read(self) -> torch.Tensor:
        """Return it, made unless an earlier reader left it."""
        return self.cell.get(lambda: self.code.made(self._key))


def _proof_of(tensor: torch.Tensor) -> Proof:
    """Proof of what a tensor holds; of its storage, where that holds nothing else."""
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return proof_of(tensor if whole else unnoticed(_gathered, tensor)[0])


def _gathered(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (tensor.detach().clone(memory_format=torch.contiguous_format),)


def _check(proof: Proof, tensor: torch.Tensor, error: Callable[[], Exception]) -> None:
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    check(proof, tensor if whole else unnoticed(_gathered, tensor)[0], error)


class Slot(int):
    """The number of an input, in the place of the tensor."""


def mapped(value: Any, change: Callable[[Any], Any], kind: type) -> Any:
    """Copy tuples, lists and dicts, with what is of a kind changed.

    Raises:
        TypeError: something else is in them that may hold tensors, or change.
    """
    if isinstance(value, kind):
        return change(value)
    if type(value) in (tuple, list):
        # Most is found to be fixed here, without a call.
        return type(value)(
            [each if type(each) in _FIXED else mapped(each, change, kind) for each in value]
        )
    if type(value) is dict:
        return {name: mapped(each, change, kind) for name, each in value.items()} if value else {}
    if type(value) in _FIXED or callable(value):
        return value
    raise TypeError(f"a {type(value).__name__}")


_FIXED = frozenset(
    {type(None), type(...), bool, int, float, complex, str, bytes, slice, range}
    | {torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format}
)
