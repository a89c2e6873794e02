"""Saves a sharded module and its optimizer, each rank its part, without a collective.

Keys are the plain module's: `model.<name>`, `optim.state.<name>.<key>` and
`optim.param_groups.<i>.<option>`, in torch.distributed.checkpoint's format. Any number of ranks
loads the result, and so does FSDP2.
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

from .._errors import CheckpointError, StateError
from ..dcp._checkpoint import commit, remove_leftovers, remove_part, write_part
from ..dcp._saved_keys import GROUPS, MODEL, STATE
from ..dcp._saved_layout import SavedSegment, encode
from ..dcp._stored import Origin
from ..dcp._tensor_slice import TensorSlice, whole
from ..layout._boundary import PerParameter
from ..layout._layout import FlatLayout
from ..layout._shard import ShardPlan
from ..sharded._by_hand import units_below
from ..sharded._full_params import local_state, named_sites
from ..sharded._unit import Unit
from ._meeting import meeting_of
from ._one_step import behind, written
from ._optim_state import NamedParam, group_options, is_piece, optimizer_params
from ._store_meeting import Notes


def save_sharded(
    module: nn.Module,
    path: str | os.PathLike[str],
    *,
    optimizer: Optimizer | None = None,
    step: int | None = None,
    timeout_s: float | None = None,
) -> bool:
    """Write a checkpoint, each rank its part. Every rank must call it; makes no collective call.

    Ranks wait for each other through the process group's store: until all are there, and until
    all parts are on the disk. What `path` held before stays whole until then; the new checkpoint
    takes its place at once. An error on one rank is an error on all, and all may try again. One
    job at a time can save to a path.

    Args:
        module: sharded.
        path: a folder that all ranks reach.
        optimizer: of the module.
        step: which step the state is of; ranks save together only at the same one. By default,
            they compare how often their parameters were written to in place.
        timeout_s: how long to wait for the other ranks; by default the process group's timeout.

    Returns:
        Whether `path` holds this state now. False only on a rank that was alone: the others have
        called it at a later step, and wait for its next call.

    Raises:
        CheckpointError: on some rank, the part cannot be written; or ranks do not save one model.
        CommError: a rank has not called it in time, or has died in it.
        StateError: the module is not sharded, or not in one way.
    """
    unit, folder = one_world(module), Path(path)
    meeting = meeting_of(unit.comms, timeout_s)
    state = _prepare(module, optimizer, folder, step)
    heard: Notes = []
    try:
        attempt = meeting.join(
            state.note,
            behind=lambda notes: behind(_heard(notes, heard)),
            prepare=lambda: remove_leftovers(folder),
        )
        if not attempt:
            return False
        part = Origin(
            attempt, unit.comms.gather.world_size, unit.comms.gather.rank, tuple(state.segments)
        )
        saves = unit.comms.replicate.rank == 0  # others have a copy of the same
        report = _write(folder, state, part) if saves else {}
        diagnosis = meeting.settle(
            report, lambda reports: _commit(folder, replace(part, rank=None), heard, reports)
        )
    finally:
        meeting.leave()
    if diagnosis and saves:
        remove_part(folder, part)
    if state.error is not None:
        raise state.error
    if diagnosis:
        raise CheckpointError(diagnosis)
    return True


@dataclass
class _State:
    """What one rank is to save, or why it cannot."""

    note: dict[str, Any]
    segments: list[SavedSegment] = field(default_factory=list)
    tensor_slices: list[TensorSlice] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    error: Exception | None = None


def _prepare(
    module: nn.Module, optimizer: Optimizer | None, folder: Path, step: int | None
) -> _State:
    state = _State({})
    try:
        state.segments = saved_segments(module)
        first = one_world(module).comms.gather.rank == 0
        state.note = {
            "path": os.path.basename(os.path.abspath(folder)),
            "model": zlib.crc32(repr(encode(state.segments)).encode()),
            "step": step,
            **written(module),
        }
        state.tensor_slices = list(_model_slices(module))
        if first:
            _add_unsharded(module, state.tensor_slices, state.values)
        if optimizer is not None:
            _add_optimizer(module, optimizer, state.tensor_slices, state.values, first=first)
    except Exception as error:  # the others must hear of it
        state.error = error
    return state


def _heard(notes: Notes, heard: Notes) -> Notes:
    heard[:] = notes
    return notes


def _write(folder: Path, state: _State, part: Origin) -> dict[str, Any]:
    """Write this rank's part; what to tell the others of it."""
    try:
        if state.error is None:
            return {"digest": write_part(folder, state.tensor_slices, state.values, part)}
    except CheckpointError as error:
        state.error = error
    return {"error": str(state.error)}


