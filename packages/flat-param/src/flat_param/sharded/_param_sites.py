"""The places in a module where a unit's parameters are registered.

Rule 1: outside forward and backward the module holds the optimizer's parameters, inside it holds
        the leaves. Only the registry entry changes; both are made once.
Rule 2: values that somebody else has put there are taken into the shard before the next gather, and
        before anything reads shards; what cannot be is refused by name, before anything is
        communicated.
Rule 3: after `unshard` the module holds the leaves outside forward and backward, too, until the
        unit is resharded. As with FSDP2, what is written to them is lost then.
Rule 4: inside `whole_params` the module shows copies, in the place of the optimizer's parameters. A
        copy is no value that somebody has put there: what would read shards, or gather, is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn

from .._errors import ParameterError, StateError
from .._torch_compat import without_torch_function
from ._sharded_params import ShardedParams


@dataclass(frozen=True)
class ParamSite:
    """One place in a module where a parameter is registered; a tied parameter has several."""

    registry: dict[str, nn.Parameter | None]
    key: str
    part: ShardedParams
    index: int

    @property
    def name(self) -> str:
        """The parameter's name in its unit."""
        return self.part.segment.layout.specs[self.index].name


class ParamSites:
    """All sites of one unit."""

    def __init__(self, sites: Sequence[ParamSite]) -> None:
        self._param_sites = tuple(sites)
        self._shows = False
        self._copies: tuple[nn.Parameter, ...] = ()
        self.refresh()

    def __iter__(self) -> Iterator[ParamSite]:
        return iter(self._param_sites)

    def refresh(self) -> None:
        """Take up parameters and leaves as they are now."""
        self._entries = tuple(
            (site.registry, site.key, site.part.params[site.index], site.part.leaves[site.index])
            for site in self._param_sites
        )

    def swap_in(self) -> None:
        """Let the module compute with the leaves (Rule 1)."""
        for registry, key, _, leaf in self._entries:
            registry[key] = leaf

    def swap_out(self) -> None:
        """Let everybody see the optimizer's parameters (Rule 1), or the copies (Rule 4)."""
        for registry, key, param, _ in self._entries:
            registry[key] = param
        for site, copy in zip(self._param_sites, self._copies, strict=False):
            site.registry[site.key] = copy

    def show_copies(self, copies: Mapping[ShardedParams, Sequence[nn.Parameter]]) -> None:
        """Let everybody see whole copies (Rule 4), which are one object for all sites."""
        self._copies = tuple(copies[site.part][site.index] for site in self._param_sites)
        self.swap_out()

    def end_copies(self) -> list[tuple[ParamSite, Tensor | None]]:
        """Show the optimizer's parameters again; what was at each site, re-assigned ones last."""
        found = [(site, site.registry.get(site.key)) for site in self._param_sites]
        known = {id(copy) for copy in self._copies}
        self._copies = ()
        self.swap_out()
        return sorted(found, key=lambda each: id(each[1]) not in known)

    @property
    def shows_copies(self) -> bool:
        """Whether copies are shown (Rule 4)."""
        return bool(self._copies)

    def show(self) -> None:
        """Let everybody see unsharded parameters (Rule 3)."""
        self._shows = True
        self.swap_in()

    @property
    def shows(self) -> bool:
        """Whether unsharded parameters are shown (Rule 3)."""
        return self._shows

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Let everybody see the optimizer's parameters for a while, where unsharded ones are shown.

        Not what was put in the place of one: that is taken in when they are not shown any more.
        """
        shown = [registry.get(key) for registry, key, _, _ in self._entries] if self._shows else []
        if shown:
            self.swap_out()
        try:
            yield
        finally:
            for (registry, key, _, _), tensor in zip(self._entries, shown, strict=False):
                if self._shows:
                    registry[key] = tensor

    def end_show(self) -> bool:
        """Show the optimizer's parameters again; whether one was re-assigned meanwhile (Rule 2)."""
        found = False
        for site, (registry, key, param, leaf) in zip(
            self._param_sites, self._entries, strict=True
        ):
            current = registry.get(key)
            has_moved = current is leaf and site.part.has_moved(site.index)
            if has_moved or (current is not param and current is not leaf):
                _absorb(site, current)
                found = True
            if has_moved:  # by `.data = ...`
                site.part.attach(site.index)
        self.swap_out()
        self._shows = False
        return found

    def absorb_changes(self) -> bool:
        """Follow re-assigned parameters and changes of `requires_grad`; say if any value is new.

        See Rule 2.

        Raises:
            ParameterError: another shape, or a frozen parameter that is to be trained.
            StateError: copies are shown (Rule 4).
        """
        if self._copies:
            raise StateError(
                "flat_param.whole_params: the module has copies of whole parameters, but only its "
                "state_dict() can be called with them. Leave the block first."
            )
        with without_torch_function():
            return self._take_changes()

    def _take_changes(self) -> bool:
        found = False
        for site, (registry, key, param, leaf) in zip(
            self._param_sites, self._entries, strict=True
        ):
            current = registry.get(key)
            if current is leaf:
                continue
            if current is not param or param.data_ptr() != site.part.pointers[site.index]:
                _absorb(site, current)
                found = True
            if leaf.requires_grad != param.requires_grad:
                _set_requires_grad(site, param.requires_grad)
        return found


def _absorb(site: ParamSite, current: Tensor | None) -> None:
    """Copy a re-assigned parameter's values into the shard and restore the registration."""
    param, piece = site.part.params[site.index], site.part.pieces[site.index]
    if type(current).__name__ == "FakeTensor":
        raise StateError(
            f"flat_param.fully_shard: parameter '{site.name}' is a fake tensor, as in "
            "torch.export, which cannot trace the collectives of a sharded module. Export the "
            "plain module, with flat_param.full_state_dict."
        )
    values = None
    if current is not None:
        values = site.part.local_of_value(site.index, current.detach())
    if values is not None and values.shape == piece.spec.shape:
        site.part.load_full(site.index, values)
    elif values is not None and values.shape == piece.shape:
        piece.view(site.part.shard).copy_(values)
    else:
        raise wrong_shape(site, values)
    param.data = piece.view(site.part.shard)
    site.registry[site.key] = param


def wrong_shape(site: ParamSite, values: Tensor | None) -> ParameterError:
    """What to raise where a value does not fit its site."""
    shape = None if values is None else tuple(values.shape)
    return ParameterError(
        f"flat_param.fully_shard: parameter '{site.name}' was re-assigned with shape {shape}, but "
        f"it was sharded with shape {site.part.pieces[site.index].spec.shape}. Assign a whole "
        "parameter of the same shape, or shard the module again."
    )


def _set_requires_grad(site: ParamSite, trainable: bool) -> None:
    if not site.part.segment.trainable:
        raise ParameterError(
            f"flat_param.fully_shard: parameter '{site.name}' was frozen when it was sharded "
            "and is trainable now, but frozen segments have no gradient buffers. Make it "
            "trainable before fully_shard."
        )
    site.part.leaves[site.index].requires_grad_(trainable)
