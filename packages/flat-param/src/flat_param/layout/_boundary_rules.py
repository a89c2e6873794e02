"""Which boundary each parameter of a module has, chosen by its name or by the class that owns it.

Rule 1. The first rule that fits a parameter decides; what none fits has the default.
Rule 2. A rule that fits no parameter of a unit is a mistake, unless `missing_ok`: names are
        those below the module that becomes the unit, and what units inside it have is theirs.
Rule 3. What was chosen is kept by name (`PerParameter`), so that a saved layout needs no rule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from .._errors import LayoutError
from ._boundary import Blocks, Boundary, PerParameter, Word, check_boundary
from ._spec import ParamSpec

Kind = str | type[nn.Module]


@dataclass(frozen=True)
class BoundaryRules:
    """A boundary for each parameter; made by `by_name` and `by_class`.

    Attributes:
        rules: a glob of names or a class of modules, and the boundary of what fits.
        default: the boundary of what fits no rule.
        missing_ok: whether a rule may fit nothing.
    """

    rules: tuple[tuple[Kind, Word | Blocks], ...]
    default: Word | Blocks
    missing_ok: bool

    def __str__(self) -> str:
        """As it is compared between ranks."""
        told = (f"{_shown(kind)}: {boundary}" for kind, boundary in self.rules)
        return f"{{{', '.join(told)}}}, else {self.default}"


def by_name(
    rules: Mapping[str, Word | Blocks],
    *,
    default: Word | Blocks = "element",
    missing_ok: bool = False,
) -> BoundaryRules:
    """Choose the boundary of each parameter by its name.

    Args:
        rules: globs of names below the module that is sharded, and boundaries; the first that
            matches decides.
        default: for parameters that match no rule.
        missing_ok: whether a glob may match no parameter of the unit.

    Raises:
        LayoutError: a boundary is unknown, or a glob is not text.

    Example:
        >>> str(by_name({"*.experts.*": "tensor", "*.weight": Blocks(32)}))
        "{'*.experts.*': tensor, '*.weight': Blocks(32)}, else element"
    """
    return _checked("by_name", rules, str, default, missing_ok)


def by_class(
    rules: Mapping[type[nn.Module], Word | Blocks],
    *,
    default: Word | Blocks = "element",
    missing_ok: bool = False,
) -> BoundaryRules:
    """Choose the boundary of each parameter by the class of the module that owns it.

    Args:
        rules: classes of modules, and boundaries; the first class that the owner is an instance of
            decides.
        default: for parameters that match no rule.
        missing_ok: whether a class may own no parameter of the unit.

    Raises:
        LayoutError: a boundary is unknown, or a class is not a module class.

    Example:
        >>> str(by_class({nn.Linear: "tensor"}))
        '{Linear: tensor}, else element'
    """
    return _checked("by_class", rules, type, default, missing_ok)


def _checked(
    where: str,
    rules: Mapping[Any, Word | Blocks],
    kind: type,
    default: Word | Blocks,
    missing_ok: bool,
) -> BoundaryRules:
    wanted = "globs of names" if kind is str else "classes of modules"
    fits = isinstance(rules, Mapping) and all(
        isinstance(each, type) and issubclass(each, nn.Module)
        if kind is type
        else isinstance(each, str)
        for each in rules
    )
    if not fits:
        raise LayoutError(
            f"flat_param.{where}: rules is {rules!r}, but it is a mapping from {wanted} to "
            "boundaries. Write for example "
            + ('{"*.weight": "tensor"}.' if kind is str else '{nn.Linear: "tensor"}.')
        )
    for boundary in (*rules.values(), default):
        check_boundary(boundary, where=where)
    return BoundaryRules(tuple(rules.items()), default, missing_ok)


def resolve(
    boundary: Boundary | BoundaryRules, specs: Sequence[ParamSpec], module: nn.Module | None
) -> Boundary:
    """What each parameter of a unit has.

    Args:
        boundary: one for all, or rules.
        specs: parameters of the unit.
        module: that they are of; None where only shapes are known.

    Raises:
        LayoutError: a rule fits nothing, or needs a module.
    """
    if isinstance(boundary, Mapping):
        raise LayoutError(
            f"flat_param.fully_shard: boundary is {boundary!r}, but it is not known of what these "
            "are the names. Pass by_name(...) for parameters, or by_class(...) for modules."
        )
    if not isinstance(boundary, BoundaryRules):
        return boundary
    fitting = [[kind for kind, _ in boundary.rules if _fits(kind, spec, module)] for spec in specs]
    used = {kind for kinds in fitting for kind in kinds}
    for kind, _ in boundary.rules:
        if kind not in used and not boundary.missing_ok:
            raise _fits_nothing(kind, specs)
    of = dict(boundary.rules)
    return PerParameter(
        tuple(
            (spec.name, of[kinds[0]] if kinds else boundary.default)
            for spec, kinds in zip(specs, fitting, strict=True)
        )
    )


def _fits(kind: Kind, spec: ParamSpec, module: nn.Module | None) -> bool:
    if isinstance(kind, str):
        return any(fnmatchcase(name, kind) for name in spec.names)
    if module is None:
        raise LayoutError(
            f"flat_param.plan_training: boundary chooses by the class {_shown(kind)}, but a plan "
            "knows names and shapes only. Choose with by_name."
        )
    owners = (module.get_submodule(name.rpartition(".")[0]) for name in spec.names)
    return any(isinstance(owner, kind) for owner in owners)


def _fits_nothing(kind: Kind, specs: Sequence[ParamSpec]) -> LayoutError:
    names = [spec.name for spec in specs]
    close = get_close_matches(kind, names, n=1) if isinstance(kind, str) else []
    meant = (
        f"Did you mean {close[0]!r}?" if close else f"There are {', '.join(names[:5]) or 'none'}."
    )
    return LayoutError(
        f"flat_param.fully_shard: boundary has a rule for {_shown(kind)}, but no parameter of the "
        f"unit matches it; names are those below the module that is sharded. {meant} If some "
        "units lack it, pass missing_ok=True."
    )


def _shown(kind: Kind) -> str:
    return repr(kind) if isinstance(kind, str) else kind.__name__
