"""Pure: what an implementation tells the suite about itself."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torchparts_conformance._errors import AdapterError
from torchparts_conformance._registry import AREAS, CLAIMED_BY_ALL, PARTS

PROTOCOL = "1"
MAX_NAME = 100


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
        protocol: version of this interface the adapter was written for.
    Raises:
        AdapterError: a name is empty or too long, an area is unknown, or the protocol is not ours.
    """

    name: str
    version: str
    distributions: tuple[str, ...] = ()
    parts: Mapping[str, Any] = field(default_factory=dict)
    capabilities: Mapping[str, frozenset[str] | set[str]] = field(default_factory=dict)
    protocol: str = PROTOCOL

    def __post_init__(self) -> None:
        if reason := _objection(self):
            raise AdapterError(f"torchparts_conformance.Implementation: {reason}")
        object.__setattr__(self, "distributions", tuple(self.distributions))
        object.__setattr__(self, "parts", types.MappingProxyType(dict(self.parts)))
        object.__setattr__(
            self,
            "capabilities",
            types.MappingProxyType({a: frozenset(c) for a, c in self.capabilities.items()}),
        )

    def provides(self, area: str) -> bool:
        """Say whether this implementation has the part; `combined` needs all four."""
        return all(part in self.parts for part in (PARTS if area == "combined" else (area,)))

    def claims(self, area: str, profile: str) -> bool:
        """Say whether the implementation is held to this profile of an area."""
        if not self.provides(area):
            return False
        return profile in CLAIMED_BY_ALL or profile in self.capabilities.get(area, frozenset())


def _objection(implementation: Implementation) -> str:
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
    if not isinstance(implementation.distributions, (tuple, list)):
        return "distributions is no tuple, but a tuple of names. Write ('my-distribution',)."
    for word, allowed in (("parts", PARTS), ("capabilities", AREAS)):
        if unknown := sorted(set(getattr(implementation, word)) - set(allowed)):
            return f"{word} names {unknown}, but the areas are {', '.join(allowed)}."
    return ""
