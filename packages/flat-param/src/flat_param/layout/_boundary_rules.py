"""A boundary for each parameter of a module, chosen by name.

The first rule that matches a parameter decides; a parameter without a rule has the default. Names
are those below the module that becomes the unit. The result is stored by name (`PerParameter`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase

from .._errors import LayoutError
from ._boundary import Blocks, Boundary, PerParameter, Word, check_boundary
from ._spec import ParamSpec


@dataclass(frozen=True)
class BoundaryRules:
    """A boundary for each parameter; made by `by_name`.

    Attributes:
        rules: a glob of names, and the boundary of parameters that match.
        default: the boundary of other parameters.
        missing_ok: whether a rule may match no parameter.
    """

    rules: tuple[tuple[str, Word | Blocks], ...]
    default: Word | Blocks
    missing_ok: bool

    def __str__(self) -> str:
        """The form that ranks compare."""
        told = (f"{glob!r}: {boundary}" for glob, boundary in self.rules)
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
    if not isinstance(rules, Mapping) or not all(isinstance(glob, str) for glob in rules):
        raise LayoutError(
            f"flat_param.by_name: rules is {rules!r}, but it must be a mapping from globs of names "
            'to boundaries. Write for example {"*.weight": "tensor"}.'
        )
    for boundary in (*rules.values(), default):
        check_boundary(boundary, where="by_name")
    return BoundaryRules(tuple(rules.items()), default, missing_ok)


def resolve(
    boundary: Boundary | BoundaryRules, specs: Sequence[ParamSpec], *, where: str = "fully_shard"
) -> Boundary:
    """The boundary of each parameter of a unit."""
    if isinstance(boundary, Mapping):
        raise LayoutError(
            f"flat_param.{where}: boundary is {boundary!r}, but names alone are no rules. Pass "
            f"flat_param.by_name({boundary!r})."
        )
    if not isinstance(boundary, BoundaryRules):
        check_boundary(boundary, where=where)
        return boundary
    matching = [[glob for glob, _ in boundary.rules if _matches(glob, spec)] for spec in specs]
    used = {glob for globs in matching for glob in globs}
    for glob, _ in boundary.rules:
        if glob not in used and not boundary.missing_ok:
            raise _matches_nothing(glob, specs)
    of = dict(boundary.rules)
    return PerParameter(
        tuple(
            (spec.name, of[globs[0]] if globs else boundary.default)
            for spec, globs in zip(specs, matching, strict=True)
        )
    )


def _matches(glob: str, spec: ParamSpec) -> bool:
    return any(fnmatchcase(name, glob) for name in spec.names)


def _matches_nothing(glob: str, specs: Sequence[ParamSpec]) -> LayoutError:
    names = [spec.name for spec in specs]
    close = get_close_matches(glob, names, n=1)
    meant = (
        f"Did you mean {close[0]!r}?" if close else f"There are {', '.join(names[:5]) or 'none'}."
    )
    return LayoutError(
        f"flat_param.fully_shard: boundary has a rule for {glob!r}, but no parameter of the "
        f"unit matches it; names are those below the module that is sharded. {meant} If some "
        "units lack it, pass missing_ok=True."
    )
