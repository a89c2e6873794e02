"""What a case needs of a part is read from its file."""

from __future__ import annotations

import ast

import pytest

from torchparts_conformance.requirements import _needs
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


# What makes the groups of ckpt-wrap; a case that names it is about that group.
ENTRIES = {
    "apply_activation_checkpointing": "applying",
    "offload_wrapper": "offloading",
}


def test_groups_agree_with_what_their_cases_need():
    """Who has only one function is asked for nothing that another group is known by."""
    registry = load_registry()
    wrong = []
    for case in find_cases():
        needs = needs_of(case.path, case.name.partition("::")[2]).names
        found = {group for name, group in ENTRIES.items() if name in needs}
        wanted = _group(found, "checkpoint_wrapper" in needs)
        groups = {registry[id].group for id in case.ids if registry[id].area == "ckpt-wrap"} - {""}
        wrong += [(case.name, groups, wanted)] if groups - wanted else []
    assert wrong == []


def test_recomputing_asks_for_a_call_and_nothing_else():
    """Who has a function around a call and its two ways is asked for no option of wrappers."""
    registry = load_registry()
    asked = {
        case.name: needs_of(case.path, case.name.partition("::")[2])
        for case in find_cases()
        if any(registry[id].group in ("recomputing", "reentrant") for id in case.ids)
    }
    assert len(asked) > 20
    words = {"checkpoint_wrapper", "CheckpointImpl"}
    assert {name: n.names - words for name, n in asked.items() if n.names - words} == {}
    options = {option for needs in asked.values() for _, option in needs.options | needs.attempts}
    assert options <= {"checkpoint_impl"}


def _group(found, wraps):
    """Give the groups that a case with these names may be of."""
    if "applying" in found:
        return {"applying"} if "offloading" not in found else {"together"}
    if "offloading" in found:
        return {"together"} if wraps else {"offloading"}
    return {"wrapping", "recomputing", "reentrant"}


# What makes the second group of an area; most are of what a part makes, and not of the part.
SECOND = {
    "mod-tracker": ("telling", ["register_user_hooks", "clear_user_hooks", "get_known_fqn"]),
    "flat-param": (
        "sharding",
        [
            ".shard()",
            "_get_shard_metadata",
            "use_orig_params=True",
            "ShardMetadata",
            ".fully_shard",
        ],
    ),
}


@pytest.mark.parametrize("area", SECOND)
def test_first_group_asks_for_nothing_of_the_second(area):
    """Who only follows modules, or only flattens, is asked for nothing else."""
    registry = load_registry()
    second, words = SECOND[area]
    wrong = []
    for case in find_cases():
        groups = {registry[id].group for id in case.ids if registry[id].area == area} - {""}
        reached = _needs._reached(case.path, case.name.partition("::")[2])
        has = groups and any(word in ast.unparse(node) for node in reached for word in words)
        wrong += [(case.name, groups)] if groups and (second in groups) != has else []
    assert wrong == []
