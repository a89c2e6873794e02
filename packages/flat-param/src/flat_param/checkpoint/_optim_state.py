"""Optimizer state by parameter name, whole or in pieces.

Rule 1: a state tensor of its parameter's shape is cut like the parameter: whole tensors have the
        whole parameter's shape, pieces the piece's. `step`, which torch's optimizers keep as a
        0-dim tensor, never is: a 0-dim parameter would otherwise be taken for its step.
Rule 2: any other state without dimensions (a step count), or that is no tensor, is the same on
        every rank that holds a part of the parameter; the rank that holds its first element speaks
        for it.
Rule 3: a tensor with a row for each block (scales) is cut between blocks, see `_block_rows`.
Rule 4: any other tensor is about the elements that its rank holds, so it is refused where these
        are not all of the parameter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from .._errors import ParameterError, StateError
from ..layout._param_shard import ParamShard
from ..memory._dtensors import DTensorPlace, is_dtensor, place_of_dtensor
from ..memory._tensors import tensors_in
from ..sharded._full_params import named_sites
from ..sharded._param_sites import ParamSite
from ._block_rows import BlockRows, block_rows
from ._one_world import place_in, whole_shape


@dataclass(frozen=True)
class NamedParam:
    """One parameter of an optimizer.

    Args:
        name: qualified name in the module.
        param: as the optimizer has it.
        site: where it lies in a unit; None for a parameter that is not sharded.
    """

    name: str
    param: nn.Parameter
    site: ParamSite | None

    @property
    def piece(self) -> ParamShard | None:
        """What this rank holds of it."""
        return None if self.site is None else self.site.part.pieces[self.site.index]

    @property
    def rows(self) -> BlockRows | None:
        """Which of its blocks this rank holds (Rule 3); none of what tensor parallel has cut."""
        if self.site is None or self.piece is None or self.place is not None:
            return None
        return block_rows(self.site.part.plan, self.site.index, self.piece.start, self.piece.stop)

    @property
    def place(self) -> DTensorPlace | None:
        """How tensor parallel has cut it."""
        return None if self.site is None else place_in(self.site)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole parameter."""
        return tuple(self.param.shape) if self.site is None else whole_shape(self.site)

    @property
    def shape_numel(self) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.shape)

    @property
    def speaks_for_all(self) -> bool:
        """Whether it `speaks` for all that tensor parallel has cut it into, too."""
        return self.speaks and (self.place is None or self.place.is_first)

    @property
    def speaks(self) -> bool:
        """Whether this rank speaks for the parameter's uncut state (Rule 2)."""
        if self.site is None or self.piece is None:
            return False
        comm = self.site.part.comms.gather
        empty = self.piece.spec.numel == 0
        return comm.rank == 0 if empty else self.piece.numel > 0 and self.piece.start == 0


def named_params(module: nn.Module) -> dict[nn.Parameter, NamedParam]:
    """The module's parameters under their first names; see `NamedParam`."""
    sites = dict(named_sites(module))
    named: dict[nn.Parameter, NamedParam] = {}
    for name, param in module.named_parameters():
        named[param] = NamedParam(name, param, sites.get(name))
    return named


def optimizer_params(module: nn.Module, optimizer: Optimizer) -> list[list[NamedParam]]:
    """The optimizer's parameters by group.

    Raises:
        ParameterError: one of them is not the module's, or there are none.
    """
    if not hasattr(optimizer, "param_groups"):
        raise ParameterError(
            f"flat_param.state_dict: optimizer is a {type(optimizer).__name__}, but it must have "
            "the groups of parameters that it trains. Pass an optimizer, or leave it out."
        )
    named = named_params(module)
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


def is_cut(key: str, shape: tuple[int, ...], param_shape: tuple[int, ...]) -> bool:
    """Whether state is cut like its parameter, from its shape and the parameter's (Rule 1).

    Args:
        key: name of the state, such as `exp_avg`.
        shape: of the state; whole or of a piece.
        param_shape: of the parameter; likewise.
    """
    return key != "step" and tuple(shape) == tuple(param_shape)


