"""Checkpoint a function by running it again in backward.

Equivalent to `torch.utils.checkpoint` (non-reentrant), with less than half of its overhead per
saved tensor. Used only where nothing else observes the recomputation: no saved-tensor hooks,
dispatch modes or functorch transforms.

Invariants:
- The n-th tensor saved by the second run replaces the n-th of the first. Shape, dtype and device
  are compared. The second run stops after the last saved tensor.
- An operator may save a tensor before it writes it, as `rrelu` does with its noise. Then the second
  run continues to the next saved tensor, or to the end.
- A recomputed tensor is dropped after its read. Another backward runs the function again.
- Inputs are held with their versions, and so are the parameters that forward saves. Backward raises
  if one was modified in place since.
- Random numbers and autocast are those of the first run.
- On request, bits of saved tensors are compared: a second run may draw other numbers from a
  generator that is not restored. Integers are not compared. On accelerators, neither are tensors
  without gradients: kernels leave unused seeds, workspaces and padding uninitialised.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar
from weakref import ref

import torch

from .._errors import MutationError, RecomputeError
from .._tensors import compared_shape
from .._torch_compat import (
    announced,
    base_of,
    in_func_transform,
    is_fake,
    is_traced,
    modes_entered,
    pop_hooks,
    push_hooks,
    saved_tensor_hooks,
)
from ._ambient_state import AmbientState
from ._guards import Guard

T = TypeVar("T")
Facts = tuple[tuple[int, ...], torch.dtype, torch.device]
Around = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
"""Contexts of the first and the second run."""


def is_possible(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether nothing else observes the recomputation."""
    return (
        torch.is_grad_enabled()
        and saved_tensor_hooks() is None
        and not modes_entered()
        and not in_func_transform()
        and not is_traced()
        and not any(tensor.is_inference() for tensor in tensors)
    )


def run(
    function: Callable[..., T],
    tensors: Sequence[torch.Tensor],
    name: str,
    around: Around | None,
    compares: bool = False,
) -> T:
    """Call `function` so that backward calls it again.

    Args:
        function: must read nothing that changes between the runs, besides its arguments.
        tensors: its arguments.
        name: the function's name in errors.
        around: contexts of the first and the second run.
        compares: whether the bits of saved tensors are compared.

    Raises:
        RecomputeError: in backward, if the second run saves other tensors.
        MutationError: in backward, if an argument or a parameter was modified in place.
    """
    first, second = (nullcontext(), nullcontext()) if around is None else around
    region = _Region(function, tensors, name, second, compares)
    with first:
        push_hooks(region.pack, region.unpack)
        try:
            out = function(*tensors)
        finally:
            pop_hooks()
    region.ended()
    return out


class _Saved:
    """Placeholder for a saved tensor; holds the tensor from the second run until its read."""

    __slots__ = ("__weakref__", "value")

    def __init__(self) -> None:
        self.value: torch.Tensor | None = None


