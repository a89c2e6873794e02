"""Changelog fragments: one file for each change, so that two changes never meet in one line.

    python .ci/changes.py FOLDER         name malformed fragments; exit with 1 where there is one
    python .ci/changes.py FOLDER DATE    move the fragments into the changelog, dated YYYY-MM-DD

`FOLDER/changes/<word>.<kind>.md` holds one line, a sentence or more, without a bullet. The kinds
are those of Keep a Changelog. A release has none left: `nox -s release-check` refuses it.
"""

from __future__ import annotations

import datetime
import re
import sys
from collections.abc import Iterator
from pathlib import Path

KINDS = ("added", "changed", "deprecated", "removed", "fixed", "security")
_NAME = re.compile(rf"^[a-z0-9][a-z0-9_-]*\.({'|'.join(KINDS)})\.md$")


def fragments(folder: Path) -> list[Path]:
    """Every file of the folder's `changes`, in order of names."""
    return sorted(path for path in (folder / "changes").glob("*") if path.name != ".gitkeep")


def malformed(path: Path) -> str:
    """What is wrong with one fragment, and what to do; empty where nothing is."""
    if path.is_dir() or not _NAME.match(path.name):
        return f"{path} is not named <word>.<kind>.md: kinds are {', '.join(KINDS)}"
    text = path.read_text(encoding="utf-8")
    line = text.strip()
    if not line:
        return f"{path} says nothing: write a sentence, or remove the file"
    if "\n" in line:
        return f"{path} has more than one line: write one file for each change"
    if line[0] in "-*#":
        return f"{path} begins with {line[0]!r}: write the sentence alone, the bullet is added"
    if line[-1] != "." or text != line + "\n":
        return f"{path} must be one line that ends with a full stop"
    return ""


def faults(folder: Path) -> Iterator[str]:
    """Yield what is wrong, one line for each malformed fragment."""
    yield from filter(None, map(malformed, fragments(folder)))


def left_over(folder: Path) -> Iterator[str]:
    """Yield one line for each fragment that a release would leave out of its changelog."""
    for path in fragments(folder):
        yield f"{path} is not in the changelog: python .ci/changes.py {folder} YYYY-MM-DD"


def by_kind(folder: Path) -> dict[str, list[str]]:
    """The lines of each kind that has some, in the order of the kinds."""
    found: dict[str, list[str]] = {}
    for kind in KINDS:
        paths = [path for path in fragments(folder) if path.name.endswith(f".{kind}.md")]
        if paths:
            found[kind] = [path.read_text(encoding="utf-8").strip() for path in paths]
    return found


def merged(changelog: str, version: str, heading: str, lines: dict[str, list[str]]) -> str:
    """The changelog with the lines in the section of `version`, which is now headed `heading`.

    The section is that which the changelog has as unreleased, or a new one above all others.
    """
    unreleased = re.search(rf"^## {re.escape(version)} - unreleased$", changelog, re.MULTILINE)
    first = re.search(r"^## ", changelog, re.MULTILINE)
    if unreleased:
        start = unreleased.start()
        after = re.search(r"^## ", changelog[unreleased.end() :], re.MULTILINE)
        end = unreleased.end() + after.start() if after else len(changelog)
        body = changelog[unreleased.end() : end]
    else:
        start = end = first.start() if first else len(changelog)
        body = ""
    for kind, added in lines.items():
        bullets = "".join(f"- {line}\n" for line in added)
        title = f"### {kind.capitalize()}"
        section = re.search(rf"^{title}\n+((?:[- ].*\n)*)", body, re.MULTILINE)
        if section:
            body = body[: section.end()] + bullets + body[section.end() :]
        else:
            body = f"{body.rstrip()}\n\n{title}\n\n{bullets}"
    gap = "\n" if end < len(changelog) else ""
    section_text = f"{heading}\n\n{body.strip()}\n{gap}"
    before = changelog[:start] if changelog[:start].endswith("\n\n") else changelog[:start] + "\n"
    return before + section_text + changelog[end:]


def version_of(folder: Path) -> str:
    """The version that is built from the folder."""
    text = (folder / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(r'^version = "([^"]+)"$', text, re.MULTILINE)
    if found is None:
        raise LookupError(f"changes: {folder}/pyproject.toml has no static version; write one")
    return found[1]


def collect(folder: Path, date: str) -> None:
    """Put the fragments into the changelog, date its section, and remove them."""
    datetime.date.fromisoformat(date)
    path, version = folder / "CHANGELOG.md", version_of(folder)
    text = path.read_text(encoding="utf-8")
    if re.search(rf"^## {re.escape(version)} - \d", text, re.MULTILINE):
        raise ValueError(
            f"changes: {path} has a dated section for {version} already; raise the version first"
        )
    new = merged(text, version, f"## {version} - {date}", by_kind(folder))
    path.write_text(new, encoding="utf-8")
    for fragment in fragments(folder):
        fragment.unlink()


def main() -> int:
    """Check, or collect; malformed fragments are never collected."""
    folder = Path(sys.argv[1])
    found = list(faults(folder))
    for line in found:
        print(f"changes: {line}")
    if not found and len(sys.argv) > 2:
        collect(folder, sys.argv[2])
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