def _commit(folder: Path, whole_save: Origin, heard: Notes, reports: Notes) -> str:
    """On the rank that leads: make the parts the checkpoint. What is wrong, or nothing."""
    for rank, report in enumerate(reports):
        if "error" in report:
            return (
                f"flat_param.save_sharded: part {rank} of {whole_save.world_size} cannot be saved, "
                f"but a checkpoint has all. Correct the error of its rank: {report['error']}"
            )
    for thing in ("path", "model", "step"):
        told = [note.get(thing) for note in heard]
        if any(each != told[0] for each in told):
            other = next(each for each in told if each != told[0])
            return (
                f"flat_param.save_sharded: the {thing} is {told[0]} on the first rank and {other} "
                "on another, but ranks must save one model to one path. Call it alike on all ranks."
            )
    try:
        commit(
            folder, whole_save, [reports[rank]["digest"] for rank in range(whole_save.world_size)]
        )
    except CheckpointError as error:
        return str(error)
    return ""


def saved_segments(module: nn.Module) -> list[SavedSegment]:
    """How a module is cut, with qualified names."""
    names: dict[tuple[int, int], list[str]] = {}
    for name, site in named_sites(module):
        names.setdefault((id(site.part), site.index), []).append(name)
    return [
        _saved(part.plan, _qualified(part.segment.layout, names, id(part)))
        for unit in units_below(module)
        for part in unit.parts
    ]


def _saved(plan: ShardPlan, layout: FlatLayout) -> SavedSegment:
    boundary = plan.boundary
    if isinstance(boundary, PerParameter):
        pairs = zip(layout.specs, boundary.choices, strict=True)
        boundary = PerParameter(tuple((spec.name, own) for spec, (_, own) in pairs))
    return SavedSegment(layout, boundary)


def _qualified(
    layout: FlatLayout, names: Mapping[tuple[int, int], list[str]], part: int
) -> FlatLayout:
    specs = []
    for index, spec in enumerate(layout.specs):
        first, *others = names[part, index]
        specs.append(replace(spec, name=first, aliases=tuple(others)))
    return replace(layout, specs=tuple(specs))


def one_world(module: nn.Module, *, function: str = "save_sharded") -> Unit:
    """The outermost unit, all of which are cut into as many parts.

    Raises:
        StateError: there is none, or they are not.
    """
    units = list(units_below(module))
    if not units:
        raise StateError(
            f"flat_param.{function}: {type(module).__name__} is not sharded, but a part of it "
            "is asked for. Call fully_shard first."
        )
    comm = units[0].comms.gather
    for unit in units:
        if unit.comms.gather.world_size != comm.world_size:
            raise StateError(
                f"flat_param.{function}: units are cut into {comm.world_size} and "
                f"{unit.comms.gather.world_size} parts, but one checkpoint has one part per rank. "
                "Save their modules apart."
            )
    if any(place is not None for unit in units for part in unit.parts for place in part.places):
        raise StateError(
            f"flat_param.{function}: {type(module).__name__} has parameters that are DTensors, "
            "but a checkpoint has parts of whole parameters. Save its state_dict() with "
            "torch.distributed.checkpoint."
        )
    return units[0]


def _model_slices(module: nn.Module) -> Iterator[TensorSlice]:
    for name, site in named_sites(module):
        piece = site.part.pieces[site.index]
        named = NamedParam(name, site.part.params[site.index], site)
        if piece.numel or named.speaks:
            yield TensorSlice(MODEL + name, piece.spec, piece.start, piece.flat(site.part.shard))


def _add_unsharded(
    module: nn.Module, tensor_slices: list[TensorSlice], values: dict[str, Any]
) -> None:
    for key, value in local_state(module).items():
        if isinstance(value, Tensor):
            tensor_slices.append(whole(MODEL + key, value))
        else:
            values[MODEL + key] = value


def _add_optimizer(
    module: nn.Module,
    optimizer: Optimizer,
    tensor_slices: list[TensorSlice],
    values: dict[str, Any],
    *,
    first: bool,
) -> None:
    groups = optimizer_params(module, optimizer)
    for named in (n for group in groups for n in group):
        for key, value in optimizer.state.get(named.param, {}).items():
            _add_state(named, key, value, tensor_slices, values, first=first)
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
    first: bool,
) -> None:
    piece, key = named.piece, f"{STATE}{named.name}.{name}"
    if piece is not None and is_piece(name, value, named.param) and piece.spec.numel:
        if piece.numel:
            elements = value.detach().as_strided((piece.numel,), (1,))
            tensor_slices.append(TensorSlice(key, piece.spec, piece.start, elements))
    elif named.speaks or (piece is None and first):
        if isinstance(value, Tensor):
            tensor_slices.append(whole(key, value))
        else:
            values[key] = value
