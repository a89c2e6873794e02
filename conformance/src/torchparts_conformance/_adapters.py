"""Find an implementation by name, path, environment variable or entry point, and import it."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torchparts_conformance._errors import AdapterError, one_line
from torchparts_conformance._implementation import Implementation
from torchparts_conformance.requirements._areas import AREAS

ENTRY_POINTS = "torchparts.conformance"
VARIABLE = "TORCHPARTS_IMPL"
_FOLDER = "torchparts_conformance.adapters"
# Short name -> module of the adapter, and the distributions that it needs.
SHIPPED: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "ours": ("ours", AREAS),
    "torch": ("inside_torch", ("torch",)),
    "fsdp1": ("fsdp1", ("torch",)),
    "fsdp2": ("fsdp2", ("torch",)),
    "torch-tools": ("torch_tools", ("torch",)),
    "fairscale": ("fairscale", ("fairscale",)),
    "torch-remat": ("torch_remat", ("torch-remat",)),
    "deepspeed": ("deepspeed", ("deepspeed",)),
    "transformers": ("transformers", ("transformers",)),
}


def known_adapters() -> dict[str, str]:
    """Return every short name with its `module:attribute`."""
    shipped = {name: f"{_FOLDER}.{module}:implementation" for name, (module, _) in SHIPPED.items()}
    return {**{point.name: point.value for point in _entry_points()}, **shipped}


def _entry_points() -> list[importlib.metadata.EntryPoint]:
    return sorted(importlib.metadata.entry_points(group=ENTRY_POINTS), key=lambda point: point.name)


def installed(name: str) -> str:
    """Return the distributions of a short name with their versions, or the missing ones."""
    wanted = _distributions(name)
    if missing := missing_of(wanted):
        return f"not installed: {', '.join(missing)}"
    return ", ".join(f"{distribution} {version_of(distribution)}" for distribution in wanted)


def _distributions(name: str) -> tuple[str, ...]:
    if name in SHIPPED:
        return SHIPPED[name][1]
    points = [point for point in _entry_points() if point.name == name]
    return tuple(point.dist.name for point in points if point.dist is not None)


def missing_of(distributions: Iterable[str]) -> list[str]:
    """Return those distributions that are not installed."""
    return [distribution for distribution in distributions if not version_of(distribution)]


def version_of(distribution: str) -> str:
    """Return the version of a distribution; "" if the distribution is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        found = importlib.util.find_spec(distribution.replace("-", "_"))
        return "from source" if found is not None else ""


def adapter_path(spec: str | None) -> str:
    """Return `module:attribute` of a short name; the default is the environment variable."""
    wanted = spec or os.environ.get(VARIABLE, "")
    if not wanted:
        raise AdapterError(f"no implementation was named. Add --impl NAME or set {VARIABLE}.")
    path = known_adapters().get(wanted, wanted)
    if ":" not in path:
        raise AdapterError(
            f"implementation {wanted!r} is unknown. Name one of "
            f"{', '.join(sorted(known_adapters()))}, or your adapter as module:attribute; "
            "torchparts-conformance without arguments shows how to write one."
        )
    return path


def load_implementation(spec: str | None = None) -> Implementation:
    """Find and import an adapter.

    Args:
        spec: a short name, or `module:attribute`; by default the environment variable
            `TORCHPARTS_IMPL`.
    """
    path = adapter_path(spec)
    _see_working_directory()
    name = spec or os.environ[VARIABLE]
    role = f"implementation {name!r}"
    if missing := missing_of(_distributions(name)):
        raise AdapterError(
            f"{role} needs {', '.join(missing)}. Run python -m pip install {' '.join(missing)}."
        )
    adapter = import_object(path, role=role)
    if callable(adapter) and not isinstance(adapter, Implementation):
        adapter = _call(adapter, role)
    if not isinstance(adapter, Implementation):
        raise AdapterError(
            f"{role} is a {type(adapter).__name__}; it must be an Implementation, or a function "
            "that returns one."
        )
    return adapter


def _see_working_directory() -> None:
    """Add the working directory to the import path: an installed command does not search it."""
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path and not getattr(sys.flags, "safe_path", False):
        sys.path.append(here)


def _call(factory: Any, role: str) -> Any:
    try:
        return factory()
    except KeyboardInterrupt:
        raise
    except AdapterError as error:
        raise AdapterError(f"{role}: {error}") from error
    except BaseException as error:  # an adapter may also skip, or exit
        raise AdapterError(f"{role} raised {one_line(error)}. Correct the adapter.") from error


def import_object(path: str, *, role: str) -> Any:
    """Import `module` or `module:attribute`; an attribute may be dotted."""
    module, _, attribute = path.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for name in attribute.split(".") if attribute else ():
            found = getattr(found, name)
    except KeyboardInterrupt:
        raise
    except AdapterError as error:  # already has a clear message
        raise AdapterError(f"{role}: {error}") from error
    except ModuleNotFoundError as error:
        missing = (error.name or module).partition(".")[0]
        raise AdapterError(
            f"{role}: importing {path!r} raised {one_line(error)}. If the name is right, install "
            f"the package that contains it, usually with python -m pip install {missing}."
        ) from error
    except BaseException as error:  # an adapter may also skip, or exit
        raise AdapterError(
            f"{role}: importing {path!r} raised {one_line(error)}. Install what it needs, or "
            "correct the name."
        ) from error
    return found


def load_part(implementation: Implementation, area: str) -> Any:
    """Return the part of one area."""
    if area not in implementation.parts:
        raise AdapterError(
            f"{implementation.name!r} does not provide {area!r}. Run another area, or give it in "
            "the adapter's parts."
        )
    part = implementation.parts[area]
    role = f"part {area!r} of {implementation.name!r}"
    return import_object(part, role=role) if isinstance(part, str) else part


def adapter_file(spec: str) -> Path | None:
    """Return the file of an imported adapter."""
    module = known_adapters().get(spec, spec).partition(":")[0]
    origin = getattr(sys.modules.get(module), "__file__", None)
    return Path(origin) if origin else None
