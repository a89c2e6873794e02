"""Makes a fresh environment, installs what a report names, and runs the suite again."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchparts_conformance._errors import ReportError
from torchparts_conformance.report import _report


@dataclass(frozen=True)
class Source:
    """Where a fresh environment gets its distributions from.

    `files` are wheels or folders to install, `pip_options` are passed on to pip. With
    `reuses_torch` the environment sees the torch and pytest of this one instead of getting its
    own; nothing else of this one, because what is installed there comes first.
    """

    files: tuple[Path, ...] = ()
    pip_options: tuple[str, ...] = ()
    reuses_torch: bool = False


def install_plan(report: Mapping[str, Any], source: Source) -> list[str]:
    """Give pip's arguments for what a report names: the suite, torch and the distributions.

    Pure.
    Raises:
        ReportError: a distribution was not installed from a version, so it cannot be had again.
    """
    named = report["implementation"]["distributions"]
    if unknown := [found["name"] for found in named if found["version"] is None]:
        raise ReportError(
            f"report names no version of {unknown!r:.120}, but a rerun installs one. Install it "
            "yourself, and use --python."
        )
    environment, suite = report["environment"], report["suite"]
    wanted = {found["name"]: found["version"] for found in named}
    wanted |= {"torch": environment["torch"].partition("+")[0], suite["name"]: suite["version"]}
    options = list(source.pip_options)
    if source.reuses_torch:
        del wanted["torch"]
        options += ["--no-deps", "--ignore-installed"]
    exact = [f"{name}=={version}" for name, version in sorted(wanted.items())]
    if unsafe := [text for text in exact if not _is_plain(text)]:
        raise ReportError(
            f"report names {unsafe[0]!r:.80}, but a distribution and a version are needed. "
            "Make it again."
        )
    return ["install", *options, *(str(path.resolve()) for path in source.files), *exact]


def _is_plain(text: str) -> bool:
    return text.isascii() and all(c.isalnum() or c in "-_.=+!" for c in text) and text[0] != "-"


def rerun(
    report: Mapping[str, Any], *, adapter: str, python: str | None = None, source: Source
) -> list[str]:
    """Run the suite again and say what came out differently.

    Args:
        report: what is to be reproduced.
        adapter: the implementation to run, named by whoever verifies; the report's own word for
            it is not trusted, because it says which code to import.
        python: interpreter of an environment that is ready; without it one is made.
        source: for the environment that is made.
    """
    with tempfile.TemporaryDirectory(prefix="torchparts-rerun-") as folder:
        home = Path(folder)
        interpreter = python or make_environment(report, home / "venv", source)
        _refuse_without_suite(interpreter, home)
        second = run_in(
            interpreter,
            report["claims"],
            adapter=adapter,
            out=home / "out",
        )
        if second is None:
            return ["the second run gave no report"]
        return differences(report, second)


def run_in(
    interpreter: str,
    claims: Mapping[str, Any],
    *,
    adapter: str,
    out: Path,
) -> dict[str, Any] | None:
    """Run the suite with an interpreter, away from the working directory; give its report.

    A relative path of the interpreter starts where the command was given.
    """
    command = [
        *(_absolute(interpreter), "-m", "torchparts_conformance", "run", "--impl", adapter),
        *("--area", ",".join(claims["areas"]), "--device", ",".join(claims["devices"])),
        *(("--profile", ",".join(claims["profiles"])) if claims["profiles"] else ()),
        *("--out", str(out)),
    ]
    out.mkdir(parents=True)
    subprocess.run(command, check=False, cwd=out, stdout=subprocess.DEVNULL, env=_clean())
    path = out / "report.json"
    return _report.read(path) if path.exists() else None


def _absolute(interpreter: str) -> str:
    """Give a path from where the command was given; a bare name is looked for on the path."""
    # Links stay: they say which environment it is.
    return os.path.abspath(interpreter) if os.path.dirname(interpreter) else interpreter


def _refuse_without_suite(interpreter: str, home: Path) -> None:
    """Refuse an environment in which the suite does not start: it says nothing of anybody's code.

    Raises:
        ReportError: it does not.
    """
    command = [_absolute(interpreter), "-m", "torchparts_conformance", "list"]
    ended = subprocess.run(
        command, check=False, cwd=home, env=_clean(), capture_output=True, text=True
    )
    if ended.returncode:
        last = (ended.stderr.strip().splitlines() or ["nothing was said"])[-1]
        raise ReportError(
            f"the suite does not start in the environment of the second run: {last:.200}, but it "
            "has to judge there. Install what is missing, and run again."
        )


def _clean() -> dict[str, str]:
    """Give the environment variables without those that lead Python to other code."""
    return {word: value for word, value in os.environ.items() if not word.startswith("PYTHON")}


def make_environment(report: Mapping[str, Any], folder: Path, source: Source) -> str:
    """Make a virtual environment that holds what the report names; give its interpreter.

    Raises:
        ReportError: something could not be installed.
    """
    plan = install_plan(report, source)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, env=_clean())
    binary = "Scripts/python.exe" if sys.platform == "win32" else "bin/python"
    interpreter = str(folder / binary)
    if source.reuses_torch:
        _see_this_environment(folder)
    command = [interpreter, "-m", "pip", "--quiet", *plan]
    if subprocess.run(command, check=False, env=_clean()).returncode:
        raise ReportError(
            "what the report names could not be installed, but it must be. See pip above."
        )
    return interpreter


def _see_this_environment(folder: Path) -> None:
    """Put this environment's packages behind those of a new one.

    A path file inside a folder that a path file names is not read, so what is only linked into
    this environment, as editable installs are, stays unseen. Torch and what else the suite needs
    may lie in other folders, as those of the system do, and are seen there.
    """
    (site,) = folder.glob("**/site-packages")
    own = [sysconfig.get_path(word) for word in ("purelib", "platlib")]
    lines = dict.fromkeys([*own, *_folders_of_what_is_needed()])
    (site / "seen.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _folders_of_what_is_needed() -> Iterator[str]:
    for needed in importlib.metadata.requires(_report.SUITE) or ():
        name = re.match(r"[\w.-]+", needed)
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            yield str(importlib.metadata.distribution(name[0] if name else "").locate_file(""))


def differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """Say in which parts two reports of the same thing differ; times and reasons may.

    Pure. The adapter's own name and address may differ too; the code it leads to may not.
    """
    if _comparable(first) == _comparable(second):
        return []
    words = ("suite", "implementation", "environment", "claims", "verdict", "problems")
    parts = [word for word in words if _comparable(first)[word] != _comparable(second)[word]]
    outcomes = {_report.row_key(row): row["outcome"] for row in first["rows"]}
    rows = [
        f"{' '.join(_report.row_key(row))}: {outcomes.get(_report.row_key(row), 'absent')} "
        f"-> {row['outcome']}"
        for row in second["rows"]
        if outcomes.get(_report.row_key(row)) != row["outcome"]
    ]
    return [f"the second run differs in: {', '.join([*parts, *rows[:5]]) or 'its rows'}"]


def _comparable(report: Mapping[str, Any]) -> dict[str, Any]:
    kept = {k: v for k, v in report.items() if k not in ("date", "digest", "seal", "rows")}
    dropped = ("adapter", "adapter_sha256", "distributions")
    kept["implementation"] = {k: v for k, v in report["implementation"].items() if k not in dropped}
    # The file's own hash is known only where the installer noted it; the content's is always.
    kept["implementation"]["distributions"] = [
        {k: v for k, v in found.items() if k != "wheel_sha256"}
        for found in report["implementation"]["distributions"]
    ]
    kept["outcomes"] = sorted((*_report.row_key(row), row["outcome"]) for row in report["rows"])
    return kept
