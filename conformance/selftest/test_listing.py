"""The list: what an entry may say, what its label is on a day, and what is refused."""

from __future__ import annotations

import copy
import dataclasses
import datetime
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from torchparts_conformance._errors import ReportError
from torchparts_conformance.commands import _cli
from torchparts_conformance.listing import _entry, _page, _submit
from torchparts_conformance.listing._entry import Objection, Run
from torchparts_conformance.report import _report
from torchparts_conformance.verify import _installed, _rerun

DAY = datetime.date(2026, 11, 22)
LATER = datetime.date(2027, 11, 21)
LOG = "https://example.org/runs/1"
ADAPTER = "mine:adapter"
LINES = f"""
adapter = "{ADAPTER}"
contact = "someone@example.org"
source = "https://example.org/mine"
submitted = 2026-11-22
"""


def test_text_of_an_entry_is_read_back(entry, ran):
    """Runs, disputes and a withdrawal, with whatever signs."""
    full = dataclasses.replace(
        ran(entry, "verified", "not reproducible"),
        disputes=(Objection(DAY, "a@b.org", 'a "quoted"\n\\ reason', "no"),),
        withdrawn=Objection(LATER, "https://b.org", "gone \x7f"),
    )
    for each in (entry, full):
        assert _entry.parse(_entry.to_toml(each), "1.0", each.report) == each


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("adapter = 1", "entry.adapter is 1"),
        ("adapter = 'a b'", "entry.adapter is 'a b'"),
        (LINES.replace("someone@example.org", "me"), "entry.contact is 'me'"),
        (LINES.replace("https", "javascript"), "entry.source is"),
        (LINES.replace("2026-11-22", "2026-11-22T10:00:00"), "entry.submitted is"),
        (LINES + "run = 1", "run is no list"),
        (LINES + "run = [1]", "run is no table"),
        (LINES + "verified = true", "unknown word 'verified'"),
        (LINES + "[[run]]\nday = 2026-11-22\nresult = 'good'\nby = 'https://a.org'", "'good'"),
        (LINES + "[[dispute]]\nday = 2026-11-22\nby = 'a@b.org'\nreason = ' '", "dispute.reason"),
        (LINES + "[withdrawn]\nday = 2026-11-22\nby = 'a@b.org'", "withdrawn.reason is None"),
        (LINES.replace("mine:adapter", "m" * 301), "entry.adapter"),
        ("a = [", "entry '1.0'"),
    ],
)
def test_entry_of_another_form_is_refused(make_report, text, said):
    """By the word that is wrong."""
    with pytest.raises(ReportError, match=re.escape(said)) as caught:
        _entry.parse(text, "1.0", make_report())
    assert "Correct it." in str(caught.value)


def test_label_is_what_the_last_run_came_to(entry, ran):
    """A run that differs ends what was verified before, and a later one begins it anew."""
    assert entry.label(DAY) == "submitted"
    for result in _entry.RESULTS:
        assert ran(entry, "verified", result).label(DAY) == result
    again = ran(entry, "verified", "not reproducible")
    assert again.earned is None
    again = dataclasses.replace(again, runs=(*again.runs, Run(LATER, "verified", LOG)))
    assert again.earned == LATER


def test_open_dispute_and_withdrawal_come_before_any_run(entry, ran):
    """An answered dispute does not."""
    objection = Objection(DAY, "a@b.org", "no")
    disputed = dataclasses.replace(ran(entry, "verified"), disputes=(objection,))
    assert disputed.label(DAY) == "disputed"
    answered = dataclasses.replace(objection, answer="it is right")
    assert dataclasses.replace(disputed, disputes=(answered,)).label(DAY) == "verified"
    withdrawn = dataclasses.replace(disputed, withdrawn=objection)
    assert withdrawn.label(DAY) == "withdrawn"


def test_verified_expires_after_a_year_or_with_its_torch(entry, monkeypatch, ran):
    """On the day itself; a second run does not renew it."""
    verified = ran(entry, "verified")
    assert verified.expires == DAY.replace(year=2027)
    assert verified.label(LATER) == "verified"
    assert verified.label(verified.expires) == "expired"
    twice = dataclasses.replace(verified, runs=(*verified.runs, Run(LATER, "verified", LOG)))
    assert twice.expires == verified.expires
    assert ran(entry, "failed cases").label(verified.expires) == "failed cases"
    leap = ran(entry, "verified", day=datetime.date(2028, 2, 29))
    assert leap.expires == datetime.date(2029, 3, 1)
    monkeypatch.setattr(_entry, "OLDEST_TORCH", (2, 14))
    assert verified.label(DAY) == "expired"


