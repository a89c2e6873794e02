"""All optimizer state of a sharded module, as whole tensors on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .._errors import StateError
from ..sharded._full_params import gather_part
from ..sharded._sharded_params import HandsOut, ShardedParams, as_gathered
from ._block_rows import gather_rows
from ._optim_state import (
    NamedParam,
    group_options,
    is_piece,
    no_place,
    optimizer_params,
    shared_rows,
)


def full_optimizer_state(
    module: nn.Module, optimizer: Optimizer, *, hands_out: HandsOut = as_gathered
) -> dict[str, Any]:
    """All state as whole tensors under parameter names. Collective.

    Args:
        module: whose parameters the optimizer trains.
        optimizer: of them.
        hands_out: what is kept of each tensor that was gathered.

    Returns:
        `{"state": {name: {key: value}}, "param_groups": [{..., "params": [names]}]}`, the form
        that `torch.distributed.checkpoint.state_dict` uses for full optimizer states.
    """
    groups = optimizer_params(module, optimizer)
    by_slot = {(n.site.part, n.site.index): n for g in groups for n in g if n.site is not None}
    state: dict[str, dict[str, Any]] = {}
    for part in dict.fromkeys(part for part, _ in by_slot):
        members = {index: by_slot[p, index] for p, index in by_slot if p is part}
        _gather_state(part, members, optimizer, state, hands_out)
    for named in (n for group in groups for n in group if n.site is None):
        if optimizer.state.get(named.param):
            state[named.name] = dict(optimizer.state[named.param])
    options = group_options(optimizer)
    return {
        "state": {n.name: state[n.name] for g in groups for n in g if n.name in state},
        "param_groups": [
            {**opts, "params": [n.name for n in group]}
            for opts, group in zip(options, groups, strict=True)
        ],
    }


def _gather_state(
    part: ShardedParams,
    members: Mapping[int, NamedParam],
    optimizer: Optimizer,
    out: dict[str, dict[str, Any]],
    hands_out: HandsOut,
) -> None:
    """Add the whole state of one segment's parameters to `out`. Collective."""
    notes = part.comms.gather.share(_describe(members, optimizer))
    if refused := [note.refused for note in notes if note.refused]:
        raise StateError(refused[0])
    uncut = {name: values for note in notes for name, values in note.uncut.items()}
    cut = {name: keys for note in notes for name, keys in note.cut.items()}
    for name, values in uncut.items():
        out.setdefault(name, {}).update(values)
    for key, dtype in sorted({pair for keys in cut.values() for pair in keys}, key=str):
        shard = torch.zeros(part.plan.shard_numel, dtype=dtype, device=part.shard.device)
        for index, named in members.items():
            value = optimizer.state.get(named.param, {}).get(key)
            if is_piece(key, value, named.param):
                part.pieces[index].view(shard).copy_(value)
        for index, whole in enumerate(gather_part(part, shard=shard, hands_out=hands_out)):
            if index in members and (key, dtype) in cut.get(members[index].name, ()):
                out.setdefault(members[index].name, {})[key] = part.placed(index, whole)
    for index, key, dtype, rest in _in_rows(notes):
        named = members[index]
        mine = optimizer.state.get(named.param, {}).get(key) if named.rows else None
        whole = gather_rows(part, index, mine, dtype=dtype, rest=rest, hands_out=hands_out)
        out.setdefault(named.name, {})[key] = whole


_Row = tuple[int, str, torch.dtype, tuple[int, ...]]


@dataclass(frozen=True)
class _Described:
    """What a rank says of its state of one segment's parameters.

    Args:
        uncut: values of those that it speaks for.
        cut: keys of what is cut like the parameter, of those that it speaks for.
        rows: position of the parameter, key, dtype and sizes of a row (Rule 3), of all it has.
        refused: why state of a parameter of which it holds a part has no place, or empty.
    """

    uncut: dict[str, dict[str, Any]]
    cut: dict[str, list[tuple[str, torch.dtype]]]
    rows: list[_Row]
    refused: str


def _describe(members: Mapping[int, NamedParam], optimizer: Optimizer) -> _Described:
    uncut: dict[str, dict[str, Any]] = {}
    cut: dict[str, list[tuple[str, torch.dtype]]] = {}
    rows: list[_Row] = []
    refused = shared_rows(members.values(), optimizer)
    for index, named in members.items():
        for key, value in optimizer.state.get(named.param, {}).items():
            refused = refused or no_place(key, value, named.param.shape, named)
            if is_piece(key, value, named.param):
                if named.speaks:
                    cut.setdefault(named.name, []).append((key, value.dtype))
            elif named.rows and named.rows.fits_piece(key, value):
                rows.append((index, key, value.dtype, tuple(value.shape[1:])))
            elif named.speaks:
                uncut.setdefault(named.name, {})[key] = value
    return _Described(uncut, cut, rows, refused)


def _in_rows(notes: Sequence[_Described]) -> list[_Row]:
    """What all ranks have in rows, in one order.

    Raises:
        StateError: on every rank, two of them have rows of another kind.
    """
    found: dict[tuple[int, str], _Row] = {}
    for row in (row for note in notes for row in note.rows):
        known = found.setdefault(row[:2], row)
        if known != row:
            raise StateError(
                f"flat_param.state_dict: optimizer state '{row[1]}' has rows of {known[2:]} on one "
                f"rank and of {row[2:]} on another, but a tensor has rows of one kind. Step the "
                "same optimizer on all ranks."
            )
    return [found[at] for at in sorted(found)]
