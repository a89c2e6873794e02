"""Every folder of source is a room that says what happens in it, and none is a drawer."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = (*sorted(ROOT.glob("packages/*/src/*")), ROOT / "conformance/src/torchparts_conformance")
# Cases are tests, and lie by what they check.
FOLDERS = [
    folder
    for source in SOURCES
    for folder in (source, *sorted(path for path in source.rglob("*") if path.is_dir()))
    if any(folder.glob("*.py")) and "cases" not in folder.relative_to(source).parts
]
FILES = [path for folder in FOLDERS for path in sorted(folder.glob("*.py"))]
MOST_FILES, MOST_LINES, MOST_LINES_OF_TESTS = 20, 350, 400
LEAST_WORDS_OF_A_FILE, LEAST_WORDS_OF_A_ROOM = 5, 12
MOST_WORDS_THAT_SAY_NOTHING = 2


def shown(path: Path) -> str:
    """A path as a test's name."""
    return path.relative_to(ROOT).as_posix()


def first_words(path: Path) -> list[str]:
    """The words of a file's docstring."""
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split()


@pytest.mark.parametrize("folder", FOLDERS, ids=shown)
def test_folder_says_what_happens_in_it_and_can_be_looked_over(folder: Path) -> None:
    """Its `__init__.py` has a paragraph; it has few enough files to be read as a list."""
    assert len(first_words(folder / "__init__.py")) >= LEAST_WORDS_OF_A_ROOM
    assert len(list(folder.glob("*.py"))) <= MOST_FILES


def test_every_file_says_what_it_is_about_and_is_read_in_one_go() -> None:
    """In a first line that says more than its name."""
    silent = [shown(path) for path in FILES if len(first_words(path)) < LEAST_WORDS_OF_A_FILE]
    assert silent == []
    lines = {shown(path): len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    assert {name: count for name, count in lines.items() if count > MOST_LINES} == {}


def test_tests_of_a_file_are_about_one_thing() -> None:
    """What is longer is divided by what it claims."""
    folders = ("packages", "conformance/simdev", "tests", "downstream")
    tests = [path for folder in folders for path in sorted((ROOT / folder).rglob("test_*.py"))]
    lines = {shown(path): len(path.read_text(encoding="utf-8").splitlines()) for path in tests}
    assert len(lines) > len(FILES) / 2
    long = {name: count for name, count in lines.items() if count > MOST_LINES_OF_TESTS}
    assert long == {}


def test_docstring_of_two_words_is_none() -> None:
    """It says what the name says: it is left out, or says more."""
    short = [
        f"{shown(path)}: {node.name}"
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, (ast.FunctionDef, ast.ClassDef))
        and 0 < len((ast.get_docstring(node) or "").split()) <= MOST_WORDS_THAT_SAY_NOTHING
    ]
    assert short == []


def test_rooms_are_those_that_are_held_to_directions() -> None:
    """A folder that no contract of import-linter names could import anything."""
    contracts = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("importlinter")[2]
    named = set(re.findall(r"\w+", contracts))
    rooms = [folder for folder in FOLDERS if folder not in SOURCES]
    assert [shown(folder) for folder in rooms if folder.name not in named] == []


NO_PUBLIC_NAME = {
    "torch.utils._python_dispatch.TorchDispatchMode",
    "torch._ops.OpOverload",
    "torch._ops.OpOverloadPacket",
    "torch._ops.HigherOrderOperator",
}
"""What torch tells others to use and has no public name for: modes, and classes of operators."""


def private_names(path: Path) -> set[str]:
    """Names of torch's own that a file reads by an import or an attribute, operators left out."""
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
    """Where each has a check and a fallback; elsewhere only what has no public name."""
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
    """Give what each module of a package imports of it, anywhere in its file."""
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
    """Give the modules that import themselves by way of others, and what imports such."""
    left = {name: set(targets) for name, targets in graph.items()}
    while ends := {name for name, targets in left.items() if not targets & left.keys()}:
        left = {name: targets for name, targets in left.items() if name not in ends}
    return set(left)


@pytest.mark.parametrize("source", SOURCES, ids=shown)
def test_no_modules_import_each_other(source: Path) -> None:
    """Not for an annotation either: whoever reads one would have to read the other first."""
    assert in_circles(imports(source)) == set()


def test_circle_is_found() -> None:
    """The check can fail."""
    assert in_circles({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}) == {"a", "b", "c"}
    assert in_circles({"a": {"b"}, "b": set()}) == set()


def word(path: Path) -> str:
    """What a file is called, and its test file after `test_`."""
    return path.stem.strip("_")


def does_nothing(path: Path) -> bool:
    """Whether a file has constants and imports alone."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    return not any(isinstance(node, (ast.FunctionDef, ast.ClassDef)) for node in body)


@pytest.mark.parametrize("source", SOURCES, ids=shown)
def test_every_file_has_a_test_file_of_its_word(source: Path) -> None:
    """Whoever changes a file knows where its tests are."""
    tests = source.parents[1] / ("selftest" if source == SOURCES[-1] else "tests")
    tested = {path.stem.removeprefix("test_") for path in tests.rglob("test_*.py")}
    files = [path for path in FILES if path.is_relative_to(source) and path.name != "__init__.py"]
    # Those of adapters are held to the requirements, by the suite itself.
    own = [path for path in files if "adapters" not in path.parts and not does_nothing(path)]
    assert [shown(path) for path in own if word(path) not in tested] == []
