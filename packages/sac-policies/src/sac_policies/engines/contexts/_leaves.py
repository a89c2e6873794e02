"""The tensors that a region reads and did not make, and whether others changed them since.

Rule 1. Such a tensor is noted with its version when an operator first reads it. A recomputation
        that reads it at another version is refused: autograd would refuse most of them. So is one
        that saves it: the last operator saves what it is given, and does not run any more.
Rule 2. A write past the version counter, as through `.data`, is seen by a guard. Guards are made
        when the forward ends: what the region made for itself is gone by then.
Rule 3. Guarded is what a recomputation reads: not what only kept operators read. Whoever takes a
        view reads nothing yet, but the view may be saved for backward, by a kept operator too:
        it must be a view of the same storage, unless a guard finds the same there. (A tensor that
        an operator saves itself is read by plain autograd, too, as it is by then.)
Rule 4. What the region itself writes to, frees or moves, as FSDP does, is its own work. What is put
        back for a recomputation (`_external_state`) must be where it was.
Rule 5. What the region made (`_made`) is no part of this. Views of what it did not make are known
        by their base.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch.utils.weak import TensorWeakRef

from ..._torch_compat import StorageReference, base_of, storage_key
from ...policies._operators import BATCH_NORMS, STATISTICS, written_statistics
from ...policies._views import Operator
from .._guards import Guard, is_small
from ._made import Made

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_DETACH = torch.ops.aten.detach.default

Mutated = Callable[[torch.Tensor, Operator | None, str], Exception]
"""Makes an error, from a tensor that was changed, what reads it again, and what was done to it."""

Place = tuple[()] | tuple[int, torch.Size]


class Leaf:
    """One tensor as it was.

    Attributes:
        reference: the tensor.
        version: its version; None where the region writes to it itself (Rule 4).
        place: where its data lay when it was read; None where no recomputation reads it.
        guard: the tensor as it was, once the forward has ended (Rule 2).
        reader: the operator of the region that read it, where a recomputation does again.
        stays: whether a recomputation needs it where it was, for it is put back there.
        detached: whether the region detaches it, and reads what comes of that. A checkpoint
            detaches in a recomputation whatever autograd saves.
        viewed: the storage of which an operator took a view; None where none did.
    """

    __slots__ = ("detached", "guard", "place", "reader", "reference", "stays", "version", "viewed")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.reference = TensorWeakRef(tensor)
        self.version: int | None = tensor._version
        self.place: Place | None = None
        self.guard: Guard | None = None
        self.reader: Operator | None = None
        self.detached = False
        self.stays = False
        self.viewed: StorageReference | None = None

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

    def exchanged(self, tensor: torch.Tensor) -> bool:
        """Whether a view of it would be of another storage (Rule 3)."""
        return self.viewed is not None and not self.viewed.is_of(tensor)


class Leaves(dict[int, Leaf]):
    """What one forward of one region reads and did not make, by identity."""

    def note(
        self, op: Operator, args: tuple[Any, ...], made: Made, *, rereads: bool, views: bool
    ) -> None:
        """Note what an operator is given.

        Args:
            op: the operator.
            args: what it is given.
            made: what the region made (Rule 5).
            rereads: whether recomputing it reads their data.
            views: whether it takes a view of them.
        """
        if op in BATCH_NORMS:
            for tensor in _tensors(written_statistics(op, args)):
                self._note_leaf(tensor, op, False, False)
            args = _without_statistics(args)
        for tensor in _tensors(args):
            base = base_of(tensor)
            root = tensor if base is None else base
            reference = made.get(id(root))  # written out for speed
            if reference is not None and reference() is root:
                continue
            if base is not None and (base.is_leaf or self.find(base) is not None):
                if rereads:
                    self._note_leaf(base, op, True, False)
                # A leaf that is a view may be given other data than its base has.
                if not (tensor.is_leaf and tensor.requires_grad):
                    continue
            # Views of a view have its base, so they do not tell later that it is read.
            self._note_leaf(tensor, op, rereads or base is not None, views)

    def _note_leaf(self, tensor: torch.Tensor, op: Operator, rereads: bool, views: bool) -> None:
        leaf = self.find(tensor)
        if leaf is None:
            leaf = self[id(tensor)] = Leaf(tensor)
        if rereads and leaf.place is None:
            leaf.place, leaf.reader = _place_of(tensor), op
        if op is _DETACH:
            leaf.detached = True
        if views and leaf.viewed is None and type(tensor) in _PLAIN:
            leaf.viewed = StorageReference(tensor)

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
        if not storages:
            return
        for leaf in self.values():
            tensor = leaf.reference()
            if tensor is not None and storage_key(tensor) in storages:
                leaf.version = None
                leaf.stays |= put_back
                leaf.place = leaf.place or _place_of(tensor)

    def protect(
        self,
        before: Leaves | None,
        error: Callable[[torch.Tensor, Operator | None, str], Exception],
    ) -> None:
        """Guard them as the forward ends.

        Args:
            before: those of the same region in the forward that is run again, if any, with guards.
            error: makes what is raised, from one that has changed since and who reads it.
        """
        for leaf in self.values():
            tensor = leaf.reference()
            if tensor is not None and leaf.exchanged(tensor):
                leaf.viewed = None
            if tensor is None or not leaf.place:
                continue
            known = None if before is None else before.find(tensor)
            guard = None if known is None else known.guard
            leaf.protect(guard)
            if guard is not None:
                # What the region was given reaches its own recomputation as another tensor.
                guard.check(tensor, partial(error, tensor, leaf.reader, "changed"))

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
        for key, leaf in self.items():
            tensor, guard = leaf.reference(), leaf.guard
            if tensor is None:
                continue
            if leaf.moved(tensor) or leaf.exchanged(tensor):
                found[key] = leaf
                continue
            unchanged = leaf.version in (None, tensor._version)
            is_same = guard is None or (is_small(tensor) and guard.is_same(tensor))
            if not (unchanged and is_same):
                found[key] = leaf
        return found

    def check(
        self,
        op: Operator,
        args: tuple[Any, ...],
        error: Callable[[torch.Tensor, str], Exception],
        *,
        reads: bool,
        views: bool,
    ) -> None:
        """Raise an error about the first of them that is not as it was (Rules 1 to 3).

        What is as it was is dropped from these: a recomputation looks once.

        Args:
            op: an operator of the recomputation.
            args: what it is given.
            error: makes what is raised, from a tensor and what was done to it.
            reads: whether it reads their data.
            views: whether it takes a view of them.
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
            if leaf is not None and views and (op is not _DETACH or leaf.detached):
                self._check_storage(leaf, tensor, error)
        if not reads:
            return
        if op in BATCH_NORMS:
            tensors = _tensors(_without_statistics(args))
        for live in (*tensors, *map(base_of, tensors)):
            leaf = None if live is None else self.find(live)
            if live is None or leaf is None or leaf.guard is None:
                continue
            if op is not _DETACH or leaf.detached:
                leaf.guard.check(live, partial(error, live, "changed"))
                if leaf.version in (None, live._version):
                    del self[id(live)]

    def have_new_versions(self) -> bool:
        """Whether one was written to since (Rule 1)."""
        return any(
            tensor is not None and leaf.version not in (None, tensor._version)
            for leaf, tensor in ((leaf, leaf.reference()) for leaf in self.values())
        )

    def check_saved(self, tensor: torch.Tensor, error: Mutated) -> None:
        """Raise an error about a tensor that is saved again at another version (Rule 1)."""
        for each in (tensor, base_of(tensor)):
            leaf = None if each is None else self.find(each)
            if each is not None and leaf is not None and leaf.version not in (None, each._version):
                raise error(each, leaf.reader, "changed in place")

    def _check_storage(
        self, leaf: Leaf, tensor: torch.Tensor, error: Callable[[torch.Tensor, str], Exception]
    ) -> None:
        if not leaf.exchanged(tensor):
            return
        if leaf.guard is None:
            raise error(tensor, "given other data")
        leaf.guard.check(tensor, lambda: error(tensor, "changed"))
        leaf.viewed = None  # looked at once


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
        and not tensor.is_nested
        and not tensor.is_meta
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )
    address = tensor.data_ptr() if comparable else 0
    return (address, tensor.shape) if address else ()


def _without_statistics(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Leave out what a batch norm writes to, in training, and does not read (Rule 4)."""
    if not args[STATISTICS.stop]:
        return args
    return args[: STATISTICS.start] + args[STATISTICS.stop :]
