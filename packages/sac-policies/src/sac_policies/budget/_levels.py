"""The levels of a block, from nothing recomputed to nothing left on the device."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from .._torch_compat._module_calls import original
from ..policies._catalogue import ATTENTION, CONVOLUTIONS
from ..policies._catalogue import MATMULS as PRODUCTS
from ..policies._decisions import Decision
from ..policies._plans import Plan
from ..policies._policies import Policy
from ..policies._rules import RECOMPUTE_ALL, OpRule, offload, save_named
from ..policies._views import RegionSummary

KEEPS, MATMULS, RECOMPUTES, INPUTS_AWAY, HIDDEN_AWAY = range(5)
LEVELS = (
    "keeps everything",
    "keeps matmuls",
    "recomputes everything",
    "offloads inputs",
    "offloads what hides",
)
"""No checkpointing; products, attention and convolutions kept; nothing kept that can be recomputed;
the same with inputs in host memory; the same with as many values there as their copies hide behind
the forward. The last two are for accelerators."""
KEEPING = (HIDDEN_AWAY, INPUTS_AWAY, RECOMPUTES, MATMULS, KEEPS)
"""Levels by how much they keep on the device, least first."""


@dataclass(frozen=True)
class _Costly(OpRule):
    """Keeps products, attention and convolutions, without a warning for a block that has none."""

    def unmatched(self, seen: RegionSummary) -> tuple[str, ...]:
        """Return nothing."""
        return ()


COSTLY = _Costly((PRODUCTS.entry, ATTENTION.entry, CONVOLUTIONS.entry), Decision.SAVE)
"""Policy of blocks that keep matmuls: one object, since compiled code depends on it."""
INPUT = "sac_policies.input"
"""Name of a block's inputs on levels that offload."""


@dataclass(frozen=True)
class RegionFit:
    """The level of one region of the model.

    Attributes:
        path: of the module, or of consecutive children of an `nn.Sequential`: "features.0-5".
        level: "keeps everything", "keeps matmuls" (also attention and convolutions) or "recomputes
            everything"; on accelerators also "offloads inputs" and "offloads what hides", which
            recompute the rest.
        policy: for `checkpoint`; None for "keeps everything".
        kind: name of the module's class; "Segment" for consecutive children.
    """

    path: str
    level: str
    policy: Policy | None
    kind: str


@dataclass(frozen=True)
class Candidate:
    """A module whose level is chosen.

    Attributes:
        path: of the module.
        module: the module.
        is_compiled: whether it is compiled. The compiler then recomputes by tags in its graph, and
            offloads nothing.
        is_taggable: whether its compiled code, if any, takes tags; else it keeps everything.
        hidden: calls whose values can be offloaded behind its forward.
        hidden_bytes: bytes of those values and of its inputs.
    """

    path: str
    module: nn.Module
    is_compiled: bool = False
    is_taggable: bool = False
    hidden: Plan | None = None
    hidden_bytes: int = 0

    def at(self, level: int) -> RegionFit:
        """Return the region on a level."""
        does, policy = self._at(level)
        return RegionFit(self.path, does, policy, type(original(self.module)).__name__)

    def _at(self, level: int) -> tuple[str, Policy | None]:
        if level == KEEPS:
            return LEVELS[KEEPS], None
        if self.is_compiled and not self.is_taggable:
            return LEVELS[KEEPS], None
        if self.is_compiled:
            level = min(level, RECOMPUTES)
        if level == MATMULS:
            return LEVELS[MATMULS], COSTLY
        if level >= INPUTS_AWAY:
            inputs = offload(save_named(INPUT, missing_ok=True))
            hidden = self.hidden if level == HIDDEN_AWAY else None
            return LEVELS[level], inputs if hidden is None else inputs | hidden
        return LEVELS[RECOMPUTES], RECOMPUTE_ALL
