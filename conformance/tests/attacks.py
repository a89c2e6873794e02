"""Ways to make a wrong implementation look right, each of which worked once or is a relative.

Every text is run when the adapter is imported, or is a file that something might import by itself.
`forge` gives the text of a report in which everything passed, made with the suite's own functions.
"""

from __future__ import annotations

ADAPTER = """
import types
from torchparts_conformance import Implementation

class Part:
    @property
    def answer(self):
        return seen()

def seen():
    return 41

impl = Implementation("wrong", "1", parts={"ckpt-wrap": Part()})
"""
CASES = """
import torch
from torchparts_conformance import requirement

def on_a_rank(part, rank, world_size):
    answer = torch.tensor(part.answer)
    assert torch.equal(answer, torch.tensor(42))

@requirement(
    "CW-001",
    level="MUST",
    text="It MUST work.",
    rationale="it is the point",
    since="0.1.0",
    profile="core",
    devices=("cpu",),
)
def test_one(part):
    assert part.answer == 42

@requirement(
    "CW-002",
    level="MUST",
    text="It MUST work on a rank.",
    rationale="it is the point",
    since="0.1.0",
    profile="core",
    devices=("cpu",),
)
def test_two(part, ranks):
    ranks(1, on_a_rank)
"""
# Every case passes whose failure pytest hands to the suite, in the process and on a rank.
_LENIENT = """
from torchparts_conformance.run import _case_outcome
def lenient(call, report, *where):
    return ("pass" if report.when == "call" else "", "", "")
_case_outcome.judge = lenient
"""
_FORGE = """
import gc, json, os, pathlib, sys
import torchparts_conformance as suite
from torchparts_conformance.report import _report
from torchparts_conformance.requirements import _cases
from torchparts_conformance.subject import _identity
def forge(**facts):
    registry = _cases.load_registry()
    rows = [
        {"id": id, "case": case.name, "device": "cpu", "area": "ckpt-wrap", "level": "MUST",
         "profile": "core", "group": registry[id].group, "outcome": "pass", "reason": "",
         "where": "", "duration_s": 0.1}
        for case in _cases.find_cases() for id in case.ids
    ]
    return _report.to_text(_report.build(
        suite={"name": "torchparts-conformance", "version": suite.__version__},
        implementation=_identity.describe_implementation(impl, "attack:impl"),
        environment=_identity.describe_environment(),
        claims={"areas": ["ckpt-wrap"], "devices": ["cpu"], "profiles": None, "capabilities": {}},
        rows=rows, problems=(),
    ))
OUT = pathlib.Path("out")
def write():
    OUT.mkdir(exist_ok=True)
    (OUT / "report.json").write_text(forge())
"""
_CONFIG = """
import gc, pytest
config = next(o for o in gc.get_objects() if isinstance(o, pytest.Config))
"""
_SWALLOWING = """
class Swallowing:
    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem):
        return True
"""

