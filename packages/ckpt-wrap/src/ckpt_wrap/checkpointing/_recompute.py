"""Run a function without keeping the tensors that it saves, and run it again in backward.

- Tensors saved in a region are handled by the innermost region alone.
- The inputs of a region are saved as autograd saves any tensor: version-checked, and seen by the
  hooks that are active around the region, those of an outer region among them. Together with the
  first point, nested regions need no code of their own: reading a saved tensor of an inner region
  reads that region's inputs, which are saved tensors of the outer region, which recomputes first.
- A recomputed tensor is given up when the saved tensor that it replaces is read. A second backward
  recomputes again.
- The n-th tensor saved in recomputation replaces the n-th saved in forward. Both must have the same
  shape, dtype, device and type of autograd node.
- Recomputation stops at the last tensor that forward saved. An operator may save a tensor before
  it writes it, as `rrelu` does with its noise; then recomputation goes on to the next one.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from ckpt_wrap._errors import RecomputeError
from ckpt_wrap._torch_compat import is_custom_node, is_parameter_view, next_node_number
from ckpt_wrap.checkpointing._call import Call

Metadata = tuple[torch.Size, torch.dtype, torch.device, str | None]

# Which of them an operator uses depends on the dispatch modes that are active.
_RESHAPES: dict[str | None, str] = dict.fromkeys(
    ("ReshapeAliasBackward0", "UnsafeViewBackward0"), "ViewBackward0"
)


class EnoughRecomputed(Exception):
    """Ends a recomputation early.

    An `Exception`, so that hooks registered with `always_call=True` still run.
    """


class SavedSlot:
    """Takes the place of one saved tensor in the graph; has its value from recompute to read."""

    __slots__ = ("__weakref__", "value")

    def __init__(self) -> None:
        self.value: torch.Tensor | None = None


class CheckpointedRegion:
    """The saved tensors of one call, none of which is kept."""

    __slots__ = (
        "_call",
        "_check",
        "_early_stop",
        "_metadata",
        "_node",
        "_slots",
        "_unwritten",
        "finished",
    )

    def __init__(self, call: Call, *, check: bool, early_stop: bool) -> None:
        self._call = call
        self._check = check
        self._early_stop = early_stop
        self._slots: list[weakref.ref[SavedSlot]] = []
        self._metadata: list[Metadata] = []
        self._node = -1  # number of the node that saved last
        self._unwritten = -2  # of the last node that saved a tensor it may still have to write
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
        self._metadata.append(_metadata(tensor))
        self._node = next_node_number()
        if _may_be_unwritten(tensor):
            self._unwritten = self._node
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

    def stops_early(self) -> bool:
        """Whether recomputation ends at the last tensor that forward saved."""
        return self._early_stop and not self._call.state.asked

    @property
    def last_may_be_unwritten(self) -> bool:
        """Whether the operator that saved last may have saved before it wrote.

        Recomputation then goes on to the next saved tensor, or to the end. What is left does no
        matmul: that would save something.
        """
        return self._node == self._unwritten

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
    """Hands each tensor saved in a recomputation to its slot."""

    __slots__ = ("_expected", "_region", "_seen", "failure", "stopped")

    def __init__(self, region: CheckpointedRegion, expected: int) -> None:
        self._region = region
        self._expected = expected
        self._seen = 0
        self.stopped = False
        self.failure: RecomputeError | None = None

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        index = self._seen
        self._seen += 1
        if index >= self._expected:
            return self._beyond(tensor)
        self._hand_over(index, tensor)
        is_last = self._seen == self._expected and self._region.stops_early()
        if is_last and not self._region.last_may_be_unwritten:
            self.stopped = True
            raise EnoughRecomputed
        return tensor.detach() if tensor.requires_grad else tensor

    def _hand_over(self, index: int, tensor: torch.Tensor) -> None:
        region = self._region
        if region._check:
            found, wanted = _metadata(tensor), region._metadata[index]
            if found != wanted and not (
                found[:3] == wanted[:3] and (found[3] is None or wanted[3] is None)
            ):
                self.failure = self._mismatch(index, found, wanted)
                raise self.failure
        slot = region._slots[index]()
        if slot is not None:
            slot.value = tensor.detach() if tensor.requires_grad else tensor

    def _mismatch(self, index: int, found: Metadata, wanted: Metadata) -> RecomputeError:
        where = self._region._call.where
        return RecomputeError(
            f"ckpt_wrap.{where.made_by}: saved tensor {index} of module {where} is "
            f"{_described(found)} in recomputation, but was {_described(wanted)} in forward. "
            "Make its forward depend on its inputs only, and run forward and backward in the same "
            "mode: compiled or not, with the same dispatch modes."
        )

    def _beyond(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._region.stops_early():
            # The module caught the exception that was to end its recomputation, or recomputation
            # went on until the last tensor was written.
            self.stopped = True
            raise EnoughRecomputed
        if self._region._check and self._region.finished:
            where = self._region._call.where
            self.failure = RecomputeError(
                f"ckpt_wrap.{where.made_by}: module {where} saved more tensors in recomputation "
                f"than the {self._expected} of its forward, but the two must be "
                "the same. Make its forward depend on its inputs only."
            )
            raise self.failure
        return tensor.detach() if tensor.requires_grad else tensor

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


def _metadata(tensor: torch.Tensor) -> Metadata:
    """Shape, dtype, device and the name of the node that made the tensor.

    The name is None for nodes of `torch.autograd.Function`: FSDP2 and hooks add nodes of their own
    in forward alone.
    """
    node: Any = tensor.grad_fn
    name = "" if node is None else None if is_custom_node(node) else node.name()
    return tensor.shape, tensor.dtype, tensor.device, _RESHAPES.get(name, name)


def _described(metadata: Metadata) -> str:
    shape, dtype, device, node = metadata
    made = {None: "", "": ", without a node"}.get(node, f", made by {node}")
    return f"{tuple(shape)} of {dtype} on {device}{made}"


def _may_be_unwritten(tensor: torch.Tensor) -> bool:
    """Whether the operator that saves the tensor may still have to write it.

    Results require grad when they are saved, and are written by then.
    """
    return tensor.is_floating_point() and not tensor.requires_grad and not is_parameter_view(tensor)
