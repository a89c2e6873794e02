"""The registered locations of a unit's parameters in its module, and the tensors there.

| when | the module has |
|---|---|
| between steps | the optimizer's parameters, which are pieces |
| in the unit's forward and backward | the leaves, which are full |
| after `unshard()` | the leaves, until the unit is resharded; changes are dropped, as in FSDP2 |
| inside `whole_params()` | full copies in the parameters' own dtype |

A parameter that a user replaces is an error, before any communication. Other memory, by
`param.data = ...`, is copied into the shard before the next gather and before any code reads
shards. Inside `whole_params()`, code that reads shards or gathers raises an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..._errors import FlatParamError, ParameterError, StateError
from ..._torch_compat import without_torch_function
from ..tensor._param_piece import ParamPiece
from ._sharded_params import ShardedParams


@dataclass(frozen=True)
class ParamSite:
    """One location in a module at which a parameter is registered; a tied one has several."""

    registry: dict[str, nn.Parameter | None]
    key: str
    part: ShardedParams
    index: int

    @property
    def piece(self) -> ParamPiece:
        """This rank's piece of the parameter."""
        return self.part.pieces[self.index]


class ParamSites:
    """All sites of one unit.

    Attributes:
        copies: the full copies that the module has inside `whole_params()`, one per parameter.
    """

    def __init__(self, sites: Sequence[ParamSite]) -> None:
        self._param_sites = tuple(sites)
        self._parts = tuple(dict.fromkeys(site.part for site in sites))
        self.copies: Mapping[ShardedParams, Sequence[nn.Parameter]] | None = None
        self.refresh()

    def __iter__(self) -> Iterator[ParamSite]:
        return iter(self._param_sites)

    def refresh(self) -> None:
        """Read parameters and leaves again, after they were replaced."""
        self._entries = [
            (site.registry, site.key, site.part.held.params[site.index], leaf)
            for site in self._param_sites
            for leaf in (site.part.leaves[site.index],)
        ]

    def swap_in(self) -> None:
        """Set the leaves in the module."""
        for registry, key, _, leaf in self._entries:
            registry[key] = leaf

    def swap_out(self) -> None:
        """Set the optimizer's parameters, or the copies inside `whole_params()`."""
        if self.copies is not None:
            for site in self._param_sites:
                site.registry[site.key] = self.copies[site.part][site.index]
        else:
            for registry, key, param, _ in self._entries:
                registry[key] = param

    def drop_copies(self) -> FlatParamError | None:
        """Set the optimizer's parameters; return the error if a copy was replaced."""
        copies, self.copies, error = self.copies or {}, None, None
        for site in self._param_sites if copies else ():
            copy: Tensor = copies[site.part][site.index]
            current = site.registry.get(site.key)
            if current is not copy or tuple(copy.shape) != site.piece.shape:
                error = _replaced(site, current)
        self.swap_out()
        return error

    def take_changes(self) -> bool:
        """Copy in the values of parameters that have other memory; also follow `requires_grad`.

        Returns:
            Whether any value is new.

        Raises:
            ParameterError: a parameter was replaced, or has another shape, or was frozen and is
                trainable now. Replaced ones are in place again.
            StateError: copies are set.
        """
        if self.copies is not None:
            raise StateError(
                "flat_param.whole_params: the module has copies of whole parameters, but only its "
                "state_dict() can be called with them. Leave the block first."
            )
        taken = False
        with without_torch_function():
            for site, (registry, key, param, leaf) in zip(
                self._param_sites, self._entries, strict=True
            ):
                current = registry.get(key)
                if current is leaf:
                    continue
                if current is not param:
                    error = _replaced(site, current)
                    self.swap_out()
                    raise error
                if leaf.requires_grad != param.requires_grad:
                    _set_requires_grad(site, leaf, param.requires_grad)
            for part in self._parts:
                if moved := part.held.moved():
                    part.take_moved(moved)
                    taken = True
        return taken


def _replaced(site: ParamSite, value: Any) -> FlatParamError:
    if type(value).__name__ == "FakeTensor":
        return StateError(
            f"flat_param.fully_shard: parameter {site.piece.label} is a fake tensor, as in "
            "torch.export, which cannot trace the collectives of a sharded module. Export the "
            "plain module, with flat_param.full_state_dict."
        )
    return ParameterError(
        f"flat_param.fully_shard: parameter {site.piece.label} was replaced by a "
        f"{type(value).__name__} after it was sharded, but the optimizer has the sharded one. The "
        "sharded one is back. Write values into it by load_state_dict, or in place under "
        "whole_params(write_back=True)."
    )


def _set_requires_grad(site: ParamSite, leaf: Tensor, trainable: bool) -> None:
    if not site.part.segment.trainable:
        raise ParameterError(
            f"flat_param.fully_shard: parameter {site.piece.label} was frozen when it was sharded "
            "and is trainable now, but frozen segments have no gradient buffers. Make it "
            "trainable before fully_shard."
        )
    leaf.requires_grad_(trainable)