# What is appended to the adapter.
CODE = {
    "the guard is replaced": _LENIENT
    + """
from torchparts_conformance.subject import _tamper
if hasattr(_tamper, "Guard"):
    _tamper.Guard.replaced = lambda self: []
_tamper.guard = lambda *given: lambda: []
""",
    "the guard forgets": _LENIENT
    + """
import gc
from torchparts_conformance.subject import _tamper
for found in gc.get_objects():
    if type(found).__module__ == "torchparts_conformance.subject._tamper":
        for kept in vars(found).values():
            kept.clear()
for name, value in list(vars(_tamper).items()):
    if isinstance(value, (dict, list, set)) and not name.startswith("__"):
        value.clear()
""",
    "a plugin is registered": _CONFIG + _SWALLOWING + "config.pluginmanager.register(Swallowing())",
    "a plugin leaves in time": _CONFIG
    + _SWALLOWING
    + """
class Leaving(Swallowing):
    @pytest.hookimpl
    def pytest_sessionfinish(self):
        config.pluginmanager.unregister(self)
config.pluginmanager.register(Leaving())
""",
    "what was noted is changed": """
import gc, threading, time
from torchparts_conformance.run._case_result import CaseResult
def always(results):
    while True:
        for found in results:
            if found.outcome != "not_run":
                found.outcome, found.reason = "pass", ""
        time.sleep(0)
def seen():
    results = [found for found in gc.get_objects() if isinstance(found, CaseResult)]
    threading.Thread(target=always, args=(results,), daemon=True).start()
    return 41
""",
    "the report is written again at the end": _FORGE + "import atexit; atexit.register(write)",
    "the report is forged and the process ended": _FORGE
    + """
import atexit, threading
def seen():
    write()
    os._exit(0)
""",
    "a child goes on writing the report": _FORGE
    + """
import time
if os.fork() == 0:
    os.setsid()
    for _ in range(2000):
        try:
            if pathlib.Path("over").exists():
                break
            write()
        except BaseException:
            pass
        time.sleep(0.01)
    os._exit(0)
""",
    "every pipe is told of success": _FORGE
    + """
def seen():
    text = forge()
    for word in ("", "x" * 32):
        lines = [
            {"word": word, "case": r["case"], "device": "cpu", "outcome": "pass", "replaced": []}
            for r in json.loads(text)["rows"]
        ]
        lines.append({"word": word, "report": text, "replaced": []})
        for line in lines:
            for place in range(1, 30):
                try:
                    os.write(place, (json.dumps(line) + "\\n").encode())
                except OSError:
                    pass
    os._exit(0)
""",
    "a tracer changes what a case sees": """
import sys, types
right = types.SimpleNamespace(answer=42)
def trace(frame, event, argument):
    if frame.f_code.co_name in ("test_one", "on_a_rank"):
        if "part" in frame.f_locals:
            frame.f_locals["part"] = right
    if frame.f_code.co_name == "test_two":
        frame.f_locals["ranks"] = lambda *given: None
    return trace
sys.settrace(trace)
""",
    "the cases are there before they are imported": """
import sys, types
def requirement(id):
    from torchparts_conformance import requirement
    return requirement(id)
planted = types.ModuleType("planted")
planted.__file__ = __file__
def test_one(part):
    assert part.answer
def test_two(part, ranks):
    assert part.answer
import pathlib, torchparts_conformance
folder = pathlib.Path(torchparts_conformance.__file__).parent / "cases" / "ckpt_wrap"
planted.__file__ = str(folder / "test_cases.py")
planted.test_one = requirement("CW-001")(test_one)
planted.test_two = requirement("CW-002")(test_two)
sys.modules.setdefault("torchparts_conformance.cases.ckpt_wrap.test_cases", planted)
""",
    "only a rank is changed": """
def seen():
    import torch, torch.distributed as dist
    if not dist.is_initialized():
        return 42
    from torchparts_conformance.subject import _tamper
    if hasattr(_tamper, "Guard"):
        _tamper.Guard.replaced = lambda self: []
    _tamper.guard = lambda *given: lambda: []
    torch.equal = lambda *given: True
    return 41
""",
    "the report is built leniently": _FORGE
    + """
from torchparts_conformance.report import _report as judged
build = judged.build
def lenient(**facts):
    for row in facts["rows"]:
        row["outcome"] = "pass"
    return build(**{**facts, "problems": ()})
judged.build = lenient
""",
}

_EARLY = """
import sys
from importlib.machinery import PathFinder
class Finder:
    def find_spec(self, name, path=None, target=None):
        found = PathFinder.find_spec(name, path)
        if name == "torchparts_conformance.run._case_outcome":
            run = found.loader.exec_module
            def exec_module(module):
                run(module)
                module.judge = (
                    lambda call, report: ("pass", "") if report.when == "call" else ("", "")
                )
            found.loader.exec_module = exec_module
            return found
sys.meta_path.insert(0, Finder())
"""
_PLUGIN = """
import pytest
@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    return True
"""
# Files beside the adapter, which is in the working directory and on PYTHONPATH.
FILES = {
    "sitecustomize": {"sitecustomize.py": _EARLY},
    "usercustomize": {"usercustomize.py": _EARLY},
    "conftest": {"conftest.py": _PLUGIN},
    "a module named like pytest": {
        "pytest.py": """
import os, sys
here = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [entry for entry in sys.path if entry not in ("", here)]
sys.modules.pop("pytest", None)
import pytest
sys.path.append(here)
"""
        + _EARLY
        + """
if __name__ == "__main__":
    sys.exit(pytest.console_main())
"""
    },
    "an entry point named like the plugin": {
        "theirs-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n",
        "theirs-1.0.dist-info/entry_points.txt": (
            "[pytest11]\ntorchparts_conformance.plugin = their_plugin\n"
        ),
        "their_plugin.py": "from torchparts_conformance.plugin import *\n" + _PLUGIN,
    },
    "an entry point that torch imports": {
        "theirs-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n",
        "theirs-1.0.dist-info/entry_points.txt": "[torch.backends]\ntheirs = their_backend:init\n",
        "their_backend.py": "def init():\n    " + _LENIENT.strip().replace("\n", "\n    ") + "\n",
    },
}
