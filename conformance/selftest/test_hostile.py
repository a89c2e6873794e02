"""Hostile code and files: what they replace, print, swallow or pretend is seen, or stays small."""

from __future__ import annotations

import os
import sys
import textwrap

import pytest
import torch

from torchparts_conformance import _console
from torchparts_conformance._errors import AdapterError, ReportError
from torchparts_conformance.commands import _runs
from torchparts_conformance.judging import _judge
from torchparts_conformance.judging._judge import Ended
from torchparts_conformance.render import _render
from torchparts_conformance.report import _report, _untrusted_file
from torchparts_conformance.run import _case_outcome
from torchparts_conformance.subject import _adapters, _identity
from torchparts_conformance.subject._ranks import shared_pool

REPLACING = """
import pytest
import torch
import torch.testing
from adapter import good
from torchparts_conformance.run import _case_outcome

def replacement(*args, **options):
    return True

{statement}
"""


@pytest.mark.parametrize(
    ("statement", "named"),
    [
        ("torch.equal = replacement", "torch.equal"),
        ("torch.allclose = torch.equal", "torch.allclose"),
        ("torch.Tensor.item = replacement", "torch.Tensor.item"),
        ("torch.testing.assert_close = replacement", "torch.testing.assert_close"),
        ("pytest.raises = replacement", "pytest.raises"),
        (
            "_case_outcome.one_line.__code__ = replacement.__code__",
            "torchparts_conformance.subject._adapters.one_line",
        ),
        ("pytest.Function.runtest = replacement", "_pytest.python.Function.runtest"),
        ("import math; math.isclose = replacement", "math.isclose"),
    ],
)
def test_replacing_what_judges_is_not_conformant(suite, monkeypatch, statement, named):
    """A comparison or a function of the judge that was replaced is named, though all passes."""
    _restore_at_the_end(monkeypatch)
    suite.write("replacing.py", REPLACING.format(statement=statement))
    assert suite.run(impl="replacing:good").ret == 1
    problems = suite.report()["problems"]
    assert any(text.startswith(named) for text in problems)
    assert all(text.endswith(" was replaced by the code under test") for text in problems)


def _restore_at_the_end(monkeypatch):
    for owner, name in (
        (torch, "equal"),
        (torch, "allclose"),
        (torch.Tensor, "item"),
        (torch.testing, "assert_close"),
        (pytest, "raises"),
        (_case_outcome.one_line, "__code__"),
        (pytest.Function, "runtest"),
        (__import__("math"), "isclose"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))


@pytest.fixture
def own_ranks():
    """Give the case worker processes that nobody used before, and nobody uses afterwards."""
    shared_pool().stop()
    yield
    shared_pool().stop()


def test_replacing_what_judges_on_a_rank_is_an_error(suite, own_ranks):
    """What is replaced only where a case runs on ranks is seen there."""
    suite.write(
        "cunning.py",
        """
        import torch
        import torch.distributed as dist
        from torchparts_conformance import Implementation

        class Part:
            @property
            def answer(self):
                if dist.is_initialized():
                    torch.equal = lambda *args: True
                return 42

        impl = Implementation("cunning", "1", parts={"ckpt-wrap": Part()})
        """,
    )
    suite.write("cases/ckpt_wrap/test_cases.py", ON_A_RANK)
    suite.freeze()
    assert suite.run(impl="cunning:impl").ret == 1
    (row,) = suite.report()["rows"]
    assert row["outcome"] == "error"
    assert "torch.equal was replaced by the code under test" in row["reason"]


ON_A_RANK = """
from torchparts_conformance import requirement

def answer(part, rank, world_size):
    return part.answer

@requirement("CW-001")
def test_one(part, ranks):
    assert ranks(1, answer) == [42]
"""


def _told(genuine, **changes):
    """What the judge hears of a run whose report is this one."""
    phases = [
        {"case": row["case"], "device": row["device"], "outcome": row["outcome"]}
        for row in genuine["rows"]
    ]
    return Ended(**{"phases": phases, "report": _report.to_text(genuine), **changes})


@pytest.fixture
def verdict(known_suite, registry, tmp_path, monkeypatch):
    """Give a function that judges what a process told; gives the code and what was written."""
    monkeypatch.setattr(_render, "load_registry", lambda: registry)

    def judge(ended):
        code = _runs._verdict(tmp_path, ended)
        return code, {path.name for path in tmp_path.iterdir()}

    return judge


def test_report_that_agrees_with_what_was_told_is_written(make_report, verdict):
    """The judge writes the report and everything made from it."""
    code, written = verdict(_told(make_report()))
    assert code == 0
    assert {"report.json", "badge-ckpt-wrap.svg", "junit.xml", "matrix.md"} <= written


def _without_a_row(report):
    """A report whose seal fits, without its first row."""
    words = ("suite", "implementation", "environment", "claims")
    rows = report["rows"][1:]
    return _report.build(**{word: report[word] for word in words}, rows=rows, problems=())


