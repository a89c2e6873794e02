"""The adapter of the torchparts packages."""

from __future__ import annotations

from importlib import import_module

from torchparts_conformance import Implementation
from torchparts_conformance.requirements._registry import AREAS, load_area

_MODULES = {
    "ckpt-wrap": "ckpt_wrap",
    "mod-tracker": "mod_tracker",
    "flat-param": "flat_param",
    "sac-policies": "sac_policies",
}


def _version() -> str:
    versions = {import_module(module).__version__ for module in _MODULES.values()}
    return " / ".join(sorted(versions))


def implementation() -> Implementation:
    """Adapt the four packages; they claim every capability profile of the registry."""
    profiles = {
        area: frozenset(requirement.profile for requirement in load_area(area)) for area in AREAS
    }
    return Implementation(
        name="torchparts",
        version=_version(),
        distributions=tuple(_MODULES),
        parts=_MODULES,
        capabilities=profiles,
    )
