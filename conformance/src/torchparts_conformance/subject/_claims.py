"""What a run holds an implementation to: the profiles that it claims and that were chosen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torchparts_conformance._errors import AdapterError, OptionError
from torchparts_conformance.requirements._requirement import Requirement
from torchparts_conformance.subject._protocol import Implementation


@dataclass(frozen=True)
class Claims:
    """The claims of one run.

    `profiles` is None when every profile is to be claimed; `unfit` says why nothing is provided
    here although the implementation has it, or is empty.
    """

    implementation: Implementation
    areas: tuple[str, ...]
    devices: tuple[str, ...]
    profiles: tuple[str, ...] | None = None
    unfit: str = ""

    def hold(self, requirement: Requirement) -> bool:
        """Say whether the implementation is held to a requirement."""
        return self._claim(requirement) and not self.unfit

    def _claim(self, requirement: Requirement) -> bool:
        is_chosen = self.profiles is None or requirement.profile in self.profiles
        return is_chosen and self.implementation.claims(requirement.area, requirement.profile)

    def lacks(self, requirement: Requirement) -> str:
        """Give the outcome of a requirement that the implementation is not held to, or nothing."""
        if self.hold(requirement):
            return ""
        is_absent = self._claim(requirement) or not self.implementation.provides(requirement.area)
        return "not_provided" if is_absent else "not_claimed"

    def why_not(self, requirement: Requirement) -> str:
        """Say why the implementation is not held to a requirement."""
        if not self.implementation.provides(requirement.area):
            return f"{requirement.area} is not provided"
        return self.unfit or not_claimed(requirement.profile)

    def provided_areas(self) -> tuple[str, ...]:
        """Give the areas asked for that the implementation has."""
        return tuple(area for area in self.areas if self.implementation.provides(area))

    def to_json(self) -> dict[str, Any]:
        """Give what a report says about the claims."""
        capabilities = sorted(self.implementation.capabilities.items())
        return {
            "areas": list(self.areas),
            "devices": list(self.devices),
            "profiles": None if self.profiles is None else list(self.profiles),
            "capabilities": {area: sorted(found) for area, found in capabilities},
        }


def not_claimed(profile: str) -> str:
    """Say why nobody is held to a requirement of a profile."""
    return f"profile {profile} is not claimed"


def refuse_unknown_profiles(chosen: Iterable[str], registry: Mapping[str, Requirement]) -> None:
    """Refuse profiles that were chosen and that no requirement has.

    Raises:
        OptionError: there is one.
    """
    known = profiles_of(registry.values())
    if unknown := sorted(set(chosen) - known):
        named = ", ".join(f"{word!r:.60}" for word in unknown)
        raise OptionError(
            f"--profile {named} is unknown, but these are known: {', '.join(sorted(known))}."
        )


def refuse_unknown(claims: Claims, registry: Mapping[str, Requirement]) -> None:
    """Refuse profiles of an implementation that no requirement has.

    Raises:
        AdapterError: the implementation claims one.
    """
    for area, profiles in sorted(claims.implementation.capabilities.items()):
        known = profiles_of(r for r in registry.values() if r.area == area)
        if unknown := sorted(profiles - known):
            raise AdapterError(
                f"implementation {claims.implementation.name!r} claims {unknown[0]!r:.60} for "
                f"{area}, but its profiles are {', '.join(sorted(known)) or 'none'}. "
                "Correct the adapter's capabilities."
            )


def profiles_of(requirements: Iterable[Requirement]) -> set[str]:
    """Give the profiles that some requirements are of."""
    return {requirement.profile for requirement in requirements}
