"""A word of the source that the glossary has is used where it has that meaning, and only there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = {
    "ckpt-wrap": ROOT / "packages/ckpt-wrap/src/ckpt_wrap",
    "mod-tracker": ROOT / "packages/mod-tracker/src/mod_tracker",
    "flat-param": ROOT / "packages/flat-param/src/flat_param",
    "sac-policies": ROOT / "packages/sac-policies/src/sac_policies",
    "conformance": ROOT / "conformance/src/torchparts_conformance",
}
# Cases and adapters speak of the parts they check, in the words of those.
OTHERS = {"cases", "adapters"}


def glossary(text: str) -> dict[str, set[str]]:
    """Give the distributions in whose names each word has its meaning."""
    _, _, table = text.partition("|---|---|---|\n")
    rows = re.findall(r"^\| ([a-z]+) \| [^|]+ \| ([a-z ,-]+) \|$", table, re.MULTILINE)
    everywhere = set(PACKAGES)
    return {
        word: everywhere if places == "all" else set(places.split(", ")) for word, places in rows
    }


def words(name: str) -> set[str]:
    """Give the words of a class's or module's name, in the singular.

    Example: `_FlatSegments` has flat and segment.
    """
    found = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)
    return {re.sub(r"(?<=[a-z]{3})(?<!s)s$", "", word.lower()) for word in found}


def names_in(package: Path) -> Iterator[tuple[str, str]]:
    """Give each module's and each class's name, with the file it is in."""
    for path in sorted(package.rglob("*.py")):
        if OTHERS & set(path.relative_to(package).parts):
            continue
        place = path.relative_to(ROOT).as_posix()
        yield path.stem, place
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                yield node.name, f"{place}:{node.lineno}"


def strangers(package: str, known: dict[str, set[str]]) -> list[str]:
    """Say which names use a word of the glossary that has its meaning elsewhere."""
    return [
        f"{place} {name}: {word!r} means something in {', '.join(sorted(known[word]))} only"
        for name, place in names_in(PACKAGES[package])
        for word in sorted(words(name) & known.keys())
        if package not in known[word]
    ]


@pytest.fixture(scope="module")
def known() -> dict[str, set[str]]:
    """The table of the page."""
    return glossary((ROOT / "docs/glossary.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize("package", PACKAGES)
def test_words_are_used_where_they_have_their_meaning(
    package: str, known: dict[str, set[str]]
) -> None:
    """Another package that uses a word means the same, and is listed, or finds another word."""
    assert strangers(package, known) == []


def test_words_are_there_once_in_their_order(known: dict[str, set[str]]) -> None:
    """A page that is searched by eye is sorted, and no row is lost to a typing mistake."""
    page = (ROOT / "docs/glossary.md").read_text(encoding="utf-8")
    rows = [line.split(" | ")[0].removeprefix("| ") for line in page.splitlines() if "|" in line]
    assert rows[2:] == sorted(rows[2:]) == list(known)


def test_listed_places_use_the_word(known: dict[str, set[str]]) -> None:
    """A place that has no name with the word any more is taken off the list."""
    used = {
        package: {word for name, _ in names_in(folder) for word in words(name)}
        for package, folder in PACKAGES.items()
    }
    idle = {
        (word, package)
        for word, places in known.items()
        for package in places
        if places != set(PACKAGES) and word not in used[package]
    }
    assert not idle


def test_word_of_another_meaning_is_found() -> None:
    """The check can fail."""
    found = strangers("mod-tracker", {"record": {"sac-policies"}})
    assert any("_record.py" in line for line in found)
    assert words("_FlatSegments") == {"flat", "segment"}
    assert words("JSONPass") == {"json", "pass"}
