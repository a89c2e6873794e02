"""What an implementation does not offer, known from its adapter before any case runs.

Rule 1: a name that a part lacks, or an option that a function of it does not take, is missing; so
is what the adapter says it lacks. No function of the part is called to find that out.
Rule 2: where an implementation is not for the torch that is installed, all of it is missing.
"""

from __future__ import annotations

import importlib.metadata
import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet

from torchparts_conformance.requirements._needs import Needs
from torchparts_conformance.subject._protocol import Implementation

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_ABSENT = object()


def why_missing(part: Any, needs: Needs, lacks: Mapping[str, str], ids: Iterable[str] = ()) -> str:
    """Say which of its needs a case would not find, or give an empty string.

    Args:
        part: the object under test.
        needs: of the case.
        lacks: what the adapter says is not there: a name, an option or a requirement, and why.
        ids: of the requirements that the case checks.
    """
    said = (*ids, *needs.names, *(option for _, option in needs.options | needs.attempts))
    if declared := sorted(set(said) & set(lacks)):
        return f"{declared[0]}: {lacks[declared[0]]}"
    missing = [*_missing_names(part, needs), *_missing_options(part, needs)]
    return f"there is no {', '.join(missing)}" if missing else ""


def _missing_names(part: Any, needs: Needs) -> Iterator[str]:
    yield from (name for name in sorted(needs.names) if _found(part, name) is _ABSENT)


def _missing_options(part: Any, needs: Needs) -> Iterator[str]:
    for name, option in sorted(needs.options):
        try:
            parameters = inspect.signature(_found(part, name)).parameters.values()
        except (TypeError, ValueError):  # not callable, or it does not say what it takes
            continue
        takes = {p.name for p in parameters if p.kind in _NAMED}
        if option not in takes and all(p.kind is not p.VAR_KEYWORD for p in parameters):
            yield f"{option}= of {name}"


def _found(part: Any, name: str) -> Any:
    """Give what is there, also where asking for it raises: then a case may show how."""
    for word in name.split("."):
        try:
            part = getattr(part, word)
        except AttributeError:
            return _ABSENT
        except Exception:
            return None
    return part


def unfit_torch(implementation: Implementation) -> str:
    """Say why an implementation is not for the torch that is installed, or nothing.

    That is what the adapter says, or a distribution of the implementation in its metadata.
    """
    import torch

    installed = str(torch.__version__)
    for who, wanted in _wanted_torchs(implementation):
        if not wanted.contains(installed, prereleases=True):
            return f"{who} is for torch {wanted}, but {installed} is installed"
    return ""


def _wanted_torchs(implementation: Implementation) -> Iterator[tuple[str, SpecifierSet]]:
    if implementation.torch:
        who = f"{implementation.name} {implementation.version}"
        yield who, SpecifierSet(implementation.torch)
    for name in implementation.distributions:
        try:
            lines = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        yield from ((name, wanted) for line in lines if (wanted := _torch_in(line)) is not None)


def _torch_in(line: str) -> SpecifierSet | None:
    try:
        needed = Requirement(line)
    except InvalidRequirement:
        return None
    is_meant = needed.name == "torch" and (needed.marker is None or needed.marker.evaluate())
    return needed.specifier if is_meant else None
