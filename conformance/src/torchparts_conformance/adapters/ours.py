"""The adapter of the torchparts packages."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

from torchparts_conformance import Implementation
from torchparts_conformance.requirements._areas import AREAS
from torchparts_conformance.requirements._cases import load_registry

_MODULES = {
    "ckpt-wrap": "ckpt_wrap",
    "mod-tracker": "mod_tracker",
    "flat-param": "flat_param",
    "sac-policies": "sac_policies",
}


_SUBMODULES = {
    "flat_param": ("plan", "handle"),
    "sac_policies": ("budget", "policies", "reports"),
}


def __getattr__(name: str) -> Any:
    """Return names of a package and of its public submodules."""
    if name not in _SUBMODULES:
        raise AttributeError(name)
    modules = (name, *(f"{name}.{each}" for each in _SUBMODULES[name]))
    found = map(import_module, modules)
    return SimpleNamespace(**{each: getattr(m, each) for m in found for each in m.__all__})


def _version() -> str:
    versions = {import_module(module).__version__ for module in _MODULES.values()}
    return " / ".join(sorted(versions))


def implementation() -> Implementation:
    """Adapt the four packages; they claim every existing profile."""
    registry = load_registry().values()
    profiles = {area: frozenset(r.profile for r in registry if r.area == area) for area in AREAS}
    return Implementation(
        name="torchparts",
        version=_version(),
        distributions=tuple(_MODULES),
        parts={
            **_MODULES,
            "flat-param": f"{__name__}:flat_param",
            "sac-policies": f"{__name__}:sac_policies",
        },
        capabilities=profiles,
    )
