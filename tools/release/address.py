"""Keep the address of the repository the same everywhere.

    python tools/release/address.py          print the lines that name another one, exit with 1
    python tools/release/address.py ADDRESS  move everything to a new address

CITATION.cff (`repository-code`) says it. The metadata of each distribution repeat it, since they
are built from their folder alone, and so do pages that show a command.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ADDRESS = re.compile(r"https://[\w.-]+/[\w.-]+/torchparts(?![\w.-]*\w)")


def address(root: Path = ROOT) -> str:
    """Return the address of the repository."""
    text = (root / "CITATION.cff").read_text(encoding="utf-8")
    found = re.search(r"^repository-code: (\S+)$", text, re.MULTILINE)
    if found is None:
        raise LookupError("address: CITATION.cff has no line `repository-code: ADDRESS`")
    return found[1]


def _files(root: Path) -> Iterator[Path]:
    told = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, check=True)
    for name in filter(None, told.stdout.decode().split("\0")):
        path = root / name
        if name.startswith("tests/"):  # of this script, with other addresses
            continue
        if path.suffix in (".md", ".toml", ".py", ".yml", ".cff", ".json") and path.is_file():
            yield path


def differences(root: Path = ROOT) -> list[str]:
    """Return `file:line` and the address of each line that names another one."""
    wanted, found = address(root), []
    for path in _files(root):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            for other in ADDRESS.findall(line):
                if other != wanted:
                    found.append(f"{path.relative_to(root)}:{number} names {other}, not {wanted}")
    return found


def move(new: str, root: Path = ROOT) -> None:
    """Replace the address in all files that git tracks."""
    old = address(root)
    for path in _files(root):
        text = path.read_text(encoding="utf-8")
        if old in text:
            path.write_text(text.replace(old, new), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:]:
        move(sys.argv[1].rstrip("/"))
    print("\n".join(differences()))
    sys.exit(bool(differences()))
