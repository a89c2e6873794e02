"""The decorator that declares a requirement: what it accepts, and what it says of mistakes."""

from __future__ import annotations

import pytest

from torchparts_conformance import requirement
from torchparts_conformance.requirements._requirement import declared

FACTS = {
    "level": "MUST",
    "text": "It MUST work.",
    "rationale": "it is the point",
    "since": "0.1.0",
    "profile": "core",
}


def test_decorator_marks_the_case_with_its_id():
    @requirement("CW-001", **FACTS)
    @requirement("CW-002")
    def case(part):
        return part

    assert [mark.args for mark in case.pytestmark] == [("CW-002",), ("CW-001",)]
    assert case(3) == 3


def test_declared_requirement_has_defaults():
    found = declared("CW-001", **FACTS)
    assert (found.area, found.group) == ("ckpt-wrap", "wrapping")
    assert (found.devices, found.source) == (("cpu", "accelerator"), "")
    assert found.is_for("cpu") and found.is_for("cuda")
    assert declared("SP-001", **FACTS).group == ""
    assert declared("CW-001", **{**FACTS, "profile": "compile"}).group == ""
    assert not declared("CW-001", **FACTS, devices=("cpu",)).is_for("cuda")


@pytest.mark.parametrize(
    ("id", "facts", "said"),
    [
        ("CW-1", {}, "'CW-1': an id is a prefix of CW, MT, FP, SP, CB and three digits"),
        ("XX-001", {}, "an id is a prefix of"),
        (None, {}, "requirement None: an id"),
        ("CW-001", {"level": ""}, "CW-001: level is missing. The first case of a requirement"),
        ("CW-001", {"text": " "}, "CW-001: text is missing"),
        ("CW-001", {"level": "MAY"}, "level is 'MAY'; it must be MUST or SHOULD"),
        ("CW-001", {"level": "SHOULD"}, "the text must contain the word SHOULD"),
        ("CW-001", {"profile": "Very Core"}, "profile is 'Very Core'; it must be a short"),
        ("CW-001", {"group": "cars"}, "group is 'cars'; groups of ckpt-wrap are wrapping, "),
        ("SP-001", {"group": "cars"}, "groups of sac-policies are none"),
        ("CW-001", {"rationale": ""}, "it has neither source nor rationale"),
        ("CW-001", {"text": 3}, "text must be text"),
        ("CW-001", {"devices": ["cpu"]}, r"devices is \['cpu'\]; it must be a tuple"),
        ("CW-001", {"devices": ()}, r"devices is \(\); it must be a tuple"),
        ("CW-001", {"rationale": "see torch#1"}, "in the rationale, 'torch#1' is no address"),
    ],
)
def test_mistake_in_a_declaration_is_refused(id, facts, said):
    with pytest.raises(ValueError, match=said):
        requirement(id, **{**FACTS, **facts})


def test_id_without_facts_is_checked_too():
    with pytest.raises(ValueError, match="an id is a prefix of"):
        requirement("CW-0001")
