"""Finds an implementation by name, path, environment variable or entry point; imports it."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import types
from collections.abc import Mapping
from typing import Any

from torchparts_conformance._errors import AdapterError
from torchparts_conformance.requirements._areas import PARTS
from torchparts_conformance.subject._protocol import Implementation

ENTRY_POINTS = "torchparts.conformance"
VARIABLE = "TORCHPARTS_IMPL"
SHIPPED: Mapping[str, str] = {
    "ours": "torchparts_conformance.adapters.ours:implementation",
    "torch": "torchparts_conformance.adapters.inside_torch:implementation",
    "fsdp1": "torchparts_conformance.adapters.fsdp1:implementation",
    "fsdp2": "torchparts_conformance.adapters.fsdp2:implementation",
    "torch-tools": "torchparts_conformance.adapters.torch_tools:implementation",
    "torch-profiler": "torchparts_conformance.adapters.torch_profiler:implementation",
    "torch-budget": "torchparts_conformance.adapters.torch_budget:implementation",
    "fairscale": "torchparts_conformance.adapters.fairscale:implementation",
    "xformers": "torchparts_conformance.adapters.xformers:implementation",
    "torch-remat": "torchparts_conformance.adapters.torch_remat:implementation",
    "torchtune": "torchparts_conformance.adapters.torchtune:implementation",
    "deepspeed": "torchparts_conformance.adapters.deepspeed:implementation",
    "transformers": "torchparts_conformance.adapters.transformers:implementation",
    "lightning": "torchparts_conformance.adapters.lightning:implementation",
    "torchtitan": "torchparts_conformance.adapters.torchtitan:implementation",
}

# What has to be installed for those that come with the suite, as `pip list` shows it.
DISTRIBUTIONS: Mapping[str, tuple[str, ...]] = {
    "ours": PARTS,
    "torch": ("torch",),
    "fsdp1": ("torch",),
    "fsdp2": ("torch",),
    "torch-tools": ("torch",),
    "torch-profiler": ("torch",),
    "torch-budget": ("torch",),
    **{n: (n,) for n in ("fairscale", "xformers", "torch-remat", "torchtune", "deepspeed")},
    **{n: (n,) for n in ("transformers", "lightning", "torchtitan")},
}


def known_adapters() -> dict[str, str]:
    """Give every short name with its `module:attribute`: ours, and those of entry points."""
    found = {point.name: point.value for point in _entry_points()}
    return {**found, **SHIPPED}


def installed(name: str) -> str:
    """Give the distributions behind a short name with their versions, or what is not installed."""
    points = {point.name: point for point in _entry_points()}
    if name not in SHIPPED and (point := points.get(name)) is not None and point.dist is not None:
        return f"{point.dist.name} {point.dist.version}"
    versions = {wanted: _version_of(wanted) for wanted in DISTRIBUTIONS.get(name, ())}
    if missing := [wanted for wanted, found in versions.items() if not found]:
        return f"not installed: {', '.join(missing)}"
    same: dict[str, list[str]] = {}
    for wanted, found in versions.items():
        same.setdefault(found, []).append(wanted)
    return "; ".join(f"{', '.join(names)} {found}" for found, names in same.items()) or "-"


def _version_of(name: str) -> str:
    """Give the version of a distribution, or of a package that is only on the path."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        found = importlib.util.find_spec(name.replace("-", "_"))
        return "from its source" if found is not None else ""


def _entry_points() -> list[importlib.metadata.EntryPoint]:
    return sorted(importlib.metadata.entry_points(group=ENTRY_POINTS), key=lambda point: point.name)


def load_implementation(spec: str | None = None) -> Implementation:
    """Find and import an adapter.

    Args:
        spec: a short name, or `module:attribute`; without one, the environment variable
            `TORCHPARTS_IMPL` is read.
    Raises:
        AdapterError: nothing was named, it cannot be imported, or it is no `Implementation`.
    """
    wanted = spec or os.environ.get(VARIABLE, "")
    if not wanted:
        raise AdapterError(
            f"no implementation given, but one is needed. Add --impl NAME or set {VARIABLE}."
        )
    path = known_adapters().get(wanted, wanted)
    if ":" not in path:
        raise AdapterError(
            f"implementation {wanted!r} is unknown, but it must be one of "
            f"{', '.join(sorted(known_adapters()))} or module:attribute."
        )
    adapter = import_object(path, role=f"implementation {wanted!r}")
    if callable(adapter) and not isinstance(adapter, Implementation):
        adapter = _call(adapter, wanted)
    if not isinstance(adapter, Implementation):
        raise AdapterError(
            f"implementation {wanted!r} is a {type(adapter).__name__}, but an Implementation or a "
            "function returning one is needed."
        )
    return adapter


def _call(factory: Any, wanted: str) -> Any:
    try:
        return factory()
    except KeyboardInterrupt:
        raise
    except AdapterError as error:
        raise AdapterError(f"implementation {wanted!r}: {error}") from error
    except BaseException as error:  # an adapter may also skip, or end the process
        raise AdapterError(
            f"implementation {wanted!r} raised {one_line(error)}, but must return. "
            "Correct the adapter."
        ) from error


def import_object(path: str, *, role: str) -> Any:
    """Import `module` or `module:attribute`; an attribute may be dotted.

    Raises:
        AdapterError: it is not there, or the import raised.
    """
    module, _, attribute = path.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for name in attribute.split(".") if attribute else ():
            found = getattr(found, name)
    except KeyboardInterrupt:
        raise
    except AdapterError as error:  # it says what to do by itself
        raise AdapterError(f"{role}: {error}") from error
    except BaseException as error:  # a stranger's code may raise anything, skip or exit
        raise AdapterError(
            f"{role}: importing {path!r} raised {one_line(error)}, but must work. "
            "Install what it needs, or correct the name."
        ) from error
    return found


def one_line(error: BaseException, *, limit: int = 300) -> str:
    """Give an exception's class and message in one printable line."""
    text = ": ".join(filter(None, (type(error).__name__, _said(error))))
    flat = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return flat if len(flat) <= limit else flat[: limit - 3] + "..."


def _said(error: BaseException) -> str:
    try:
        return str(error)
    except KeyboardInterrupt:
        raise
    except BaseException:  # what a stranger raises may raise again when it is asked why
        return ""


def load_part(implementation: Implementation, area: str) -> Any:
    """Give the object of one area; for `combined`, a namespace with all four, by module name.

    Raises:
        AdapterError: the part is not provided or cannot be imported.
    """
    if area == "combined":
        return types.SimpleNamespace(
            **{part.replace("-", "_"): load_part(implementation, part) for part in PARTS}
        )
    if area not in implementation.parts:
        raise AdapterError(
            f"part {area!r} is not provided by {implementation.name!r}, but was asked for. "
            "Give it in the adapter's parts."
        )
    part = implementation.parts[area]
    role = f"part {area!r} of {implementation.name!r}"
    return import_object(part, role=role) if isinstance(part, str) else part
