"""Needs of a case are read from its file, and missing names are found before any case runs."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import types
from importlib import metadata

import pytest
from small_suite import declared

from torchparts_conformance import PROTOCOL, Implementation, _adapters, _claims
from torchparts_conformance._claims import Claims
from torchparts_conformance._errors import AdapterError
from torchparts_conformance.requirements._cases import find_cases, load_registry
from torchparts_conformance.requirements._needs import Needs, needs_of

CASES = """
import pytest
from torchparts_conformance.cases.ckpt_wrap._beside import helped

def test_direct(part):
    part.one(1, color=2).two()

def test_method(part):
    part.Made.of(size=1)

def _inner(part):
    part.three.four

def test_through_a_function(part, ranks):
    ranks(2, _inner)

def test_through_a_file_beside(part):
    helped(part)

def test_alternative(part):
    part.made = 3
    _either(part)

def _either(part):
    return part.new() if hasattr(part, "new") else part.old()

def test_wrong_on_purpose(part):
    with pytest.raises(TypeError):
        part.one(nonsense=1)
    try:
        part.one(policy=1)
    except TypeError:
        pass
"""
BESIDE = "def helped(part):\n    part.five(size=1)\n"


@pytest.fixture
def cases(tmp_path):
    """A file of cases that imports another one."""
    (tmp_path / "_beside.py").write_text(BESIDE)
    (tmp_path / "test_them.py").write_text(CASES)
    return tmp_path / "test_them.py"


@pytest.mark.parametrize(
    ("name", "needs"),
    [
        ("test_direct", Needs(frozenset({"one"}), frozenset({("one", "color")}))),
        ("test_method", Needs(frozenset({"Made"}), frozenset({("Made.of", "size")}))),
        ("test_through_a_function", Needs(frozenset({"three"}))),
        ("test_through_a_file_beside", Needs(frozenset({"five"}), frozenset({("five", "size")}))),
        ("test_alternative", Needs()),
        (
            "test_wrong_on_purpose",
            Needs(frozenset({"one"}), attempts=frozenset({("one", "nonsense"), ("one", "policy")})),
        ),
    ],
)
def test_needs_of_a_case_are_read_from_its_file(cases, name, needs):
    assert needs_of(cases, name) == needs


@pytest.mark.parametrize("name", ["torch", "ours"])
def test_implementation_with_every_name_lacks_nothing(name):
    implementation, registry = _adapters.load_implementation(name), load_registry()
    missing = []
    for case in find_cases():
        held = [id for id in case.ids if implementation.claims(case.area, registry[id].profile)]
        needs = needs_of(case.path, case.name.partition("::")[2])
        if held:
            part = _adapters.load_part(implementation, case.area)
            missing += [(case.name, why)] if (why := _claims.why_missing(part, needs, {})) else []
    assert missing == []


def _takes(module, depth=1):
    """A function with some named arguments."""


PART = types.SimpleNamespace(wrap=_takes, passes_on=lambda **options: None)


@pytest.mark.parametrize(
    ("needs", "lacks", "said"),
    [
        (Needs(frozenset({"wrap"})), {}, ""),
        (Needs(frozenset({"wrap", "apply"})), {}, "there is no apply"),
        (Needs(options=frozenset({("wrap", "depth")})), {}, ""),
        (Needs(options=frozenset({("wrap", "policy")})), {}, "there is no policy= of wrap"),
        (Needs(attempts=frozenset({("wrap", "policy")})), {}, ""),
        (Needs(options=frozenset({("passes_on", "policy")})), {}, ""),
        (Needs(options=frozenset({("passes_on", "policy")})), {"policy": "no"}, "policy: no"),
        (Needs(frozenset({"wrap"})), {"wrap": "needs a GPU"}, "wrap: needs a GPU"),
        (Needs(), {"CW-001": "has no inside"}, "has no inside"),
        (Needs(), {"CW-002": "has no inside"}, ""),
    ],
)
def test_missing_names_options_and_declared_lacks(needs, lacks, said):
    assert _claims.why_missing(PART, needs, lacks, ["CW-001"]) == said


def test_attribute_that_raises_is_not_missing():
    class Part:
        @property
        def wrap(self):
            raise RuntimeError("broken")

    assert _claims.why_missing(Part(), Needs(frozenset({"wrap"})), {}) == ""


@pytest.mark.parametrize(
    ("versions", "requires", "said"),
    [
        ("", None, ""),
        (">=2", None, ""),
        ("<2", None, "mine 1 is for torch <2, but"),
        ("", ["torch>=99", "numpy"], "theirs is for torch >=99, but"),
        ("", ['torch>=99; extra == "old"', "torch>=2"], ""),
        ("", ["not a ( requirement"], ""),
    ],
)
def test_torch_that_an_implementation_is_not_for(monkeypatch, versions, requires, said):
    monkeypatch.setattr(metadata, "requires", lambda name: requires)
    found = _claims.unfit_torch(
        Implementation("mine", "1", distributions=("theirs",), torch=versions)
    )
    assert found.startswith(said)
    assert bool(found) == bool(said)


MINE = Implementation(
    "mine", "1", parts={"ckpt-wrap": 1}, capabilities={"ckpt-wrap": {"plan", "compile"}}
)


@pytest.mark.parametrize(
    ("claims", "id", "profile", "outcome"),
    [
        (Claims(MINE), "CW-001", "core", ""),
        (Claims(MINE), "CW-001", "plan", ""),
        (Claims(MINE), "CW-001", "offload", "not_claimed"),
        (Claims(MINE), "MT-001", "core", "not_provided"),
        (Claims(MINE, profiles=("plan",)), "CW-001", "core", "not_claimed"),
        (Claims(MINE, unfit="mine is for torch <2"), "CW-001", "core", "not_provided"),
        (Claims(MINE, unfit="mine is for torch <2"), "CW-001", "offload", "not_claimed"),
    ],
)
def test_requirements_that_an_implementation_is_not_held_to(claims, id, profile, outcome):
    requirement = dataclasses.replace(load_registry()[id], profile=profile)
    assert claims.why_not(requirement)[0] == outcome


def test_missing_names_are_not_counted(suite):
    suite.write(
        "partial.py",
        """
        import types
        from torchparts_conformance import Implementation

        def tell(**options):
            raise RuntimeError("must not be called")

        part = types.SimpleNamespace(answer=42, tell=tell)
        lacks = {"ckpt-wrap": {"tell": "it has nothing to say"}}
        impl = Implementation("partial", "1", parts={"ckpt-wrap": part}, lacks=lacks)
        old = Implementation("old", "1", parts={"ckpt-wrap": part}, torch="<1")
        """,
    )
    bodies = {
        "CW-001": "part.question",
        "CW-002": "part.tell(loud=True)",
        "CW-004": "assert part.answer == 42",
    }
    text = "".join(
        f"{declared(id)}\ndef test_{id[-1]}(part):\n    {body}\n" for id, body in bodies.items()
    )
    suite.write(
        "cases/ckpt_wrap/test_cases.py", f"from torchparts_conformance import requirement\n{text}"
    )
    assert suite.run(impl="partial:impl").ret == 0
    reasons = {row["id"]: (row["outcome"], row["reason"]) for row in suite.report()["rows"]}
    assert reasons["CW-001"] == ("not_provided", "there is no question")
    assert reasons["CW-002"] == ("not_provided", "tell: it has nothing to say")
    (verdict,) = suite.report()["verdicts"]
    assert (verdict["must"], verdict["not_provided"]) == ([1, 1], 2)
    assert (
        "core 1 of 1 (2 not provided) | cpu" in (suite.root / "out/badge-ckpt-wrap.svg").read_text()
    )
    assert suite.run(impl="partial:old").ret == 1
    assert suite.report()["verdict"] == "not provided"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"protocol": "2"}, "protocol is '2'; this suite has '1'"),
        ({"name": ""}, "name is ''; it must be text of 1 to 100 characters"),
        ({"version": "1" * 101}, "it must be text of 1 to 100 characters"),
        ({"parts": {"wheels": 1}}, r"parts names \['wheels'\]; the areas are"),
        ({"capabilities": {"wheels": set()}}, r"capabilities names \['wheels'\]"),
        ({"parts": 5}, "parts is a int; it must be a dict"),
        ({"capabilities": {"ckpt-wrap": "compile"}}, "is 'compile'; write a set"),
        ({"capabilities": {"ckpt-wrap": {5}}}, r"is \{5\}; write a set"),
        ({"distributions": "mine"}, "distributions is 'mine'; it must be a tuple of names"),
        ({"distributions": (5,)}, r"distributions is \(5,\); it must be a tuple"),
        ({"lacks": {"ckpt-wrap": {"a"}}}, r"is \{'a'\}; write a dict"),
        ({"lacks": {"ckpt-wrap": {"a": ""}}}, "write a dict"),
        ({"torch": "new"}, "torch is 'new'; it must be versions"),
        ({"torch": None}, "torch is None; it must be versions"),
    ],
)
def test_bad_adapter_is_refused(changes, said):
    with pytest.raises(AdapterError, match=said):
        Implementation(**{"name": "mine", "version": "1", "protocol": PROTOCOL, **changes})


def test_adapter_imports_neither_torch_nor_pytest():
    code = (
        "import sys; from torchparts_conformance import Implementation\n"
        "Implementation('mine', '1.0', parts={'ckpt-wrap': 'mine.wrapper'})\n"
        "print({'packaging.specifiers', 'pytest', 'torch'} & set(sys.modules))\n"
    )
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert told.stdout == "set()\n"
