"""What the documentation tells a new user works at the first try."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from torchparts_conformance import _report


@pytest.fixture
def docs(package):
    """Give the folder of the suite's pages."""
    return package.parents[2] / "docs" / "conformance"


@pytest.mark.slow
def test_adapter_from_the_page_works_at_the_first_try(docs, tmp_path):
    """The adapter on the page, saved under its name, runs by the command on the page."""
    page = (docs / "write-an-adapter.md").read_text(encoding="utf-8")
    (adapter,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert adapter.count("\n") <= 30
    (tmp_path / "my_adapter.py").write_text(adapter, encoding="utf-8")
    doctor, run = re.findall(r"^\$ torchparts-conformance (.*)$", page, re.MULTILINE)
    assert "nothing is missing" in _run(doctor, tmp_path)
    _run(run, tmp_path)
    report = _report.read(tmp_path / "results" / "report.json")
    (verdict,) = [v for v in report["verdicts"] if v["profile"] == "core"]
    passed, total = verdict["must"]
    assert passed == total > 0
    assert report["verdict"] == "conformant"


def _run(line, folder):
    command = [sys.executable, "-m", "torchparts_conformance", *line.split()]
    ended = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_pages_link_to_pages_that_exist(docs):
    """No link inside the suite's pages leads nowhere."""
    links = {
        (page.name, target)
        for page in docs.glob("*.md")
        for target in re.findall(r"\]\(([\w./-]+\.md)", page.read_text(encoding="utf-8"))
    }
    assert links
    assert [link for link in links if not (docs / link[1]).exists()] == []
