"""Edge: makes a fresh environment, installs what a report names, and runs the suite again."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchparts_conformance import _report
from torchparts_conformance._errors import ReportError


def install_plan(report: Mapping[str, Any], extra: Sequence[str] = ()) -> list[str]:
    """Give pip's arguments for what a report names: the suite, torch and the distributions.

    Pure. `extra` is passed on, for example `--find-links dist`.
    Raises:
        ReportError: a distribution was not installed from a version, so it cannot be had again.
    """
    named = report["implementation"]["distributions"]
    if unknown := [found["name"] for found in named if found["version"] is None]:
        raise ReportError(f"report names no version of {unknown}, so it cannot be run again.")
    environment, suite = report["environment"], report["suite"]
    wanted = {found["name"]: found["version"] for found in named}
    wanted |= {"torch": environment["torch"].partition("+")[0], suite["name"]: suite["version"]}
    exact = [f"{name}=={version}" for name, version in sorted(wanted.items())]
    if unsafe := [text for text in exact if not _is_plain(text)]:
        raise ReportError(f"report names {unsafe[0]!r:.80}, which is no distribution and version.")
    return ["install", *extra, *exact]


def _is_plain(text: str) -> bool:
    return text.isascii() and all(c.isalnum() or c in "-_.=+!" for c in text) and text[0] != "-"


def rerun(
    report: Mapping[str, Any],
    *,
    adapter: str,
    python: str | None = None,
    pip_options: Sequence[str] = (),
) -> list[str]:
    """Run the suite again and say what came out differently.

    Args:
        report: what is to be reproduced.
        adapter: the implementation to run, named by whoever verifies; the report's own word for
            it is not trusted, because it says which code to import.
        python: interpreter of an environment that is ready; without it one is made.
        pip_options: for the environment that is made.
    """
    with tempfile.TemporaryDirectory(prefix="torchparts-rerun-") as folder:
        home = Path(folder)
        interpreter = python or _environment(report, home / "venv", pip_options)
        claims = report["claims"]
        command = [
            *(interpreter, "-m", "torchparts_conformance", "run", "--impl", adapter),
            *("--area", ",".join(claims["areas"]), "--device", ",".join(claims["devices"])),
            *(("--profile", ",".join(claims["profiles"])) if claims["profiles"] else ()),
            *("--out", str(home / "out")),
        ]
        subprocess.run(command, check=False, cwd=home, stdout=subprocess.DEVNULL)
        if not (home / "out" / "report.json").exists():
            return ["the second run gave no report"]
        return differences(report, _report.read(home / "out" / "report.json"))


def _environment(report: Mapping[str, Any], folder: Path, options: Sequence[str]) -> str:
    """Make a virtual environment that holds what the report names; give its interpreter."""
    plan = install_plan(report, options)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    binary = "Scripts/python.exe" if sys.platform == "win32" else "bin/python"
    interpreter = str(folder / binary)
    ended = subprocess.run([interpreter, "-m", "pip", "--quiet", *plan], check=False)
    if ended.returncode:
        raise ReportError("what the report names could not be installed; pip says why above.")
    return interpreter


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
    kept = {k: v for k, v in report.items() if k not in ("digest", "seal", "rows")}
    dropped = ("adapter", "adapter_sha256")
    kept["implementation"] = {k: v for k, v in report["implementation"].items() if k not in dropped}
    kept["outcomes"] = sorted((*_report.row_key(row), row["outcome"]) for row in report["rows"])
    return kept
