"""The parameters of a called module are in its second run what they were in the first.

Rule 1. One that was changed in place since is refused before the second run starts: that would
        compute other values, and the gradients of neither. Autograd refuses the same of what it
        saves, but a parameter is not saved.
Rule 2. What checkpointed runs write themselves, first ones and second ones, is counted apart and
        refused nowhere, as where an embedding bounds its norms.
Rule 3. A tensor that the module does not have any more is not compared. Sharding and
        parametrization put other tensors in, or other memory into the same one, which is no
        change in place. What counts no version, such as a fused optimizer, cannot be seen.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from ckpt_wrap._torch_compat import versions_of
from ckpt_wrap.checkpointing._object_tensors import Refused

Noted = tuple[list[torch.Tensor], list[int]]  # parameters, and the changes of each

_written = WeakIdKeyDictionary()  # how many versions of a parameter are of Rule 2


class Parameters:
    """The parameters of one called module, in its first run and in its second.

    Args:
        module: what is called, if it is a module.
    """

    __slots__ = ("_kept", "_module", "_noted")

    def __init__(self, module: nn.Module | None) -> None:
        self._module = module
        self._noted: Noted = ([], [])  # while the first run lasts
        self._kept: Noted = ([], [])  # since then

    def begin(self, modules: Iterable[nn.Module]) -> None:
        """Note what the parameters of these modules, all there are, are; the first run starts."""
        tensors: list[torch.Tensor] = [
            tensor
            for module in modules
            for tensor in module._parameters.values()
            if tensor is not None and not is_lazy(tensor)
        ]
        self._noted = tensors, _changes(tensors)

    def end(self, *, keep: bool) -> None:
        """The first run has ended; have what the second one needs, or nothing."""
        noted, self._noted = self._noted, ([], [])
        _count_written(*noted)
        if keep:
            self._kept = noted

    def begin_again(self) -> None:
        """See to Rule 1; the second run starts. In one inside the first, nothing is compared.

        Raises:
            Refused: a parameter was changed in place since the first run ended.
        """
        tensors, before = self._kept
        now = _changes(tensors)
        if now == before:
            return
        assert self._module is not None  # who has parameters
        names = {id(tensor): name for name, tensor in self._module.named_parameters()}
        for tensor, then, count in zip(tensors, before, now, strict=True):
            if then != count and id(tensor) in names:
                raise Refused(
                    f"parameter {names[id(tensor)]!r}",
                    "was changed in place since the forward, but recomputation with other values "
                    "gives another gradient. Step the optimizer after backward, and have what "
                    "forward writes in a buffer.",
                )

    def end_again(self) -> None:
        """The second run has ended, in whichever way."""
        _count_written(*self._kept)


def _count_written(tensors: list[torch.Tensor], before: list[int]) -> None:
    """A run has ended: see Rule 2.

    Args:
        tensors: parameters that the run may have written.
        before: their changes when it began.
    """
    if _changes(tensors) == before:
        return
    for tensor, count in zip(tensors, before, strict=True):
        more = _changes([tensor])[0] - count  # none, for one that was there already
        if more:
            _written[tensor] = _written.get(tensor, 0) + more


def _changes(tensors: list[torch.Tensor]) -> list[int]:
    """How often each was changed in place by others than checkpointed runs."""
    versions = versions_of(tensors)
    if not _written:
        return versions
    return [
        version - _written.get(tensor, 0) for tensor, version in zip(tensors, versions, strict=True)
    ]
