"""The adapter of the torchparts packages."""

from __future__ import annotations

from importlib import import_module
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


class _Joined:
    """The names of a package and of its public submodules, as the cases use them."""

    def __init__(self, package: str, *submodules: str) -> None:
        self._modules = (package, *(f"{package}.{name}" for name in submodules))

    def __getattr__(self, name: str) -> Any:
        for module in map(import_module, self._modules):
            if name in module.__all__:
                return getattr(module, name)
        raise AttributeError(f"{self._modules[0]} has no {name}")


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
        parts={
            **_MODULES,
            "flat-param": _Joined("flat_param", "plan", "handle"),
            "sac-policies": _Joined("sac_policies", "budget", "policies", "reports"),
        },
        capabilities=profiles,
    )
