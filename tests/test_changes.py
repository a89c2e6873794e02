"""Changelog fragments are refused where they are malformed or left over, and collected whole."""

from __future__ import annotations

import importlib.util
import io
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = [*sorted((ROOT / "packages").iterdir()), ROOT / "conformance"]


def load(name: str) -> ModuleType:
    """Import one of the scripts."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f".ci/{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def changes() -> ModuleType:
    """The script."""
    return load("changes")


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_fragments_of_this_repository_are_well_formed(changes, folder):
    """A word, a kind, one line; and the folder for them is there."""
    assert (folder / "changes").is_dir()
    assert list(changes.faults(folder)) == []


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("fast.added.md", "It is faster.\n", ""),
        ("fast.md", "It is faster.\n", "is not named <word>.<kind>.md"),
        ("fast.better.md", "It is faster.\n", "is not named <word>.<kind>.md"),
        ("fast.fixed.md", "\n", "says nothing"),
        ("fast.fixed.md", "One.\nTwo.\n", "more than one line"),
        ("fast.fixed.md", "- One.\n", "begins with '-'"),
        ("fast.fixed.md", "It is faster\n", "ends with a full stop"),
        ("fast.fixed.md", "It is faster.", "ends with a full stop"),
    ],
)
def test_malformed_fragments_are_named(changes, tmp_path, monkeypatch, name, text, said):
    """Each says what is wrong; none of them is collected."""
    _folder(tmp_path, "## 1.0.0 - unreleased\n", **{name: text})
    found = list(changes.faults(tmp_path))
    assert [said in line for line in found] == ([True] if said else [])
    monkeypatch.setattr(sys, "argv", ["changes", str(tmp_path), "2026-11-24"])
    assert changes.main() == bool(said)
    assert bool(changes.fragments(tmp_path)) == bool(said)


def test_release_with_a_fragment_left_over_is_refused(changes, tmp_path):
    """Until it is collected, the release check names it; afterwards nothing is wrong."""
    _folder(tmp_path, "# Changelog\n\n## 1.0.0 - unreleased\n", **{"a.added.md": "New.\n"})
    (tmp_path / "src/thing").mkdir(parents=True)
    (tmp_path / "src/thing/__init__.py").write_text('__version__ = "1.0.0"\n')
    release = load("release_tag")
    found = list(release.problems(tmp_path, "thing", "thing-v1.0.0"))
    assert len(found) == 2 and "a.added.md is not in the changelog" in found[1]
    changes.collect(tmp_path, "2026-11-24")
    assert list(release.problems(tmp_path, "thing", "thing-v1.0.0")) == []


UNRELEASED = """# Changelog

Words.

## 1.0.0 - unreleased

First.

### Added

- Old.

## 0.9.0 - 2026-01-01

### Added

- Older.
"""


def test_fragments_join_the_section_that_is_not_released(changes, tmp_path):
    """Under the headings it has, and new ones; other versions stay as they were."""
    added = {"b.fixed.md": "Mended.\n", "a.added.md": "New.\n"}
    _folder(tmp_path, UNRELEASED, **added)
    changes.collect(tmp_path, "2026-11-24")
    text = (tmp_path / "CHANGELOG.md").read_text()
    assert text == UNRELEASED.replace("1.0.0 - unreleased", "1.0.0 - 2026-11-24").replace(
        "- Old.\n", "- Old.\n- New.\n\n### Fixed\n\n- Mended.\n"
    )
    assert changes.fragments(tmp_path) == []
    with pytest.raises(ValueError, match="raise the version first"):
        changes.collect(tmp_path, "2026-11-25")


def test_next_version_has_a_section_above_the_others(changes, tmp_path):
    """Where no unreleased section waits for them."""
    released = UNRELEASED.replace("1.0.0 - unreleased", "0.9.1 - 2026-02-01")
    _folder(tmp_path, released, **{"a.removed.md": "Gone.\n"})
    changes.collect(tmp_path, "2026-11-24")
    text = (tmp_path / "CHANGELOG.md").read_text()
    new = "## 1.0.0 - 2026-11-24\n\n### Removed\n\n- Gone.\n\n"
    assert text == released.replace("## 0.9.1", f"{new}## 0.9.1")


def _folder(path: Path, changelog: str, **fragments: str) -> None:
    (path / "changes").mkdir()
    (path / "pyproject.toml").write_text('version = "1.0.0"\n')
    (path / "CHANGELOG.md").write_text(changelog)
    for name, text in fragments.items():
        (path / "changes" / name).write_text(text)


PROJECT = """version = "1.0.0"
description = "A thing."
license = "BSD-3-Clause"
requires-python = ">=3.10"
Source = "https://example.org/things"
"""
METADATA = """Metadata-Version: 2.4
Name: thing
Version: 1.0.0
Summary: A thing.
License-Expression: BSD-3-Clause
Requires-Python: >=3.10
Description-Content-Type: text/markdown
Requires-Dist: torch>=2.9

