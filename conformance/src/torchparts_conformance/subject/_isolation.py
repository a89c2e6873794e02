"""Starts processes that find the judge, and the code under test only when it is let in.

Rule 1: the standard library comes first, whatever lies beside an adapter.
Rule 2: the suite, pytest and torch are imported from where installed packages are, before anything
else can be found: not `PYTHONPATH`, not the working directory, no path file, no `sitecustomize`.
Rule 3: `admit` then makes everything findable that the user's own process finds, in its order.
"""

from __future__ import annotations

import json
import os
import site
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from torchparts_conformance._package import PACKAGE

BOOT = Path(__file__).with_name("_boot.py")
# What the suite, pytest and torch import; folders of installed packages are there already.
_NEEDED = (
    *("torch", "typing_extensions", "sympy", "mpmath", "networkx", "jinja2", "markupsafe"),
    *("filelock", "fsspec", "setuptools", "numpy", "pytest", "_pytest", "pluggy", "iniconfig"),
    *("packaging", "pygments", "exceptiongroup", "tomli"),
)


@dataclass(frozen=True)
class Paths:
    """Folders to import from, and the prefixes of the environment.

    Args:
        judge: for the suite and what it needs.
        subject: for everything, in the order of the user's own process.
        sites: of `subject`, those whose path files count, as those of editable installs do.
        prefixes: `sys.prefix` and `sys.exec_prefix`.
    """

    judge: tuple[str, ...]
    subject: tuple[str, ...]
    sites: tuple[str, ...]
    prefixes: tuple[str, str]


_taken_over: list[Paths] = []
_admitted: list[Paths] = []


def take_over(handed: Mapping[str, Any]) -> None:
    """Note, in a process that was started by `command`, what was handed to it."""
    words = {word: tuple(handed[word]) for word in ("judge", "subject", "sites", "prefixes")}
    _taken_over[:] = [Paths(**words)]


def is_isolated() -> bool:
    """Say whether this process was started by `command`."""
    return bool(_taken_over)


def paths() -> Paths:
    """Give what was handed to this process, or what it found by itself."""
    return _taken_over[0] if _taken_over else _found()


def command(module: str, *arguments: str) -> list[str]:
    """Give the command that calls `module.main()` in a process that finds only the judge."""
    handed = json.dumps({"module": module, **asdict(paths())})
    return [sys.executable, "-I", "-S", str(BOOT), handed, *arguments]


def environment() -> dict[str, str]:
    """Give the variables for such a process.

    Those of pytest could change outcomes, and torch would import whatever an installed package
    names as its back end before anybody has looked at what judges.
    """
    pytests = ("PYTEST_ADDOPTS", "PYTEST_PLUGINS", "PYTEST_DEBUG")
    kept = {word: value for word, value in os.environ.items() if word not in pytests}
    return {**kept, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}


def admit() -> None:
    """Make findable what the user's own process finds; does nothing in any other process.

    Path files may run code, as those of some editable installs do, so they are read only now.
    """
    if not _taken_over or _admitted:
        return
    _admitted[:] = _taken_over
    known = _taken_over[0]
    rest = [entry for entry in sys.path if entry not in (*known.judge, *known.subject)]
    sys.path[:] = [*rest, *known.subject]
    sys.path.extend(entry for entry in known.judge if entry not in known.subject)
    for folder in known.sites:
        site.addsitedir(folder, set(sys.path))


def _found() -> Paths:
    here = [] if getattr(sys.flags, "safe_path", False) else [str(Path.cwd())]
    script = str(Path(sys.executable).parent)
    entries = [str(Path(entry or ".").resolve()) for entry in sys.path]
    subject = _folders([*here, *(e for e in entries if e != script and not _is_standard(e))])
    sites = _folders(_sites())
    apart = [entry for entry in subject if entry not in (*here, *_variable())]
    return Paths(
        judge=_folders([str(PACKAGE.parent), *sites, *_needed(sites, [*apart, *_variable()])]),
        subject=subject,
        sites=sites,
        prefixes=(sys.prefix, sys.exec_prefix),
    )


def _is_standard(entry: str) -> bool:
    """Say whether an entry is one that Python has by itself."""
    library = Path(os.__file__).resolve().parent
    return Path(entry) in (library, library / "lib-dynload") or entry.endswith(".zip")


def _sites() -> list[str]:
    if sys.flags.no_site:
        return []
    user = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    return [*user, *site.getsitepackages()]


def _variable() -> list[str]:
    words = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return [] if sys.flags.ignore_environment else [str(Path(w).resolve()) for w in words if w]


def _needed(sites: Iterable[str], others: Iterable[str]) -> list[str]:
    """Give the folders of what the judge needs and what no folder of packages has."""
    sites, others = list(sites), list(others)
    found = []
    for name in _NEEDED:
        if PathFinder.find_spec(name, sites) is None:
            specification = PathFinder.find_spec(name, others)
            if specification is not None and specification.origin:
                is_package = specification.submodule_search_locations is not None
                found.append(str(Path(specification.origin).parents[1 if is_package else 0]))
    return found


def _folders(entries: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(entry for entry in entries if Path(entry).exists()))