def is_piece(key: str, state: Any, param: nn.Parameter) -> bool:
    """Whether a state value that the optimizer has is a piece (Rule 1)."""
    return isinstance(state, Tensor) and is_cut(key, state.shape, param.shape)


def no_place(key: str, state: Any, shape: tuple[int, ...], named: NamedParam) -> str:
    """Why a state value cannot be saved or loaded by name (Rule 4); empty if it can.

    Args:
        key: name of the state.
        state: the value.
        shape: of what is cut like the parameter, whole or a piece.
        named: the parameter.
    """
    cut = isinstance(state, Tensor) and is_cut(key, state.shape, shape)
    shapes = [] if cut else [tuple(tensor.shape) for tensor in tensors_in(state) if tensor.ndim]
    if named.piece is None or not shapes:
        return ""
    held, numel = named.piece.numel, named.shape_numel
    if held in (0, numel):
        return ""
    rows = named.rows
    if rows and (rows.fits_piece if math.prod(shape) == held else rows.fits_whole)(key, state):
        return ""
    return (
        f"flat_param.state_dict: optimizer state '{key}' of parameter '{named.name}' has a tensor "
        f"of shape {shapes[0]}, and this rank has {held} of the parameter's {numel} elements, but "
        "only tensors of the parameter's shape, or with a row for each of its blocks, can be cut. "
        'Shard with boundary="tensor", which cuts no parameter, or with Blocks as the optimizer '
        "has them; or save without it."
    )


def shared_rows(params: Iterable[NamedParam], optimizer: Optimizer) -> str:
    """Why what has a row for each block is none of a parameter's (Rule 3); empty if all are.

    A table that parameters share may have as many rows as a rank has blocks. It is one tensor;
    rows of blocks are each parameter's own.
    """
    first: dict[tuple[object, ...], str] = {}
    rows: dict[tuple[object, ...], str] = {}
    for named in params:
        for key, value in optimizer.state.get(named.param, {}).items():
            if type(value) is not Tensor or not value.dim() or not value.data_ptr():
                continue
            place = value.device, value.data_ptr(), tuple(value.shape)
            if named.rows is not None and named.rows.fits_piece(key, value):
                rows.setdefault(place, key)
            other = first.setdefault(place, named.name)
            if other != named.name and place in rows:
                return (
                    f"flat_param.state_dict: optimizer state '{rows[place]}' of parameter "
                    f"'{other}' is also that of parameter '{named.name}', and has a row for each "
                    "block of one of them, but rows of blocks are one parameter's. Keep what "
                    "parameters share with the optimizer, not in the state of each."
                )
    return ""


