"""Announced failures: what is wrong with their file is said, and what they say has to be true."""

from __future__ import annotations

import datetime

import pytest

from torchparts_conformance._errors import ReportError
from torchparts_conformance.report import _known_failures
from torchparts_conformance.run._rows import announce

GOOD = {
    "id": '"CW-001"',
    "devices": '["cpu"]',
    "reason": '"it is being mended"',
    "issue": '"https://example.org/7"',
    "expires": "2999-01-01",
}


def _file(folder, **changes):
    lines = [f"{key} = {value}" for key, value in {**GOOD, **changes}.items() if value]
    path = folder / "known.toml"
    path.write_text("\n".join(["[[known_failure]]", *lines]), encoding="utf-8")
    return path


def test_good_entry_is_read(tmp_path):
    """Every key has its place."""
    (entry,) = _known_failures.load(_file(tmp_path))
    assert (entry.id, entry.devices, entry.expires.year) == ("CW-001", ("cpu",), 2999)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"reason": None}, "has other keys, but they are"),
        ({"colour": '"red"'}, "has other keys, but they are"),
        ({"devices": '["Cuda"]'}, r"'CW-001': devices is \['Cuda'\], but these are words"),
        ({"devices": "[]"}, r"devices is \[\], but these are words"),
        ({"reason": '" "'}, "id or reason is empty or no text, but both are words"),
        ({"issue": '"http://x.org"'}, "issue is 'http://x.org', but an https address is needed"),
        ({"expires": '"2999-01-01"'}, "expires is '2999-01-01', but a day, such as 2027-03-01"),
        ({"expires": "2999-01-01T00:00:00"}, "but a day, such as 2027-03-01, is needed"),
        ({"id": '"' + "x" * 90 + '"', "devices": "[]"}, "known failure 'x{59}: devices"),
    ],
)
def test_bad_entry_is_refused(tmp_path, changes, said):
    """An announcement that says too little, or what nobody knows, is refused."""
    with pytest.raises(ReportError, match=said) as refused:
        _known_failures.load(_file(tmp_path, **changes))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = [", "known failures 'known.toml' are no TOML"),
        ("other = 1", "hold something else, but"),
        ("known_failure = 1", "hold something else, but"),
        ("a = " + "[" * 5000, "are no TOML"),
    ],
)
def test_file_of_something_else_is_refused(tmp_path, text, said):
    """What is no list of announcements is named by file."""
    path = tmp_path / "known.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ReportError, match=said):
        _known_failures.load(path)


def test_note_comes_a_month_before_the_end(tmp_path):
    """Not earlier, and not once it is over: then it is a problem."""
    known = _known_failures.load(_file(tmp_path, expires="2027-03-31"))
    for day, count in (((2, 28), 0), ((3, 1), 1), ((3, 31), 1), ((4, 1), 0)):
        notes = _known_failures.notes(known, today=datetime.date(2027, *day))
        assert len(notes) == count
    (said,) = _known_failures.notes(known, today=datetime.date(2027, 3, 31))
    assert said == "note: known failure CW-001 expires on 2027-03-31; fix it, or announce it again"


def test_announcement_that_ends_soon_is_told_and_fails_nothing(suite, monkeypatch):
    """The exit code is that of a failure that was announced."""
    cases = suite.root / "cases/ckpt_wrap/test_cases.py"
    suite.write("cases/ckpt_wrap/test_cases.py", cases.read_text().replace("== 42", "== 41", 1))
    soon = datetime.date.today() + datetime.timedelta(days=7)
    facts = {"id": "CW-001", "issue": "https://example.org/1", "day": soon}
    suite.write("known.toml", KNOWN.format(**facts))
    result = suite.run("--known-failures", str(suite.root / "known.toml"))
    assert result.ret == 0
    assert f"note: known failure CW-001 expires on {soon}" in result.stdout.str()
    assert suite.report()["problems"] == []


KNOWN = """
[[known_failure]]
id = "{id}"
devices = ["cpu"]
reason = "we know"
issue = "{issue}"
expires = {day}
"""


@pytest.mark.parametrize(
    ("entry", "code", "outcome", "said"),
    [
        ({}, 0, "xfail", None),
        ({"day": "2020-01-01"}, 1, "xfail", "expired on 2020-01-01"),
        ({"id": "CW-002"}, 1, "fail", "did not fail (pass)"),
        ({"id": "CW-777"}, 1, "fail", "no such requirement was run"),
    ],
)
def test_announced_failure_has_to_be_true(suite, entry, code, outcome, said):
    """Announced and failing is quiet but not conformant; stale, expired or unknown is a problem."""
    cases = suite.root / "cases/ckpt_wrap/test_cases.py"
    suite.write("cases/ckpt_wrap/test_cases.py", cases.read_text().replace("== 42", "== 41", 1))
    facts = {"id": "CW-001", "issue": "https://example.org/1", "day": "2999-01-01", **entry}
    suite.write("known.toml", KNOWN.format(**facts))
    assert suite.run("--known-failures", str(suite.root / "known.toml")).ret == code
    assert suite.outcomes()["CW-001"] == outcome
    assert suite.report()["verdict"] != "conformant"
    problems = " ".join(suite.report()["problems"])
    assert said is None or said in problems


@pytest.mark.parametrize(
    ("outcomes", "become", "problem"),
    [
        (["fail", "pass"], ["xfail", "pass"], None),
        (["fail", "error"], ["xfail", "error"], None),
        (["pass", "pass"], ["xpass", "xpass"], "did not fail (pass)"),
        (["pass", "error"], ["xpass", "error"], "did not fail (error, pass)"),
    ],
)
def test_a_requirement_is_announced_and_not_a_case(tmp_path, outcomes, become, problem):
    """One case of it has to fail; that others pass is no luck. Other requirements stay."""
    rows = [{"id": "CW-001", "device": "cpu", "outcome": outcome} for outcome in outcomes]
    other = [
        {"id": "CW-002", "device": "cpu", "outcome": "fail"},
        {"id": "CW-001", "device": "cuda", "outcome": "pass"},
    ]
    found, problems = announce([*rows, *other], _known_failures.load(_file(tmp_path)))
    assert [row["outcome"] for row in found[:2]] == become
    assert found[2:] == other
    assert [problem in text for text in problems] == [True] * (problem is not None)


def test_announced_crash_stays_an_error(suite):
    """Only a failed claim can be announced."""
    suite.write_case("raise RuntimeError('no')")
    facts = {"id": "CW-001", "issue": "https://example.org/1", "day": "2999-01-01"}
    suite.write("known.toml", KNOWN.format(**facts))
    assert suite.run("--known-failures", str(suite.root / "known.toml")).ret == 1
    assert suite.outcomes()["CW-001"] == "error"


def test_announcement_without_an_address_is_exit_code_4(suite):
    """An announcement says where the failure is being dealt with."""
    facts = {"id": "CW-001", "issue": "somewhere", "day": "2999-01-01"}
    suite.write("known.toml", KNOWN.format(**facts))
    result = suite.run("--known-failures", str(suite.root / "known.toml"))
    assert result.ret == 4
    assert "an https address is needed" in result.stderr.str()
