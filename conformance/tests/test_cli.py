"""Commands that run no cases, and the commands in the documentation."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from torchparts_conformance import _adapters, _cli, _report
from torchparts_conformance.requirements._cases import PACKAGE

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs/conformance"


def test_list_names_shipped_adapters_and_what_is_missing(capsys, monkeypatch):
    shipped = {
        "ours": ("ours", ("pytest", "no-such-thing")),
        "torch": ("inside_torch", ("pytest",)),
    }
    monkeypatch.setattr(_adapters, "SHIPPED", shipped)
    assert _cli.main(["list"]) == 0
    listed = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "not installed: no-such-thing" in listed["ours"]
    assert f"pytest {pytest.__version__}" in listed["torch"]


def test_entry_point_gives_a_short_name(tmp_path, monkeypatch, capsys):
    info = tmp_path / "theirs-1.0.dist-info"
    _report.write(info / "METADATA", "Name: theirs\nVersion: 1.0\n")
    point = "[torchparts.conformance]\ntheirs = their_adapter:implementation\n"
    _report.write(info / "entry_points.txt", point)
    adapter = "from torchparts_conformance import Implementation\nimplementation = "
    _report.write(tmp_path / "their_adapter.py", f"{adapter}Implementation('theirs', '1.0')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert _cli.main(["list"]) == 0
    listed = "theirs         entry point  theirs 1.0  (their_adapter:implementation)"
    assert listed in capsys.readouterr().out
    assert _cli.main(["doctor", "theirs"]) == 0
    assert "theirs 1.0, protocol 1" in capsys.readouterr().out


PARTIAL = """
import types
from torchparts_conformance import Implementation

def checkpoint_wrapper(module):
    return module

