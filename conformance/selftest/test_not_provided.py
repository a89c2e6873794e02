"""What an implementation does not offer is found from its adapter, and is never an error."""

from __future__ import annotations

import types
from importlib import metadata

import pytest

from torchparts_conformance import Implementation
from torchparts_conformance._errors import AdapterError, RegistryError
from torchparts_conformance.render import _badge
from torchparts_conformance.report import _outcomes
from torchparts_conformance.requirements import _registry
from torchparts_conformance.requirements._cases import find_cases
from torchparts_conformance.requirements._needs import Needs, needs_of
from torchparts_conformance.subject import _adapters, _missing

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

def test_all_parts(parts):
    parts.ckpt_wrap.wrap(speed=1).parts
"""
BESIDE = "def helped(part):\n    part.five(size=1)\n"


@pytest.fixture
def cases(tmp_path):
    """Give a file of cases with another beside it."""
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
        ("test_all_parts", Needs()),
    ],
)
def test_needs_of_a_case_are_read_from_its_file(cases, name, needs):
    """Names and options, also those of functions that it names, but not those it only asks for."""
    assert needs_of(cases, name) == needs


def test_needs_of_a_case_of_all_parts_name_the_part(cases):
    """Where `parts` holds several, the part is a word of the name."""
    assert needs_of(cases, "test_all_parts", combined=True) == Needs(
        frozenset({"ckpt_wrap", "ckpt_wrap.wrap"}), frozenset({("ckpt_wrap.wrap", "speed")})
    )


@pytest.mark.parametrize("name", ["torch", "ours"])
def test_who_has_everything_lacks_nothing_that_the_cases_need(name):
    """What is read from the cases is no mistake: nothing of what is claimed is missing."""
    implementation, registry = _adapters.load_implementation(name), _registry.load_registry()
    missing = []
    for case in find_cases():
        held = [id for id in case.ids if implementation.claims(case.area, registry[id].profile)]
        function = case.name.partition("::")[2]
        needs = needs_of(case.path, function, combined=case.area == "combined")
        if held and (
            why := _missing.why_missing(_adapters.load_part(implementation, case.area), needs, {})
        ):
            missing.append((case.name, why))
    assert missing == []


def _takes(module, depth=1):
    """A function that takes what it names."""


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
        (Needs(attempts=frozenset({("passes_on", "policy")})), {"policy": "no"}, "policy: no"),
        (Needs(frozenset({"wrap"})), {"wrap": "needs a GPU"}, "wrap: needs a GPU"),
        (Needs(), {"CW-001": "has no inside"}, "CW-001: has no inside"),
        (Needs(), {"CW-002": "has no inside"}, ""),
    ],
)
def test_missing_is_what_is_not_there_or_said_to_be_lacking(needs, lacks, said):
    """An option counts where a function would refuse it, and where no error is awaited."""
    assert _missing.why_missing(PART, needs, lacks, ["CW-001"]) == said


def test_part_whose_attribute_raises_is_left_to_its_case():
    """Only a missing name is missing; what breaks on the way is for the case to show."""

    class Part:
        @property
        def wrap(self):
            raise RuntimeError("broken")

    assert _missing.why_missing(Part(), Needs(frozenset({"wrap"})), {}) == ""


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
def test_torch_that_an_implementation_is_not_for_is_told(monkeypatch, versions, requires, said):
    """By the adapter, or by the metadata of its distributions."""
    monkeypatch.setattr(metadata, "requires", lambda name: requires)
    mine = Implementation("mine", "1", distributions=("theirs",), torch=versions)
    found = _missing.unfit_torch(mine)
    assert found.startswith(said)
    assert bool(found) == bool(said)


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ({"lacks": {"wheels": {}}}, "lacks names ['wheels'], but the areas are"),
        ({"lacks": {"ckpt-wrap": {"a"}}}, "but it goes from a name to why it is not there"),
        ({"lacks": {"ckpt-wrap": {"a": ""}}}, "but it goes from a name to why it is not there"),
        ({"torch": "new"}, "torch is 'new', but versions are needed. Write '>=2.9,<2.12'."),
        ({"torch": None}, "torch is None, but versions are needed"),
    ],
)
def test_adapter_that_says_it_wrongly_is_refused(field, said):
    """In one line that names the field."""
    with pytest.raises(AdapterError) as caught:
        Implementation("mine", "1", **field)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_case_that_needs_what_is_not_there_does_not_run(suite):
    """It is not provided, says what is missing, and nothing of the implementation was called."""
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
    body = "    part.question\n\n"
    told = '@requirement("CW-002")\ndef test_two(part):\n    part.tell(loud=True)\n'
    one = '@requirement("CW-001")\ndef test_one(part):\n'
    suite.write(
        "cases/ckpt_wrap/test_cases.py",
        f"from torchparts_conformance import requirement\n{one}{body}{told}",
    )
    suite.freeze()
    assert suite.run(impl="partial:impl").ret == 1
    reasons = {row["id"]: (row["outcome"], row["reason"]) for row in suite.report()["rows"]}
    assert reasons == {
        "CW-001": ("not_provided", "there is no question"),
        "CW-002": ("not_provided", "tell: it has nothing to say"),
    }
    suite.run(impl="partial:old")
    (reason,) = {row["reason"] for row in suite.report()["rows"]}
    assert reason.startswith("old 1 is for torch <1, but ")
    assert suite.report()["verdict"] == "not provided"


GROUPED = {
    ("wrapping", "core"): "pass",
    ("wrapping", "robust"): "pass",
    ("offloading", "core"): "not_provided",
    ("offloading", "robust"): "not_provided",
    ("", "compile"): "not_claimed",
}


def _report_of(make_report, outcomes):
    """Give a report with a row for each group and profile."""
    report = make_report()
    rows = [
        {**report["rows"][0], "id": f"CW-{n:03}", "group": g, "profile": p, "outcome": outcome}
        for n, ((g, p), outcome) in enumerate(outcomes.items(), 1)
    ]
    from torchparts_conformance.report import _report

    words = ("suite", "implementation", "environment", "claims", "problems")
    return _report.build(rows=rows, **{word: report[word] for word in words})


@pytest.mark.parametrize(
    ("changes", "verdict", "message"),
    [
        ({}, "conformant", "wrapping: core+robust 2/2 | cpu"),
        ({("offloading", "robust"): "pass"}, "not conformant", None),
        ({("wrapping", "robust"): "not_provided"}, "not conformant", None),
        ({("wrapping", "core"): "fail"}, "not conformant", "wrapping: not conformant 1/2 | cpu"),
        ({("", "compile"): "not_provided"}, "not conformant", None),
        (
            {("offloading", "core"): "pass", ("offloading", "robust"): "pass"},
            "conformant",
            "core+robust 4/4 | cpu",
        ),
    ],
)
def test_group_counts_whole_or_not_at_all(make_report, changes, verdict, message):
    """What is not there at all is not counted, and named; what is there in part is not enough."""
    report = _report_of(make_report, {**GROUPED, **changes})
    assert report["verdict"] == verdict
    badge = _badge.badge(report, "ckpt-wrap")
    assert message is None or badge.message == message
    assert (badge.color == "brightgreen") == (verdict == "conformant")


def test_everything_of_an_area_may_be_absent():
    """Then its capabilities are, too."""
    rows = [{"area": "a", "group": g, "outcome": "not_provided"} for g in ("one", "two", "")]
    assert _outcomes.absent(rows) == {("a", "one"), ("a", "two"), ("a", "")}
    rows[0]["outcome"] = "fail"
    assert _outcomes.absent(rows) == {("a", "two")}


# What makes the groups of ckpt-wrap; a case that names it is about that group.
ENTRIES = {
    "apply_activation_checkpointing": "applying",
    "offload_wrapper": "offloading",
}


def test_groups_agree_with_what_their_cases_need():
    """Who has only one function is asked for nothing that another group is known by."""
    registry = _registry.load_registry()
    wrong = []
    for case in find_cases():
        needs = needs_of(case.path, case.name.partition("::")[2]).names
        found = {group for name, group in ENTRIES.items() if name in needs}
        wanted = _group(found, "checkpoint_wrapper" in needs)
        groups = {registry[id].group for id in case.ids if registry[id].area == "ckpt-wrap"} - {""}
        wrong += [(case.name, groups, wanted)] if groups - {wanted} else []
    assert wrong == []


def _group(found, wraps):
    if "applying" in found:
        return "applying" if "offloading" not in found else "together"
    if "offloading" in found:
        return "together" if wraps else "offloading"
    return "wrapping"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('profile = "core"\ngroup = "none"', "has group 'none', but groups are a, b"),
        ('profile = "speed"\ngroup = "a"', "has group 'a', but a capability is not divided"),
    ],
)
def test_group_that_is_none_is_refused(tmp_path, text, said):
    """By the requirement and the file."""
    entry = 'level = "MUST"\ndevices = ["cpu"]\nsince = "0.1.0"\ntext = "It MUST."\n'
    more = f'source = "none"\nrationale = "why"\n{text}\n'
    path = tmp_path / "ckpt_wrap.toml"
    path.write_text(f'[groups]\na = "One."\nb = "Two."\n[CW-001]\n{entry}{more}')
    with pytest.raises(RegistryError, match=said):
        _registry.load_area("ckpt-wrap", spec=tmp_path)
    path.write_text(f"groups = 3\n[CW-001]\n{entry}{more}")
    with pytest.raises(RegistryError, match="groups is 3, but it goes to sentences"):
        _registry.load_area("ckpt-wrap", spec=tmp_path)


def test_requirement_without_a_group_is_of_the_first():
    """So that a new one is asked of whoever has the area's first part."""
    (first,) = {r.group for r in _registry.load_area("ckpt-wrap") if r.id == "CW-001"}
    assert first == next(iter(_registry.load_groups("ckpt-wrap"))) == "wrapping"
    assert {r.group for r in _registry.load_area("mod-tracker")} == {""}
