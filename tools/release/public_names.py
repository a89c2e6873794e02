"""Write the public names of the distributions, with their signatures, to files.

    python tools/release/public_names.py          print differences from the files, exit with 1
    python tools/release/public_names.py --write  write the files

Removing a name or an option breaks users, so the change should be visible in a review.
"""

from __future__ import annotations

import difflib
import enum
import functools
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = Path(__file__).resolve().parents[2] / "tests/repository/public_names"
MODULES = (
    *("ckpt_wrap", "mod_tracker", "torchparts_conformance"),
    *("flat_param", "flat_param.handle", "flat_param.plan"),
    *("sac_policies", "sac_policies.budget", "sac_policies.policies", "sac_policies.reports"),
)
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def lines_of(module: ModuleType) -> list[str]:
    """Return one line for each public name, member and signature, sorted."""
    package = sys.modules.get(module.__name__.rpartition(".")[0])
    names = set(module.__all__) - set(getattr(package, "__all__", ()))
    public = {name: getattr(module, name) for name in sorted(names)}
    classes = {value for value in public.values() if inspect.isclass(value)}
    return [line for name, value in public.items() for line in _lines(name, value, classes)]


def _lines(name: str, value: Any, public: set[type]) -> Iterator[str]:
    if inspect.isclass(value):
        yield from _class(name, value, public)
    elif callable(value):
        yield f"{name}{_signature(value)}"
    elif inspect.ismodule(value):
        yield f"{name}: module"
    else:
        yield f"{name}: {type(value).__name__}"


def _class(name: str, kind: type, public: set[type]) -> Iterator[str]:
    bases = ", ".join(base.__name__ for base in kind.__bases__)
    if issubclass(kind, enum.Enum):
        yield f"class {name}({bases}): {', '.join(kind.__members__)}"
        return
    yield f"class {name}({bases}){'' if issubclass(kind, Exception) else _signature(kind)}"
    package = kind.__module__.partition(".")[0]
    members: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        is_own = base.__module__.partition(".")[0] == package
        if is_own and (base is kind or base not in public):
            members |= vars(base)
    for member, value in sorted(members.items()):
        if member.startswith("_"):
            continue
        function = getattr(value, "__func__", value)  # for class and static methods
        if inspect.isfunction(function):
            yield f"{name}.{member}{_signature(function)}"
        elif isinstance(value, (property, functools.cached_property)) or inspect.isdatadescriptor(
            value
        ):
            yield f"{name}.{member}"


def _signature(value: Any) -> str:
    try:
        return _ADDRESS.sub("", str(inspect.signature(value)))
    except (TypeError, ValueError):
        return "(...)"


def differences(module: ModuleType) -> list[str]:
    """Return lines that are only in the module or only in its file."""
    path = FOLDER / f"{module.__name__}.txt"
    written = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    found = difflib.unified_diff(written, lines_of(module), path.name, module.__name__, "", "", 0)
    return [line.rstrip("\n") for line in found]


def main() -> int:
    """Compare or write."""
    different = []
    for name in MODULES:
        module = importlib.import_module(name)
        if "--write" in sys.argv[1:]:
            FOLDER.mkdir(exist_ok=True)
            text = "\n".join(lines_of(module)) + "\n"
            (FOLDER / f"{name}.txt").write_text(text, encoding="utf-8")
        different += differences(module)
    print("\n".join(different))
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