FAILED = {"case": "ckpt_wrap/test_a.py::test_a", "device": "cpu", "outcome": "fail"}
PASSED = {**FAILED, "outcome": "pass"}
OTHER = {**PASSED, "case": "ckpt_wrap/test_a.py::test_b"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"phases": []}, "test_a.py::test_a cpu is pass, but was not run"),
        ({"phases": [FAILED, OTHER]}, "test_a.py::test_a cpu is pass, but was fail"),
        ({"phases": [FAILED, PASSED, OTHER]}, "test_a cpu is pass, but was fail/pass"),
        ({"strange": 3}, "3 lines came from elsewhere"),
        ({"replaced": ["torch.equal"]}, "torch.equal was replaced unsaid"),
        ({"report": "{}"}, "report 'of the run' has schema None"),
    ],
)
def test_report_that_contradicts_what_was_told_is_not_written(
    make_report, verdict, capsys, changes, said
):
    """Outcomes noted as they came count, and what arrived without the run's word is a doubt."""
    code, written = verdict(_told(make_report(), **changes))
    complaint = capsys.readouterr().err
    assert (code, written) == (1, set())
    assert "the report is not genuine (" in complaint
    assert said in complaint
    assert complaint.count("\n") == 1


def test_report_that_is_not_genuine_gives_no_badge(make_report, verdict, capsys):
    """Success is believed only if the report is one that this suite could have written."""
    assert verdict(_told(_without_a_row(make_report()))) == (1, set())
    said = capsys.readouterr().err
    assert "the report is not genuine (row CW-001 ckpt_wrap/test_a.py::test_a cpu is miss" in said


def test_profile_that_is_conformant_is_looked_at_though_another_is_not(make_report, verdict):
    """A badge may be green for one profile; what is doubtful of that is not written either."""
    report = make_report({"CW-002": "xpass"})
    assert {v["verdict"] for v in report["verdicts"]} == {"conformant", "not conformant"}
    report["seal"] = "0" * 64
    assert verdict(_told(report, phases=[PASSED, OTHER])) == (1, set())


@pytest.mark.parametrize("line", ["::error::x", "  ::set-output name=a::b", "##[command]x"])
def test_words_are_no_commands_of_continuous_integration(line):
    """What a log's reader would act on does not start a line."""
    assert not _console.shown(line).lstrip().startswith(("::", "##["))
    assert _console.shown(line).endswith(line)


def _judging(code, **environment):
    with pytest.MonkeyPatch.context() as patch:
        for word, value in environment.items():
            patch.setenv(word, value)
        return _judge.watch([sys.executable, "-c", textwrap.dedent(code)])


def test_what_is_told_without_the_word_is_strange():
    """Only what has the word counts, and nothing does after the report."""
    ended = _judge.watch(
        [sys.executable, "-c", TELLER], "secret", {"word": "secret", "options": []}
    )
    assert [phase["case"] for phase in ended.phases] == ["a"]
    assert (ended.report, ended.replaced, ended.strange) == ("text", ["x"], 3)


TELLER = """
import json
word = json.loads(input())["word"]
def tell(**told):
    print(json.dumps({"replaced": [], **told}))
tell(word=word, case="a", device="cpu", outcome="pass")
tell(word="guessed", case="b", device="cpu", outcome="pass")
print("no JSON")
tell(word=word, report="text", replaced=["x"])
tell(word=word, report="another")
"""


def test_flood_of_output_is_not_passed_on(capfd):
    """Whatever is printed, a complaint of pytest is found, and nothing else is shown."""
    ended = _judging("""
        import os, sys
        os.write(1, b"o" * 3_000_000)
        os.write(2, b"e" * 3_000_000)
        sys.stderr.write("\\nERROR: implementation 'x' is unknown\\n")
        sys.exit(4)
    """)
    assert ended.status == 4
    assert ended.complaint == "implementation 'x' is unknown"
    assert capfd.readouterr() == ("", "")


def test_process_that_says_it_was_refused_without_a_word_is_lost(tmp_path, capsys):
    """Exit code 4 needs a complaint; a process that only ends so did not run the suite."""
    ended = _judging("import os; os._exit(4)")
    assert _runs._verdict(tmp_path, ended) == 1
    said = capsys.readouterr().err
    assert "the run ended without a report and with status 4, but every run writes one" in said
    assert said.count("\n") == 1


def test_way_a_process_was_lost_is_said():
    """A signal is named, and else the last line is."""
    assert "and by signal 9, but" in _runs._lost(Ended(status=-9, last_line="x"))
    assert "status 3; its last line was 'Abc', but" in _runs._lost(Ended(3, last_line="Abc"))


