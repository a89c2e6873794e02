"""What one forward of one region leaves for its recomputations.

Rule 1. Recomputing is always right: a value that is gone (already read, cleared) is computed
        again, so a second backward, a double backward and a partial one need no special case.
Rule 2. Values are handed out for good only by a backward that does not retain its graph; when
        its recomputation ends, whatever is left is dropped (nothing stays cached, B8).
Rule 3. A random operator whose value is kept still draws, as long as a later random operator
        is recomputed, so that the later one sees the numbers it saw.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from ..._errors import MutationError
from ..._torch_compat import Hooks
from ..._torch_compat._nested import shape_of
from ...policies._policies import Policy
from ...policies._views import Operator, RegionState
from .._error_context import error_context
from ._arguments import Arguments
from ._external_state import ExternalState
from ._kept import Kept, storages_of
from ._leaves import Leaves
from ._made import Made
from ._moved import leaving

Key = tuple[Any, int]


def _nothing() -> None:
    """Stands where no region was before."""


class Region:
    """One forward of one region: counts, kept values, regions run inside it.

    Attributes:
        policy: what decides.
        state: calls of each counted operator.
        kept: (operator, call number) to value.
        hooks: the user's saved-tensor hooks around the region, None without.
        children: regions inside this one, in forward order.
        origin: the same region in the forward that is being recomputed, None otherwise.
        draws: random operators run so far.
        earlier: the region before it that moved values to the host, weakly.
        frame: weakly, what torch's checkpoint knows of it; None where that is not known.
        last_recomputed_draw: number of the last of them whose value is not kept.
        log: every operator, where debugging asks for it.
        unread: calls whose value the last backward to own them did not read.
        finished: the forward has ended.
        special: operators need more care than to be run, counted and kept.
        arguments: what it was given, where that is more than tensors.
        leaves: leaf tensors that operators read, as they were then.
        external: what operators wrote to that the region did not make, as it was before.
        made: what operators have returned, until the forward ends.
    """

    __slots__ = (
        "__weakref__",
        "arguments",
        "children",
        "compares",
        "draws",
        "earlier",
        "external",
        "finished",
        "frame",
        "hooks",
        "kept",
        "last_recomputed_draw",
        "leaves",
        "log",
        "made",
        "origin",
        "policy",
        "special",
        "state",
        "unread",
    )

    def __init__(
        self,
        policy: Policy,
        hooks: Hooks | None,
        debug: bool,
        arguments: Arguments | None = None,
        compares: bool = True,
    ) -> None:
        self.policy = policy
        self.arguments = arguments
        self.compares = compares
        self.state = RegionState()
        self.kept: dict[Key, Kept] = {}
        self.hooks = hooks
        self.children: list[Region] = []
        self.origin: Region | None = None
        self.draws = 0
        self.earlier: Callable[[], object] = _nothing
        self.last_recomputed_draw = 0
        self.log: list[Operator] | None = [] if debug else None
        self.finished = False
        self.frame: weakref.ref[Any] | None = None
        self.special = False
        self.unread: tuple[Key, ...] = ()
        self.leaves = Leaves()
        self.external = ExternalState()
        self.made = Made()

    def protect(self, written: list[torch.Tensor]) -> None:
        """Clone kept values that share storage with tensors about to be written.

        Those of the forward that is being recomputed too: it handed its values to this region.
        """
        if self.arguments is not None:
            self.arguments.before_write(written)
        inside = self.children[-1] if self.children else None
        if inside is not None and inside.arguments is not None and not inside.finished:
            inside.arguments.before_write(written)
        if not self.finished and self.leaves:
            self.leaves.wrote(storages_of(written))
        if self.kept:
            storages = storages_of(written)
            for kept in self.kept.values():
                kept.leave(storages)
        if self.origin is not None:
            self.origin.protect(written)

    def end(self) -> None:
        """The forward has ended; what it wrote to is not as operators read it before."""
        self.finished = True
        self.made.clear()
        self.leaves.wrote(self.external.storages, put_back=True)
        if leaving.region_ended():
            self.earlier, leaving.region = leaving.region, weakref.ref(self)

    def ask_for_values(self, unread: frozenset[Key]) -> None:
        """Start bringing back what backward reads next: this region's, and the one's before.

        Args:
            unread: calls whose value a recomputation has no use for.
        """
        earlier = self.earlier()
        for region in (self, earlier):
            if isinstance(region, Region):
                region._start_back(unread)

    def _start_back(self, unread: frozenset[Key]) -> None:
        for key, kept in list(self.kept.items()):
            if key not in unread:
                kept.start_back()
        for child in self.children:
            child._start_back(unread)

    def mutated(self, tensor: torch.Tensor, op: Operator | None, how: str) -> MutationError:
        """Make the error about a tensor that others changed since the region read it."""
        return MutationError(
            f"sac_policies.checkpoint: tensor of shape {shape_of(tensor)} was {how} after the "
            f"region read it, but {op or 'an operator'} of the recomputation reads it as it was "
            f"(read {error_context(self.policy, op)}). Change it after backward."
        )

    def draw(self, keeps: bool) -> int:
        """Number one more random draw."""
        self.draws += 1
        if not keeps:
            self.last_recomputed_draw = self.draws
        return self.draws

    def child(self, at: int) -> Region | None:
        """Return the region that was run inside this one at a place."""
        return self.children[at] if at < len(self.children) else None

    def add(self, child: Region) -> Region | None:
        """Add a region inside; return what stood at its place in the forward being recomputed."""
        self.children.append(child)
        return None if self.origin is None else self.origin.child(len(self.children) - 1)

    def start_from(self, before: Region | None) -> None:
        """Be given what this region was given in the forward that is being recomputed."""
        if self.arguments is not None and before is not None and before.arguments is not None:
            self.arguments.start_from(before.arguments)

    def clear(self) -> None:
        """Drop every value (Rule 2); remember which nobody read.

        What regions inside were given stays: another recomputation asks for it.
        """
        self.unread = tuple(self.kept)
        self.kept.clear()
        self.children = self._without_values().children

    def _without_values(self) -> Region:
        bare = Region(self.policy, None, False, self.arguments)
        bare.finished = True
        bare.children = [child._without_values() for child in self.children]
        return bare
