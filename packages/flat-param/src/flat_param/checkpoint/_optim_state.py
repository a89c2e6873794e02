"""Optimizer state by parameter name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from .._errors import ParameterError, StateError
from ..buffers._dtensors import as_dtensor
from ..layout._arguments import check_is_optimizer
from ..sharded._full_params import named_sites
from ..sharded._optim_state import present_all, take_all
from ..sharded._param_piece import ParamPiece


@dataclass(frozen=True)
class NamedParam:
    """One parameter of an optimizer.

    Args:
        name: qualified name in the module.
        param: the optimizer's parameter.
        piece: None for a parameter that is not sharded.
    """

    name: str
    param: nn.Parameter
    piece: ParamPiece | None

    @property
    def speaks(self) -> bool:
        """Whether this rank is the first with elements of the parameter."""
        return self.piece is None or self.piece.comm.rank == self.piece.first_holder


def pieces_of(module: nn.Module) -> dict[str, ParamPiece]:
    """The piece of each sharded parameter, under all of its names."""
    return {name: site.part.param_pieces[site.index] for name, site in named_sites(module)}


def optimizer_params(module: nn.Module, optimizer: Optimizer) -> list[list[NamedParam]]:
    """The optimizer's parameters by group, under their first names."""
    check_is_optimizer("state_dict", optimizer)
    pieces = pieces_of(module)
    named = {p: NamedParam(name, p, pieces.get(name)) for name, p in module.named_parameters()}
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


def shared_rows(params: Iterable[NamedParam], optimizer: Optimizer) -> str:
    """The error if parameters share state that has a row for each block; else empty.

    A table shared by all parameters may have as many rows as a rank has blocks by coincidence.
    """
    first: dict[tuple[object, ...], str] = {}
    rows: dict[tuple[object, ...], str] = {}
    for named in params:
        for key, value in optimizer.state.get(named.param, {}).items():
            if type(value) is not Tensor or not value.dim() or not value.data_ptr():
                continue
            place = value.device, value.data_ptr(), tuple(value.shape)
            if named.piece is not None and named.piece.has_rows(key, value):
                rows.setdefault(place, key)
            other = first.setdefault(place, named.name)
            if other != named.name and place in rows:
                return (
                    f"flat_param.state_dict: optimizer state '{rows[place]}' of parameter "
                    f"'{other}' is shared with parameter '{named.name}' and has as many rows as "
                    "one of them has blocks, so it cannot be told from state of the blocks. Keep "
                    "shared tensors on the optimizer, not in the state of each parameter."
                )
    return ""


