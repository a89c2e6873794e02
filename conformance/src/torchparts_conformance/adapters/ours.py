"""The adapter of the torchparts packages."""

from __future__ import annotations

from importlib import import_module

from torchparts_conformance import Implementation
from torchparts_conformance.requirements._areas import AREAS
from torchparts_conformance.requirements._cases import load_registry

_MODULES = {
    "ckpt-wrap": "ckpt_wrap",
    "mod-tracker": "mod_tracker",
    "flat-param": "flat_param",
    "sac-policies": "sac_policies",
}
_PARTS = {
    **_MODULES,
    "flat-param": "torchparts_conformance.adapters.inside_flat_param",
    "sac-policies": "torchparts_conformance.adapters.inside_sac_policies",
}


_PARTS = {**_MODULES, "sac-policies": "torchparts_conformance.adapters.inside_sac_policies"}


def _version() -> str:
    versions = {import_module(module).__version__ for module in _MODULES.values()}
    return " / ".join(sorted(versions))


def implementation() -> Implementation:
    """Adapt the four packages; they claim every profile that a requirement has."""
    registry = load_registry().values()
    profiles = {area: frozenset(r.profile for r in registry if r.area == area) for area in AREAS}
    return Implementation(
        name="torchparts",
        version=_version(),
        distributions=tuple(_MODULES),
        parts=_PARTS,
        capabilities=profiles,
    )
