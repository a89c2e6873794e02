"""Private torch names are in one place per package, and modules import in one direction."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = (*sorted(ROOT.glob("packages/*/src/*")), ROOT / "conformance/src/torchparts_conformance")
# Cases are tests, and are grouped by what they check.
FOLDERS = [
    folder
    for source in SOURCES
    for folder in (source, *sorted(path for path in source.rglob("*") if path.is_dir()))
    if any(folder.glob("*.py")) and "cases" not in folder.relative_to(source).parts
]
FILES = [path for folder in FOLDERS for path in sorted(folder.glob("*.py"))]


def shown(path: Path) -> str:
    """Shorten a path for a test name."""
    return path.relative_to(ROOT).as_posix()


NO_PUBLIC_NAME = {
    "torch.utils._python_dispatch.TorchDispatchMode",
    "torch._ops.OpOverload",
    "torch._ops.OpOverloadPacket",
    "torch._ops.HigherOrderOperator",
}
"""What torch tells others to use and has no public name for: modes, and classes of operators."""


def private_names(path: Path) -> set[str]:
    """Return private torch names that a file uses, without operators."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            found.add(ast.unparse(node))
    mine = {name for name in found if re.match(r"torch(\.\w+)*\._(?!_)", name)}
    return {name for name in mine if not name.startswith("torch.ops.")} - {"torch._ops"}


@pytest.mark.parametrize("source", SOURCES[:-1], ids=shown)
def test_private_names_of_torch_are_read_in_one_place_of_a_package(source: Path) -> None:
    """There each has a check and a fallback; elsewhere only names without a public alternative."""
    outside = {
        shown(path): sorted(names - NO_PUBLIC_NAME)
        for path in FILES
        if path.is_relative_to(source)
        and "_torch_compat" not in path.relative_to(source).as_posix()
        if (names := private_names(path)) - NO_PUBLIC_NAME
    }
    assert outside == {}
    inside = [*source.glob("_torch_compat.py"), *source.glob("_torch_compat/*.py")]
    assert any(private_names(path) or "_C" in path.read_text("utf-8") for path in inside)


def imports(source: Path) -> dict[str, set[str]]:
    """Return the imports of each module of a package from that package, anywhere in its file."""
    names = {}
    for path in source.rglob("*.py"):
        parts = [source.name, *path.relative_to(source).with_suffix("").parts]
        names[".".join(parts[:-1] if path.name == "__init__.py" else parts)] = path
    found: dict[str, set[str]] = {}
    for name, path in names.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        found[name] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found[name] |= {alias.name for alias in node.names} & names.keys()
            elif isinstance(node, ast.ImportFrom):
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([node.module] if node.module else [])])
                base = base if node.level else str(node.module)
                for alias in node.names:
                    wanted = f"{base}.{alias.name}" if f"{base}.{alias.name}" in names else base
                    found[name] |= {wanted} & names.keys() - {name}
    return found


def in_circles(graph: dict[str, set[str]]) -> set[str]:
    """Return modules in import cycles, and modules that import those."""
    left = {name: set(targets) for name, targets in graph.items()}
    while ends := {name for name, targets in left.items() if not targets & left.keys()}:
        left = {name: targets for name, targets in left.items() if name not in ends}
    return set(left)


@pytest.mark.parametrize("source", SOURCES, ids=shown)
def test_no_modules_import_each_other(source: Path) -> None:
    """Imports for annotations count."""
    assert in_circles(imports(source)) == set()


def test_circle_is_found() -> None:
    assert in_circles({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}) == {"a", "b", "c"}
    assert in_circles({"a": {"b"}, "b": set()}) == set()
