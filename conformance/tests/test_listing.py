"""The list of implementations: an entry is made from a report, run again, and shown on a page."""

from __future__ import annotations

import dataclasses
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from torchparts_conformance._errors import ReportError
from torchparts_conformance.commands import _cli
from torchparts_conformance.listing import _entry, _listing
from torchparts_conformance.verify import _rerun

ROOT = Path(__file__).parents[2]
TEMPLATE = ROOT / "docs/examples/adapter"
PAGE = ROOT / "docs/conformance/be-listed.md"
ISSUES, SOURCE = "https://example.org/mine/issues", "https://example.org/mine"


@pytest.fixture
def entry(make_report):
    """Give an entry made from a report."""
    return _listing.new(make_report(), adapter="ours", contact=ISSUES, source=SOURCE)


def test_entry_reads_back(entry, tmp_path):
    path = _listing.submit(entry, tmp_path / "list")
    assert path.name == "mine-1.0.toml"
    assert _entry.read(path) == entry
    assert entry.results == {"ckpt-wrap": "core+robust 1/1 | cpu"}
    assert entry.distributions == ("mine==1.0",)
    with pytest.raises(ReportError, match=r"mine-1\.0\.toml exists, but results are not replaced"):
        _listing.submit(entry, tmp_path / "list")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("contact = ", "kontakt = ", "contact, kontakt is missing or unknown"),
        (f'"{SOURCE}"', '"http://example.org"', "source is 'http://example.org', which is of"),
        ('"mine==1.0"', "1", r"distributions is \[1\], which is of another form"),
        ('"1.0"', '"2.0"', "so its file must be mine-2.0.toml"),
        ('"mine"', '"\\u001b"', "name is '\\\\x1b', which is of another form"),
        ("[results]", "[results", "entry 'mine-1.0.toml': "),
    ],
)
def test_wrong_entry_is_refused(entry, tmp_path, old, new, said):
    path = tmp_path / "mine-1.0.toml"
    text = _entry.to_toml(entry)
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ReportError, match=said):
        _entry.read(path)


def test_implementation_without_a_plain_name_is_refused(entry):
    with pytest.raises(ReportError, match="so it cannot name a file"):
        assert dataclasses.replace(entry, name="///").file


def _with(report, **distribution):
    for found in report["implementation"]["distributions"]:
        found.update(distribution)
    return report


@pytest.mark.parametrize(
    ("change", "facts", "said"),
    [
        (lambda r: r["problems"].append("odd"), {}, "the run had problems (odd)"),
        (lambda r: r["rows"][0].update(outcome="not_run"), {}, "cases were left out"),
        (lambda r: r["implementation"].update(distributions=[]), {}, "names no distribution"),
        (lambda r: _with(r, kind="source"), {}, "mine was run from its source, but a rerun"),
        (lambda r: None, {"adapter": "a b"}, "--impl 'a b' is neither a short name nor"),
        (lambda r: None, {"adapter": "torch"}, "the report is of adapter mine:adapter, not torch"),
        (lambda r: None, {}, "the adapter's module mine is in none of the distributions"),
        (lambda r: None, {"contact": "me"}, "--contact 'me' is no https or mail address"),
        (lambda r: None, {"source": "here"}, "--source 'here' is no https address"),
    ],
)
def test_report_that_cannot_be_listed_is_told_why(make_report, expected, change, facts, said):
    report = make_report()
    change(report)
    given = {"adapter": "mine:adapter", "contact": ISSUES, "source": SOURCE, **facts}
    found = _listing.problems(report, _listing.new(report, **given), expected)
    assert [text for text in found if said in text]


def test_second_run_that_differs_is_told(entry, make_report, tmp_path, monkeypatch):
    path = _listing.submit(entry, tmp_path)
    again = [make_report(), make_report({"CW-001": "fail"}), None]
    monkeypatch.setattr(_rerun, "run_in", lambda *_, **__: again.pop(0))
    found = [_listing.recheck(path, source=_rerun.Source(), python="x") for _ in range(3)]
    assert found == [
        [],
        ["ckpt-wrap: core+robust 1/1 | cpu -> not conformant 0/1 | cpu"],
        ["the second run gave no report"],
    ]


def test_page_has_a_row_for_each_entry(entry, tmp_path):
    assert "There are none yet." in _listing.page(tmp_path)
    _listing.submit(entry, tmp_path)
    _listing.submit(dataclasses.replace(entry, name="a|<b>", contact="a@example.org"), tmp_path)
    _, *rows = _listing.page(tmp_path).partition("|---")[2].splitlines()
    assert len(rows) == 2
    assert all(row.count(" | ") == 5 for row in rows)
    assert "[mine 1.0](https://example.org/mine)" in rows[1]
    assert "<b>" not in "".join(rows)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["recheck", "x"], "entry 'x' cannot be read"),
        (["submit", "none.json"], "the following arguments are required"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_4(capsys, tmp_path, monkeypatch, options, said):
    monkeypatch.chdir(tmp_path)
    try:
        code = _cli.main(options)
    except SystemExit as ended:
        code = ended.code
    err = capsys.readouterr().err
    assert code == 4
    assert said in err
    assert err.count("\n") == 1


def commands(page):
    """Give the suite's commands of a page, without pip's: wheels stand for the index here."""
    lines = page.read_text(encoding="utf-8").splitlines()
    return [shlex.split(line[2:]) for line in lines if line.startswith("$ torchparts-")]


@pytest.mark.nightly
@pytest.mark.skipif(not PAGE.exists(), reason="only in the repository")
def test_commands_of_the_page_lead_to_an_entry(package, make_report, built, tmp_path):
    wheels = [built(package.parents[1], tmp_path / "suite"), built(TEMPLATE, tmp_path / "mine")]
    source = _rerun.Source(files=tuple(wheels), reuses_torch=True)
    python = _rerun.make_environment(make_report(name="my-tracker"), tmp_path / "venv", source)
    (tmp_path / "wheels").mkdir()
    assert [command[1] for command in commands(PAGE)] == ["run", "submit", "recheck"]
    for _, command, *options in commands(PAGE):
        is_rerun = command == "recheck"  # where torch is installed
        more = ["--reuse-torch", *(f"--install={wheel}" for wheel in wheels)] if is_rerun else []
        line = [sys.executable if is_rerun else python, "-m", "torchparts_conformance", command]
        subprocess.run([*line, *options, *more], cwd=tmp_path, check=True)
    (listed,) = tmp_path.glob("**/registry/my-tracker-1.0.toml")
    assert "core" in _entry.read(listed).results["mod-tracker"]
    for name in ("test_conformance.py", "known-failures.toml"):
        shutil.copy(TEMPLATE / name, tmp_path)
    subprocess.run([python, "-m", "pytest", "-q", "test_conformance.py"], cwd=tmp_path, check=True)
