"""What a run says about an implementation, and about options and adapters that are no good."""

from __future__ import annotations

import json

import pytest


def test_right_implementation_is_conformant(suite):
    """Every requirement passes, the exit code is 0 and all renderings are written."""
    result = suite.run()
    assert result.ret == 0
    result.stdout.fnmatch_lines(["*= conformance =*", "*ckpt-wrap*conformant*"])
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


def test_listing_cases_runs_nothing(suite):
    """`--collect-only` says what there is, and leaves no report."""
    result = suite.run("--collect-only", "-q")
    assert result.ret == 0
    assert "test_cases.py::test_one" in result.stdout.str()
    assert not (suite.root / "out").exists()


def test_plugin_is_silent_where_no_implementation_is_named(pytester):
    """In somebody's own tests it is installed, and does nothing."""
    pytester.makepyfile("def test_fine():\n    pass\n")
    for options in ((), ("--collect-only",)):
        result = pytester.runpytest_inprocess("-p", "torchparts_conformance.plugin", *options)
        assert result.ret == 0
        result.stdout.no_fnmatch_line("*= conformance =*")


def test_what_is_not_claimed_is_not_asked_whether_it_would_skip(suite):
    """A skip of another's would be an error; nobody is asked about what is not claimed."""
    text = (suite.root / "cases/ckpt_wrap/test_cases.py").read_text()
    marked = text.replace("def test_three", "@pytest.mark.skip\ndef test_three")
    suite.write("cases/ckpt_wrap/test_cases.py", marked)
    suite.run(impl="adapter:plain")
    assert suite.outcomes()["CW-003"] == "not_claimed"
    suite.run()
    assert suite.outcomes()["CW-003"] == "error"


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


def test_no_device_is_its_own_exit_code(suite, monkeypatch):
    """Without a GPU nothing is shown about one: exit code 3, and no pass."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert suite.run("--device", "cuda").ret == 3
    assert {row["outcome"] for row in suite.report()["rows"]} == {"no_device"}
    badge = json.loads((suite.root / "out/badge-ckpt-wrap.json").read_text())
    assert badge["message"] == "cuda: not run"


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
