"""`python taken_out.py [WORDS...] [--page FILE]`: take one wait, event, record or lock out at a
time, and say which test notices, as rows of a table. Words choose rows that have one of them.

Each is taken out of a copy of the package's source. The tests that it names are run with that copy
until one fails; they have to pass with what is there first. Exits with 1 where none fails.
"""

from __future__ import annotations

import argparse
import functools
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
BEGIN, END = "<!-- taken out: begin -->\n", "<!-- taken out: end -->"
ROW = re.compile(r"^\| (.+?: .+?) \| .* \|\n", re.MULTILINE)


def without(part: Part) -> str:
    """The text of its file without it.

    Raises:
        ValueError: what is taken out is not there once.
    """
    text = (PACKAGES / part.file).read_text(encoding="utf-8")
    if text.count(part.old) != 1:
        raise ValueError(
            f"{part.name}: its text is in {part.file} {text.count(part.old)} times, but must be "
            "once. Say in waits/ what stands there now."
        )
    return text.replace(part.old, part.new)


def take_out(part: Part, into: Path) -> Path:
    """Copy the package's source without the part; gives the folder for the path."""
    folder = into / part.package
    shutil.copytree(PACKAGES / part.package / "src", folder)
    path = folder / part.file.split("/src/", 1)[1]
    path.write_text(without(part), encoding="utf-8")
    return folder


def noticed_by(part: Part) -> str:
    """The first test that fails without it; empty where none does."""
    if told := _first_failure("", part.tests):
        raise RuntimeError(f"{told} fails with all that is there. Mend that first.")
    with tempfile.TemporaryDirectory() as temporary:
        return _first_failure(str(take_out(part, Path(temporary))), part.tests)


@functools.cache
def _first_failure(source: str, arguments: tuple[str, ...]) -> str:
    """The first test that fails with a package's source, empty for what is there."""
    # The simulated device's own tests register it themselves.
    registered = [] if "conformance/" in arguments[-1] else ["-m", "simdev"]
    pytest = ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    path = os.pathsep.join([source, str(HERE), os.environ.get("PYTHONPATH", "")])
    try:
        ran = subprocess.run(
            [sys.executable, *registered, *pytest, *arguments],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT_S,
            cwd=ROOT,
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{arguments} came to no end in {LIMIT_S} s: no test noticed") from None
    found = re.search(r"^(?:FAILED|ERROR) \S*?(test_\w+\.py(?:::.+?)?)(?: - |$)", ran.stdout, re.M)
    if ran.returncode and not found:
        raise RuntimeError(f"pytest ended with {ran.returncode}: {ran.stdout[-300:]}")
    return found.group(1) if found else ""


def row(part: Part) -> tuple[str, bool]:
    """Its row of the table, and whether it is as it should be."""
    try:
        test = noticed_by(part)
    except RuntimeError as error:
        return f"| {part} | **nothing**: {error} |\n", False
    return f"| {part} | {f'`{test}`' if test else '**nothing**'} |\n", bool(test)


def write(page: Path, rows: list[str]) -> None:
    """Put rows between the marks of a page, where those that were not run now stay."""
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    table, _, after = rest.partition(END)
    known = {match[1]: match[0] for match in ROW.finditer(table + "".join(rows))}
    rows = [known[str(part)] for part in PARTS if str(part) in known]
    head = "\n| taken out | noticed by |\n|---|---|\n"
    page.write_text(f"{before}{BEGIN}{head}{''.join(rows)}\n{END}{after}", encoding="utf-8")


def main() -> int:
    """Print a row for each; which of them were not as they should be decides the exit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--page", type=Path, help="a file with the two marks of the table")
    options = parser.parse_args()
    all_fine = True
    for part in PARTS:
        if options.words and not any(word in str(part) for word in options.words):
            continue
        told, fine = row(part)
        all_fine = all_fine and fine
        print(told, end="", flush=True)
        if options.page:
            write(options.page, [told])
    return 0 if all_fine else 1


if __name__ == "__main__":
    sys.exit(main())
