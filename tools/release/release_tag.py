"""Check that a release is consistent before it is published.

Tag, version and changelog agree, files and metadata are those of the folder (`release_files.py`),
and two builds are equal.

Usage: python release_tag.py FOLDER DISTRIBUTION TAG [ONE OTHER]

ONE and OTHER are folders with the files of two builds. With an empty TAG, "", as in a rehearsal,
the changelog need not be dated.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import release_files


def static_version(folder: Path) -> str:
    """Read the version that hatchling will build."""
    text = (folder / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(r'^version = "([^"]+)"$', text, re.MULTILINE)
    return found.group(1) if found else ""


def problems(folder: Path, distribution: str, tag: str) -> Iterator[str]:
    """Yield each disagreement as one line."""
    version = static_version(folder)
    if tag and tag != f"{distribution}-v{version}":
        yield f"the tag is {tag}, but {folder}/pyproject.toml builds {distribution}-v{version}"
    (init,) = folder.glob("src/*/__init__.py")
    if f'__version__ = "{version}"' not in init.read_text(encoding="utf-8"):
        yield f"{init} does not say __version__ = {version!r}"
    changelog = (folder / "CHANGELOG.md").read_text(encoding="utf-8")
    dated = rf"^## {re.escape(version)} - \d{{4}}-\d\d-\d\d$"
    if tag and not re.search(dated, changelog, re.MULTILINE):
        yield f"{folder}/CHANGELOG.md has no dated section for {version}"


NOT_UPLOADED = "Not uploaded yet"


def unfinished(root: Path) -> Iterator[str]:
    """Yield the pages that still say that nothing is uploaded, which a release makes wrong."""
    for page in (
        root / "README.md",
        *root.glob("docs/**/*.md"),
        *root.glob("packages/*/README.md"),
    ):
        if NOT_UPLOADED in page.read_text(encoding="utf-8"):
            yield f"{page.relative_to(root)} says {NOT_UPLOADED!r}: take that sentence out"


def differing(one: Path, other: Path) -> Iterator[str]:
    """Yield each file that is missing in one build or differs between the two."""
    first, second = (
        {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}
        for folder in (one, other)
    )
    for name in sorted(first.keys() | second.keys()):
        if first.get(name) != second.get(name):
            yield f"{name} is another file when it is built a second time"
    if not first:
        yield f"{one} has no files that were built"


def main() -> int:
    """Print each disagreement; return 1 if there are any."""
    folder, distribution, tag, *builds = sys.argv[1:]
    found = list(problems(Path(folder), distribution, tag))
    if tag:
        found += unfinished(release_files.ROOT)
    if builds:
        one, other = map(Path, builds)
        found += differing(one, other)
        known = release_files.known_files(Path(folder))
        found += release_files.wrong_contents(Path(folder), one, known)
        version = static_version(Path(folder))
        found += release_files.wrong_metadata(Path(folder), one, distribution, version)
    for line in found:
        print(f"release: {line}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
