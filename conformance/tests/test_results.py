"""The results file of the site: reports go in, and the same verdicts come out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from torchparts_conformance._errors import ReportError
from torchparts_conformance.commands import _cli, _maintenance
from torchparts_conformance.render import _matrix
from torchparts_conformance.report import _report, _results
from torchparts_conformance.requirements._cases import load_registry

PUBLISHED = Path(__file__).parents[2] / "docs/conformance/results.json"


@pytest.fixture
def publish(known_suite, registry, monkeypatch, tmp_path):
    """Give a function that publishes reports; gives the exit code and the results."""
    monkeypatch.setattr(_maintenance, "load_registry", lambda: registry)

    def publish(*reports):
        paths = []
        for number, report in enumerate(reports):
            path = tmp_path / f"{number}.json"
            path.write_text(_report.to_text(report))
            paths.append(str(path))
        code = _cli.main(["publish", str(tmp_path / "results.json"), *paths])
        return code, _results.read(tmp_path / "results.json")

    return publish


def test_verdicts_follow_from_the_results(publish, make_report, registry):
    report = make_report({"CW-001": "fail", "CW-002": "not_provided"}, devices=("cpu", "cuda"))
    code, found = publish(report)
    assert code == 0
    again = [_results.as_report(result, registry) for result in found]
    assert [v for r in again for v in r["verdicts"]] == sorted(
        report["verdicts"], key=lambda verdict: verdict["device"]
    )
    (one, two) = _matrix.matrix(again, registry).columns
    assert (one.name, two.name) == ("mine 1.0, cpu", "mine 1.0, cuda")
    assert (one.date, one.torch) == (report["date"], "2.13.0")


def test_newer_report_replaces_that_of_its_adapter_and_device(publish, make_report, changed):
    other = changed(make_report(name="other"), adapter="fsdp1")
    publish(make_report(), other)
    code, found = publish(make_report({"CW-002": "fail"}, devices=("cuda",)), make_report())
    assert code == 0
    assert [(r.adapter, r.device) for r in found] == [
        ("fsdp1", "cpu"),
        ("mine:adapter", "cpu"),
        ("mine:adapter", "cuda"),
    ]
    assert found[2].outcomes == {"CW-001": "pass", "CW-002": "fail"}


def test_results_of_another_suite_are_dropped(publish, make_report, capsys, tmp_path):
    publish(make_report())
    path = tmp_path / "results.json"
    path.write_text(path.read_text().replace('"suite": "0.1.0"', '"suite": "0.0.1"'))
    _, found = publish(make_report(devices=("cuda",)))
    assert [r.device for r in found] == ["cuda"]
    assert "dropped mine, cpu: it was run by suite 0.0.1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"problems": ("odd",)}, "odd"),
        ({"outcomes": {"CW-002": "not_run"}}, "cases were left out"),
    ],
)
def test_unsound_report_is_not_published(publish, make_report, capsys, changes, said):
    code, found = publish(make_report(**changes))
    assert (code, found) == (1, [])
    assert said in capsys.readouterr().err


def test_edited_report_is_not_published(publish, make_report, capsys):
    report = make_report({"CW-001": "fail"})
    report["rows"][0]["outcome"] = "pass"
    assert publish(report) == (1, [])
    assert "the seal does not match" in capsys.readouterr().err


def test_requirement_newer_than_a_run_is_not_run(publish, make_report, registry):
    _, (found,) = publish(make_report())
    older = _results.Result(**{**vars(found), "outcomes": {"CW-001": "pass"}})
    (again,) = json.loads(_results.to_text([older], registry))["implementations"]
    assert again["outcomes"]["ckpt-wrap"] == "P "
    rows = {row["id"]: row["outcome"] for row in _results.as_report(older, registry)["rows"]}
    assert rows == {"CW-001": "pass", "CW-002": "not_run"}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"requirements": {}, "implementations": [1]}'])
def test_other_file_is_refused(tmp_path, text):
    path = tmp_path / "results.json"
    path.write_text(text)
    with pytest.raises(ReportError, match=r"results 'results\.json' cannot be used"):
        _results.read(path)


@pytest.mark.skipif(not PUBLISHED.exists(), reason="only in the repository")
def test_published_results_are_read_with_this_registry():
    registry = load_registry()
    reports = [_results.as_report(result, registry) for result in _results.read(PUBLISHED)]
    assert _matrix.matrix(reports, registry).columns
