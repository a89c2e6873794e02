"""`python -m simdev taken_out.py [WORDS...] [--page FILE]`: take out one wait, event, record or
lock at a time, and say which test notices, as rows of a table. Words choose rows that have them.

Each is taken out of a copy of the package's source. The tests that it names are run with that copy
until one fails; they have to pass with what is there first. Exits with 1 where none fails.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

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
def _first_failure(source: str, tests: tuple[str, ...]) -> str:
    """The first test that fails with a package's source, empty for what is there."""
    mine, theirs = _PROCESSES.Pipe()
    process = _PROCESSES.Process(target=_run, args=(theirs, source, tests))
    process.start()
    theirs.close()
    try:
        if not mine.poll(LIMIT_S):
            raise RuntimeError(f"no end in {LIMIT_S} s, of which no test tells")
        code, failed = mine.recv()
    except EOFError:
        raise RuntimeError("the process is gone, of which no test tells") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # it leads a group of its own, with its ranks
        process.join()
    if code and not failed:
        raise RuntimeError(f"pytest ended with {code}, of which no test tells")
    return failed


# What takes longest to import is imported once, and a process for each row begins with it.
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["torch", "hypothesis", "torchparts_conformance.plugin"])


class _Failures:
    """Notes the first."""

    first = ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Of a test."""
        if report.failed and not self.first:
            path, *rest = report.nodeid.split("::", 1)
            self.first = "::".join([Path(path).name, *rest])

    pytest_collectreport = pytest_runtest_logreport


def _run(pipe: Any, source: str, tests: tuple[str, ...]) -> None:
    """Run tests in this process with a package's source first on the path."""
    os.setsid()
    os.chdir(ROOT)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    if source:
        sys.path.insert(0, source)
        os.environ["PYTHONPATH"] = os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])
    if any(each.startswith("conformance/") for each in tests):  # they register it themselves
        os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    failures = _Failures()
    options = ["-x", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
    code = pytest.main([*options, *tests], plugins=[failures])
    pipe.send((int(code), failures.first))


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
