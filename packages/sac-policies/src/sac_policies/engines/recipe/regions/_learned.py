"""What a forward that is watched teaches of its function, for later ones to mind."""

from __future__ import annotations

import torch

from ...._torch_compat import storage_bytes, storage_key
from ....policies._policies import Policy
from ....policies._rules import RECOMPUTE_ALL
from ..._wrappers import is_wrapper
from .._calls import WORTH, WORTH_BYTES
from .._edges import Follower
from .._writes import Habit

MUCH = 1 / 8
"""Share of a region's saved bytes that has no recipe, above which another engine keeps less."""


class Learned:
    """Bytes that a forward saves: by storage that nothing rebuilds, by node that is replayed."""

    def __init__(self) -> None:
        self._stuck: dict[int, int] = {}
        self._rebuilt: dict[int, int] = {}
        self._has_nested = False
        self._has_wrappers = False

    def stuck(self, tensor: torch.Tensor) -> None:
        """Note a tensor that is kept against the policy.

        Of a function with a nested one nothing is learned that would have it run again: torch's
        checkpoint takes that for another each time.
        """
        if tensor.is_nested:
            self._has_nested = True
            return
        self._has_wrappers = self._has_wrappers or is_wrapper(tensor)
        self._stuck[storage_key(tensor)] = storage_bytes(tensor)

    def rebuilt(self, tensor: torch.Tensor, number: int) -> None:
        """Note one that the node with this number is replayed for."""
        self._rebuilt[number] = tensor.untyped_storage().nbytes()

    def habit(self, policy: Policy | None, follow: Follower, calls_custom: bool = False) -> Habit:
        """Say at the end what later forwards under the policy are to mind.

        Args:
            policy: what decided.
            follow: what followed edges.
            calls_custom: whether custom operators ran.
        """
        learned = Habit.NONE
        stuck = sum(self._stuck.values())
        saved = stuck + sum(self._rebuilt.values())
        much = stuck > max(WORTH_BYTES, MUCH * saved)
        if much and policy == RECOMPUTE_ALL and not self._has_nested:
            learned |= Habit.KEEPS
        if much and (calls_custom or self._has_wrappers):
            learned |= Habit.OPAQUE
        if follow.only_tries and follow.used_bytes > min(WORTH_BYTES, WORTH * saved):
            learned |= Habit.FORGETS
            learned |= Habit.REWRITES if follow.edges.calls.are_rewritten else Habit.NONE
        return learned
