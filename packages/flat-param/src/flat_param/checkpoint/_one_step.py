"""Which ranks would save an earlier step than the others.

Note [One step]
    A checkpoint must be of one step. Ranks that are in `save_sharded` at the same time need not
    be: where one of them calls it once more than the others, its call meets their next one. So
    each call says how often the optimizer has written to the parameters that are cut between two
    ranks; of two halves of one parameter, the one that was written to less often is behind. Where
    no parameter is cut between two ranks, each has all as an empty or a whole piece, and a step
    writes to both: behind is whose are all written to as often or less. A caller who passes `step`
    says it better.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, groupby, repeat
from typing import Any

from torch import nn

from .._torch_compat import versions
from ..layout._param_shard import keeps_dims
from ..sharded._full_params import named_sites
from ..sharded._param_sites import ParamSite
from ._store_meeting import Notes


def written(module: nn.Module) -> dict[str, Any]:
    """What a rank tells the others of the step that its parameters are of; see Note [One step]."""
    return {"writes": _writes(module), "pieces": _runs(_piece_writes(module))}


def _writes(module: nn.Module) -> dict[str, int]:
    """How often each parameter that is cut here was written to; see Note [One step]."""
    return {
        name: _written(site)
        for name, site in named_sites(module)
        if 0 < site.part.pieces[site.index].numel < site.part.pieces[site.index].spec.numel
    }


def _piece_writes(module: nn.Module) -> list[int]:
    """The same of every piece that each rank has, in the order that all ranks have."""
    sites = [site for _, site in named_sites(module)]
    return [_written(site) for site in sites if not keeps_dims(site.part.plan)]


def _written(site: ParamSite) -> int:
    start, now = site.part.versions_at_start, versions([site.part.params[site.index]])
    return 0 if start is None or now is None else now[0] - start[site.index]


def _runs(counts: list[int]) -> list[list[int]]:
    """Short for what is mostly the same: each count, and how many times it follows itself."""
    return [[count, len(list(run))] for count, run in groupby(counts)]


def behind(notes: Notes) -> set[int]:
    """Ranks whose state is of an earlier step than another's."""
    steps = [note["step"] for note in notes if note.get("step") is not None]
    if len(steps) == len(notes):
        return {rank for rank, step in enumerate(steps) if step < max(steps)}
    return {
        rank for rank, note in enumerate(notes) if any(_is_behind(note, other) for other in notes)
    }


def _is_behind(note: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether one rank's state is of an earlier step than another's; see Note [One step]."""
    first, second = note.get("writes", {}), other.get("writes", {})
    if both := first.keys() & second.keys():
        return any(first[name] < second[name] for name in both)
    first, second = note.get("pieces", []), other.get("pieces", [])
    if first == second:
        return False
    pairs = list(zip(_counts(first), _counts(second), strict=False))
    return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)


def _counts(runs: list[list[int]]) -> Iterator[int]:
    return chain.from_iterable(repeat(count, times) for count, times in runs)
