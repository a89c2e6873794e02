"""What becomes an entry of the list: a report in order that somebody else can run again."""

from __future__ import annotations

import dataclasses

import pytest

from torchparts_conformance._errors import ReportError
from torchparts_conformance.listing import _entry, _submit
from torchparts_conformance.report import _report


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


@pytest.mark.usefixtures("owned")
def test_report_by_an_older_list_is_not_submitted(by_older_list, entry, expected):
    """The list shows what the newest suite asks for."""
    mine = dataclasses.replace(entry, report=by_older_list)
    found = _submit.problems(by_older_list, mine, expected)
    assert "an earlier list judged. Run it without --suite-version" in found