def test_oldest_torch_is_that_of_the_package(package):
    """What the distribution asks for."""
    project = (package.parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    assert f'"torch>={".".join(map(str, _entry.OLDEST_TORCH))}"' in project


def test_badge_of_an_entry_names_torch_and_day_until_it_expires(entry, ran):
    """Grey afterwards, and before somebody else has run it."""
    (badge,) = _page.dated(ran(entry, "verified"), DAY)
    assert badge.message == "core+robust 1/1 | cpu | torch 2.13 | 2026-11-22"
    assert badge.color == "brightgreen"
    (badge,) = _page.dated(ran(entry, "verified"), DAY.replace(year=2028))
    assert (badge.message, badge.color) == ("expired 2027-11-22", "lightgrey")
    (badge,) = _page.dated(entry, DAY)
    assert (badge.message, badge.color) == ("submitted", "lightgrey")


@pytest.fixture
def owned(monkeypatch):
    """Let the made-up adapter come with the made-up distribution."""
    owners = {"mine": ["Mine"], "theirs": ["theirs"]}
    monkeypatch.setattr(_submit.importlib.metadata, "packages_distributions", lambda: owners)


@pytest.mark.usefixtures("owned")
def test_report_in_order_is_submitted_once(entry, expected, tmp_path):
    """What was written is what was given, and a second time is refused."""
    assert _submit.problems(entry.report, entry, expected) == []
    folder = _submit.submit(entry.report, entry, tmp_path)
    assert folder == tmp_path / "mine" / "1.0"
    read = _entry.read(folder)
    assert read == entry
    assert read.report == entry.report
    with pytest.raises(ReportError, match=r"mine/1\.0 is in the list, but results are not"):
        _submit.submit(entry.report, entry, tmp_path)


DISTRIBUTION = {
    "name": "mine",
    "version": "1.0",
    "kind": "record",
    "sha256": "1" * 64,
    "wheel_sha256": None,
}


@pytest.mark.usefixtures("owned")
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"distributions": []}, "the adapter names no distribution"),
        ({"distributions": [DISTRIBUTION | {"kind": "source"}]}, "mine was run from its source"),
        ({"distributions": [DISTRIBUTION | {"version": None}]}, "mine was run from its source"),
        ({"adapter": "other:adapter"}, "the report is of adapter other:adapter, not mine:adapter"),
        (
            {"distributions": [DISTRIBUTION | {"name": "theirs"}]},
            "the adapter's module mine is in none of the",
        ),
    ],
)
def test_what_nobody_could_run_again_is_not_submitted(entry, expected, changes, said, changed):
    """Each with a next step."""
    report = changed(entry.report, **changes)
    found = _submit.problems(report, dataclasses.replace(entry, report=report), expected)
    assert found[0].startswith(said)


@pytest.mark.usefixtures("owned")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"contact": "me"}, "--contact 'me' is no https or mail address"),
        ({"source": "http://a.org"}, "--source 'http://a.org' is no https address"),
        ({"adapter": "a b"}, "--impl 'a b' is neither"),
    ],
)
def test_words_beside_a_report_are_checked(entry, expected, words, said):
    """As an entry's reader would."""
    (found,) = _submit.problems(entry.report, dataclasses.replace(entry, **words), expected)
    assert found.startswith(said)


@pytest.mark.usefixtures("owned")
def test_edited_interfered_or_partial_report_is_not_submitted(make_report, entry, expected):
    """Nor one on a torch that has no entry."""
    edited = make_report()
    edited["implementation"]["version"] = "2.0"
    old = make_report()
    old["environment"]["torch"] = "2.8.0"
    old = {**old, "seal": _report.seal(old | _report.derived(old))}
    for report, said in (
        (edited, "the seal does not match"),
        (make_report(problems=("torch.equal was replaced",)), "the run had problems"),
        (make_report({"CW-002": "not_run"}), "cases were left out"),
        (old, "torch 2.8.0 is too old"),
    ):
        found = _submit.problems(report, dataclasses.replace(entry, report=report), expected)
        assert any(text.startswith(said) for text in found), found


