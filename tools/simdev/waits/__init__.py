"""What `taken_out.py` takes out of the packages, one at a time: a file for each package."""

from __future__ import annotations

from . import ckpt_wrap, flat_param, flat_param_ranks, flat_param_saves, mod_tracker, sac_policies
from ._part import Part

__all__ = ["PARTS", "Part"]

PARTS: tuple[Part, ...] = (
    *ckpt_wrap.PARTS,
    *sac_policies.PARTS,
    *mod_tracker.PARTS,
    *flat_param.PARTS,
    *flat_param_ranks.PARTS,
    *flat_param_saves.PARTS,
)
