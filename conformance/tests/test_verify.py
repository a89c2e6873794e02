"""Checking reports against the suite by running again; list entries made from reports."""

from __future__ import annotations

import json

import pytest

from torchparts_conformance import _badge, _cli, _listing, _pages, _report, _verify
from torchparts_conformance._errors import ReportError

CONTACT, SOURCE = "https://example.org/mine/issues", "https://example.org/mine"


def test_genuine_report_has_no_problems(make_report):
    report = make_report(devices=("cpu", "cuda"))
    (badge,) = _badge.badges(report)
    for text in (None, _badge.to_svg(badge), _badge.to_shields(badge)):
        assert _verify.problems(report, text) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda r: r["rows"].pop(),
            "row CW-003 ckpt_wrap/test_cases.py::test_three cpu is missing",
        ),
        (lambda r: r["rows"].append(r["rows"][0]), "a row occurs twice"),
        (lambda r: r["rows"][0].update(case="x::y"), "row CW-001 x::y cpu is not a case"),
        (
            lambda r: r["rows"][0].update(outcome="not_claimed"),
            "CW-001 cpu is of a claimed profile",
        ),
    ],
)
def test_report_that_the_suite_cannot_have_written_has_problems(make_report, change, said):
    report = make_report()
    change(report)
    assert any(said in text for text in _verify.problems(report))


def test_badge_of_another_report_is_refused(make_report, stored, tmp_path, capsys):
    (badge,) = _badge.badges(make_report())
    (tmp_path / "badge.svg").write_text(_badge.to_svg(badge))
    path = stored({"CW-001": "fail"})
    assert _cli.main(["verify", str(path), str(tmp_path / "badge.svg")]) == 1
    assert "the badge does not match this report" in capsys.readouterr().err


def test_report_is_verified_without_running_anything(stored, capsys):
    assert _cli.main(["verify", str(stored())]) == 0
    assert "nothing contradicts it. Nothing was run again: add --impl" in capsys.readouterr().out


LIAR = """
import types
from torchparts_conformance import Implementation

liar = Implementation("liar", "1", parts={"ckpt-wrap": types.SimpleNamespace(answer=41)})
"""


@pytest.fixture
def claimed(suite):
    """Write a report in which a failing implementation passes everything."""
    suite.write("liar.py", LIAR)
    suite.run(impl="liar:liar")
    report = suite.report()
    assert {row["outcome"] for row in report["rows"]} == {"fail", "not_claimed"}
    for row in report["rows"]:
        row["outcome"] = row["outcome"].replace("fail", "pass")
    facts = {word: report[word] for word in ("implementation", "environment", "claims")}
    forged = _report.build(**facts, rows=report["rows"], problems=[])
    _report.write(suite.root / "forged.json", _report.to_text(forged))
    return suite.root / "forged.json"


def test_report_that_claims_passes_is_caught_by_its_sample(claimed, suite, monkeypatch, capsys):
    asked = []

    def run_cases(options, *, jobs):
        asked.append(options)
        suite.run(*options, impl="liar:liar")
        return suite.report()

    monkeypatch.setattr(_verify, "run_cases", run_cases)
    assert _cli.main(["verify", str(claimed)]) == 0  # undetectable without running
    options = ["--impl", "liar:liar", "--sample", "1", "--seed", "3"]
    assert _cli.main(["verify", str(claimed), *options]) == 1
    said = capsys.readouterr()
    assert "is pass in the report, and fail now" in said.err
    assert "1 requirements were run again, with seed 3" in said.out
    assert asked[0][0].startswith("--requirement=CW-00")


def test_sample_is_random_but_repeatable(make_report):
    report = make_report({"CW-003": "not_claimed"})
    assert _verify.sample(report, 20, 1) == ["CW-001", "CW-002"]
    assert {tuple(_verify.sample(report, 1, seed)) for seed in range(20)} == {
        ("CW-001",),
        ("CW-002",),
    }


