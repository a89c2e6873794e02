"""The commands of the list: what they refuse, and the way from nothing to a verified badge."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from torchparts_conformance.commands import _cli
from torchparts_conformance.listing import _entry, _page
from torchparts_conformance.verify import _installed, _rerun

LOG = "https://example.org/runs/1"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["recheck", "x", "--by", "me"], "--by 'me' is no https address"),
        (["recheck", "x", "--by", LOG], "cannot be read"),
        (["registry", "nowhere"], "'nowhere' is no folder"),
        (["submit", "none.json"], "the following arguments are required"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_4(capsys, tmp_path, monkeypatch, options, said):
    """With what to do."""
    monkeypatch.chdir(tmp_path)
    try:
        code = _cli.main(options)
    except SystemExit as ended:
        code = ended.code
    err = capsys.readouterr().err
    assert code == 4
    assert said in err
    assert err.count("\n") == 1


def test_day_that_is_none_is_refused(capsys, tmp_path):
    """The form is shown."""
    with pytest.raises(SystemExit) as ended:
        _cli.main(["registry", str(tmp_path), "--day", "tomorrow"])
    assert ended.value.code == 4
    assert "'tomorrow' is no day. Write it as 2026-12-31" in capsys.readouterr().err


LISTED = Path(__file__).parents[2] / "docs" / "conformance" / "registry"


@pytest.mark.skipif(not LISTED.exists(), reason="only in the repository")
def test_public_list_follows_from_its_entries():
    """On the day that its page names."""
    assert _cli.main(["registry", str(LISTED), "--check"]) == 0


TEMPLATE = Path(__file__).parents[2] / "docs" / "examples" / "adapter"


PAGE = Path(__file__).parents[2] / "docs" / "conformance" / "be-listed.md"


def commands(page):
    """The suite's commands of a page, without pip's: wheels stand for the index here."""
    lines = page.read_text(encoding="utf-8").splitlines()
    return [shlex.split(line[2:]) for line in lines if line.startswith("$ torchparts-")]


@pytest.mark.skipif(not PAGE.exists(), reason="only in the repository")
def test_page_leaves_nothing_to_guess():
    """What it types beside the suite's commands: a clone, the template, an environment, wheels."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    typed = [line[2:] for line in lines if line.startswith("$ ")]
    assert [line.split()[0] for line in typed] == [
        *("git", "cp", "python", ".", "python"),
        *("torchparts-conformance", "torchparts-conformance", "git", "git", "git"),
        *("python", "torchparts-conformance", "torchparts-conformance"),
    ]
    root = PAGE.parents[2]
    words = {word.removeprefix("./") for line in typed for word in line.split()}
    named = {word.removeprefix("torchparts/") for word in words if word.startswith("torchparts/")}
    assert {name for name in named if not (root / name).exists()} == {
        "docs/conformance/registry/my-tracker/1.0"
    }


@pytest.mark.slow
@pytest.mark.skipif(not TEMPLATE.exists(), reason="only in the repository")
@pytest.mark.parametrize("page", [TEMPLATE / "README.md", PAGE], ids=["template", "page"])
def test_from_an_empty_folder_to_a_verified_badge(package, make_report, built, tmp_path, page):
    """As the page says; another run of other code is then not reproducible."""
    wheels = [built(package.parents[1], tmp_path / "suite"), built(TEMPLATE, tmp_path / "mine")]
    source = _rerun.Source(files=tuple(wheels), reuses_torch=True)
    python = _rerun.make_environment(make_report(name="my-tracker"), tmp_path / "venv", source)
    given = ["--reuse-torch", *(f"--install={wheel}" for wheel in wheels)]
    here = {"recheck": sys.executable, "registry": sys.executable}  # where torch is installed
    (tmp_path / "wheels").mkdir()
    assert [command[1] for command in commands(page)] == ["run", "submit", "recheck", "registry"]
    for _, command, *options in commands(page):
        interpreter = here.get(command, python)
        more = given if command == "recheck" else []
        line = [interpreter, "-m", "torchparts_conformance", command, *options, *more]
        subprocess.run(line, cwd=tmp_path, check=True)
    (listed,) = tmp_path.glob("**/registry/index.md")
    for name in ("test_conformance.py", "known-failures.toml"):
        shutil.copy(TEMPLATE / name, tmp_path)
    subprocess.run([python, "-m", "pytest", "-q", "test_conformance.py"], cwd=tmp_path, check=True)
    entry = _entry.read(listed.parent / "my-tracker/1.0")
    assert [run.result for run in entry.runs] == ["verified"]
    assert _page.drift(listed.parent) == []
    assert _page.problems({"mine": entry}, _installed.expected()) == []
    badge = (listed.parent / "my-tracker/1.0/badge-mod-tracker.svg").read_text("utf-8")
    assert f"| {entry.earned}" in badge
