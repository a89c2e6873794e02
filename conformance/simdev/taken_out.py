"""`python taken_out.py [NAME...]`: take one wait, event, record or lock out at a time, and say
which test notices, as rows of a table.

Each is taken out of a copy of the package's source. The tests that the package marks for
accelerators are run with that copy until one fails, and then the file that has the source's word.
Exits with 1 where nothing noticed one that is not listed as such, or something one that is.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from waits import PARTS, Part

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PACKAGES = ROOT / "packages"
LIMIT_S = 300


def take_out(part: Part, into: Path) -> Path:
    """Copy the package's source without the part; gives the folder for the path.

    Raises:
        ValueError: its text is not there once.
    """
    folder = into / part.package
    shutil.copytree(PACKAGES / part.package / "src", folder)
    path = folder / part.file.split("/src/", 1)[1]
    text = path.read_text(encoding="utf-8")
    if text.count(part.old) != 1:
        raise ValueError(
            f"{part.name}: its text is in {part.file} {text.count(part.old)} times, but must be "
            "once. Say in waits/ what stands there now."
        )
    path.write_text(text.replace(part.old, part.new), encoding="utf-8")
    return folder


def noticed_by(part: Part) -> str:
    """The first test that fails without it; empty where none does."""
    with tempfile.TemporaryDirectory() as temporary:
        source = take_out(part, Path(temporary))
        path = os.pathsep.join([str(source), str(HERE), os.environ.get("PYTHONPATH", "")])
        if part.tests:
            return _first_failure(path, [str(ROOT / each) for each in part.tests])
        tests = PACKAGES / part.package / "tests"
        marked = [p for p in sorted(tests.glob("test_*.py")) if "accelerator" in p.read_text()]
        own = tests / f"test{Path(part.file).name}"
        return _first_failure(path, ["-m", "accelerator", *map(str, marked)]) or (
            _first_failure(path, [str(own)]) if own.exists() else ""
        )


def _first_failure(path: str, arguments: list[str]) -> str:
    command = [sys.executable, "-m", "simdev", "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    try:
        ran = subprocess.run(
            [*command, *arguments],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return f"no end in {LIMIT_S} s"
    found = re.search(r"^(?:FAILED|ERROR) \S*?(test_\w+\.py(?:::\S+)?)", ran.stdout, re.MULTILINE)
    if found:
        return found.group(1)
    return "" if ran.returncode == 0 else f"pytest ended with {ran.returncode}: {ran.stdout[-300:]}"


def main() -> int:
    """Print a row for each; which of them were not as they should be decides the exit."""
    wrong = 0
    for part in PARTS:
        if sys.argv[1:] and part.name not in sys.argv[1:]:
            continue
        test = noticed_by(part)
        wrong += bool(test) == bool(part.unnoticed)
        row = f"`{test}`" if test else f"**nothing**: {part.unnoticed or 'a test is missing'}"
        print(f"| {part.package}: {part.name} | {row} |", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
