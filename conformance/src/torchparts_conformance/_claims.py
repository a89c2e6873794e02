"""What an implementation is judged by in a run: its claimed profiles, and the names of its parts.

Missing names and options are found before any case runs, without calling a part: names are looked
up, and options are compared with signatures.
"""

from __future__ import annotations

import importlib.metadata
import inspect
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torchparts_conformance._errors import AdapterError, OptionError
from torchparts_conformance._implementation import Implementation
from torchparts_conformance.requirements._needs import Needs
from torchparts_conformance.requirements._requirement import Requirement

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_ABSENT = object()


@dataclass(frozen=True)
class Claims:
    """The claims of one run.

    Attributes:
        implementation: the implementation under test.
        profiles: the chosen profiles; None for core and those that the implementation claims.
        unfit: why the implementation does not support the installed torch, or "".
    """

    implementation: Implementation
    profiles: tuple[str, ...] | None = None
    unfit: str = ""

    def why_not(self, requirement: Requirement) -> tuple[str, str]:
        """Return outcome and reason if a requirement does not apply, or ''."""
        if not self.implementation.provides(requirement.area):
            return "not_provided", f"{requirement.area} is not provided"
        area, profile = requirement.area, requirement.profile
        chosen = self.profiles
        if not (self.implementation.claims(area, profile) if chosen is None else profile in chosen):
            return "not_claimed", f"profile {profile} is not claimed"
        return ("not_provided", self.unfit) if self.unfit else ("", "")


def check_profiles(chosen: Iterable[str], registry: Mapping[str, Requirement]) -> None:
    """Raise if no requirement has a chosen profile."""
    known = {requirement.profile for requirement in registry.values()}
    if unknown := sorted(set(chosen) - known):
        raise OptionError(
            f"--profile {unknown[0]!r:.60} is unknown. Known are {', '.join(sorted(known))}."
        )


def check_capabilities(implementation: Implementation, registry: Mapping[str, Requirement]) -> None:
    """Raise if no requirement has a claimed capability."""
    for area, profiles in sorted(implementation.capabilities.items()):
        known = {
            requirement.profile for requirement in registry.values() if requirement.area == area
        }
        if unknown := sorted(profiles - known):
            raise AdapterError(
                f"implementation {implementation.name!r} claims {unknown[0]!r:.60} for {area}. "
                f"Its profiles are {', '.join(sorted(known)) or 'none'}."
            )


def why_missing(
    part: Any, needs: Needs, lacks: Mapping[str, str], ids: Collection[str] = ()
) -> str:
    """Return which name or option that a case needs is missing, or "".

    Args:
        part: the object under test.
        needs: names and options that the case uses.
        lacks: name, option or requirement -> the adapter's reason why it is missing.
        ids: requirements that the case checks.
    """
    said = (*ids, *needs.names, *(option for _, option in needs.options | needs.attempts))
    if declared := sorted(set(said) & set(lacks)):
        first = declared[0]
        return lacks[first] if first in ids else f"{first}: {lacks[first]}"
    missing = [name for name in sorted(needs.names) if _found(part, name) is _ABSENT]
    missing += _missing_options(part, needs)
    return f"there is no {', '.join(missing)}" if missing else ""


def _missing_options(part: Any, needs: Needs) -> Iterator[str]:
    for name, option in sorted(needs.options):
        try:
            parameters = inspect.signature(_found(part, name)).parameters.values()
        except (TypeError, ValueError):  # not callable, or without a signature
            continue
        takes = {p.name for p in parameters if p.kind in _NAMED}
        if option not in takes and all(p.kind is not p.VAR_KEYWORD for p in parameters):
            yield f"{option}= of {name}"


def _found(part: Any, name: str) -> Any:
    """Look up a dotted name. An attribute that raises counts as found; the case then fails."""
    for word in name.split("."):
        try:
            part = getattr(part, word)
        except AttributeError:
            return _ABSENT
        except Exception:
            return None
    return part


def unfit_torch(implementation: Implementation) -> str:
    """Return why an implementation does not support the installed torch, or "".

    The adapter may say so, or the metadata of one of its distributions.
    """
    import torch
    from packaging.specifiers import SpecifierSet

    wanted = [(f"{implementation.name} {implementation.version}", implementation.torch)]
    for name in implementation.distributions:
        wanted += [(name, versions) for versions in _torch_wanted_by(name)]
    for who, versions in wanted:
        if not SpecifierSet(versions).contains(str(torch.__version__), prereleases=True):
            return f"{who} is for torch {versions}, but {torch.__version__} is installed"
    return ""


def _torch_wanted_by(distribution: str) -> Iterator[str]:
    from packaging.requirements import InvalidRequirement
    from packaging.requirements import Requirement as Wanted

    try:
        lines = importlib.metadata.requires(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        return
    for line in lines:
        try:
            needed = Wanted(line)
        except InvalidRequirement:
            continue
        if needed.name == "torch" and (needed.marker is None or needed.marker.evaluate()):
            yield str(needed.specifier)
