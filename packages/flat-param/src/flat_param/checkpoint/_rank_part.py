"""What one rank saves: its slices of tensors, and values; or why it cannot.

Keys are the plain module's: `model.<name>`, `optim.state.<name>.<key>` and
`optim.param_groups.<i>.<option>`.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from .._errors import StateError
from ..dcp._dcp_write import serialized
from ..dcp._saved_keys import GROUPS, MODEL, STATE
from ..dcp._saved_layout import SavedSegment, encode
from ..dcp._tensor_slice import TensorSlice
from ..layout._boundary import PerParameter
from ..layout._layout import FlatLayout
from ..layout._shard import ShardPlan
from ..memory._dtensors import local_of, place_of_dtensor
from ..memory._host_room import HostRoom
from ..sharded._by_hand import units_below
from ..sharded._full_params import local_state, named_sites
from ..sharded._sharded_params import ShardedParams
from ._one_step import written
from ._one_world import OneWorld, one_world, slice_beside, slice_of
from ._optim_state import (
    NamedParam,
    group_options,
    is_piece,
    no_place,
    optimizer_params,
    shared_rows,
)


@dataclass
class RankPart:
    """What one rank is to save, or why it cannot.

    Args:
        note: what the leader has to know of it.
        segments: how the module is cut.
        tensor_slices: parts of tensors, by key.
        values: what is no tensor, by key.
        error: why it cannot be saved.
    """

    note: dict[str, Any] = field(default_factory=dict)
    segments: list[SavedSegment] = field(default_factory=list)
    tensor_slices: list[TensorSlice] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    error: Exception | None = None

    def fill(
        self, module: nn.Module, optimizer: Optimizer | None, folder: Path, step: int | None
    ) -> None:
        """Look at the module; nothing is copied."""
        world = one_world(module)
        self.segments = saved_segments(module)
        self.note = {
            "path": os.path.basename(os.path.abspath(folder)),
            "model": zlib.crc32(repr(encode(self.segments)).encode()),
            "step": step,
            **written(module),
        }
        self.tensor_slices = list(_model_slices(module, world))
        _add_unsharded(module, world, self.tensor_slices, self.values)
        if optimizer is not None:
            _add_optimizer(module, optimizer, world, self.tensor_slices, self.values)

    def take_snapshot(self) -> None:
        """Have copies of its own on the host, so that the module may change."""
        room = HostRoom(each.elements for each in self.tensor_slices)
        for index, each in enumerate(self.tensor_slices):
            self.tensor_slices[index] = replace(each, elements=room.copy(each.elements))
        self.values = {key: serialized(value) for key, value in self.values.items()}


def saved_segments(module: nn.Module) -> list[SavedSegment]:
    """How a module is cut, with qualified names; as if nothing else had cut it."""
    names: dict[tuple[int, int], list[str]] = {}
    for name, site in named_sites(module):
        names.setdefault((id(site.part), site.index), []).append(name)
    return [
        _saved(part.plan, _qualified(part, names))
        for unit in units_below(module)
        for part in unit.parts
    ]


def _saved(plan: ShardPlan, layout: FlatLayout) -> SavedSegment:
    boundary = plan.boundary
    if isinstance(boundary, PerParameter):
        pairs = zip(layout.specs, boundary.choices, strict=True)
        boundary = PerParameter(tuple((spec.name, own) for spec, (_, own) in pairs))
    return SavedSegment(layout, boundary)


def _qualified(part: ShardedParams, names: Mapping[tuple[int, int], list[str]]) -> FlatLayout:
    specs = []
    for index, (spec, place) in enumerate(zip(part.segment.layout.specs, part.places, strict=True)):
        first, *others = names[id(part), index]
        named = replace(spec, name=first, aliases=tuple(others))
        if place is not None:
            named = replace(named, shape=tuple(place.shape), stride=place.stride)
        specs.append(named)
    return replace(part.segment.layout, specs=tuple(specs))


def _model_slices(module: nn.Module, world: OneWorld) -> Iterator[TensorSlice]:
    for name, site in named_sites(module):
        piece = site.part.pieces[site.index]
        named = NamedParam(name, site.part.params[site.index], site)
        if world.has_own(named.place) and (piece.numel or named.speaks_for_all):
            yield slice_of(MODEL + name, site, piece.flat(site.part.shard))


def _add_unsharded(
    module: nn.Module, world: OneWorld, tensor_slices: list[TensorSlice], values: dict[str, Any]
) -> None:
    for key, value in local_state(module, live=False).items():
        place = place_of_dtensor(value)
        if not world.has_beside(place):
            continue
        if isinstance(value, Tensor):
            tensor_slices.append(slice_beside(MODEL + key, local_of(value), place))
        else:
            values[MODEL + key] = value


def _add_optimizer(
    module: nn.Module,
    optimizer: Optimizer,
    world: OneWorld,
    tensor_slices: list[TensorSlice],
    values: dict[str, Any],
) -> None:
    groups = optimizer_params(module, optimizer)
    first = world.part == 0
    if reason := shared_rows((named for group in groups for named in group), optimizer):
        raise StateError(reason)
    for named in (n for group in groups for n in group):
        for key, value in optimizer.state.get(named.param, {}).items():
            if reason := no_place(key, value, named.param.shape, named):
                raise StateError(reason)
            beside = named.site is None and world.has_beside(place_of_dtensor(value))
            if beside or (named.site is not None and world.has_own(named.place)):
                _add_state(named, key, value, tensor_slices, values, beside=beside)
    if first:
        for position, options in enumerate(group_options(optimizer)):
            names = [named.name for named in groups[position]]
            for option, value in {**options, "params": names}.items():
                values[f"{GROUPS}.{position}.{option}"] = value


def _add_state(
    named: NamedParam,
    name: str,
    value: Any,
    tensor_slices: list[TensorSlice],
    values: dict[str, Any],
    *,
    beside: bool,
) -> None:
    piece, key = named.piece, f"{STATE}{named.name}.{name}"
    is_cut = piece is not None and is_piece(name, value, named.param)
    if piece is not None and named.site is not None and is_cut and named.shape_numel:
        if piece.numel:
            elements = value.detach().as_strided((piece.numel,), (1,))
            tensor_slices.append(slice_of(key, named.site, elements))
    elif (rows := named.rows) is not None and rows.fits_piece(name, value):
        tensor_slices.append(rows.slice_of(key, value))
    elif named.speaks_for_all or beside:
        if isinstance(value, Tensor):
            place = place_of_dtensor(value)
            tensor_slices.append(slice_beside(key, local_of(value), place))
        else:
            values[key] = value
