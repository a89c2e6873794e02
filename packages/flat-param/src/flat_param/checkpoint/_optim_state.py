"""Optimizer state by parameter name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from .._errors import ParameterError, StateError
from ..buffers._dtensors import as_dtensor, is_dtensor
from ..layout._arguments import check_is_optimizer
from ..sharded.state._optim_state import follow, present_all, take_all
from ..sharded.tensor._param_piece import ParamPiece, piece_of


class NamedParam(NamedTuple):
    """A parameter of an optimizer, its name in the module, and its piece if it is sharded."""

    name: str
    param: nn.Parameter
    piece: ParamPiece | None

    @property
    def speaks(self) -> bool:
        """Whether this rank is the first with elements of the parameter."""
        return self.piece is None or self.piece.comm.rank == self.piece.first_holder


def optimizer_params(module: nn.Module, optimizer: Optimizer) -> list[list[NamedParam]]:
    """The optimizer's parameters by group, under their first names."""
    check_is_optimizer("state_dict", optimizer)
    named = {p: NamedParam(name, p, piece_of(p)) for name, p in module.named_parameters()}
    groups = []
    for position, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if param not in named:
                raise ParameterError(
                    f"flat_param.state_dict: group {position} of the optimizer has a parameter of "
                    f"shape {tuple(param.shape)} that the module does not have, but states are "
                    "saved by name. Pass the module that the optimizer trains."
                )
        groups.append([named[param] for param in group["params"]])
    return groups


def _check_shared(params: Iterable[NamedParam], optimizer: Optimizer) -> None:
    """Refuse a tensor in the state of several parameters that looks like a row for each block.

    A table shared by all parameters may have as many rows as a rank has blocks by coincidence.
    """
    first: dict[tuple[object, ...], NamedParam] = {}
    for named in params:
        for key, value in optimizer.state.get(named.param, {}).items():
            if (
                not isinstance(value, Tensor)
                or is_dtensor(value)
                or not value.dim()
                or not value.data_ptr()
            ):
                continue
            place = value.device, value.data_ptr(), tuple(value.shape)
            other = first.setdefault(place, named)
            pieces = [each.piece for each in (named, other) if each.piece is not None]
            if other is not named and any(piece.has_rows(key, value) for piece in pieces):
                raise StateError(
                    f"flat_param.state_dict: optimizer state '{key}' of parameter '{other.name}' "
                    f"is shared with parameter '{named.name}' and has as many rows as one of them "
                    "has blocks, so it cannot be told from state of the blocks. Keep shared "
                    "tensors on the optimizer, not in the state of each parameter."
                )


def named_optimizer_state(module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """State by name with shards, as `get_optimizer_state_dict` returns it. Not a collective.

    Parameters that the optimizer skips on this rank are left out.
    """
    groups = optimizer_params(module, optimizer)
    flat = [named for group in groups for named in group]
    _check_shared(flat, optimizer)
    state: dict[str, dict[str, Any]] = {}
    for named in flat:
        values = optimizer.state.get(named.param)
        if values and named.piece is not None:
            values = present_all(values, named.param, named.piece, skips=False, name=named.name)
            values = None if named.piece.skips else values
        if values:
            state[named.name] = dict(values)
    names = [[named.name for named in group] for group in groups]
    pairs = zip(optimizer.param_groups, names, strict=True)
    return {"state": state, "param_groups": [{**group, "params": own} for group, own in pairs]}


def load_optimizer_state(module: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load state by name, through the optimizer's own `load_state_dict`. Not a collective."""
    groups = optimizer_params(module, optimizer)
    flat = [named for group in groups for named in group]
    if "param_groups" not in state:
        raise StateError(
            "flat_param.load_state_dict: the optimizer state has no 'param_groups', which have its "
            "options by parameter name. Pass what full_state_dict returned."
        )
    options = _options_of(state["param_groups"], groups, optimizer)
    values: Mapping[str, Mapping[str, Any]] = state.get("state", {})
    for name in values.keys() - {named.name for named in flat}:
        raise StateError(
            f"flat_param.load_state_dict: the optimizer state has '{name}', but the optimizer "
            "trains no parameter of that name. Load the state of the same model."
        )
    now = optimizer.state
    new, codes = {}, []
    for position, named in enumerate(flat):
        own = values.get(named.name)
        if own is None:
            continue
        if named.piece is None:
            taken = {k: v if k == "step" else as_dtensor(v, named.param) for k, v in own.items()}
        else:  # raises before anything is loaded
            taken = take_all(own, named.param, named.piece, now.get(named.param, {}))
        # The optimizer converts state of pieces itself.
        new[position] = dict(taken if named.piece is None else own)
        codes += [
            (named.param, key, value)  # integers, such as 8-bit codes
            for key, value in taken.items()
            if key != "step" and isinstance(value, Tensor) and not value.is_floating_point()
        ]
    positions = iter(range(len(flat)))
    merged = [
        {"params": [next(positions) for _ in group], **opts}
        for group, opts in zip(groups, options, strict=True)
    ]
    follow(optimizer)
    optimizer.load_state_dict({"state": new, "param_groups": merged})
    for param, key, code in codes:
        value = optimizer.state.get(param, {}).get(key)
        if isinstance(value, Tensor) and value.is_floating_point():  # torch has cast it
            optimizer.state[param][key] = code.to(value.device)


def _options_of(
    saved: Sequence[Mapping[str, Any]], groups: list[list[NamedParam]], optimizer: Optimizer
) -> list[dict[str, Any]]:
    """The saved options of each of the optimizer's groups, which may be in another order."""
    by_name: dict[Any, dict[str, Any]] = {}
    for given in saved:
        options = {k: v for k, v in given.items() if k not in ("params", "param_names")}
        by_name |= dict.fromkeys(given["params"], options)
    if any(not isinstance(name, str) for name in by_name):
        raise StateError(
            "flat_param.load_state_dict: the optimizer state is by position, but states are "
            "loaded by name. Pass it to optimizer.load_state_dict, which takes whole tensors; or "
            "save what torch's get_optimizer_state_dict returns."
        )
    missing = [each.name for group in groups for each in group if each.name not in by_name]
    if missing or len(by_name) != sum(map(len, groups)):
        raise StateError(
            f"flat_param.load_state_dict: the optimizer state is of {len(by_name)} parameters, "
            f"{'without ' + repr(missing[0]) if missing else 'more than the optimizer has'}. "
            "Build the optimizer with the same parameters, or load without it."
        )
    found = []
    for position, (group, now) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
        options = by_name[group[0].name] if group else {**now}
        for named in group:
            other = by_name[named.name]
            keys = sorted(k for k in options | other if options.get(k) != other.get(k))
            if keys:
                raise StateError(
                    f"flat_param.load_state_dict: group {position} of the optimizer has "
                    f"'{group[0].name}' and '{named.name}', which were saved in groups with "
                    f"different options ({', '.join(keys)}). Build the optimizer with groups of "
                    "the same parameters."
                )
        found.append(options)
    return found