impl = Implementation(
    "partial", "1.0", distributions=("no-such-thing",),
    parts={"ckpt-wrap": types.SimpleNamespace(checkpoint_wrapper=checkpoint_wrapper)},
    lacks={"ckpt-wrap": {"CW-001": "it is another kind of wrapper"}},
)
"""


def test_doctor_says_what_a_verdict_would_cover(tmp_path, monkeypatch, capsys):
    _report.write(tmp_path / "partial.py", PARTIAL)
    monkeypatch.chdir(tmp_path)
    assert _cli.main(["doctor", "partial:impl"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[:2] == [
        "partial 1.0, protocol 1",
        "distribution no-such-thing: missing; run python -m pip install no-such-thing",
    ]
    core = re.fullmatch(
        r"ckpt-wrap: the verdict is about core (\d+) of (\d+) requirements", said[2]
    )
    assert 0 < int(core[1]) < int(core[2])
    own = re.fullmatch(
        r"  beside it, torchparts' own: robust (\d+) of (\d+), run with --profile robust", said[3]
    )
    assert 0 < int(own[1]) < int(own[2])
    assert "  not provided CW-001: it is another kind of wrapper" in said
    assert any("there is no offload_wrapper" in line for line in said)
    assert "mod-tracker: not provided" in said


def test_doctor_says_which_package_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(_adapters.SHIPPED, "peer", ("fairscale", ("no-such-thing",)))
    assert _cli.main(["doctor", "peer"]) == 4
    said = "implementation 'peer' needs no-such-thing. Run python -m pip install no-such-thing."
    assert said in capsys.readouterr().err
    _report.write(tmp_path / "needy.py", "import no_such_module.deep")
    monkeypatch.syspath_prepend(tmp_path)
    assert _cli.main(["doctor", "needy:impl"]) == 4
    assert "usually with python -m pip install no_such_module." in capsys.readouterr().err


def test_doctor_of_another_torch_is_exit_code_1(tmp_path, monkeypatch, capsys):
    _report.write(tmp_path / "unfit.py", PARTIAL.replace('"1.0",', '"1.0", torch="<1",'))
    monkeypatch.syspath_prepend(tmp_path)
    assert _cli.main(["doctor", "unfit:impl"]) == 1
    assert "partial 1.0 is for torch <1, but" in capsys.readouterr().err


def test_trace_leads_from_every_source_test_to_cases(capsys):
    assert _cli.main(["trace"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "50 source tests, 0 problems"


def test_help_shows_how_to_write_an_adapter(tmp_path, monkeypatch, capsys):
    """The two lines that it shows are an adapter."""
    assert _cli.main([]) == 4
    shown = capsys.readouterr().out
    adapter = shown.partition("write my_adapter.py:\n")[2].partition("  torchparts-conf")[0]
    _report.write(tmp_path / "my_adapter.py", textwrap.dedent(adapter))
    _report.write(tmp_path / "my_wrapper.py", "checkpoint_wrapper = None")
    monkeypatch.syspath_prepend(tmp_path)
    assert _cli.main(["doctor", "my_adapter:implementation"]) == 0
    assert "ckpt-wrap: the verdict is about core" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["run", "--imp", "ours"], "unrecognized arguments: --imp"),
        (["run", "--impl", "torch", "--explain", "MT-999"], "--explain 'MT-999' is unknown"),
        (["run", "--jobs", "0", "--impl", "torch"], "--jobs is 0"),
        (["run", "--case-limit", "x"], "invalid float value: 'x'"),
        (
            ["verify", "none.json", "--impl", "x:y"],
            "report 'none.json' cannot be read: No such file",
        ),
        (["nothing"], "invalid choice: 'nothing'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_4(capsys, tmp_path, monkeypatch, options, said):
    monkeypatch.chdir(tmp_path)
    try:
        code = _cli.main(options)
    except SystemExit as ended:
        code = ended.code
    err = capsys.readouterr().err
    assert (code, err.count("\n")) == (4, 1)
    assert said in err


@pytest.mark.slow
@pytest.mark.parametrize(("id", "code", "said"), [("mt-001", 0, "passed"), ("CW-053", 1, "failed")])
def test_explanation_runs_one_requirement_without_capturing(id, code, said):
    """Also one of a profile that the implementation does not claim."""
    command = [sys.executable, "-m", "torchparts_conformance", "run", "--impl", "torch"]
    ended = subprocess.run([*command, "--explain", id], capture_output=True, text=True, timeout=300)
    assert ended.returncode == code, ended.stdout + ended.stderr
    assert ended.stdout.startswith(f"{id.upper()}: ")
    assert f"1 {said}" in ended.stdout


def commands(page: Path) -> list[tuple[list[str], dict[str, str], list[str]]]:
    """Return arguments, variables and shown output of each command of the suite on a page."""
    blocks = re.findall(r"```console\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    found = []
    for command in re.split(r"^\$ ", "".join(blocks), flags=re.MULTILINE)[1:]:
        line, *shown = command.splitlines()
        words = shlex.split(line)
        if "torchparts-conformance" in words:
            place = words.index("torchparts-conformance")
            variables = dict(word.split("=", 1) for word in words[:place])
            found.append((words[place + 1 :], variables, [s for s in shown if s != "..."]))
    return found


@pytest.fixture
def command(tmp_path):
    """`command(...)` runs a page's command and returns its output."""
    script = tmp_path / "bin" / "torchparts-conformance"
    script.parent.mkdir()
    script.write_text(
        "import sys\nfrom torchparts_conformance._cli import main\nsys.exit(main())\n"
    )

    def run(arguments, variables):
        ended = subprocess.run(
            [sys.executable, str(script), *arguments],
            cwd=tmp_path,
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout.splitlines()

    return run


@pytest.mark.nightly
@pytest.mark.skipif(not DOCS.exists(), reason="only in the repository")
def test_adapter_page_leads_from_an_empty_folder_to_a_badge(command, tmp_path):
    began = time.monotonic()
    page = DOCS / "write-an-adapter.md"
    text = page.read_text(encoding="utf-8")
    names = re.findall(r"[Ss]ave (?:it|this one) as `(\w+\.py)`", text)
    adapters = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(names) == 2
    for fragment in adapters[2:]:
        exec(compile(fragment, page.name, "exec"), {})
    for name, adapter in zip(names, adapters, strict=False):
        (tmp_path / name).write_text(adapter, encoding="utf-8")
    typed = commands(page)
    assert [arguments[0] for arguments, _, _ in typed] == ["doctor", "run", "run", "run", "verify"]
    for arguments, variables, shown in typed:
        said = {_without_numbers(line) for line in command(arguments, variables)}
        assert [line for line in shown if _without_numbers(line) not in said] == []
    assert "core" in (tmp_path / "results/badge-sac-policies.svg").read_text()
    assert time.monotonic() - began < 300


def _without_numbers(line: str) -> str:
    return re.sub(r"\d+", "N", line)


@pytest.mark.nightly
@pytest.mark.skipif(not DOCS.exists(), reason="only in the repository")
def test_template_gives_the_badge_that_its_readme_promises(command, tmp_path):
    template = tmp_path / "my-tracker"
    shutil.copytree(ROOT / "docs/examples/adapter", template)
    info = template / "my_tracker-1.0.dist-info"
    _report.write(info / "METADATA", "Name: my-tracker\nVersion: 1.0\n")
    point = "[torchparts.conformance]\nmy-tracker = my_tracker_adapter:implementation\n"
    _report.write(info / "entry_points.txt", point)
    path = os.pathsep.join([str(template), str(PACKAGE.parent)])
    ((arguments, _, _),) = commands(template / "README.md")
    command(arguments, {"PYTHONPATH": path})
    badge = (tmp_path / "results/badge-mod-tracker.svg").read_text()
    assert re.search(r"core (\d+) of \1 \| cpu", badge)
