"""Which folders the judge and the code under test import from."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchparts_conformance.subject import _isolation


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A folder with a package and a module that the judge needs, and which is no site."""
    (tmp_path / "made_up_package").mkdir()
    (tmp_path / "made_up_package" / "__init__.py").write_text("")
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "made_up_module.py").write_text("")
    (tmp_path / "sites").mkdir()
    needed = ("made_up_package", "made_up_module", "nobody_has_this")
    monkeypatch.setattr(_isolation, "_NEEDED", needed)
    return tmp_path


def test_what_the_judge_needs_and_no_site_has_is_found_elsewhere(elsewhere):
    """The folder that a package or module is in, each where it is; what nobody has is left out."""
    sites, inner = str(elsewhere / "sites"), str(elsewhere / "inner")
    assert _isolation._needed([sites], [str(elsewhere), inner]) == [str(elsewhere), inner]
    assert _isolation._needed([str(elsewhere)], [str(elsewhere), inner]) == [inner]
    assert _isolation._needed([str(elsewhere), inner], [str(elsewhere), inner]) == []
    assert _isolation._needed([sites], []) == []


def _subject(tmp_path: Path, *options: str) -> list[str]:
    code = "from torchparts_conformance.subject import _isolation as i; print(*i._found().subject)"
    package = Path(_isolation.__file__).parents[2]
    return subprocess.run(
        [sys.executable, *options, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(package)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()


def test_working_directory_is_a_place_for_the_subject(tmp_path):
    """As Python would have it, unless it was told not to look there."""
    assert _subject(tmp_path)[0] == str(tmp_path)
    if sys.version_info >= (3, 11):
        assert str(tmp_path) not in _subject(tmp_path, "-P")
