"""The leaf tensors that a region reads, and whether others changed them before backward.

Rule 1. A leaf is noted with its version when an operator first reads it. A recomputation that
        reads it at another version is refused: autograd would refuse most of them.
Rule 2. A write past the version counter, as through `.data`, is seen by a guard. Guards are made
        when the forward ends: what the region made for itself is gone by then.
Rule 3. Guarded is what a recomputation reads: not what only kept operators read. Whoever takes a
        view reads nothing yet.
Rule 4. What the region itself writes to, frees or moves, as FSDP does, is its own work. What is put
        back for a recomputation (`_external_state`) must be where it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.weak import TensorWeakRef

from ..._torch_compat import base_of, storage_key
from ...policies._views import Operator
from .._guards import Guard, are_same, joins

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_BATCH_NORMS = frozenset(
    getattr(torch.ops.aten, name).default
    for name in ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")
    if hasattr(torch.ops.aten, name)
)
"""Given running statistics, and after them whether they are written to: no schema says so."""
_STATISTICS = slice(3, 5)
_DETACH = torch.ops.aten.detach.default

Place = tuple[()] | tuple[int, torch.Size]


class Leaf:
    """One leaf as it was.

    Attributes:
        reference: the tensor.
        version: its version; None where the region writes to it itself (Rule 4).
        place: where its data lay when it was read; None where no recomputation reads it.
        guard: the tensor as it was, once the forward has ended (Rule 2).
        stays: whether a recomputation needs it where it was, for it is put back there.
        detached: whether the region detaches it, and reads what comes of that. A checkpoint
            detaches in a recomputation whatever autograd saves.
    """

    __slots__ = ("detached", "guard", "place", "reference", "stays", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.reference = TensorWeakRef(tensor)
        self.version: int | None = tensor._version
        self.place: Place | None = None
        self.guard: Guard | None = None
        self.detached = False
        self.stays = False

    def protect(self, known: Guard | None) -> None:
        """Guard the tensor if it is still there, where it was; by a `known` guard of it if any."""
        tensor = self.reference()
        if tensor is None or self.guard is not None or self.version is None:
            return
        if self.place and self.place == _place_of(tensor):
            self.guard = known or Guard(tensor)

    def moved(self, tensor: torch.Tensor) -> bool:
        """Whether it is not where it is put back."""
        return self.stays and bool(self.place) and self.place != _place_of(tensor)


class Leaves(dict[int, Leaf]):
    """The leaves of one forward of one region, by identity."""

    def note(self, op: Operator, args: tuple[Any, ...], *, rereads: bool) -> None:
        """Note what an operator is given; `rereads` tells whether recomputing reads its data."""
        if op in _BATCH_NORMS:
            for tensor in _tensors(written_statistics(op, args)):
                self._note_leaf(tensor, op, False)
            args = _without_statistics(args)
        for tensor in _tensors(args):
            base = base_of(tensor) if rereads else None
            if base is not None and base.is_leaf:
                self._note_leaf(base, op, rereads)
            # A view that is a leaf of its own may be given other data than its base has.
            if tensor.is_leaf and (base is None or tensor.requires_grad):
                self._note_leaf(tensor, op, rereads)

    def _note_leaf(self, tensor: torch.Tensor, op: Operator, rereads: bool) -> None:
        leaf = self.find(tensor)
        if leaf is None:
            leaf = self[id(tensor)] = Leaf(tensor)
        if rereads and leaf.place is None:
            leaf.place = _place_of(tensor)
        if op is _DETACH:
            leaf.detached = True

    def find(self, tensor: torch.Tensor) -> Leaf | None:
        """Return what was noted of a tensor."""
        leaf = self.get(id(tensor))
        return leaf if leaf is not None and leaf.reference() is tensor else None

    def wrote(self, storages: set[int], *, put_back: bool = False) -> None:
        """Take a region's own writing for its work: the recomputation writes again (Rule 4).

        Args:
            storages: where it wrote.
            put_back: whether what was there is put back for the recomputation.
        """
        for leaf in self.values():
            tensor = leaf.reference()
            if tensor is not None and storage_key(tensor) in storages:
                leaf.version = None
                leaf.stays |= put_back
                leaf.place = leaf.place or _place_of(tensor)

    def protect(self, known: Leaves) -> None:
        """Guard them as the forward ends, with the guards that another region has of them."""
        for key, leaf in self.items():
            if leaf.place:
                other = known.get(key)
                shared = other is not None and other.reference() is leaf.reference()
                leaf.protect(other.guard if shared and other is not None else None)

    def hand_to(self, around: Leaves) -> None:
        """Give the guards to the region around, which reads all that is read in here."""
        for key, leaf in self.items():
            outer = around.get(key)
            if leaf.guard is not None and outer is not None:
                outer.protect(leaf.guard)

    def doubtful(self) -> Leaves:
        """Return those that a recomputation has to look at when an operator reads them.

        The others are as they were, or gone.
        """
        found = Leaves()
        small: list[tuple[int, Leaf, torch.Tensor, torch.Tensor]] = []
        for key, leaf in self.items():
            tensor, guard = leaf.reference(), leaf.guard
            if tensor is None:
                continue
            if leaf.moved(tensor):
                found[key] = leaf
                continue
            unchanged = leaf.version in (None, tensor._version)
            copy = None if guard is None else guard.copy
            if unchanged and copy is not None and joins(copy, tensor):
                small.append((key, leaf, copy, tensor))
            elif guard is not None or not unchanged:
                found[key] = leaf
        if small and not are_same([each[2] for each in small], [each[3] for each in small]):
            found.update((key, leaf) for key, leaf, _, _ in small)
        return found

    def check(
        self,
        op: Operator,
        args: tuple[Any, ...],
        error: Callable[[torch.Tensor, str], Exception],
        *,
        reads: bool,
    ) -> None:
        """Raise an error about the first leaf that is not as it was (Rules 1 and 2).

        What is as it was is dropped from these: a recomputation looks once.

        Args:
            op: an operator of the recomputation.
            args: what it is given.
            error: makes what is raised, from a leaf and what was done to it.
            reads: whether it reads their data.
        """
        tensors = _tensors(args)
        if self.keys().isdisjoint([id(each) for each in (*tensors, *map(base_of, tensors))]):
            return
        for tensor in tensors:
            leaf = self.find(tensor)
            if leaf is not None and leaf.version not in (None, tensor._version):
                raise error(tensor, "changed in place")
            if leaf is not None and leaf.moved(tensor):
                raise error(tensor, "given other data")
        if not reads:
            return
        if op in _BATCH_NORMS:
            tensors = _tensors(_without_statistics(args))
        for live in (*tensors, *map(base_of, tensors)):
            leaf = None if live is None else self.find(live)
            if live is None or leaf is None or leaf.guard is None:
                continue
            if op is _DETACH and not leaf.detached:
                continue
            leaf.guard.check(live, lambda live=live: error(live, "changed"))  # type: ignore[misc]
            if leaf.version in (None, live._version):
                del self[id(live)]


def written_statistics(op: Operator, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return what a batch norm is about to write to, which its schema does not say."""
    if op in _BATCH_NORMS and args[_STATISTICS.stop]:
        return args[_STATISTICS]
    return ()


def _tensors(args: Iterable[Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for each in args:
        if isinstance(each, torch.Tensor):
            found.append(each)
        elif isinstance(each, (list, tuple)):
            found += [inner for inner in each if isinstance(inner, torch.Tensor)]
    return found


def _place_of(tensor: torch.Tensor) -> Place:
    """Return address and shape of a tensor's data; () where it has none that can be compared."""
    comparable = (
        type(tensor) in _PLAIN
        and tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )
    address = tensor.data_ptr() if comparable else 0
    return (address, tensor.shape) if address else ()


def _without_statistics(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Leave out what a batch norm writes to, in training, and does not read (Rule 4)."""
    if not args[_STATISTICS.stop]:
        return args
    return args[: _STATISTICS.start] + args[_STATISTICS.stop :]
