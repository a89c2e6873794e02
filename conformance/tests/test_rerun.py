"""Running again: what is installed, and what counts as different."""

from __future__ import annotations

import copy
import hashlib
import subprocess
import sysconfig
from pathlib import Path

import packaging
import pytest
import torch

from torchparts_conformance._errors import ReportError
from torchparts_conformance.commands import _cli
from torchparts_conformance.render import _render
from torchparts_conformance.report import _report
from torchparts_conformance.subject import _identity
from torchparts_conformance.verify import _rerun


def test_plan_pins_the_suite_torch_and_the_distribution(make_report):
    """Exactly the versions of the report are asked for."""
    source = _rerun.Source(files=(Path("/w/mine.whl"),), pip_options=("--find-links", "dist"))
    plan = _rerun.install_plan(make_report(), source)
    assert plan[:4] == ["install", "--find-links", "dist", str(Path("/w/mine.whl").resolve())]
    assert plan[4:] == ["mine==1.0", "torch==2.13.0", "torchparts-conformance==0.1.0"]


def test_plan_without_a_torch_of_its_own_installs_only_what_is_named(make_report):
    """Nothing of this environment stands for a distribution that is to be run again."""
    plan = _rerun.install_plan(make_report(), _rerun.Source(reuses_torch=True))
    assert plan[:3] == ["install", "--no-deps", "--ignore-installed"]
    assert plan[3:] == ["mine==1.0", "torchparts-conformance==0.1.0"]


@pytest.mark.parametrize("name", ["--index-url=evil", "a b", "x;y", "../x", "git+https://x"])
def test_plan_refuses_what_is_no_distribution(make_report, name):
    """A report cannot put options or addresses on pip's command line."""
    with pytest.raises(ReportError, match="but a distribution and a version are needed"):
        _rerun.install_plan(make_report(name=name), _rerun.Source())


def test_plan_names_the_first_that_is_no_distribution(make_report):
    """In the order of their names."""
    report = make_report()
    given = report["implementation"]["distributions"]
    given += [{**given[0], "name": name} for name in ("x;y", "a b")]
    with pytest.raises(ReportError, match=r"report names 'a b==1\.0', but a distribution"):
        _rerun.install_plan(report, _rerun.Source())


def test_plan_needs_versions(make_report):
    """What was never installed from a version cannot be had again."""
    report = make_report()
    report["implementation"]["distributions"][0]["version"] = None
    with pytest.raises(ReportError, match=r"names no version of \['mine'\]"):
        _rerun.install_plan(report, _rerun.Source())


def test_same_outcomes_are_no_difference(make_report):
    """Times, reasons and the adapter's address may differ."""
    second = copy.deepcopy(make_report(reason="slow"))
    second["implementation"]["adapter"] = "elsewhere:adapter"
    assert _rerun.differences(make_report(), second) == []


def test_other_outcome_or_code_is_a_difference(make_report):
    """A row that came out differently is named, and so is other code."""
    (said,) = _rerun.differences(make_report(), make_report({"CW-001": "fail"}))
    assert "CW-001 ckpt_wrap/test_a.py::test_a cpu: pass -> fail" in said
    other = make_report()
    other["implementation"]["distributions"][0]["sha256"] = "2" * 64
    (said,) = _rerun.differences(make_report(), other)
    assert said == "the second run differs in: implementation"


def test_of_many_rows_that_differ_five_are_named(make_report):
    """The others are in the two reports."""
    first = make_report()
    first["rows"] = [{**first["rows"][0], "id": f"CW-{n:03}"} for n in range(7)]
    second = copy.deepcopy(first)
    for row in second["rows"]:
        row["outcome"] = "fail"
    (said,) = _rerun.differences(first, second)
    assert said.count(": pass -> fail") == 5


RECORD = """
mine/__init__.py,sha256=abc,10
mine/__pycache__/__init__.cpython-311.pyc,,
mine-1.0.dist-info/METADATA,sha256=def,20
mine-1.0.dist-info/RECORD,,
mine-1.0.dist-info/INSTALLER,sha256={installer},4
mine-1.0.dist-info/direct_url.json,sha256={url},90
../../../bin/mine,sha256={script},200
"""


def test_fingerprint_of_a_distribution_is_that_of_its_wheel():
    """Who installed it, where from and where to is not in it; every file of the wheel is."""
    here = RECORD.format(installer="pip", url="a", script="b")
    there = RECORD.format(installer="uv", url="c", script="d")
    assert _identity.record_sha256(here) == _identity.record_sha256(there)
    changed = here.replace("mine/__init__.py,sha256=abc", "mine/__init__.py,sha256=abd")
    assert _identity.record_sha256(here) != _identity.record_sha256(changed)


def test_environment_without_the_suite_says_nothing_of_the_code(make_report, tmp_path):
    """It is refused with what Python said there, so that nothing is noted of an entry."""
    bare = tmp_path / "bare"
    bare.write_text('#!/bin/sh\necho "No module named packaging" >&2; exit 1\n', encoding="utf-8")
    bare.chmod(0o755)
    said = "does not start in the environment of the second run: No module named packaging, but"
    with pytest.raises(ReportError, match=said):
        _rerun.rerun(make_report(), adapter="x", python=str(bare), source=_rerun.Source())