# Thing
"""
FILES = ["src/thing/__init__.py", "README.md", "CHANGELOG.md", "LICENSE", "pyproject.toml"]


def _built(path: Path, *, wheel: list[str], sdist: list[str], metadata: str = METADATA) -> None:
    (path / "pyproject.toml").write_text(PROJECT)
    (path / "README.md").write_text("# Thing\n")
    with zipfile.ZipFile(path / "thing-1.0.0-py3-none-any.whl", "w") as archive:
        for name in wheel:
            archive.writestr(name, "")
        archive.writestr("thing-1.0.0.dist-info/METADATA", metadata)
    with tarfile.open(path / "thing-1.0.0.tar.gz", "w:gz") as archive:
        for name in [*sdist, "PKG-INFO"]:
            archive.addfile(tarfile.TarInfo(f"thing-1.0.0/{name}"), io.BytesIO())


def test_contents_are_those_of_the_folder(tmp_path):
    """What is lacking and what is too much is named, in the wheel and in the sdist."""
    wrong = load("release_files").wrong_contents
    _built(tmp_path, wheel=["thing/__init__.py"], sdist=FILES)
    assert list(wrong(tmp_path, tmp_path, set(FILES))) == []
    _built(tmp_path, wheel=["thing/scratch.py"], sdist=[*FILES[1:], "notes.txt"])
    assert [line.partition(" ")[2] for line in wrong(tmp_path, tmp_path, set(FILES))] == [
        "lacks thing/__init__.py",
        "has thing/scratch.py, which is not in src",
        "lacks src/thing/__init__.py",
        "has notes.txt, which git does not know",
    ]


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        ("", "", None),
        ("Name: thing", "Name: another", "says Name: another, not thing"),
        ("Version: 1.0.0", "Version: 1.0.1", "says Version: 1.0.1, not 1.0.0"),
        ("Summary: A thing.", "Summary: Old.", "says Summary: Old., not A thing."),
        ("torch>=2.9", "numpy", "does not require torch"),
        ("# Thing", "# Old", "describes itself in other words"),
    ],
)
def test_metadata_is_that_of_the_project(tmp_path, one, other, said):
    """A field that says something else is named."""
    _built(tmp_path, wheel=[], sdist=[], metadata=METADATA.replace(one, other))
    found = list(load("release_files").wrong_metadata(tmp_path, tmp_path, "thing", "1.0.0"))
    assert [said in line for line in found] == ([] if said is None else [True])


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_package_index_shows_the_readme_with_links_that_lead_somewhere(folder):
    """As hatchling gives it: no link is relative, for there is nothing beside it there."""
    command = [sys.executable, "-m", "hatchling", "metadata", "readme"]
    told = subprocess.run(command, cwd=folder, capture_output=True, check=True, encoding="utf-8")
    name = "torchparts-conformance" if folder.name == "conformance" else folder.name
    version = load("release_tag").static_version(folder)
    tree = f"https://github.com/torchparts/torchparts/blob/{name}-v{version}"
    assert list(load("release_files").wrong_description(folder, told.stdout, tree)) == []
    assert f"]({tree}/docs/" in told.stdout


@pytest.mark.parametrize(
    ("shown", "said"),
    [
        ("[a](https://x.y/v1/docs/a.md#b), [c](#c), `x[0](../y)`", []),
        ("[a](../docs/a.md#b), [c](#c), `x[0](../y)`", ["links to ../docs/a.md#b, not to https"]),
        ("[a](https://x.y/v0/docs/a.md#b), [c](#c), `x[0](../y)`", ["links to https://x.y/v0/"]),
        ("[z](https://x.y/v1/docs/a.md#b), [c](#c), `x[0](../y)`", ["describes itself in other"]),
    ],
)
def test_links_shown_by_a_package_index_are_compared(tmp_path, monkeypatch, shown, said):
    """One that stayed relative, one of another version, and words that are no link's address."""
    script = load("release_files")
    monkeypatch.setattr(script, "ROOT", tmp_path)
    for path, text in (
        ("docs/a.md", ""),
        ("thing/README.md", "[a](../docs/a.md#b), [c](#c), `x[0](../y)`\n"),
    ):
        (tmp_path / path).parent.mkdir()
        (tmp_path / path).write_text(text)
    found = list(script.wrong_description(tmp_path / "thing", shown, "https://x.y/v1"))
    assert len(found) == len(said)
    assert all(line.startswith(begin) for line, begin in zip(found, said, strict=True))


def test_link_of_a_readme_to_a_file_that_is_not_there_is_named(tmp_path, monkeypatch):
    """Although the package index shows the address that it leads to."""
    script = load("release_files")
    monkeypatch.setattr(script, "ROOT", tmp_path)
    (tmp_path / "README.md").write_text("[a](docs/a.md)\n")
    shown = "[a](https://x.y/v1/docs/a.md)"
    (said,) = script.wrong_description(tmp_path, shown, "https://x.y/v1")
    assert said == "links to docs/a.md, which is not in the repository"
