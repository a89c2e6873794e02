"""The process that runs an area's cases on a broken implementation says what failed, or why not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from torchparts_conformance.mutation import _kill_worker
from torchparts_conformance.render import _render
from torchparts_conformance.report import _report

JOB = {"impl": "ours", "mutant": "a.py::wrong", "area": None}


@pytest.fixture
def ran(monkeypatch):
    """Give a function that sets what a run of pytest leaves behind; gives the options it got."""
    options = []

    def set_up(report, code=1):
        def main(arguments):
            options.extend(arguments)
            folder = next(a.partition("=")[2] for a in arguments if a.startswith("--out="))
            if report is not None:
                _render.write(Path(folder) / "report.json", _report.to_text(report))
            return code

        monkeypatch.setattr(_kill_worker.pytest, "main", main)
        return options

    return set_up


def test_rows_that_failed_are_told_in_order(ran, make_report):
    """Requirement and case of each, and nothing of what passed; options without a value go."""
    options = ran(make_report({"CW-001": "fail"}))
    assert _kill_worker._answer(JOB) == {"failed": [["CW-001", "ckpt_wrap/test_a.py::test_a"]]}
    assert {"--impl=ours", "--mutant=a.py::wrong"} <= set(options)
    assert not [each for each in options if "area" in each]
    ran(make_report({"CW-002": "error", "CW-001": "not_run"}))
    assert [id for id, _ in _kill_worker._answer(JOB)["failed"]] == ["CW-001", "CW-002"]


def test_rows_of_requirements_that_were_not_asked_for_are_not_told(ran, make_report):
    """Their cases did not run, which says nothing of the mutant."""
    options = ran(make_report({"CW-001": "fail", "CW-002": "not_run"}))
    job = {**JOB, "requirement": "CW-001"}
    assert [id for id, _ in _kill_worker._answer(job)["failed"]] == ["CW-001"]
    assert "--requirement=CW-001" in options
    assert "there are no cases" in _kill_worker._answer({**job, "requirement": "CW-999"})["failure"]


def test_run_without_a_report_shows_nothing(ran):
    """The reason is said, so that nobody takes it for a mutant that lives."""
    ran(None, code=3)
    said = "RuntimeError: the run ended with code 3 and without a report"
    assert _kill_worker._answer(JOB) == {"failure": said}


def test_report_without_rows_shows_nothing(ran, make_report):
    """Where no case was run, none failed, and that is no answer."""
    ran(make_report() | {"rows": []})
    assert "there are no cases" in _kill_worker._answer(JOB)["failure"]


def test_process_says_that_it_is_ready_and_ends_with_its_input():
    """Whoever gives it no job any more need not end it."""
    command = [sys.executable, "-m", "torchparts_conformance.mutation._kill_worker"]
    ended = subprocess.run(command, input="", capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, '{"ready": true}\n')
