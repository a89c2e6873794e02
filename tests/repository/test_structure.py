"""Private torch names are in one place per package, and packages use no sibling."""

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


@pytest.mark.parametrize("source", SOURCES[:-1], ids=shown)
def test_tests_and_benchmarks_import_no_sibling(source: Path) -> None:
    """All packages are installed where tests run; only the suite, which starts ranks, is shared."""
    siblings = {other.name for other in SOURCES[:-1]} - {source.name}
    found = {}
    for folder in ("tests", "benchmarks"):
        for path in (source.parents[1] / folder).rglob("*.py"):
            nodes = [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
            names = {
                alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names
            }
            names |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
            if used := {name.partition(".")[0] for name in names} & siblings:
                found[shown(path)] = sorted(used)
    assert found == {}
