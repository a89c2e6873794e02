"""Edge: saves a sharded module and its optimizer, each rank its part, without a collective.

Keys are the plain module's: `model.<name>`, `optim.state.<name>.<key>` and
`optim.param_groups.<i>.<option>`, in torch.distributed.checkpoint's format. Any number of ranks
loads the result, and so does FSDP2.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ._checkpoint import commit, new_attempt, put_in_place, rank_folder
from ._dcp_write import write_folder
from ._errors import StateError
from ._layout import FlatLayout
from ._optim_state import NamedParam, group_options, is_piece, optimizer_params
from ._saved_layout import FILE_NAME, SavedSegment, encode
from ._stretch import Stretch, whole
from ._unit import Unit
from ._whole import local_state, named_slots, units_below

MODEL, STATE, GROUPS = "model.", "optim.state.", "optim.param_groups"


def save_sharded(
    module: nn.Module, path: str | os.PathLike[str], *, optimizer: Optimizer | None = None
) -> bool:
    """Write this rank's part of a checkpoint. Makes no collective call.

    What `path` held before stays whole until the last rank has written its part; then the new
    checkpoint takes its place at once. Every rank must call it, with the same folder in reach.

    Returns:
        Whether all parts were there when this rank was done, so that `path` holds this state.
    """
    unit = one_world(module)
    lane, folder = unit.lanes.gather, Path(path)
    attempt = new_attempt()
    if unit.lanes.replicate.rank:
        return False  # another copy of the same parameters is being saved
    stretches = list(_model_stretches(module))
    values: dict[str, Any] = {}
    if lane.rank == 0:
        _add_unsharded(module, stretches, values)
    if optimizer is not None:
        _add_optimizer(module, optimizer, stretches, values, first=lane.rank == 0)
    draft = folder / f"draft-{attempt}-{lane.rank}"
    draft.mkdir(parents=True)
    keys = [*values, *(stretch.key for stretch in stretches)]
    (draft / FILE_NAME).write_text(encode(saved_segments(module)))
    write_folder(draft, stretches, values, paths={key: nested_path(key) for key in keys})
    put_in_place(
        draft, rank_folder(folder, attempt=attempt, rank=lane.rank, world_size=lane.world_size)
    )
    return commit(folder, attempt=attempt, world_size=lane.world_size)


def saved_segments(module: nn.Module) -> list[SavedSegment]:
    """How a module is cut, with qualified names."""
    names: dict[tuple[int, int], list[str]] = {}
    for name, slot in named_slots(module):
        names.setdefault((id(slot.part), slot.index), []).append(name)
    return [
        SavedSegment(_qualified(part.segment.layout, names, id(part)), part.plan.boundary)
        for unit in units_below(module)
        for part in unit.parts
    ]


def _qualified(
    layout: FlatLayout, names: Mapping[tuple[int, int], list[str]], part: int
) -> FlatLayout:
    specs = []
    for index, spec in enumerate(layout.specs):
        first, *others = names[part, index]
        specs.append(replace(spec, name=first, aliases=tuple(others)))
    return replace(layout, specs=tuple(specs))


def nested_path(key: str) -> tuple[Any, ...]:
    """Where a key belongs in the nested state dict."""
    if key.startswith(MODEL):
        return ("model", key[len(MODEL) :])
    if key.startswith(STATE):
        return ("optim", "state", *key[len(STATE) :].rsplit(".", 1))
    if key.startswith(GROUPS):
        position, option = key[len(GROUPS) + 1 :].split(".", 1)
        return ("optim", "param_groups", int(position), option)
    return (key,)


def one_world(module: nn.Module) -> Unit:
    """The outermost unit, all of which are cut into as many parts.

    Raises:
        StateError: there is none, or they are not.
    """
    units = list(units_below(module))
    if not units:
        raise StateError(
            f"flat_param.save_sharded: {type(module).__name__} is not sharded, but a part of it "
            "is asked for. Call fully_shard first."
        )
    lane = units[0].lanes.gather
    for unit in units:
        if unit.lanes.gather.world_size != lane.world_size:
            raise StateError(
                f"flat_param.save_sharded: units are cut into {lane.world_size} and "
                f"{unit.lanes.gather.world_size} parts, but one checkpoint has one part per rank. "
                "Save their modules apart."
            )
    return units[0]


def _model_stretches(module: nn.Module) -> Iterator[Stretch]:
    for name, slot in named_slots(module):
        piece = slot.part.pieces[slot.index]
        named = NamedParam(name, slot.part.params[slot.index], slot)
        if piece.numel or named.speaks:
            yield Stretch(MODEL + name, piece.spec, piece.start, piece.flat(slot.part.shard))


def _add_unsharded(module: nn.Module, stretches: list[Stretch], values: dict[str, Any]) -> None:
    for key, value in local_state(module).items():
        if isinstance(value, Tensor):
            stretches.append(whole(MODEL + key, value))
        else:
            values[MODEL + key] = value


def _add_optimizer(
    module: nn.Module,
    optimizer: Optimizer,
    stretches: list[Stretch],
    values: dict[str, Any],
    *,
    first: bool,
) -> None:
    groups = optimizer_params(module, optimizer)
    for named in (n for group in groups for n in group):
        for key, value in optimizer.state.get(named.param, {}).items():
            _add_state(named, f"{STATE}{named.name}.{key}", value, stretches, values, first=first)
    if first:
        for position, options in enumerate(group_options(optimizer)):
            names = [named.name for named in groups[position]]
            for option, value in {**options, "params": names}.items():
                values[f"{GROUPS}.{position}.{option}"] = value


def _add_state(
    named: NamedParam,
    key: str,
    value: Any,
    stretches: list[Stretch],
    values: dict[str, Any],
    *,
    first: bool,
) -> None:
    piece = named.piece
    if piece is not None and is_piece(value, named.param) and piece.spec.numel:
        if piece.numel:
            elements = value.detach().as_strided((piece.numel,), (1,))
            stretches.append(Stretch(key, piece.spec, piece.start, elements))
    elif named.speaks or (piece is None and first):
        if isinstance(value, Tensor):
            stretches.append(whole(key, value))
        else:
            values[key] = value
