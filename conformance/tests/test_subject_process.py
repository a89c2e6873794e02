"""The process of the cases: it tells each outcome with its word, and the report at the end."""

from __future__ import annotations

import sys

from torchparts_conformance.judging import _judge
from torchparts_conformance.report import _report
from torchparts_conformance.subject import _isolation

TELLER = """
import os
from torchparts_conformance.judging import _subject_process
tell = _subject_process._teller("secret")
tell({"case": "a", "replaced": [], "word": "guessed"})
print('{"case": "b", "replaced": [], "word": "secret"}', flush=True)
os.write(1, b"written by a case")
tell({"report": "text", "replaced": ["x" * 1_000_000]})
"""


def test_what_is_told_arrives_with_the_word_and_nothing_else_does():
    """What a case prints goes to the standard error, also where it is written past Python."""
    ended = _judge.watch([sys.executable, "-c", TELLER], "secret")
    assert ended.phases == [{"case": "a", "replaced": [], "word": "secret"}]
    assert (ended.report, ended.strange, ended.status) == ("text", 0, 0)
    assert ended.replaced == ["x" * 1_000_000]
    assert ended.last_line == "written by a case"


def test_run_is_told_phase_by_phase_and_its_report_at_the_end():
    """All of it has the word, and the report agrees with what was told."""
    options = ["--impl=ours", "--area=mod-tracker", "--requirement=MT-001"]
    job = {"word": "secret", "options": options}
    ended = _judge.watch(_isolation.command(_judge._SUBJECT), "secret", job)
    assert (ended.status, ended.strange, ended.replaced) == (0, 0, [])
    report = _report.parse(ended.report, "of the run")
    ran = {row["case"] for row in report["rows"] if row["outcome"] == "pass"}
    assert ran
    assert {phase["case"] for phase in ended.phases} == ran
    assert _judge.contradictions(report, ended) == []


def test_run_that_is_refused_tells_no_report():
    """What pytest complains of is all there is."""
    ended = _judge.run(["--impl=nobody", "--area=mod-tracker"])
    assert (ended.status, ended.report, ended.phases) == (4, None, [])
    assert "implementation 'nobody' is unknown" in ended.complaint
