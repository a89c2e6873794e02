"""Check contents and metadata of a built distribution against its folder.

A wheel has exactly the files of `src`; an sdist has those, tests, README, changelog and licence,
and only files tracked by git. The metadata is that of `pyproject.toml`. The description is the
README, with links to this version in the repository.
"""

from __future__ import annotations

import os
import re
import subprocess
import tarfile
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OWN = {"PKG-INFO", ".gitignore"}  # added to an sdist by the build
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
LINK = re.compile(
    r"""(?P<before>\]\(|^\[[^\]]+\]:\s+|\b(?:src|href)=["'])(?P<target>[^\s)"']+)""", re.MULTILINE
)


def known_files(folder: Path) -> set[str]:
    """Return the files of the folder that git tracks, relative to it."""
    command = ["git", "ls-files", "-z", "."]
    told = subprocess.run(command, cwd=folder, capture_output=True, check=True, text=True)
    return set(filter(None, told.stdout.split("\0")))


def wrong_contents(folder: Path, dist: Path, known: set[str]) -> Iterator[str]:
    """Yield each missing and each unexpected file of the wheel or the sdist."""
    (wheel,) = dist.glob("*.whl")
    (sdist,) = dist.glob("*.tar.gz")
    source = {name.removeprefix("src/") for name in known if name.startswith("src/")}
    in_wheel = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    yield from _differences(wheel.name, source, in_wheel)
    with tarfile.open(sdist) as archive:
        files = (member.name for member in archive.getmembers() if member.isfile())
        in_sdist = {name.partition("/")[2] for name in files} - OWN
    needed = {name for name in known if name.startswith("src/")}
    needed |= {"README.md", "CHANGELOG.md", "LICENSE", "pyproject.toml"}
    for name in sorted(needed - in_sdist):
        yield f"{sdist.name} lacks {name}"
    for name in sorted(in_sdist - known):
        yield f"{sdist.name} has {name}, which git does not know"


def _differences(archive: str, wanted: set[str], held: set[str]) -> Iterator[str]:
    for name in sorted(wanted - held):
        yield f"{archive} lacks {name}"
    for name in sorted(held - wanted):
        yield f"{archive} has {name}, which is not in src"


def wrong_metadata(folder: Path, dist: Path, distribution: str, version: str) -> Iterator[str]:
    """Yield each missing or wrong field of the wheel's metadata."""
    (wheel,) = dist.glob("*.whl")
    archive = zipfile.ZipFile(wheel)
    (path,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    fields = Parser().parsestr(archive.read(path).decode())
    text = (folder / "pyproject.toml").read_text(encoding="utf-8")
    wanted = {
        "Name": distribution,
        "Version": version,
        "Requires-Python": _static(text, "requires-python"),
        "Summary": _static(text, "description"),
        "License-Expression": _static(text, "license"),
        "Description-Content-Type": "text/markdown",
    }
    for field, value in wanted.items():
        if not value or fields[field] != value:
            yield f"{wheel.name} says {field}: {fields[field]}, not {value}"
    tree = f"{_static(text, 'Source')}/blob/{distribution}-v{version}"
    shown = str(fields.get_payload())
    yield from (f"{wheel.name} {fault}" for fault in wrong_description(folder, shown, tree))
    required = {
        re.split(r"[^\w.-]", line)[0]
        for line in fields.get_all("Requires-Dist") or []
        if "extra ==" not in line
    }
    if "torch" not in required:
        yield f"{wheel.name} does not require torch"


def wrong_description(folder: Path, shown: str, tree: str) -> Iterator[str]:
    """Yield differences between the description and the README, and broken links.

    `tree` is the address of the repository's files at this version.
    """
    readme = (folder / "README.md").read_text(encoding="utf-8")
    if LINK.sub(r"\g<before>", shown).strip() != LINK.sub(r"\g<before>", readme).strip():
        yield "describes itself in other words than README.md"
        return
    for target, link in zip(_targets(readme), _targets(shown), strict=True):
        wanted = target
        if not re.match(r"#|[a-z]+:", target):
            path = os.path.relpath(folder / target, ROOT)
            if not (ROOT / path.partition("#")[0]).exists():
                yield f"links to {target}, which is not in the repository"
            wanted = f"{tree}/{Path(path).as_posix()}"
        if link != wanted:
            yield f"links to {link}, not to {wanted}"


def _targets(text: str) -> list[str]:
    return [found["target"] for found in LINK.finditer(CODE.sub("", text))]


def _static(text: str, key: str) -> str:
    found = re.search(rf'^{key} = "([^"]+)"$', text, re.MULTILINE)
    return found[1] if found else ""
