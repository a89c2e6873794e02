"""The registered locations of a unit's parameters in its module, and the tensors there.

| when | the module has |
|---|---|
| between steps | the optimizer's parameters, which are pieces |
| in the unit's forward and backward | the leaves, which are full |
| after `unshard()` | the leaves, until the unit is resharded; changes are dropped, as in FSDP2 |
| inside `whole_params()` | full copies in the parameters' own dtype |

A user may assign other tensors. They are copied into the shard before the next gather, and
before any code reads shards. Values that do not fit are refused by name before any
communication. Inside `whole_params()`, code that reads shards or gathers raises an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from .._errors import ParameterError, StateError
from .._torch_compat import without_torch_function
from ._sharded_params import ShardedParams


@dataclass(frozen=True)
class ParamSite:
    """One location in a module at which a parameter is registered; a tied one has several."""

    registry: dict[str, nn.Parameter | None]
    key: str
    part: ShardedParams
    index: int

    @property
    def name(self) -> str:
        """The parameter's name in its unit."""
        return self.part.segment.layout.specs[self.index].name


Found = tuple[ParamSite, "Tensor | None"]
"""A site, and the tensor that a user put there."""


class ParamSites:
    """All sites of one unit.

    Attributes:
        shows_copies: whether the module has full copies, as inside `whole_params()`.
    """

    def __init__(self, sites: Sequence[ParamSite]) -> None:
        self._param_sites = tuple(sites)
        self._parts = tuple(dict.fromkeys(site.part for site in sites))
        self._shown: tuple[Tensor, ...] = ()
        self.shows_copies = False
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
        if self.shows_copies:
            self._put(self._shown)
        else:
            for registry, key, param, _ in self._entries:
                registry[key] = param

    def show(self, copies: Mapping[ShardedParams, Sequence[Tensor]]) -> None:
        """Set full copies (one per parameter) between steps."""
        self.shows_copies = True
        self._shown = tuple(copies[site.part][site.index] for site in self._param_sites)
        self._put(self._shown)

    def _put(self, tensors: Sequence[Tensor]) -> None:
        for site, tensor in zip(self._param_sites, tensors, strict=True):
            site.registry[site.key] = tensor  # type: ignore[assignment]

    def end_show(self) -> list[Found]:
        """Set the optimizer's parameters, and return the tensors that replaced the copies.

        Those of re-assigned copies come last.
        """
        known = set(map(id, self._shown))
        self._shown, self.shows_copies = (), False
        found: list[Found] = [(site, site.registry.get(site.key)) for site in self._param_sites]
        self.swap_out()
        return sorted(found, key=lambda each: id(each[1]) not in known)

    def have_changed(self) -> bool:
        """Whether `take_changes` has something to do, or raises."""
        if self.shows_copies:
            return True
        with without_torch_function():
            for part in self._parts:
                if part.held.moved():
                    return True
            for registry, key, param, leaf in self._entries:
                current = registry.get(key)
                if current is leaf:
                    continue
                if current is not param or leaf.requires_grad != param.requires_grad:
                    return True
        return False

    def take_changes(self) -> bool:
        """Copy in re-assigned parameters and changes of `requires_grad`.

        Returns:
            Whether any value is new.

        Raises:
            ParameterError: another shape, or a frozen parameter that is now trainable.
            StateError: copies are set.
        """
        if self.shows_copies:
            raise StateError(
                "flat_param.whole_params: the module has copies of whole parameters, but only its "
                "state_dict() can be called with them. Leave the block first."
            )
        with without_torch_function():
            return self.write(self.checked(self._changes()))

    def _changes(self) -> list[Found]:
        moved = {part: part.held.moved() for part in self._parts}
        found: list[Found] = []
        for site, (registry, key, param, leaf) in zip(
            self._param_sites, self._entries, strict=True
        ):
            current = registry.get(key)
            if current is leaf:
                continue
            if current is not param or site.index in moved[site.part]:
                found.append((site, current))
            if leaf.requires_grad != param.requires_grad:
                _set_requires_grad(site, leaf, param.requires_grad)
        return found

    def checked(self, found: Iterable[Found]) -> list[tuple[ParamSite, Tensor]]:
        """The tensors, if each fits its site.

        Raises:
            ParameterError: names the first that does not.
        """
        return [(site, _checked(site, value)) for site, value in found]

    def write(self, values: Sequence[tuple[ParamSite, Tensor]]) -> bool:
        """Copy tensors that fit into the shard; return whether there were any. Not a collective."""
        for site, value in values:
            site.part.load(site.index, value)
            site.registry[site.key] = site.part.held.params[site.index]
        return bool(values)


def _checked(site: ParamSite, value: Tensor | None) -> Tensor:
    if type(value).__name__ == "FakeTensor":
        raise StateError(
            f"flat_param.fully_shard: parameter '{site.name}' is a fake tensor, as in "
            "torch.export, which cannot trace the collectives of a sharded module. Export the "
            "plain module, with flat_param.full_state_dict."
        )
    if value is not None:
        with without_torch_function():
            value = site.part.local_of_value(site.index, value.detach())
        if site.part.fits(site.index, value):
            return value
    shape = None if value is None else tuple(value.shape)
    raise ParameterError(
        f"flat_param.fully_shard: parameter '{site.name}' was re-assigned with shape {shape}, but "
        f"it was sharded with shape {site.part.pieces[site.index].spec.shape}. Assign a whole "
        "parameter of the same shape, or shard the module again."
    )


def _set_requires_grad(site: ParamSite, leaf: nn.Parameter, trainable: bool) -> None:
    if not site.part.segment.trainable:
        raise ParameterError(
            f"flat_param.fully_shard: parameter '{site.name}' was frozen when it was sharded "
            "and is trainable now, but frozen segments have no gradient buffers. Make it "
            "trainable before fully_shard."
        )
    leaf.requires_grad_(trainable)
