"""What a run says about an implementation that is right, wrong, or trying to look right."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys

import pytest

from torchparts_conformance.report import _report
from torchparts_conformance.verify import _verify


def test_right_implementation_is_conformant(suite):
    """Every requirement passes, the exit code is 0 and all renderings are written."""
    assert suite.run().ret == 0
    assert suite.outcomes() == {"CW-001": "pass", "CW-002": "pass", "CW-003": "pass"}
    written = {path.name for path in (suite.root / "out").iterdir()}
    assert written == {
        "report.json",
        "junit.xml",
        "matrix.html",
        "matrix.md",
        "badge-ckpt-wrap.json",
        "badge-ckpt-wrap.svg",
    }


@pytest.mark.parametrize("order", ["reversed", "seed:1", "seed:2"])
def test_two_runs_in_any_order_have_one_digest(suite, order):
    """Neither time nor order is in the digest, and the order is really another one."""
    suite.write("cases/conftest.py", NOTE_ORDER)
    suite.run()
    first, listed = suite.report(), (suite.root / "order").read_text().split()
    suite.run("--order", order)
    shuffled = (suite.root / "order").read_text().split()[len(listed) :]
    assert suite.report()["digest"] == first["digest"]
    assert shuffled != listed
    assert sorted(shuffled) == sorted(listed)


NOTE_ORDER = """
def pytest_runtest_call(item):
    with open("order", "a") as file:
        file.write(item.name + " ")
"""


@pytest.mark.slow
def test_real_area_in_two_shuffled_orders_has_one_digest(tmp_path):
    """No case of the tracker's area depends on what ran before it."""
    digests = {_digest_of(tmp_path / order[-1], order) for order in ("seed:1", "seed:2")}
    assert len(digests) == 1


def _digest_of(folder, order):
    command = [sys.executable, "-m", "torchparts_conformance", "run", "--impl", "ours"]
    options = ["--area", "mod-tracker", "--profile", "core,robust,queries,reports"]
    command += [*options, "--order", order, "--out", str(folder)]
    subprocess.run(command, capture_output=True, timeout=300, check=False)
    report = _report.read(folder / "report.json")
    assert {row["outcome"] for row in report["rows"]} == {"pass", "not_claimed"}
    return report["digest"]


def test_case_that_does_not_end_is_an_error(suite):
    """A case is ended after its time, whatever the implementation swallows; the rest goes on."""
    body = "while True:\n        try:\n            while True: continue"
    body += "\n        except Exception: continue"
    suite.write_case(body, and_two=True)
    suite.freeze()
    assert suite.run("--case-limit=0.3").ret == 1
    assert suite.outcomes() == {"CW-001": "error", "CW-002": "pass"}
    assert suite.report()["rows"][0]["reason"] == "OutOfTime: took more than 0.3 s"


def test_unclaimed_profile_is_never_passed(suite):
    """A capability the adapter does not name is not claimed, and does not count against it."""
    assert suite.run(impl="adapter:plain").ret == 0
    assert suite.outcomes()["CW-003"] == "not_claimed"


@pytest.mark.parametrize(
    ("adapter", "said"),
    [
        ("adapter:empty", "part 'ckpt-wrap' is not provided by 'empty', but was asked for"),
        ("strange:lost", "part 'ckpt-wrap' of 'lost': importing 'no_such_part' raised ModuleNot"),
        ("strange:skips", "implementation 'strange:skips' raised Skipped: not today"),
        ("strange:leaves", "implementation 'strange:leaves' raised SystemExit: 0"),
        ("skipping:x", "importing 'skipping:x' raised Skipped: not today"),
    ],
)
def test_missing_part_is_exit_code_4(suite, adapter, said):
    """A part that nobody gave or that cannot be had is said in one line before any case runs."""
    suite.write("strange.py", STRANGE)
    suite.write("skipping.py", "import pytest\npytest.skip('not today', allow_module_level=True)")
    result = suite.run(impl=adapter)
    assert result.ret == 4
    assert said in result.stderr.str()
    assert "Traceback" not in result.stderr.str() + result.stdout.str()


STRANGE = """
import pytest
from torchparts_conformance import Implementation

lost = Implementation("lost", "1", parts={"ckpt-wrap": "no_such_part"})

def skips():
    pytest.skip("not today")

def leaves():
    raise SystemExit(0)
"""


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


