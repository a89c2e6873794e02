"""Values from outside are held against the types and limits they are to have."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from sac_policies.policies._checked import (
    MAX_CHARACTERS,
    MAX_ENTRIES,
    conforms,
    field_problem,
    is_count,
    text_problem,
)


@dataclass(frozen=True)
class _Record:
    name: str
    rows: tuple[tuple[str, int], ...] = ()
    share: float = 0.0
    hidden: int = field(default=0, compare=False)
    made: list[int] = field(default_factory=list)


@pytest.mark.parametrize("value", [0, 1, 2**63 - 1])
def test_whole_numbers_of_64_bits_are_counts(value):
    """Zero and the largest signed number too."""
    assert is_count(value)


@pytest.mark.parametrize("value", [-1, 2**63, True, 1.0, "1", None])
def test_what_is_no_whole_number_from_zero_is_no_count(value):
    """A bool is none, nor a float of a whole value."""
    assert not is_count(value)


def test_text_of_the_largest_size_is_an_entry():
    """The limits themselves are allowed."""
    assert text_problem(["a" * MAX_CHARACTERS] * MAX_ENTRIES, "name") == ""


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["a", ""], "name '' is a str, but a name is text that is not empty"),
        (["a", 3], "name 3 is a int, but"),
        (["a" * 1001], "has 1001 characters, but 1000 are the most"),
        (["a"] * 4097, "one rule has more than 4096 of them"),
        (iter(["a", None]), "name None is a NoneType"),
    ],
)
def test_text_that_is_no_entry_is_told(texts, said):
    """With what it is and what is needed."""
    assert said in text_problem(texts, "name")


@pytest.mark.parametrize(
    "given",
    [
        {"name": "a"},
        {"name": "a", "rows": (("b", 1), ("c", 2)), "share": 1},
        {"name": "a", "made": [1]},
    ],
)
def test_values_of_the_declared_types_are_no_problem(given):
    """Fields that have a default may be left out."""
    assert field_problem(_Record, given) == ""


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "_Record lacks 'name'"),
        ({"name": 3}, "name is 3"),
        ({"name": "a", "rows": (("b", "1"),)}, "rows is (('b', '1'),)"),
        ({"name": "a", "share": math.inf}, "share is inf"),
        ({"name": "a", "other": 1}, "_Record has no 'other'"),
        ({"name": "a", "hidden": 1}, "_Record has no 'hidden'"),
    ],
)
def test_value_of_another_type_is_told_by_its_field(given, said):
    """So are fields that nobody declared, or that are not compared, and those that are missing."""
    assert field_problem(_Record, given) == said


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (1, int),
        (-(2**63 - 1), int),
        (1, float),
        (1.5, float),
        (None, int | None),
        (3, int | None),
        ("ns", Literal["ns", "flops"]),
        ((), tuple[int, ...]),
        ((1, 2, 3), tuple[int, ...]),
        (("a", 1), tuple[str, int]),
        (len, Callable[..., Any]),
        ("a", str),
        (object(), Any),
        ([1], list[int]),
    ],
    ids=str,
)
def test_value_is_of_its_annotation(value, hint):
    """An annotation that cannot be asked is met."""
    assert conforms(value, hint)


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (True, int),
        (2**63, int),
        (-(2**63), int),
        (True, float),
        (math.nan, float),
        ("3", int | None),
        ("us", Literal["ns", "flops"]),
        (True, Literal[1]),
        ([1], tuple[int, ...]),
        ((1, "2"), tuple[int, ...]),
        (("a",), tuple[str, int]),
        (("a", 1, 2), tuple[str, int]),
        (3, Callable[..., Any]),
        (b"a", str),
    ],
    ids=str,
)
def test_value_is_not_of_its_annotation(value, hint):
    """A bool is no number here, and a list is no tuple."""
    assert not conforms(value, hint)


def test_annotations_whose_names_are_gone_are_met():
    """A record of a scope that is gone can still be read."""

    class Gone:
        pass

    @dataclass
    class Local:
        value: Gone  # a name of this function: nobody else can look it up

    assert field_problem(Local, {"value": 3}) == ""
