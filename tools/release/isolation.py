"""Check, inside a clean environment, that one distribution needs only torch.

Usage: python -I isolation.py PACKAGE DIST_FOLDER
"""

from __future__ import annotations

import ast
import importlib
import re
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from importlib import metadata, util
from pathlib import Path

MODULES = {
    "ckpt-wrap": "ckpt_wrap",
    "mod-tracker": "mod_tracker",
    "flat-param": "flat_param",
    "sac-policies": "sac_policies",
    "conformance": "torchparts_conformance",
}
DISTRIBUTIONS = {**{name: name for name in MODULES}, "conformance": "torchparts-conformance"}


def required(distribution: str, *, extras: bool) -> set[str]:
    """Return the import packages in the metadata's requirements (by distribution names)."""
    lines = metadata.requires(distribution) or []
    kept = [line for line in lines if extras or "extra ==" not in line]
    return {re.split(r"[^A-Za-z0-9_]", line)[0] for line in kept}


def imported_names(node: ast.AST) -> Iterator[str]:
    """Yield the top-level names of one import statement, without relative imports."""
    if isinstance(node, ast.Import):
        yield from (alias.name.split(".")[0] for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
        yield node.module.split(".")[0]


def foreign_imports(path: Path, allowed: set[str], optional: set[str]) -> Iterator[str]:
    """Yield imports that are neither standard nor allowed; extras only inside functions."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    deferred = {
        child
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for child in ast.walk(function)
    }
    for node in ast.walk(tree):
        fine = allowed | sys.stdlib_module_names | (optional if node in deferred else set())
        for name in imported_names(node):
            if name not in fine:
                yield f"{path.name}:{getattr(node, 'lineno', 0)} imports {name}"


def missing_files(dist: Path, module: str) -> Iterator[str]:
    """Yield the files that the wheel or the sdist should contain and does not."""
    wheel = next(dist.glob("*.whl"))
    names = zipfile.ZipFile(wheel).namelist()
    for wanted in (f"{module}/py.typed", "licenses/LICENSE"):
        if not any(name.endswith(wanted) for name in names):
            yield f"{wheel.name} lacks {wanted}"
    sdist = next(dist.glob("*.tar.gz"))
    with tarfile.open(sdist) as archive:
        held = archive.getnames()
    for wanted in ("/README.md", "/LICENSE", "/CHANGELOG.md", f"/src/{module}/__init__.py"):
        if not any(name.endswith(wanted) for name in held):
            yield f"{sdist.name} lacks {wanted}"


def lost_files(dist: Path) -> Iterator[str]:
    """Yield files that only one of two wheels has: one from the sdist, one from the folder."""
    (wheel,) = dist.glob("*.whl")
    (direct,) = dist.glob("direct/*.whl")
    one, other = (set(zipfile.ZipFile(path).namelist()) for path in (wheel, direct))
    for name in sorted(one ^ other):
        yield f"{name} is in the wheel of the {'sdist' if name in one else 'folder'} alone"


def problems(package: str, dist: Path) -> Iterator[str]:
    """Yield everything that is wrong with the installed distribution."""
    module, distribution = MODULES[package], DISTRIBUTIONS[package]
    for sibling in set(MODULES.values()) - {module}:
        if util.find_spec(sibling) is not None:
            yield f"{sibling} is importable beside {module}"
    # torch's own distribution installs functorch, too.
    allowed = required(distribution, extras=False) | {module}
    extra_names = {"functorch"} if "torch" in allowed else set()
    optional = required(distribution, extras=True)
    if package == "conformance":  # its adapters import the libraries they adapt
        optional |= set(MODULES.values()) | {"fairscale", "torch_remat", "deepspeed"}
    elif allowed != {"torch", module}:
        yield f"{distribution} requires {sorted(allowed - {'torch', module})} beside torch"
    folder = Path(importlib.import_module(module).__file__ or "").parent
    for path in sorted(folder.rglob("*.py")):
        yield from foreign_imports(path, allowed | extra_names, optional)
    yield from missing_files(dist, module)
    yield from lost_files(dist)


def main() -> int:
    """Print each problem on a line; return 1 if there are any."""
    package, dist = sys.argv[1], Path(sys.argv[2])
    found = list(problems(package, dist))
    for line in found:
        print(f"isolation: {package}: {line}")
    print(f"isolation: {package}: {len(found)} problems")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