def test_frozen_row_of_a_lost_requirement_is_exit_code_4(suite):
    """A requirement that was taken out is missed, though every case that is left passes."""
    spec, cases = suite.root / "spec/ckpt_wrap.toml", suite.root / "cases/ckpt_wrap/test_cases.py"
    head, _, tail = spec.read_text().partition("[CW-002]")
    spec.write_text(head + "[CW-003]" + tail.partition("[CW-003]")[2])
    first, _, rest = cases.read_text().partition('@requirement("CW-002")')
    cases.write_text(first + '@requirement("CW-003")' + rest.partition('@requirement("CW-003")')[2])
    result = suite.run()
    assert result.ret == 4
    said = result.stderr.str()
    assert "the frozen list has CW-002 (ckpt_wrap/test_cases.py::test_two), but no such" in said


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


@pytest.mark.parametrize(
    "options",
    [
        ["-k", "test_one"],
        ["-k", "not test_one"],
        ["--deselect", "cases/ckpt_wrap/test_cases.py::test_one[cpu]"],
        ["-m", "nothing"],
    ],
)
def test_selection_is_not_conformant(suite, options):
    """What was selected away is not run, and what is not run is not conformant."""
    assert suite.run(*options).ret == 1
    assert "not_run" in suite.outcomes().values()
    assert "brightgreen" not in (suite.root / "out/badge-ckpt-wrap.json").read_text()


def test_stopping_early_is_not_conformant(suite):
    """After the first failure of `-x`, the rest was not run."""
    cases = suite.root / "cases/ckpt_wrap/test_cases.py"
    suite.write("cases/ckpt_wrap/test_cases.py", cases.read_text().replace("== 42", "== 41", 1))
    suite.freeze()
    assert suite.run("-x").ret == 1
    assert suite.outcomes() == {"CW-001": "fail", "CW-002": "not_run", "CW-003": "not_run"}


def test_node_id_is_not_conformant(suite):
    """Naming one case leaves the others not run, because the frozen list has them."""
    path = "cases/ckpt_wrap/test_cases.py::test_one"
    options = ["--impl=adapter:good", "--area=ckpt-wrap", "--rootdir=.", "--out=out"]
    suite.pytester.runpytest_inprocess("-p", "torchparts_conformance.plugin", *options, path)
    assert suite.report()["verdict"] == "not conformant"
    assert suite.outcomes()["CW-002"] == "not_run"


def test_exit_in_the_implementation_is_not_conformant(suite):
    """An implementation that ends pytest leaves cases not run."""
    suite.write_case("pytest.exit('bye', returncode=0)")
    suite.freeze()
    assert suite.run().ret == 1
    assert suite.outcomes()["CW-001"] == "not_run"


def test_interrupt_is_not_conformant(suite):
    """After Ctrl-C there is a report, and what did not run is in it."""
    suite.write_case("raise KeyboardInterrupt", and_two=True)
    suite.freeze()
    with contextlib.suppress(KeyboardInterrupt):
        suite.run()
    assert set(suite.outcomes().values()) == {"not_run"}
    assert suite.report()["verdict"] == "not conformant"


@pytest.mark.parametrize("name", ["spec/ckpt_wrap.toml", "lock.json"])
def test_edited_requirement_or_list_is_not_conformant(suite, name):
    """A softened requirement, or a row taken off the frozen list, shows in the report."""
    path = suite.root / name
    text = path.read_text()
    row = '  [\n   "CW-002",\n   "ckpt_wrap/test_cases.py::test_two"\n  ],\n'
    assert row in text or 'level = "SHOULD"' in text
    text = text.replace(row, "").replace('level = "SHOULD"', 'level = "MAY"')
    path.write_text(text.replace("It SHOULD hold", "It MAY hold"))
    assert suite.run().ret == 1
    assert suite.report()["suite"]["frozen"] is False


def test_consistently_edited_list_is_another_suite(suite, frozen, registry):
    """Who takes a case away and freezes again has another suite, and the genuine one refuses it."""
    suite.run()
    genuine = suite.report()["suite"]["manifest_sha256"]
    cases = suite.root / "cases/ckpt_wrap/test_cases.py"
    head, one, _, three = cases.read_text().split("@requirement")
    cases.write_text(f"{head}@requirement{one}@requirement{three}")
    suite.freeze()
    assert suite.run().ret == 0
    forged = suite.report()
    assert forged["suite"]["manifest_sha256"] != genuine
    expected = _verify.Expected("0.1.0", frozen, registry)
    assert "the manifest is not the one of this suite" in _verify.problems(forged, None, expected)


