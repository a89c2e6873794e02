"""What an implementation does not offer is found from its adapter, and is never an error."""

from __future__ import annotations

import types
from importlib import metadata

import pytest
from small_suite import declared

from torchparts_conformance import Implementation
from torchparts_conformance.requirements._cases import find_cases, load_registry
from torchparts_conformance.requirements._needs import Needs, needs_of
from torchparts_conformance.subject import _adapters, _missing


@pytest.mark.parametrize("name", ["torch", "ours"])
def test_who_has_everything_lacks_nothing_that_the_cases_need(name):
    """What is read from the cases is no mistake: nothing of what is claimed is missing."""
    implementation, registry = _adapters.load_implementation(name), load_registry()
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
    told = f"{declared('CW-002')}\ndef test_two(part):\n    part.tell(loud=True)\n"
    one = f"{declared('CW-001')}\ndef test_one(part):\n"
    suite.write(
        "cases/ckpt_wrap/test_cases.py",
        f"from torchparts_conformance import requirement\n{one}{body}{told}",
    )
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