def test_torch_is_seen_wherever_it_lies(tmp_path):
    """An environment may have it from the system, or from another one behind it."""
    (tmp_path / "lib/site-packages").mkdir(parents=True)
    _rerun._see_this_environment(tmp_path)
    seen = (tmp_path / "lib/site-packages/seen.pth").read_text(encoding="utf-8").splitlines()
    assert str(Path(packaging.__file__).parents[1]) in seen
    assert str(Path(torch.__file__).parents[1]) in seen
    assert len(seen) == len(set(seen))


PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "rerun-me"
version = "1.0"

[tool.hatch.build.targets.wheel]
include = ["rerun_me.py"]
"""
MODULE = """
from torchparts_conformance import Implementation

implementation = Implementation(
    "mine", "1.0", ("rerun-me",), {{"mod-tracker": "{module}"}}
)
"""
MODULES = {"good": "torch.distributed._tools.mod_tracker", "spoilt": "types"}


@pytest.fixture
def wheels(package, built, tmp_path):
    """Build the suite, and a small implementation in a good and a spoilt form, as wheels."""
    for name, module in MODULES.items():
        _render.write(tmp_path / name / "pyproject.toml", PROJECT)
        _render.write(tmp_path / name / "rerun_me.py", MODULE.format(module=module))
    sources = {"suite": package.parents[1], **{name: tmp_path / name for name in MODULES}}
    return {name: built(path, tmp_path / "dist" / name) for name, path in sources.items()}


@pytest.mark.nightly
def test_run_in_two_fresh_environments_agrees(wheels, make_report, tmp_path, capsys):
    """A report made from wheels is reproduced from the same wheels, and not from another one."""
    named = make_report(name="rerun-me")
    source = _rerun.Source(files=(wheels["suite"], wheels["good"]), reuses_torch=True)
    python = _rerun.make_environment(named, tmp_path / "venv", source)
    claims = {"areas": ["mod-tracker"], "devices": ["cpu"], "profiles": ["core"]}
    adapter = "rerun_me:implementation"
    first = _rerun.run_in(python, claims, adapter=adapter, out=tmp_path / "out")
    (found,) = first["implementation"]["distributions"]
    assert (found["kind"], found["version"]) == ("record", "1.0")
    assert found["wheel_sha256"] == hashlib.sha256(wheels["good"].read_bytes()).hexdigest()
    assert first["verdict"] == "conformant"
    report = str(tmp_path / "out" / "report.json")
    again = ["verify", report, "--rerun", "--impl", adapter]
    files = ["--install", str(wheels["suite"]), "--install", str(wheels["good"])]
    assert _cli.main([*again, "--reuse-torch", *files]) == 0
    assert "mine: conformant, nothing contradicts it" in capsys.readouterr().out
    replace = ["-m", "pip", "install", "--quiet", "--no-deps", "--force-reinstall"]
    subprocess.run([python, *replace, wheels["spoilt"]], check=True)
    assert _cli.main([*again, "--python", python]) == 1
    assert "differs in: implementation, verdict, MT-001" in capsys.readouterr().err


@pytest.mark.parametrize("profiles", [None, ["core", "in-place"]])
def test_second_run_asks_for_what_the_first_was_asked(monkeypatch, make_report, tmp_path, profiles):
    """Away from the working directory, and from other code that the environment points to."""
    asked = {}

    def run(command, *, cwd, env, **_):
        asked.update(command=command, cwd=cwd, env=env)
        _render.write(tmp_path / "out" / "report.json", _report.to_text(make_report()))

    monkeypatch.setattr(_rerun.subprocess, "run", run)
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    claims = make_report()["claims"] | {"profiles": profiles, "devices": ["cpu", "cuda"]}
    found = _rerun.run_in("python3", claims, adapter="mine:impl", out=tmp_path / "out")
    assert found == make_report()
    wanted = "python3 -m torchparts_conformance run --impl mine:impl --area ckpt-wrap"
    wanted += " --device cpu,cuda" + (" --profile core,in-place" if profiles else "")
    assert asked["command"] == [*wanted.split(), "--out", str(tmp_path / "out")]
    assert asked["cwd"] == tmp_path / "out"
    assert "PYTHONPATH" not in asked["env"]


def test_second_run_without_a_report_gives_none(monkeypatch, make_report, tmp_path):
    """Whoever asks says so; it is no agreement."""
    monkeypatch.setattr(_rerun.subprocess, "run", lambda *_, **__: None)
    claims = make_report()["claims"]
    assert _rerun.run_in("python3", claims, adapter="a:b", out=tmp_path / "out") is None


def test_new_environment_sees_the_packages_of_this_one(tmp_path):
    """One folder a line, each of which is there."""
    site = tmp_path / "lib" / "site-packages"
    site.mkdir(parents=True)
    _rerun._see_this_environment(tmp_path)
    (path,) = site.glob("*.pth")
    text = path.read_text()
    assert text.endswith("\n")
    assert sysconfig.get_path("purelib") in text.splitlines()
    assert all(Path(line).is_dir() for line in text.splitlines())


@pytest.mark.parametrize("named", ["env/bin/python", "python3"])
def test_interpreter_is_found_from_where_the_command_was_given(
    monkeypatch, make_report, tmp_path, named
):
    """The run is elsewhere; a bare name stays one, and a link is not followed."""
    ran = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "run", lambda line, **_: ran.append(line[0]))
    _rerun.run_in(named, make_report()["claims"], adapter="mine", out=tmp_path / "out")
    assert ran == [str(tmp_path / named) if "/" in named else named]
