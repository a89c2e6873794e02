"""The commands that run an implementation or look for one: what they believe of it, and say."""

from __future__ import annotations

import datetime
import importlib.metadata
import subprocess
import sys

import pytest

from torchparts_conformance.commands import _cli, _runs
from torchparts_conformance.judging._judge import Ended
from torchparts_conformance.render import _render
from torchparts_conformance.report import _report
from torchparts_conformance.subject import _adapters


def test_badge_of_an_earlier_run_does_not_outlive_a_failed_one(stored):
    """A run that comes to nothing leaves nothing that shows success."""
    folder = stored()
    (folder / "badge.svg").rename(folder / "badge-ckpt-wrap.svg")
    assert _cli.main(["run", "--impl", "nobody", "--out", str(folder)]) == 4
    assert list(folder.iterdir()) == []


def test_list_names_what_is_shipped(capsys):
    """Ours, those inside torch and those of others have short names."""
    assert _cli.main(["list"]) == 0
    listed = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    shipped = {"ours", "torch", "fsdp1", "fsdp2", "torch-tools"}
    shipped |= {"fairscale", "xformers", "torch-remat", "torchtune", "deepspeed"}
    assert shipped <= set(listed)
    assert f"torch {importlib.metadata.version('torch')}" in listed["torch"]


def test_list_says_what_is_not_installed(capsys, monkeypatch):
    """And what of several is there, by version."""
    wanted = {"ours": ("pytest", "no-such-thing"), "torch": ("pytest", "pluggy")}
    monkeypatch.setattr(_adapters, "DISTRIBUTIONS", wanted)
    assert _cli.main(["list"]) == 0
    listed = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "not installed: no-such-thing" in listed["ours"]
    assert f"pytest {pytest.__version__}; pluggy " in listed["torch"]


def test_entry_point_gives_a_short_name(tmp_path, monkeypatch, capsys):
    """An installed distribution's adapter is listed, and run by its name."""
    _render.write(tmp_path / "theirs-1.0.dist-info" / "METADATA", "Name: theirs\nVersion: 1.0\n")
    point = "[torchparts.conformance]\ntheirs = their_adapter:implementation\n"
    _render.write(tmp_path / "theirs-1.0.dist-info" / "entry_points.txt", point)
    adapter = "from torchparts_conformance import Implementation\nimplementation = "
    _render.write(tmp_path / "their_adapter.py", f"{adapter}Implementation('theirs', '1.0')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert _cli.main(["list"]) == 0
    listed = "theirs         entry point  theirs 1.0  (their_adapter:implementation)"
    assert listed in capsys.readouterr().out
    assert _cli.main(["doctor", "theirs"]) == 0
    assert "theirs 1.0, protocol 1" in capsys.readouterr().out


def test_doctor_finds_an_adapter_beside_it(tmp_path, monkeypatch, capsys):
    """The command looks in the working directory, as a run does, wherever it is installed."""
    adapter = "from torchparts_conformance import Implementation\nimplementation = "
    _render.write(tmp_path / "beside.py", f"{adapter}Implementation('beside', '1.0')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    assert _cli.main(["doctor", "beside:implementation"]) == 0
    assert "beside 1.0, protocol 1" in capsys.readouterr().out


KILLER = """
import os
from torchparts_conformance import Implementation

class Part:
    def __getattr__(self, name):
        os._exit(0)

impl = Implementation("killer", "1", parts={"mod-tracker": Part()})
"""


@pytest.mark.slow
def test_implementation_that_ends_the_process_is_not_conformant(tmp_path):
    """The judge is another process than the one that runs a stranger's code."""
    (tmp_path / "killer.py").write_text(KILLER)
    ended = _run(tmp_path, "run", "--impl", "killer:impl", "--area", "mod-tracker")
    assert ended.returncode == 1
    assert "the run ended without a report" in ended.stderr


@pytest.mark.slow
def test_adapter_that_cannot_be_imported_is_exit_code_4(tmp_path):
    """The whole complaint is one line that names the cause."""
    (tmp_path / "broken.py").write_text("import a_module_nobody_has\n")
    ended = _run(tmp_path, "run", "--impl", "broken:impl", "--area", "mod-tracker")
    assert ended.returncode == 4
    assert "No module named 'a_module_nobody_has'" in ended.stderr
    assert ended.stderr.strip().count("\n") == 0


def _run(folder, *arguments):
    command = [sys.executable, "-m", "torchparts_conformance", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


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


def test_way_a_process_was_lost_is_said():
    """A signal is named, and else the last line is."""
    assert "and by signal 9, but" in _runs._lost(Ended(status=-9, last_line="x"))
    assert "status 3; its last line was 'Abc', but" in _runs._lost(Ended(3, last_line="Abc"))


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


def test_explaining_an_unknown_requirement_is_refused(capsys):
    assert _cli.main(["run", "--impl", "torch", "--explain", "MT-999"]) == 4
    assert "--explain 'MT-999' is unknown" in capsys.readouterr().err


def test_announcement_that_ends_soon_is_noted_by_the_judge(make_report, verdict, capsys, tmp_path):
    """Beside the verdict, which it does not change."""
    soon = datetime.date.today() + datetime.timedelta(days=7)
    known = (
        f'id = "CW-009"\ndevices = ["cpu"]\nreason = "x"\nissue = "https://x.org"\nexpires = {soon}'
    )
    _render.write(tmp_path / "known.toml", f"[[known_failure]]\n{known}\n")
    ended = _told(make_report(), phases=[PASSED, OTHER])
    assert _runs._verdict(tmp_path, ended, known_failures=tmp_path / "known.toml") == 0
    assert f"note: known failure CW-009 expires on {soon}" in capsys.readouterr().out
