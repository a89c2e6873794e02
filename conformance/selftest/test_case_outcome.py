"""What a case does becomes an outcome, and what the implementation lacks is never passed."""

from __future__ import annotations

import pytest


def test_case_that_does_not_end_is_an_error(suite):
    """A case is ended after its time, whatever the implementation swallows; the rest goes on."""
    body = "while True:\n        try:\n            while True: continue"
    body += "\n        except Exception: continue"
    suite.write_case(body, and_two=True)
    suite.freeze()
    assert suite.run("--case-limit=0.3").ret == 1
    assert suite.outcomes() == {"CW-001": "error", "CW-002": "pass"}
    assert suite.report()["rows"][0]["reason"] == "OutOfTime: took more than 0.3 s"


LIBRARY = """
def breaks():
    raise ValueError("broken")

def claims():
    assert False, "wrong"
"""


@pytest.mark.parametrize(("name", "outcome"), [("breaks", "error"), ("claims", "fail")])
def test_error_says_where_it_was_raised_and_a_failure_what_was_claimed(suite, name, outcome):
    """What a false claim called last is no reason."""
    suite.write("library.py", LIBRARY)
    suite.write_case(f"import library\n    library.{name}()")
    suite.freeze()
    suite.run()
    row = suite.report()["rows"][0]
    assert row["outcome"] == outcome
    assert row["where"].endswith("library.py:3") is (name == "breaks")


def test_unclaimed_profile_is_never_passed(suite):
    """A capability the adapter does not name is not claimed, and does not count against it."""
    assert suite.run(impl="adapter:plain").ret == 0
    assert suite.outcomes()["CW-003"] == "not_claimed"


def test_part_that_is_missing_among_others_is_not_provided(suite):
    """What an implementation lacks of all areas is said to be lacking, and never passed."""
    suite.write("spec/mod_tracker.toml", SPEC_OF_TRACKER)
    suite.write("cases/mod_tracker/test_more.py", CASES_OF_TRACKER)
    suite.run("--collect-only", f"--freeze={suite.root / 'lock.json'}", "--area", "all")
    assert suite.run("--area", "ckpt-wrap,mod-tracker").ret == 0
    assert suite.outcomes()["MT-001"] == "not_provided"
    (verdict,) = [v for v in suite.report()["verdicts"] if v["area"] == "mod-tracker"]
    assert verdict["verdict"] == "not provided"


def test_name_that_an_adapter_does_not_provide_is_neither_wrong_nor_passed(suite):
    """What a part says it does not have is its own outcome, and keeps the profile from passing."""
    suite.write(
        "partial.py",
        """
        from torchparts_conformance import Implementation, NotProvided

        class Part:
            asked = 0

            @property
            def answer(self):
                return Answer()

        class Answer:
            def __eq__(self, other):
                Part.asked += 1
                if Part.asked == 1:
                    raise NotProvided("there is no answer")
                return other == 42

        impl = Implementation("partial", "1", parts={"ckpt-wrap": Part()})
        """,
    )
    assert suite.run(impl="partial:impl").ret == 1
    assert suite.outcomes()["CW-001"] == "not_provided"
    assert suite.outcomes()["CW-002"] == "pass"
    assert suite.report()["verdict"] == "not conformant"
    assert "brightgreen" not in (suite.root / "out/badge-ckpt-wrap.json").read_text()


SPEC_OF_TRACKER = """
[MT-001]
level = "MUST"
profile = "core"
devices = ["cpu"]
since = "0.1.0"
text = "It MUST track."
source = "none"
rationale = "it is the point"
"""


CASES_OF_TRACKER = """
from torchparts_conformance import requirement

@requirement("MT-001")
def test_tracks(part):
    assert part.tracks
"""


@pytest.mark.parametrize(
    ("body", "outcome"),
    [
        ("assert part.answer == 43", "fail"),
        ("pytest.fail('no')", "fail"),
        ("raise RuntimeError('no')", "error"),
        ("pytest.skip('no')", "error"),
        ("pytest.xfail('no')", "error"),
        ("pytest.importorskip('no_such_module')", "error"),
        ("import unittest; raise unittest.SkipTest('no')", "error"),
        ("object.missing", "error"),
        ("part.missing", "not_provided"),
    ],
)
def test_what_a_case_does_becomes_an_outcome(suite, body, outcome):
    """A failed claim is a failure; anything else, a skip above all, is an error."""
    suite.write_case(body)
    suite.freeze()
    assert suite.run().ret == 1
    assert suite.outcomes()["CW-001"] == outcome


def test_reason_names_no_place_of_the_machine(suite):
    """Folders and addresses are left out of a reason; file names and web addresses stay."""
    text = "/home/me/env/lib/case.py of https://example.org/a/b at 0x7f12"
    suite.write_case(f"raise RuntimeError({text!r})")
    suite.freeze()
    suite.run()
    (row,) = (row for row in suite.report()["rows"] if row["id"] == "CW-001")
    assert row["reason"] == "RuntimeError: case.py of https://example.org/a/b at 0x..."


@pytest.mark.parametrize(
    "mark", ["skip(reason='no')", "xfail(reason='no')", "skipif(True, reason='')"]
)
def test_mark_on_a_case_is_an_error(suite, mark):
    """A case cannot be marked away."""
    cases = suite.root / "cases/ckpt_wrap/test_cases.py"
    text = cases.read_text().replace("def test_one", f"@pytest.mark.{mark}\ndef test_one")
    suite.write("cases/ckpt_wrap/test_cases.py", text.replace("== 42", "== 41", 1))
    suite.freeze()
    assert suite.run().ret == 1
    assert suite.outcomes()["CW-001"] == "error"