def test_progress_is_shown_sparsely(capfd):
    """Of a long run, every twentieth case and the end are shown; failures are told at the end."""
    _judging("""
        import sys
        for i in range(1, 42):
            print(f"[{i:>2}/41] ckpt-wrap {i}/41" + ", 1 wrong" * (i > 6), file=sys.stderr)
    """)
    numbers = [line.split("/")[0].strip("[ ") for line in capfd.readouterr().err.splitlines()]
    assert numbers == ["20", "40", "41"]


def test_environment_brings_no_plugins():
    """Neither an installed plugin nor options from the environment can change an outcome."""
    words = "sorted(w for w in os.environ if 'PYTEST' in w or 'AUTOLOAD' in w)"
    code = f"import os, sys; sys.stderr.write(str({words}))"
    ended = _judging(code, PYTEST_ADDOPTS="-k nothing", PYTEST_PLUGINS="theirs")
    assert "PYTEST_DISABLE_PLUGIN_AUTOLOAD" in ended.last_line
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD" in ended.last_line
    assert "PYTEST_ADDOPTS" not in ended.last_line
    assert "PYTEST_PLUGINS" not in ended.last_line


def test_code_that_swallows_every_interruption_is_ended():
    """Where raising in a case does not help, the process is ended."""
    ended = _judging("""
        import time
        from torchparts_conformance.run._time_limit import time_limit
        with time_limit(0.2):
            while True:
                try:
                    time.sleep(60)
                except BaseException:
                    continue
    """)
    assert ended.status == 1
    assert "File" in ended.last_line


def test_exception_without_a_text_is_named_by_its_class():
    """What is raised may raise again when it is asked for its message."""

    class Mute(Exception):
        def __str__(self):
            raise SystemExit(0)

    assert _adapters.one_line(Mute()) == "Mute"


def test_distribution_with_a_dotted_name_needs_no_parent_package():
    """A name that no import finds is described, not looked for in a package that is not there."""
    described = _identity.describe_distribution("nobody.has-this")
    assert (described["version"], described["kind"]) == (None, "none")


def test_unknown_capability_is_refused(suite):
    """What the registry does not know cannot be claimed; exit code 4 before any case."""
    suite.write("adapter.py", (suite.root / "adapter.py").read_text().replace("in-place", "speed"))
    result = suite.run()
    assert result.ret == 4
    said = result.stderr.str()
    assert "implementation 'good' claims 'speed' for ckpt-wrap, but its profiles are core" in said


def test_doctor_names_the_attribute_that_raises(suite, capsys, monkeypatch):
    """An attribute that ends the process when it is looked at is missing, with the reason."""
    suite.write(
        "raising.py",
        """
        from torchparts_conformance import Implementation

        class Part:
            def __getattr__(self, name):
                raise SystemExit(0)

        impl = Implementation("raising", "1", parts={"mod-tracker": Part()})
        """,
    )
    monkeypatch.undo()
    monkeypatch.syspath_prepend(suite.root)
    arguments = type("Arguments", (), {"impl": "raising:impl"})
    assert _runs.doctor(arguments) == 1
    assert "mod-tracker: ModTracker is missing (SystemExit: 0)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("endless", "report 'endless' cannot be read: it is no ordinary file"),
        ("pipe", "report 'pipe' cannot be read: it is no ordinary file"),
        ("bytes", "report 'bytes' is not UTF-8, but text is needed"),
        ("large", "report 'large' exceeds 100 bytes, the most allowed"),
        ("nowhere", "report 'nowhere' cannot be read: No such file"),
        ("no\0name", "cannot be read"),
    ],
)
def test_only_small_text_files_are_read(tmp_path, place, said):
    """A link to a device or a pipe is not waited for, and nothing large is taken in."""
    (tmp_path / "endless").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    (tmp_path / "large").write_text("x" * 101)
    with pytest.raises(ReportError, match=said):
        _untrusted_file.read_text(tmp_path / place, role="report", max_bytes=100)


def test_refusal_of_an_adapter_is_said_once(tmp_path, monkeypatch):
    """What the adapter did wrong is said with its name, not wrapped in another complaint."""
    text = "from torchparts_conformance import Implementation\nImplementation('', '1')\n"
    (tmp_path / "nameless.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(AdapterError) as refused:
        _adapters.load_implementation("nameless:it")
    assert str(refused.value) == (
        "implementation 'nameless:it': torchparts_conformance.Implementation: name '' is "
        "unusable, but 1 to 100 characters are needed."
    )


def test_file_of_exactly_the_most_bytes_is_read(tmp_path):
    """One more is refused, and nothing is cut off."""
    path = tmp_path / "file"
    path.write_text("x" * 100)
    assert _untrusted_file.read_text(path, role="report", max_bytes=100) == "x" * 100
    with pytest.raises(ReportError, match="exceeds 99 bytes"):
        _untrusted_file.read_text(path, role="report", max_bytes=99)