@pytest.mark.parametrize("name", ["../..", "...", "§"])
def test_names_lead_nowhere_else(make_report, tmp_path, name, changed):
    """A folder is made of letters and digits, or the report is refused."""
    with pytest.raises(ReportError, match="a folder needs letters or digits"):
        _submit.folder_of(changed(make_report(), name=name), tmp_path)
    folder = _submit.folder_of(changed(make_report(), name="../A b", version="1/2"), tmp_path)
    assert folder == tmp_path / "a-b" / "1-2"


def test_page_shows_entries_and_nothing_of_their_markup(entry, tmp_path, ran, changed):
    """Every entry has its row, and files that were edited are named."""
    _page.write(tmp_path, DAY)
    assert "Nobody has asked yet." in (tmp_path / "index.md").read_text(encoding="utf-8")
    hostile = changed(entry.report, name="[x](javascript:1) <b>", version="1.0")
    withdrawn = Objection(DAY, "a@b.org", "<img> | cell")
    _submit.submit(entry.report, ran(entry, "verified"), tmp_path)
    _submit.submit(
        hostile, dataclasses.replace(entry, report=hostile, withdrawn=withdrawn), tmp_path
    )
    _page.write(tmp_path, DAY)
    text = (tmp_path / "index.md").read_text(encoding="utf-8")
    assert "[verified](https://example.org/runs/1)" in text
    assert "javascript:1)" not in text
    assert "<" not in text.replace("<br>", "")
    assert text.count("\n|") == 4
    assert _page.drift(tmp_path) == []
    (tmp_path / "mine/1.0/badge-ckpt-wrap.svg").write_text("edited", encoding="utf-8")
    assert _page.drift(tmp_path) == ["mine/1.0/badge-ckpt-wrap.svg is out of date; write it again"]
    (tmp_path / "mine/1.0").rename(tmp_path / "mine/2.0")
    with pytest.raises(ReportError, match=r"mine/2\.0 holds a report of another name"):
        _page.drift(tmp_path)


def test_reports_of_this_suite_are_verified_again(entry, expected):
    """Those of an older suite were judged by theirs."""
    edited = copy.deepcopy(entry.report)
    edited["implementation"]["version"] = "2.0"
    listed = dataclasses.replace(entry, report=edited)
    said = "mine/1.0: the seal does not match: the file was changed after it was written"
    assert said in _page.problems({"mine/1.0": listed}, expected)
    newer = dataclasses.replace(expected, version="9.0")
    assert _page.problems({"mine/1.0": listed}, newer) == []


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


def commands():
    """The commands of the template's README, without pip's: wheels stand for the index here."""
    lines = (TEMPLATE / "README.md").read_text(encoding="utf-8").splitlines()
    return [shlex.split(line[2:]) for line in lines if line.startswith("$ torchparts-")]


@pytest.mark.slow
@pytest.mark.skipif(not TEMPLATE.exists(), reason="only in the repository")
def test_from_an_empty_folder_to_a_verified_badge(package, make_report, built, tmp_path):
    """As the template's README says; another run of other code is then not reproducible."""
    wheels = [built(package.parents[1], tmp_path / "suite"), built(TEMPLATE, tmp_path / "mine")]
    source = _rerun.Source(files=tuple(wheels), reuses_torch=True)
    python = _rerun.make_environment(make_report(name="my-tracker"), tmp_path / "venv", source)
    given = ["--reuse-torch", *(f"--install={wheel}" for wheel in wheels)]
    here = {"recheck": sys.executable, "registry": sys.executable}  # where torch is installed
    assert [command[1] for command in commands()] == ["run", "submit", "recheck", "registry"]
    for _, command, *options in commands():
        interpreter = here.get(command, python)
        more = given if command == "recheck" else []
        line = [interpreter, "-m", "torchparts_conformance", command, *options, *more]
        subprocess.run(line, cwd=tmp_path, check=True)
    for name in ("test_conformance.py", "known-failures.toml"):
        shutil.copy(TEMPLATE / name, tmp_path)
    subprocess.run([python, "-m", "pytest", "-q", "test_conformance.py"], cwd=tmp_path, check=True)
    entry = _entry.read(tmp_path / "registry/my-tracker/1.0")
    assert [run.result for run in entry.runs] == ["verified"]
    assert _page.drift(tmp_path / "registry") == []
    assert _page.problems({"mine": entry}, _installed.expected()) == []
    badge = (tmp_path / "registry/my-tracker/1.0/badge-mod-tracker.svg").read_text("utf-8")
    assert f"| {entry.earned}" in badge