def test_changed_case_is_not_conformant(suite):
    """A suite that is not the frozen one proves nothing, though all passes."""
    cases = suite.root / "cases/ckpt_wrap/test_cases.py"
    suite.write("cases/ckpt_wrap/test_cases.py", cases.read_text().replace("== 42", "!= 0"))
    assert suite.run().ret == 1
    assert set(suite.outcomes().values()) == {"pass"}
    assert suite.report()["suite"]["frozen"] is False


def test_no_device_is_its_own_exit_code(suite, monkeypatch):
    """Without a GPU nothing is shown about one: exit code 3, and no pass."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert suite.run("--device", "cuda").ret == 3
    assert {row["outcome"] for row in suite.report()["rows"]} == {"no_device"}
    badge = json.loads((suite.root / "out/badge-ckpt-wrap.json").read_text())
    assert badge["message"] == "cuda: not run"


def test_case_on_two_devices_has_the_same_name(suite, monkeypatch):
    """Devices are in the row, not in the case's name."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    suite.run("--device", "cpu,cuda")
    rows = [row for row in suite.report()["rows"] if row["id"] == "CW-001"]
    assert [row["device"] for row in rows] == ["cpu", "cuda"]
    assert len({row["case"] for row in rows}) == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--impl", "nobody"], "implementation 'nobody' is unknown"),
        (["--impl", "nobody", "--area", "wheels"], "--area 'wheels' is unknown"),
        (["--impl", "no_such:thing"], "importing 'no_such:thing' raised ModuleNotFoundError"),
        (["--impl", "adapter:nothing"], "has no attribute 'nothing'"),
        (["--impl", "adapter:ADAPTER_IS_NOT_HERE"], "has no attribute"),
        (["--impl", "adapter:types"], "is a module, but an Implementation"),
        (["--area", "wheels"], "--area 'wheels' is unknown"),
        (["--device", "tpu"], "--device 'tpu' is unknown"),
        (["--profile", "speed"], "--profile 'speed' is unknown, but these are known: core, in-"),
        (["--case-limit", "nan"], "--case-limit nan asked for, but more than 0 and at most 86400"),
        (["--case-limit", "0"], "--case-limit 0 asked for, but more than 0"),
        (["--order", "seed:x"], "--order 'seed:x' is unknown, but listed, reversed and seed:N"),
    ],
)
def test_bad_option_is_one_line_and_exit_code_4(suite, options, words):
    """What cannot be used is said in one line, without a traceback."""
    result = suite.run(*options)
    assert result.ret == 4
    assert words in result.stderr.str()
    assert "Traceback" not in result.stderr.str() + result.stdout.str()


def test_wrong_protocol_is_exit_code_4(suite):
    """An adapter for another protocol is refused by both numbers."""
    suite.write(
        "old.py",
        "from torchparts_conformance import Implementation\n"
        "impl = Implementation('old', '1', protocol='0')\n",
    )
    result = suite.run(impl="old:impl")
    assert result.ret == 4
    assert "protocol '0' is not spoken here, but '1' is" in result.stderr.str()


def test_unknown_requirement_is_exit_code_4(suite):
    """A case that names a requirement that does not exist stops the run."""
    cases = suite.root / "cases/ckpt_wrap/test_cases.py"
    suite.write("cases/ckpt_wrap/test_cases.py", cases.read_text().replace("CW-001", "CW-999"))
    result = suite.run()
    assert result.ret == 4
    assert "names ['CW-999']" in result.stderr.str()


def test_mutant_report_is_never_conformant(suite):
    """A run with a fault put in cannot be mistaken for one without."""
    suite.write(
        "faults.py",
        "from torchparts_conformance.mutants import mutant, overlay\n"
        "@mutant(area='ckpt-wrap', kills={'CW-001', 'CW-002', 'CW-003'})\n"
        "def wrong(part):\n"
        "    '''Answers wrongly.'''\n"
        "    return overlay(part, answer=41)\n",
    )
    assert suite.run(f"--mutant={suite.root / 'faults.py'}::wrong").ret == 1
    assert set(suite.outcomes().values()) == {"fail"}
    assert suite.report()["suite"]["frozen"] is False


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
    suite.freeze()
    facts = {"id": "CW-001", "issue": "https://example.org/1", "day": "2999-01-01", **entry}
    suite.write("known.toml", KNOWN.format(**facts))
    assert suite.run("--known-failures", str(suite.root / "known.toml")).ret == code
    assert suite.outcomes()["CW-001"] == outcome
    assert suite.report()["verdict"] != "conformant"
    problems = " ".join(suite.report()["problems"])
    assert said is None or said in problems


def test_announced_crash_stays_an_error(suite):
    """Only a failed claim can be announced."""
    suite.write_case("raise RuntimeError('no')")
    suite.freeze()
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
