"""What CONTRIBUTING tells a newcomer to type works, step by step, in a copy of the repository."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
STEP = re.compile(r"<!-- follow: (\w+) (.+?) -->\n\n( *)```\w+\n(.*?)\n\3```", re.DOTALL)


def steps(name: str) -> list[tuple[str, str]]:
    """What to do, and the text of the block below it, for each step of one walkthrough."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    found = [match for match in STEP.finditer(page) if match[1] == name]
    return [(m[2], re.sub(rf"^{m[3]}", "", m[4], flags=re.MULTILINE)) for m in found]


def follow(folder: Path, what: str, text: str) -> list[subprocess.CompletedProcess[str]]:
    """Take one step in a copy; give what its commands came to; they stop at one that fails."""
    if what == "run":
        return [_run(folder, f"set -e\n{text}")]
    path, how = what.split(" ", 1)
    target = folder / path
    if how == "create":
        assert not target.exists()
        target.write_text(text + "\n")
    elif how == "append":
        target.write_text(target.read_text() + "\n" + text + "\n")
    else:
        before = how.removeprefix("before `").removesuffix("`")
        assert target.read_text().count(before) == 1
        target.write_text(target.read_text().replace(before, f"{text}\n{before}"))
    return []


def _run(folder: Path, lines: str) -> subprocess.CompletedProcess[str]:
    sources = [*folder.glob("packages/*/src"), folder / "conformance/src"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, sources))}
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env["PATH"]])  # `python`
    command = ["bash", "-c", lines]
    return subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=500, check=False
    )


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The files that git knows, copied; a repository of its own is not needed."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tmp_path / name)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(("name", "count"), [("rule", 2), ("requirement", 4)])
def test_walkthrough_works_as_it_stands(clone: Path, name: str, count: int) -> None:
    """Every command ends well, and the tests that it names were there."""
    taken = steps(name)
    assert len(taken) == count
    for what, text in taken:
        for done in follow(clone, what, text):
            assert done.returncode == 0, done.stdout + done.stderr
            assert re.search(r"[1-9]\d* passed", done.stdout), done.stdout


@pytest.mark.slow
def test_wrong_rule_of_the_walkthrough_is_seen(clone: Path) -> None:
    """Its third step: the tests that passed fail."""
    (what, text), (_, command) = steps("rule")
    follow(clone, what, text.replace("n._saved_eps", "0.3"))
    (done,) = follow(clone, "run", command)
    assert done.returncode == 1 and "failed" in done.stdout
