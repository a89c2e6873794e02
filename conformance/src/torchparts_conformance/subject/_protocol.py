"""What an implementation tells the suite about itself."""

from __future__ import annotations

import re
import types
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from torchparts_conformance._errors import AdapterError
from torchparts_conformance.requirements._areas import AREAS, CLAIMED_BY_ALL, PARTS

PROTOCOL = "1"
MAX_NAME = 100
MAX_DISTRIBUTIONS = 20
_DISTRIBUTION = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,98}[A-Za-z0-9])?")


@dataclass(frozen=True)
class Implementation:
    """Where the parts of one implementation are, and what it claims beyond the drop-in names.

    Args:
        name: shown in reports and badges; 1 to 100 printable characters.
        version: of the implementation, likewise.
        distributions: names of the installed distributions that hold the code; hashed in reports.
        parts: area -> the object whose attributes are the drop-in names, or `"module"` or
            `"module:attribute"`, imported when a case needs it. Areas left out are not provided.
        capabilities: area -> names of the capability profiles the implementation claims there.
        lacks: area -> {name, option or id of a requirement: why}, of what the part has not though
            it looks as if it had: a keyword that it would pass on, or a function that needs what is
            not there. Names that the part does not have are found without being said.
        torch: the versions the implementation is for, as in `">=2.9,<2.12"`; empty for those that
            the metadata of its distributions allow.
        protocol: version of this interface the adapter was written for.
    Raises:
        AdapterError: a name is empty or too long, an area is unknown, the protocol is not ours, or
            a field is not what is said here.
    Example:
        >>> Implementation("mine", "1.0", parts={"ckpt-wrap": "mine.wrapper"}).provides("combined")
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
        object.__setattr__(self, "distributions", tuple(self.distributions))
        object.__setattr__(self, "parts", types.MappingProxyType(dict(self.parts)))
        object.__setattr__(
            self,
            "capabilities",
            types.MappingProxyType({a: frozenset(c) for a, c in self.capabilities.items()}),
        )
        object.__setattr__(
            self, "lacks", types.MappingProxyType({a: dict(said) for a, said in self.lacks.items()})
        )

    def provides(self, area: str) -> bool:
        """Say whether this implementation has the part; `combined` needs all four."""
        return all(part in self.parts for part in (PARTS if area == "combined" else (area,)))

    def claims(self, area: str, profile: str) -> bool:
        """Say whether the implementation is held to this profile of an area."""
        if not self.provides(area):
            return False
        return profile in CLAIMED_BY_ALL or profile in self.capabilities.get(area, frozenset())


def _violation(implementation: Implementation) -> str:
    """Say what is wrong with an adapter, or give an empty string."""
    if implementation.protocol != PROTOCOL:
        return (
            f"protocol {implementation.protocol!r} is not spoken here, but {PROTOCOL!r} is. "
            "Install the suite the adapter was written for, or update the adapter."
        )
    for word in ("name", "version"):
        value = getattr(implementation, word)
        if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME:
            return f"{word} {value!r:.120} is unusable, but 1 to {MAX_NAME} characters are needed."
    return (
        _violation_in_distributions(implementation.distributions)
        or _violation_in_areas("parts", implementation.parts, PARTS)
        or _violation_in_areas("capabilities", implementation.capabilities, AREAS)
        or _violation_in_profiles(implementation.capabilities)
        or _violation_in_areas("lacks", implementation.lacks, AREAS)
        or _violation_in_lacks(implementation.lacks)
        or _violation_in_torch(implementation.torch)
    )


def _violation_in_distributions(names: Any) -> str:
    if not isinstance(names, (tuple, list)):
        return "distributions is no tuple, but a tuple of names. Write ('my-distribution',)."
    if len(names) > MAX_DISTRIBUTIONS:
        return f"distributions holds {len(names)}, but {MAX_DISTRIBUTIONS} is the most. Name fewer."
    for name in names:
        if not isinstance(name, str) or not _DISTRIBUTION.fullmatch(name):
            return (
                f"distributions has {name!r:.120}, but a distribution is named by letters, digits, "
                "'-', '_' and '.'. Write the name that pip list shows."
            )
    return ""


def _violation_in_areas(word: str, given: Any, allowed: tuple[str, ...]) -> str:
    if not isinstance(given, Mapping):
        kind = type(given).__name__
        return f"{word} is of type {kind}, but it goes from area to value. Write a dict."
    if unknown := sorted(set(given) - set(allowed), key=repr):
        return f"{word} names {unknown!r:.120}, but the areas are {', '.join(allowed)}."
    return ""


def _violation_in_profiles(capabilities: Mapping[str, Any]) -> str:
    for area, profiles in capabilities.items():
        named = isinstance(profiles, Collection) and not isinstance(profiles, (str, bytes, Mapping))
        if not named or not all(isinstance(profile, str) for profile in profiles):
            return (
                f"capabilities of {area} is {profiles!r:.120}, but a set of names is needed. "
                "Write {'compile'}."
            )
    return ""


def _violation_in_lacks(lacks: Mapping[str, Any]) -> str:
    for area, said in lacks.items():
        words = [*said, *said.values()] if isinstance(said, Mapping) else [None]
        if not all(isinstance(word, str) and word for word in words):
            return (
                f"lacks of {area} is {said!r:.120}, but it goes from a name to why it is not "
                "there. Write {'name': 'reason'}."
            )
    return ""


def _violation_in_torch(versions: Any) -> str:
    if versions == "":
        return ""
    # An adapter is imported wherever a part is; most name no versions, and need not wait for this.
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    try:
        SpecifierSet(versions)
    except (InvalidSpecifier, TypeError, AttributeError):
        return f"torch is {versions!r:.120}, but versions are needed. Write '>=2.9,<2.12'."
    return ""
