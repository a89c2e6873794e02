"""What the documentation tells a new user works at the first try."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from torchparts_conformance.report import _report


@pytest.fixture
def docs(package):
    """Give the folder of the suite's pages."""
    return package.parents[2] / "docs" / "conformance"


@pytest.mark.nightly
def test_adapters_from_the_page_work_at_the_first_try(docs, tmp_path):
    """Saved under their names, the page's adapters do what its commands say, in that order."""
    page = (docs / "write-an-adapter.md").read_text(encoding="utf-8")
    names = re.findall(r"[Ss]ave (?:it|this one) as `(\w+\.py)`", page)
    adapters = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(names) == 2
    whole, (lacking, raising) = adapters[:2], adapters[2:]
    assert "lacks=" in lacking
    assert "NotProvided" in raising
    for fragment in (lacking, raising):
        exec(compile(fragment, "write-an-adapter.md", "exec"), {})
    for name, adapter in zip(names, whole, strict=True):
        assert adapter.count("\n") <= 30
        (tmp_path / name).write_text(adapter, encoding="utf-8")
    commands = list(_commands(page))
    assert [arguments[0] for _, arguments, _ in commands] == [
        *("doctor", "run", "run", "run", "verify", "run", "diff"),
    ]
    for environment, arguments, shown in commands:
        said = _run(arguments, environment, tmp_path)
        assert [line for line in shown if line not in said] == []
    assert _report.read(tmp_path / "later" / "report.json")["verdict"] == "conformant"


def _commands(page):
    """Give each command of the page: its variables, its arguments, and the lines it shows."""
    blocks = re.findall(r"```console\n(.*?)```", page, re.DOTALL)
    for command in re.split(r"^\$ ", "".join(blocks), flags=re.MULTILINE)[1:]:
        line, *shown = command.splitlines()
        variables, _, arguments = line.partition("torchparts-conformance ")
        environment = dict(word.split("=", 1) for word in variables.split())
        yield environment, arguments.split(), [line for line in shown if line != "..."]


def _run(arguments, environment, folder):
    """Run the command as it is installed: a script that is not in the working directory."""
    script = folder / "bin" / "torchparts-conformance"
    script.parent.mkdir(exist_ok=True)
    script.write_text(
        "import sys\nfrom torchparts_conformance.commands._cli import main\nsys.exit(main())\n"
    )
    ended = subprocess.run(
        [sys.executable, str(script), *arguments],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout.splitlines()
