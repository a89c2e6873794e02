"""`Implementation`: how an adapter describes itself to the suite."""

from __future__ import annotations

import types
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from torchparts_conformance._errors import AdapterError
from torchparts_conformance.requirements._areas import AREAS, CORE

PROTOCOL = "1"
MAX_NAME = 100


@dataclass(frozen=True)
class Implementation:
    """Locations of the parts of one implementation, and its claims beyond core.

    Args:
        name: shown in reports and badges; 1 to 100 characters.
        version: of the implementation; 1 to 100 characters.
        distributions: names of the installed distributions that contain the code.
        parts: area -> the object whose attributes the cases use, or `"module"` or
            `"module:attribute"`. Areas that are left out are not provided.
        capabilities: area -> names of the profiles that the implementation claims there beside
            core, such as "robust".
        lacks: area -> {name, option or id of a requirement: reason}, for things that seem to be
            there but do not work. The suite itself finds names that a part does not have.
        torch: supported versions of torch, as in `">=2.9,<2.12"`; by default those in the metadata
            of its distributions.
        protocol: version of this interface that the adapter was written for.
    Raises:
        AdapterError: a name is empty or too long, an area or the protocol is unknown, or a field
            has the wrong form.
    Example:
        >>> Implementation("mine", "1.0", parts={"ckpt-wrap": "mine"}).provides("flat-param")
        False
    """

    name: str
    version: str
    distributions: tuple[str, ...] = ()
    parts: Mapping[str, Any] = field(default_factory=dict)
    capabilities: Mapping[str, frozenset[str] | set[str]] = field(default_factory=dict)
    lacks: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    torch: str = ""
    protocol: str = PROTOCOL

    def __post_init__(self) -> None:
        if reason := _violation(self):
            raise AdapterError(f"torchparts_conformance.Implementation: {reason}")
        frozen = {
            "distributions": tuple(self.distributions),
            "parts": types.MappingProxyType(dict(self.parts)),
            "capabilities": types.MappingProxyType(
                {area: frozenset(found) for area, found in self.capabilities.items()}
            ),
            "lacks": types.MappingProxyType({a: dict(found) for a, found in self.lacks.items()}),
        }
        for word, value in frozen.items():
            object.__setattr__(self, word, value)

    def provides(self, area: str) -> bool:
        """Return whether this implementation has the part."""
        return area in self.parts

    def claims(self, area: str, profile: str) -> bool:
        """Return whether the implementation claims this profile of an area."""
        if not self.provides(area):
            return False
        return profile == CORE or profile in self.capabilities.get(area, frozenset())


def _violation(implementation: Implementation) -> str:
    """Return what is wrong with an adapter, or an empty string."""
    if implementation.protocol != PROTOCOL:
        return (
            f"protocol is {implementation.protocol!r:.60}; this suite has {PROTOCOL!r}. Install "
            "the suite the adapter was written for, or update the adapter."
        )
    for word in ("name", "version"):
        value = getattr(implementation, word)
        if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME:
            return f"{word} is {value!r:.120}; it must be text of 1 to {MAX_NAME} characters."
    if not _are_words(implementation.distributions):
        return (
            f"distributions is {implementation.distributions!r:.120}; it must be a tuple of names, "
            "as pip list shows them."
        )
    for word in ("parts", "capabilities", "lacks"):
        given = getattr(implementation, word)
        if not isinstance(given, Mapping):
            return f"{word} is a {type(given).__name__}; it must be a dict from area to value."
        if unknown := sorted(set(given) - set(AREAS), key=repr):
            return f"{word} names {unknown!r:.120}; the areas are {', '.join(AREAS)}."
    for area, profiles in implementation.capabilities.items():
        if not _are_words(profiles):
            return f"capabilities of {area} is {profiles!r:.120}; write a set such as {{'compile'}}"
    for area, said in implementation.lacks.items():
        if not isinstance(said, Mapping) or not _are_words([*said, *said.values()]):
            return f"lacks of {area} is {said!r:.120}; write a dict such as {{'name': 'reason'}}."
    return _violation_in_torch(implementation.torch)


def _are_words(given: Any) -> bool:
    is_collection = isinstance(given, Collection) and not isinstance(given, (str, bytes, Mapping))
    return is_collection and all(isinstance(word, str) and word for word in given)


def _violation_in_torch(versions: Any) -> str:
    if versions == "":
        return ""
    # Imported here, since most adapters name no versions.
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    try:
        SpecifierSet(versions)
    except (InvalidSpecifier, TypeError, AttributeError):
        return f"torch is {versions!r:.120}; it must be versions such as '>=2.9,<2.12'."
    return ""
