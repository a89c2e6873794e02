"""What a case does becomes an outcome, and what the implementation lacks is never passed."""

from __future__ import annotations

import pytest


def test_case_that_does_not_end_is_an_error(suite):
    """A case is ended after its time, whatever the implementation swallows; the rest goes on."""
    body = "while True:\n        try:\n            while True: continue"
    body += "\n        except Exception: continue"
    suite.write_case(body, and_two=True)
    assert suite.run("--case-limit=0.3").ret == 1
    assert suite.outcomes() == {"CW-001": "error", "CW-002": "pass"}
    assert suite.report()["rows"][0]["reason"] == "OutOfTime: took more than 0.3 s"


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
    assert suite.run().ret == 1
    assert suite.outcomes()["CW-001"] == outcome


def test_reason_names_no_place_of_the_machine(suite):
    """Folders and addresses are left out of a reason; file names and web addresses stay."""
    text = "/home/me/env/lib/case.py of https://example.org/a/b at 0x7f12"
    suite.write_case(f"raise RuntimeError({text!r})")
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
    assert suite.run().ret == 1
    assert suite.outcomes()["CW-001"] == "error"