@pytest.fixture
def entry(make_report):
    """An entry made from a report."""
    return _listing.new(make_report(), contact=CONTACT, source=SOURCE)


def test_entry_reads_back(entry, tmp_path):
    path = _listing.submit(entry, tmp_path / "list")
    assert path.name == "mine-1.0.toml"
    assert _listing.read(path) == entry
    assert entry["results"] == {"ckpt-wrap": "core 1 of 1; robust 0 of 0; in-place 1 of 1 | cpu"}
    assert entry["install"] == ["mine==1.0"]
    with pytest.raises(ReportError, match=r"mine-1\.0\.toml exists, and results are not replaced"):
        _listing.submit(entry, tmp_path / "list")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("contact = ", "kontakt = ", "contact, kontakt is missing or unknown"),
        (f'"{SOURCE}"', '"http://example.org"', "source is 'http://example.org'"),
        ('"mine==1.0"', '"mine @ https://x.org"', r"install is \['mine @ https"),
        ('"mine==1.0"', '"--index-url=x"', r"install is \['--index-url=x'\]"),
        ('"mine:adapter"', '"os:system;x"', "adapter is 'os:system;x'"),
        ('"1.0"', '"2.0"', r"must be named mine-2\.0\.toml"),
        ('"mine"', '"\\u001b"', "name is '\\\\x1b', which has the wrong form"),
        ("[results]", "[results", "entry 'mine-1.0.toml': "),
    ],
)
def test_wrong_entry_is_refused(entry, tmp_path, old, new, said):
    path = tmp_path / "mine-1.0.toml"
    text = _listing.to_toml(entry)
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ReportError, match=said):
        _listing.read(path)


@pytest.mark.parametrize(
    ("changes", "facts", "said"),
    [
        ({"problems": ("odd",)}, {}, "cannot be listed: odd"),
        ({"outcomes": {"CW-001": "not_run"}}, {}, "cases were left out"),
        ({}, {"contact": "me"}, "contact is 'me'"),
        ({}, {"source": "here"}, "source is 'here'"),
        ({"adapter": "a b"}, {}, "adapter is 'a b'"),
    ],
)
def test_report_that_cannot_be_listed_is_refused(make_report, changes, facts, said):
    with pytest.raises(ReportError, match=said):
        _listing.new(make_report(**changes), **{"contact": CONTACT, "source": SOURCE, **facts})


def test_second_run_that_differs_is_named(entry, make_report, tmp_path, monkeypatch, capsys):
    path = _listing.submit(entry, tmp_path)
    again = [make_report(), make_report({"CW-001": "fail"})]
    monkeypatch.setattr(_listing, "run_cases", lambda options, *, jobs: again.pop(0))
    assert _cli.main(["recheck", str(path)]) == 0
    assert _cli.main(["recheck", str(path)]) == 1
    said = capsys.readouterr().err
    assert said.startswith("ckpt-wrap: core 1 of 1; ")
    assert "-> core 0 of 1; " in said


def test_list_page_has_a_row_for_each_entry(entry, tmp_path):
    assert "There are none yet." in _pages.list_page(tmp_path)
    _listing.submit(entry, tmp_path)
    _listing.submit({**entry, "name": "a|<b>", "contact": "a@example.org"}, tmp_path)
    _, *rows = _pages.list_page(tmp_path).partition("|---")[2].splitlines()
    assert len(rows) == 2
    assert all(row.count(" | ") == 5 for row in rows)
    assert "[mine 1.0](https://example.org/mine)" in rows[1]
    assert "<b>" not in "".join(rows)


def test_implementation_without_letters_cannot_be_listed(entry, tmp_path):
    with pytest.raises(ReportError, match="has no letters or digits to name a file by"):
        _listing.submit({**entry, "name": "///"}, tmp_path)


def test_report_is_json_that_others_can_read(stored):
    assert json.loads(stored().read_text())["verdicts"][0]["must"] == [1, 1]