class _Region:
    """One call of a function; saved placeholders in the graph keep it alive."""

    def __init__(
        self,
        function: Callable[..., Any],
        tensors: Sequence[torch.Tensor],
        name: str,
        around: AbstractContextManager[Any],
        compares: bool,
    ) -> None:
        self.name = name
        self._compared: list[tuple[torch.Tensor | None, int]] | None = [] if compares else None
        self.guards: list[Guard | None] = []
        self.saved: list[ref[_Saved]] = []
        self.facts: list[Facts] = []
        self._may_be_unwritten: list[bool] = []
        self._ambient = AmbientState(tensors)
        self._function, self._around = function, around
        self._tensors = [(tensor, tensor._version) for tensor in tensors]
        self._parameters: list[torch.Tensor] = []
        self._versions: list[int] = []

    def pack(self, tensor: torch.Tensor) -> _Saved:
        if tensor.requires_grad:
            leaf = tensor if tensor.is_leaf else base_of(tensor)
            if leaf is not None and leaf.is_leaf:
                self._parameters.append(leaf)
        # A result that is saved requires grad, and its kernel has finished writing.
        is_input = tensor.requires_grad or not tensor.is_floating_point()
        self._may_be_unwritten.append(not is_input)
        if self._compared is not None:
            is_written = tensor.requires_grad or (tensor.is_cpu and tensor.is_floating_point())
            self._compared.append((tensor.detach() if is_written else None, tensor._version))
        saved = _Saved()
        self.saved.append(ref(saved))
        self.facts.append((compared_shape(tensor), tensor.dtype, tensor.device))
        return saved

    @property
    def stops_at_last(self) -> bool:
        """Whether the last saved tensor is complete; one operator may save the last three."""
        return not any(self._may_be_unwritten[-3:])

    def ended(self) -> None:
        """Note the state after forward, which may have written parameters or drawn numbers."""
        self._ambient.settle()
        self._versions = [parameter._version for parameter in self._parameters]
        if self._compared is not None:
            self.guards = [_guard_of(*each) for each in self._compared]
            self._compared = None

    def unpack(self, saved: _Saved) -> torch.Tensor:
        if saved.value is None:
            self._run_again()
        value, saved.value = saved.value, None
        assert value is not None, "the second run is complete"
        return value

    def _run_again(self) -> None:
        self._refuse_written()
        second = _Second(self)
        with self._ambient.restored(), self._around, torch.enable_grad():
            push_hooks(second.pack, _same)
            try:
                announced(-1, self._function, *(tensor for tensor, _ in self._tensors))
            except Exception:
                # A function that catches the stop may raise another error.
                if not second.has_ended:
                    raise
            finally:
                pop_hooks()
            second.compare()
        second.settle()
        self._versions = [parameter._version for parameter in self._parameters]

    def _refuse_written(self) -> None:
        for at, (tensor, version) in enumerate(self._tensors):
            if tensor._version != version:
                raise self._written(f"tensor {at} that {self.name} was given", tensor, version)
        # A gradient computed inside forward may precede the recording of parameter versions.
        for tensor, version in zip(self._parameters, self._versions, strict=False):
            if tensor._version != version:
                shape = tuple(tensor.shape)
                raise self._written(f"a parameter {shape} of {self.name}", tensor, version)

    def _written(self, what: str, tensor: torch.Tensor, version: int) -> MutationError:
        return MutationError(
            f"sac_policies.fit_: {what} has been modified by an inplace operation since (it is at "
            f"version {tensor._version}, not {version}), but the second forward needs it as it "
            "was. Pass a copy, or change it after backward."
        )


class _StopRun(Exception):
    """Ends the second run; an `Exception`, so that `finally` and `except` blocks run."""


class _Second:
    """Passes the tensors saved by a second run to the graph of the first."""

    def __init__(self, region: _Region) -> None:
        self._region, self._count = region, 0
        self._error: RecomputeError | None = None

    @property
    def has_ended(self) -> bool:
        return self._error is not None or self._count >= len(self._region.saved)

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        at, region = self._count, self._region
        if self.has_ended:
            raise _StopRun
        found = (compared_shape(tensor), tensor.dtype, tensor.device)
        if found != region.facts[at]:
            self._error = RecomputeError(
                f"sac_policies.fit_: tensor {at} that {region.name} saves is {_shown(found)} in "
                f"its second forward, but was {_shown(region.facts[at])} in its first. {_HELP}"
            )
            raise self._error
        value = tensor.detach() if tensor.requires_grad else tensor
        saved = region.saved[at]()
        if saved is not None:
            saved.value = value
        self._count = at + 1
        if region.stops_at_last and self._count == len(region.saved):
            raise _StopRun
        return value  # for a gradient inside the function

    def compare(self) -> None:
        """Compare bits with the first run, before buffers are restored."""
        if self._error is not None:
            return
        for at, (saved, guard) in enumerate(
            zip(self._region.saved, self._region.guards, strict=False)  # empty: nothing to compare
        ):
            found = saved()
            if guard is not None and found is not None and found.value is not None:
                guard.check(found.value, partial(self._differs, at))

    def settle(self) -> None:
        """Raise an error that the function caught, or the error for too few saved tensors."""
        if self._error is not None:
            raise self._error
        if self._count != len(self._region.saved):
            raise RecomputeError(
                f"sac_policies.fit_: {self._region.name} saves {self._count} tensors in its second "
                f"forward, but saved {len(self._region.saved)} in its first. {_HELP}"
            )

    def _differs(self, at: int) -> RecomputeError:
        return RecomputeError(
            f"sac_policies.fit_: tensor {at} that {self._region.name} saves has other bits in its "
            f"second forward than in its first. {_HELP}"
        )


_HELP = (
    "Make both do the same, by reading nothing but its arguments, parameters and buffers; or "
    "checkpoint it with a policy, which runs it once."
)


def _guard_of(tensor: torch.Tensor | None, version: int) -> Guard | None:
    """Guard a tensor; None if it was modified since, or is not strided memory."""
    if tensor is None:
        return None
    is_dense = tensor.layout is torch.strided and not tensor.is_nested
    if type(tensor) is not torch.Tensor or not is_dense or tensor._version != version:
        return None
    return None if is_fake(tensor) or tensor.is_conj() or tensor.is_neg() else Guard(tensor)


def _shown(facts: Facts) -> str:
    shape, dtype, device = facts
    return f"{tuple(shape)} of {dtype} on {device}"


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
