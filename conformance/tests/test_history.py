"""The frozen lists of all versions: how they are kept, and by which of them one can be judged."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import torchparts_conformance
from torchparts_conformance._errors import OptionError, RegistryError
from torchparts_conformance.render import _badge
from torchparts_conformance.report import _report
from torchparts_conformance.requirements import _cases, _history, _manifest
from torchparts_conformance.requirements._manifest import Row
from torchparts_conformance.requirements._registry import Requirement, load_registry
from torchparts_conformance.run import _run
from torchparts_conformance.verify import _verify

OLD = "0.0.7"
CASES = "ckpt_wrap/test_cases.py"


@pytest.fixture
def lists(suite, monkeypatch):
    """Freeze the small suite as version 0.0.7 with two of its three requirements."""
    folder = suite.root / "lists"
    for function in (_history.read, _history.versions, _history.others):
        monkeypatch.setattr(function, "__defaults__", (folder,))
    monkeypatch.setattr(_run, "CASES", suite.root / "cases")
    rows = [Row("CW-001", f"{CASES}::test_one"), Row("CW-002", f"{CASES}::test_two")]
    made = _history.make(OLD, rows, load_registry(), cases=suite.root / "cases")
    _history.write(made, folder)
    suite.freeze()
    return folder


def test_older_list_judges_by_its_own_rows(suite, lists):
    """What came later is not asked for, and report and badge name the list."""
    assert suite.run(f"--suite-version={OLD}").ret == 0
    report = suite.report()
    assert suite.outcomes() == {"CW-001": "pass", "CW-002": "pass"}
    assert report["suite"]["list"] == _history.read(OLD).named()
    assert report["suite"]["frozen"]
    (badge,) = _badge.badges(report)
    assert badge.label == f"ckpt-wrap {OLD} (run by {torchparts_conformance.__version__})"
    assert badge.color == "brightgreen"


def test_requirement_counts_as_it_was(suite, lists):
    """A SHOULD that became a MUST is a SHOULD by the list of when it was one."""
    fails = {"answer == 42": "answer == 43"}
    text = (suite.root / f"cases/{CASES}").read_text()
    second = text.partition('@requirement("CW-002")')[2].partition("@requirement")[0]
    (old, new), *_ = fails.items()
    suite.write(f"cases/{CASES}", text.replace(second, second.replace(old, new)))
    made = _history.make(OLD, _history.read(OLD).rows, load_registry(), cases=suite.root / "cases")
    _history.write(made, lists)
    spec = (suite.root / "spec/ckpt_wrap.toml").read_text()
    suite.write("spec/ckpt_wrap.toml", spec.replace("SHOULD", "MUST"))
    suite.freeze()
    suite.run("--profile=robust")
    assert suite.report()["verdict"] == "not conformant"
    suite.run("--profile=robust", f"--suite-version={OLD}")
    robust = [v for v in suite.report()["verdicts"] if v["profile"] == "robust"]
    assert [v["verdict"] for v in robust] == ["conformant"]
    assert [v["should"] for v in robust] == [[0, 1]]


def test_installed_version_is_the_plain_run(suite, lists):
    """The list of the installed suite is the one that judges anyway."""
    suite.run(f"--suite-version={torchparts_conformance.__version__}")
    named = suite.report()
    suite.run()
    assert named["digest"] == suite.report()["digest"]
    assert "list" not in named["suite"]


def test_changed_case_is_refused_with_the_next_step(suite, lists):
    """A list judges with the cases that it was made of."""
    path = suite.root / f"cases/{CASES}"
    path.write_text(path.read_text().replace("def test_two(part):", "def test_two(part, ranks):"))
    result = suite.run(f"--suite-version={OLD}")
    assert result.ret == 4
    said = str(result.stderr)
    assert f"--suite-version {OLD} cannot judge here: of its 2 cases 1 have changed" in said
    assert f"({CASES}::test_two)" in said
    assert f"Run torchparts-conformance=={OLD}" in said


def test_lost_case_is_refused(suite, lists):
    """A case that is gone cannot be run."""
    suite.write_case("assert part.answer == 42")
    result = suite.run(f"--suite-version={OLD}")
    assert result.ret == 4
    # What the case of CW-001 imports is the same; its body is, too.
    assert f"1 are gone ({CASES}::test_two)" in str(result.stderr)


def test_other_areas_may_have_changed(lists, suite):
    """Only the cases that are asked for have to be the same."""
    chosen = _history.read(OLD)
    (suite.root / f"cases/{CASES}").unlink()
    _history.refuse_changed(chosen, areas=["mod-tracker"], cases=suite.root / "cases")
    with pytest.raises(OptionError, match="2 are gone"):
        _history.refuse_changed(chosen, areas=["ckpt-wrap"], cases=suite.root / "cases")


def test_unknown_version_is_refused_with_those_that_are_known(suite, lists):
    """There is no list to judge by."""
    result = suite.run("--suite-version=0.0.8")
    assert result.ret == 4
    assert f"--suite-version '0.0.8' is unknown, but this suite has the lists of {OLD}" in str(
        result.stderr
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data["rows"].pop(),
        lambda data: data["requirements"]["CW-001"].update(level="SHOULD"),
        lambda data: data["cases"].update({f"{CASES}::test_one": "0" * 64}),
        lambda data: data.update(version="0.0.6"),
        lambda data: data.pop("sha256"),
        lambda data: data["requirements"].update({"XX-001": {}}),
        lambda data: data.update(rows=3),
    ],
)
def test_tampered_list_is_refused(suite, lists, change):
    """A list says the hash of its content, and nobody is judged by one that is another."""
    path = lists / f"{OLD}.json"
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    result = suite.run(f"--suite-version={OLD}")
    assert result.ret == 4
    assert f"lists/{OLD}.json is not what its hash says" in str(result.stderr)


def test_list_with_a_new_hash_is_not_the_suite_that_was_frozen(suite, lists):
    """Whoever changes a list and its hash has changed the suite, and no run is conformant."""
    rows = [Row("CW-001", f"{CASES}::test_one")]
    made = _history.make(OLD, rows, load_registry(), cases=suite.root / "cases")
    _history.write(made, lists)
    assert suite.run(f"--suite-version={OLD}").ret == 1
    assert not suite.report()["suite"]["frozen"]


def test_file_that_is_named_after_no_version_is_refused(lists):
    """Each list is of a version."""
    (lists / "newest.json").write_text("{}")
    with pytest.raises(RegistryError, match=r"lists/newest\.json is named after no version"):
        _history.versions()


def test_written_list_is_read_back(lists):
    """What was written is what is there, to the last byte of its hash."""
    made = _history.read(OLD)
    text = (lists / f"{OLD}.json").read_text()
    _history.write(made, lists)
    assert (lists / f"{OLD}.json").read_text() == text
    assert json.loads(text)["sha256"] == made.sha256


def test_versions_are_ordered_as_versions(tmp_path):
    """0.10 comes after 0.9."""
    for version in ("0.10.0", "0.9.0", "1.0.0rc1"):
        (tmp_path / f"{version}.json").write_text("{}")
    assert _history.versions(tmp_path) == ["0.9.0", "0.10.0", "1.0.0rc1"]


def test_list_of_this_suite_is_that_of_its_cases():
    """The list that a later suite will judge by is what this one consists of."""
    frozen = _manifest.load_manifest()
    version = torchparts_conformance.__version__
    made = _history.make(version, frozen.rows, load_registry(), cases=_cases.CASES)
    assert _history.read(version).named() == made.named()
    assert {_history.function_of(row.case) for row in made.rows} == made.cases.keys()


def test_every_requirement_is_since_the_first_list_that_has_it():
    """`since` is the version that brought it, and every requirement is in the newest list."""
    registry = load_registry()
    lists = [_history.read(version) for version in _history.versions()]
    assert _history.problems(registry, lists) == []
    assert lists[-1].requirements.keys() == registry.keys()


def test_wrong_since_is_found(registry, frozen):
    """One that says an earlier or a later version than the first list with it is named."""
    lists = [
        _history.FrozenList("0.0.9", {"CW-001": registry["CW-001"]}, frozen.rows[:1], {}),
        _history.FrozenList("0.1.0", registry, frozen.rows, {}),
    ]
    assert _history.problems(registry, lists) == [
        "CW-001 says since 0.1.0, but 0.0.9 was the first list that had it"
    ]


def test_report_by_an_older_list_is_verified_by_it(make_report, expected, registry, frozen):
    """Rows, levels and hash are those of the list; another list is refused."""
    rows = (frozen.rows[0],)
    made = _history.FrozenList(OLD, {"CW-001": registry["CW-001"]}, rows, {})
    whole = make_report()
    report = {**whole, "suite": {**whole["suite"], "list": made.named()}}
    report["rows"] = [row for row in whole["rows"] if row["id"] == "CW-001"]
    report |= _report.derived(report)
    report["seal"] = _report.seal(report)
    assert _verify.problems(report, None, replace(expected, lists={OLD: made})) == []
    other = _history.FrozenList(OLD, registry, frozen.rows, {})
    found = _verify.problems(report, None, replace(expected, lists={OLD: other}))
    assert "the list that judged is not one of this suite" in found
    found = _verify.problems(report, None, expected)
    assert "the list that judged is not one of this suite" in found
    assert re.search("row CW-002 .* is missing", " ".join(found))


_REQUIREMENT = st.builds(
    Requirement,
    id=st.from_regex(r"(CW|MT|FP|SP|CB)-\d{3}", fullmatch=True),
    area=st.just("ckpt-wrap"),
    level=st.sampled_from(["MUST", "SHOULD", "MAY"]),
    profile=st.sampled_from(["core", "robust", "speed"]),
    devices=st.lists(st.sampled_from(["cpu", "accelerator"]), min_size=1).map(tuple),
    since=st.just("0.1.0"),
    text=st.text(min_size=1),
    source=st.just("none"),
)


@settings(deadline=None)  # a busy machine is slow
@given(found=st.lists(_REQUIREMENT, max_size=5), at=st.floats(0, 1), sign=st.characters())
def test_changed_sign_of_a_list_is_refused_or_means_nothing(tmp_path_factory, found, at, sign):
    """Whatever was written is read back; one sign that changes what is said is refused."""
    folder = tmp_path_factory.mktemp("lists")
    made = _history.FrozenList(
        "0.0.3", {r.id: r for r in found}, tuple(Row(r.id, f"a::{r.id}") for r in found), {}
    )
    _history.write(made, folder)
    assert _history.read("0.0.3", folder).named() == made.named()
    path = folder / "0.0.3.json"
    text = path.read_text(encoding="utf-8")
    place = int(at * (len(text) - 1))
    changed = text[:place] + sign + text[place + 1 :]
    path.write_bytes(changed.encode("utf-8", errors="surrogatepass"))
    try:
        read = _history.read("0.0.3", folder)
    except RegistryError:
        return
    assert read.content() == made.content()


@pytest.mark.slow
def test_installed_suite_judges_by_an_older_list(package, tmp_path):
    """From the command line: frozen, run, verified, and refused once a case's text has changed."""
    copy = tmp_path / "torchparts_conformance"
    shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__"))
    ids = ("MT-001", "MT-004")
    rows = [row for row in _manifest.load_manifest().rows if row.id in ids]
    _history.write(
        _history.make("0.0.5", rows, load_registry(), cases=_cases.CASES), copy / "lists"
    )
    out, asked = tmp_path / "out", ["--impl", "torch", "--area", "mod-tracker"]

    def call(*options):
        line = [sys.executable, "-m", "torchparts_conformance", *options]
        env = {**os.environ, "PYTHONPATH": str(tmp_path)}
        return subprocess.run(
            line, capture_output=True, text=True, timeout=300, cwd=tmp_path, env=env, check=False
        )

    frozen = call("freeze")
    assert "MT-001 says since 0.1.0, but 0.0.5 was the first list that had it" in frozen.stderr
    ran = call("run", *asked, "--suite-version", "0.0.5", "--out", str(out))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "judged by the list of suite 0.0.5, run by 0.1.0" in ran.stdout
    assert {row["id"] for row in _report.read(out / "report.json")["rows"]} == set(ids)
    verified = call("verify", str(out / "report.json"), str(out / "badge-mod-tracker.svg"))
    assert verified.returncode == 0, verified.stderr
    case = copy / "cases" / rows[0].case.partition("::")[0]
    case.write_text(case.read_text().replace("import requirement", "import requirement  # so"))
    refused = call("run", *asked, "--suite-version", "0.0.5")
    assert refused.returncode == 4
    assert "--suite-version 0.0.5 cannot judge here" in refused.stderr