def named_optimizer_state(module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """State by name with shards, as `get_optimizer_state_dict` returns it. Not a collective.

    Parameters that the optimizer skips on this rank are left out.
    """
    groups = optimizer_params(module, optimizer)
    flat = [named for group in groups for named in group]
    if reason := shared_rows(flat, optimizer):
        raise StateError(reason)
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
    """Load state by name or by position, through the optimizer's own `load_state_dict`.

    Not a collective.
    """
    groups = optimizer_params(module, optimizer)
    flat = [named for group in groups for named in group]
    names = names_by_key(state["param_groups"], groups)
    by_name = _by_name(state.get("state", {}), names, groups)
    saved = [{**g, "params": [names[key] for key in g["params"]]} for g in state["param_groups"]]
    options = _options_by_name(saved, groups, optimizer)
    found = state_of(optimizer)
    given = {
        named.name: _given(by_name[named.name], named, found.get(named.param, {}))
        for named in flat
        if named.name in by_name
    }
    position = {named.name: index for index, named in enumerate(flat)}
    merged = [
        {"params": [position[named.name] for named in group], **opts}
        for group, opts in zip(groups, options, strict=True)
    ]
    sharded = {named.name for named in flat if named.piece is not None}
    new = {position[name]: dict((by_name if name in sharded else given)[name]) for name in given}
    optimizer.load_state_dict({"state": new, "param_groups": merged})
    for named in flat:
        _keep_codes(optimizer.state.get(named.param, {}), given.get(named.name, {}))


def names_by_key(
    saved: Sequence[Mapping[str, Any]], groups: list[list[NamedParam]]
) -> dict[Any, str]:
    """The name of each parameter that the groups of a state dict list, by its key there.

    Positions are looked up in `param_names`, which optimizers save if they were built from
    `named_parameters()`; otherwise the order is this optimizer's.
    """
    flat = [named.name for group in groups for named in group]
    keys = [key for group in saved for key in group["params"]]
    if len(keys) != len(flat):
        raise StateError(
            f"flat_param.load_state_dict: the optimizer state is of {len(keys)} parameters, but "
            f"the optimizer has {len(flat)}. Build it with the same parameters."
        )
    names = [name for group in saved for name in group.get("param_names", ())]
    in_order = names if sorted(names) == sorted(flat) else flat
    return {
        key: key if isinstance(key, str) else name for key, name in zip(keys, in_order, strict=True)
    }


def _by_name(
    state: Mapping[Any, Mapping[str, Any]],
    names: Mapping[Any, str],
    groups: list[list[NamedParam]],
) -> dict[str, Mapping[str, Any]]:
    found = {names.get(key, key): value for key, value in state.items()}
    unknown = sorted(map(str, set(found) - {named.name for group in groups for named in group}))
    if unknown:
        raise StateError(
            f"flat_param.load_state_dict: the optimizer state has '{unknown[0]}', but the "
            "optimizer trains no parameter of that name. Load the state of the same model."
        )
    return found


def _options_by_name(
    saved: Sequence[Mapping[str, Any]], groups: list[list[NamedParam]], optimizer: Optimizer
) -> list[dict[str, Any]]:
    """The saved options of each of the optimizer's groups, which may be in another order."""
    by_name = {name: _options_in(each) for each in saved for name in each["params"]}
    found = []
    for position, (group, own) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
        known = [named.name for named in group if named.name in by_name]
        if group and not known:
            raise StateError(
                f"flat_param.load_state_dict: no parameter of group {position} of the optimizer "
                f"(the first is '{group[0].name}') is in a saved group. Build the optimizer with "
                "groups of the same parameters, or load without it."
            )
        options = by_name[known[0]] if known else _options_in(own)
        for name in known[1:]:
            if by_name[name] != options:
                raise _other_options(position, (known[0], options), (name, by_name[name]))
        found.append(options)
    return found


def _options_in(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _other_options(
    position: int, one: tuple[str, dict[str, Any]], other: tuple[str, dict[str, Any]]
) -> StateError:
    (name, options), (name_2, options_2) = one, other
    keys = sorted(k for k in options | options_2 if options.get(k) != options_2.get(k))
    return StateError(
        f"flat_param.load_state_dict: group {position} of the optimizer has '{name}' and "
        f"'{name_2}', which were saved in groups with different options ({', '.join(keys)}). "
        "Build the optimizer with groups of the same parameters."
    )


def state_of(optimizer: Optimizer) -> Any:
    """Return an optimizer's state, without the check of offloaded optimizers for interrupted steps.

    Wrapped optimizers, such as accelerate's, keep the state in another object.
    """
    if "state" in vars(optimizer):
        return vars(optimizer)["state"]
    return optimizer.state


def _given(
    values: Mapping[str, Any], named: NamedParam, now: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Convert state to the optimizer's form; raises before anything is loaded."""
    if named.piece is None:
        return {k: v if k == "step" else as_dtensor(v, named.param) for k, v in values.items()}
    return take_all(values, named.param, named.piece, now)


def _keep_codes(found: dict[str, Any], given: Mapping[str, Any]) -> None:
    """Restore integers, such as 8-bit codes, which torch casts to the parameter's dtype."""
    for key, value in found.items():
        code = given.get(key)
        if not isinstance(value, Tensor) or not isinstance(code, Tensor) or key == "step":
            continue
        if value.is_floating_point() and not code.is_floating_point():
            found[key] = code.to(value.device)