def group_options(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Every group's options, without its parameters."""
    return [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def load_optimizer_state(module: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load whole state by name, or a plain optimizer's state by position. Not a collective.

    Args:
        module: whose parameters the optimizer trains.
        optimizer: with groups of the same parameters, in any order.
        state: as `whole_optimizer_state` or `torch.optim.Optimizer.state_dict` gives it.
    """
    groups = optimizer_params(module, optimizer)
    names = _names_by_key(state["param_groups"], groups)
    by_name = _by_name(state["state"], names, groups)
    pieces: dict[str, dict[str, Any]] = {}
    for named in (n for group in groups for n in group):
        if named.name in by_name:
            pieces[named.name] = {k: _cut(k, v, named) for k, v in by_name[named.name].items()}
    saved = [{**g, "params": [names[key] for key in g["params"]]} for g in state["param_groups"]]
    load_pieces(optimizer, groups, pieces, options=options_by_name(saved, groups, optimizer))


def _names_by_key(
    saved: Sequence[Mapping[str, Any]], groups: list[list[NamedParam]]
) -> dict[Any, str]:
    """The name of each parameter that the groups of a state dict list, by its key there.

    A name is its own key. Positions are looked up in `param_names`, which torch's optimizers save
    if they were built from `named_parameters()`; without it, the order is the optimizer's.
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


def options_by_name(
    saved: Sequence[Mapping[str, Any]], groups: list[list[NamedParam]], optimizer: Optimizer
) -> list[dict[str, Any]]:
    """The saved options of each of the optimizer's groups, which may be in another order.

    Args:
        saved: options of each saved group, and the names of its parameters as `params`.
        groups: of the optimizer.
        optimizer: a group of it without parameters keeps its own options.

    Raises:
        StateError: no parameter of a group was saved, or they were saved with several options.
    """
    by_name: dict[str, dict[str, Any]] = {}
    for each in saved:
        kept = {key: value for key, value in each.items() if key not in _OF_PARAMS}
        by_name.update(dict.fromkeys(each["params"], kept))
    found = []
    for position, (group, own) in enumerate(zip(groups, group_options(optimizer), strict=True)):
        known = [named.name for named in group if named.name in by_name]
        if group and not known:
            raise StateError(
                f"flat_param.load_state_dict: no parameter of group {position} of the optimizer "
                f"(the first is '{group[0].name}') is in a saved group. Build the optimizer with "
                "groups of the same parameters, or load without it."
            )
        options = by_name[known[0]] if known else own
        for name in known[1:]:
            if by_name[name] != options:
                raise _other_options(position, (known[0], options), (name, by_name[name]))
        found.append(options)
    return found


_OF_PARAMS = ("params", "param_names")
"""What a group has for each of its parameters; all else are options."""


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


def _cut(key: str, value: Any, named: NamedParam) -> Any:
    """This rank's piece of a whole state tensor; anything else as it is.

    Raises:
        StateError: a tensor of another shape, and this rank has a part of the parameter.
    """
    piece = named.piece
    if piece is None:
        place = place_of_dtensor(named.param)
        if place is None or not isinstance(value, Tensor) or is_dtensor(value):
            return value
        cut = is_cut(key, value.shape, named.shape)
        return place.over(place.local_of_value(value)) if cut else value
    if reason := no_place(key, value, named.shape, named):
        raise StateError(reason)
    if not isinstance(value, Tensor):
        return value
    if not is_cut(key, value.shape, named.shape):
        rows = named.rows
        return rows.of(value).clone() if rows and rows.fits_whole(key, value) else value
    assert named.site is not None
    part, index = named.site.part, named.site.index
    return part.cut(index, part.local_of_value(index, value))


def load_pieces(
    optimizer: Optimizer,
    groups: list[list[NamedParam]],
    pieces: Mapping[str, Mapping[str, Any]],
    *,
    options: list[dict[str, Any]],
) -> None:
    """Give the optimizer its state, through its own `load_state_dict`. Not a collective.

    Args:
        optimizer: of the parameters.
        groups: its parameters.
        pieces: state of each parameter, by name.
        options: of each of its groups; `param_names` is left as the optimizer has it.
    """
    flat = [named for group in groups for named in group]
    position = {named.name: index for index, named in enumerate(flat)}
    state = {position[name]: dict(values) for name, values in pieces.items()}
    merged = []
    for group, opts in zip(groups, options, strict=True):
        plain = {key: value for key, value in opts.items() if key not in _OF_PARAMS}
        merged.append({**plain, "params": [position[named.name] for named in group]})
    optimizer.load_state_dict({"state": state, "param_groups": merged})
    for named in flat:
        _keep_codes(optimizer.state.get(named.param, {}), pieces.get(named.name, {}))


def _keep_codes(found: dict[str, Any], given: Mapping[str, Any]) -> None:
    """Have integers as they were given: torch casts all state of a parameter to its dtype.

    Codes of 8 bits would take the memory of floating-point moments.
    """
    for key, value in found.items():
        code = given.get(key)
        if not isinstance(value, Tensor) or not isinstance(code, Tensor) or key == "step":
            continue
        if value.is_floating_point() and not code.is_floating_point():
            found[key] = code.to(value.device)
