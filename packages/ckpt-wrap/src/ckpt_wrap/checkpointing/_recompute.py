"""Run a function without keeping what it saves for backward, and run it again there.

Rule 1. What a region saves is handled by the innermost region alone.
Rule 2. The inputs of a region are saved as autograd saves any tensor: version-checked, and
        seen by whatever hooks are active around the region, an outer region's among them.
        It makes no difference where in the arguments a tensor stands.
Rule 3. A recomputed tensor belongs to the one saved tensor it replaces, and is given up when
        that is read. A second backward recomputes again.
Rule 4. Recomputation stops at the last tensor the forward saved.
Rule 5. The n-th tensor saved in recomputation is the n-th saved in forward.

Rules 1 and 2 together are why nested regions need no code of their own: reading a saved
tensor of an inner region reads that region's inputs, which are the outer region's saved
tensors, which recomputes the outer region first.
"""

from __future__ import annotations

import weakref

import torch
from torch.autograd.graph import saved_tensors_hooks

from ckpt_wrap._errors import RecomputeError
from ckpt_wrap.checkpointing._call import Call

Metadata = tuple[torch.Size, torch.dtype, torch.device]


class EnoughRecomputed(Exception):
    """Ends a recomputation early, see Rule 4.

    An `Exception`, so that hooks registered with `always_call=True` still run.
    """


class SavedSlot:
    """Takes the place of one saved tensor in the graph; has its value from recompute to read."""

    __slots__ = ("__weakref__", "value")

    def __init__(self) -> None:
        self.value: torch.Tensor | None = None


class CheckpointedRegion:
    """The saved tensors of one call, none of which is kept."""

    __slots__ = ("_call", "_check", "_early_stop", "_metadata", "_slots", "finished")

    def __init__(self, call: Call, *, check: bool, early_stop: bool) -> None:
        self._call = call
        self._check = check
        self._early_stop = early_stop
        self._slots: list[weakref.ref[SavedSlot]] = []
        self._metadata: list[Metadata] = []
        self.finished = False

    @property
    def saved_something(self) -> bool:
        """Whether backward may ask for anything."""
        return bool(self._slots)

    def hooks(self) -> saved_tensors_hooks:
        """Context under which the forward runs."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> SavedSlot:
        slot = SavedSlot()
        self._slots.append(weakref.ref(slot))
        self._metadata.append((tensor.shape, tensor.dtype, tensor.device))
        return slot

    def _unpack(self, slot: SavedSlot) -> torch.Tensor:
        if slot.value is None:
            self._recompute()
        value, slot.value = slot.value, None
        if value is None:
            where = self._call.where
            raise RecomputeError(
                f"ckpt_wrap.{where.made_by}: module {where} saved fewer tensors in "
                f"recomputation than the {len(self._slots)} of its forward, but the two must "
                "be the same. Make its forward depend on its inputs only."
            )
        return value

    def _recompute(self) -> None:
        second_run = _SecondRun(self, len(self._slots))
        try:
            with saved_tensors_hooks(second_run.pack, _same), torch.enable_grad():
                self._call.again()
        except Exception as error:
            # The module, or TorchScript, may raise another error in the place of ours.
            if second_run.stopped:
                return
            if second_run.failure is not None:
                raise second_run.failure from error
            raise
        second_run.require_complete()


class _SecondRun:
    """Hands each tensor saved in a recomputation to its slot, see Rule 5."""

    __slots__ = ("_expected", "_region", "_seen", "failure", "stopped")

    def __init__(self, region: CheckpointedRegion, expected: int) -> None:
        self._region = region
        self._expected = expected
        self._seen = 0
        self.stopped = False
        self.failure: RecomputeError | None = None

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach() if tensor.requires_grad else tensor
        index = self._seen
        self._seen += 1
        if index >= self._expected:
            return self._beyond(tensor)
        self._hand_over(index, tensor)
        if self._region._early_stop and self._seen == self._expected:
            self.stopped = True
            raise EnoughRecomputed
        return tensor

    def _hand_over(self, index: int, tensor: torch.Tensor) -> None:
        region = self._region
        found: Metadata = (tensor.shape, tensor.dtype, tensor.device)
        if region._check and found != region._metadata[index]:
            where = region._call.where
            self.failure = RecomputeError(
                f"ckpt_wrap.{where.made_by}: saved tensor {index} of module {where} is {found} in "
                f"recomputation, but was {region._metadata[index]} in forward. "
                "Make its forward depend on its inputs only."
            )
            raise self.failure
        slot = region._slots[index]()
        if slot is not None:
            slot.value = tensor

    def _beyond(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._region._early_stop:
            # The module caught the exception that was to end its recomputation.
            raise EnoughRecomputed
        if self._region._check and self._region.finished:
            where = self._region._call.where
            self.failure = RecomputeError(
                f"ckpt_wrap.{where.made_by}: module {where} saved more tensors in recomputation "
                f"than the {self._expected} of its forward, but the two must be "
                "the same. Make its forward depend on its inputs only."
            )
            raise self.failure
        return tensor

    def require_complete(self) -> None:
        if self.failure is not None:  # the module caught it
            raise self.failure
        if self._region._check and self._seen < self._expected:
            where = self._region._call.where
            raise RecomputeError(
                f"ckpt_wrap.{where.made_by}: module {where} saved {self._seen} tensors in "
                f"recomputation, but {self._expected} in forward. "
                "Make its forward depend on its inputs only."
            )


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
