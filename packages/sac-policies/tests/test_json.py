"""Every policy built from rules survives JSON."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import make_dataclass
from typing import Any

import pytest

from sac_policies import (
    Policy,
    PolicyError,
    first_match,
    offload,
    save_by_bytes,
    save_by_flops,
    save_by_shape,
    save_every_nth,
    save_modules,
    save_named,
    save_ops,
)
from sac_policies.policies import Decision, as_policy, from_json, save_by_index, to_json


@pytest.mark.parametrize(
    "policy",
    [
        save_ops("aten.mm", "@attention"),
        offload(save_named("h*")),
        save_every_nth("aten.mm", n=3, phase=1),
        save_modules("attn"),
        save_by_bytes(at_least=4, at_most=8),
        save_by_shape((None, 3), (4,)),
        save_by_flops(at_least=7),
        save_by_index({("aten.mm.default", 2): Decision.OFFLOAD}),
        first_match(~save_ops("aten.mm"), save_ops("aten.mm") & save_by_bytes(at_least=1)),
        save_ops("aten.mm") | save_named("hidden"),
    ],
    ids=str,
)
def test_round_trip_gives_an_equal_policy(policy):
    """Reading what was written gives an equal policy with equal text."""
    again = from_json(to_json(policy))
    assert again == policy
    assert hash(again) == hash(policy)
    assert to_json(again) == to_json(policy)


def test_function_cannot_be_written():
    """A plain function has no JSON; the error says what to use."""
    with pytest.raises(PolicyError, match="is Python code, but JSON holds rules only"):
        to_json(as_policy(lambda ctx, op, *args, **kwargs: True))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "Expecting property name"),
        ("3", "it holds a int"),
        ('{"rule": "Nothing"}', "there is no rule 'Nothing'"),
        ('{"rule": "OpRule", "colour": 1}', "OpRule has no 'colour'"),
        ('{"decision": "keep"}', "'keep' is not a valid Decision"),
    ],
)
def test_text_that_is_no_policy_is_refused(text, reason):
    """The error repeats what could not be read."""
    with pytest.raises(PolicyError, match=reason):
        from_json(text)


def test_parts_of_a_policy_that_stand_for_nothing_alone_are_no_rules():
    """What the package uses inside of others is not read."""
    with pytest.raises(PolicyError, match="there is no rule '_Recorded'"):
        from_json('{"rule": "_Recorded", "inner": {"rule": "OpRule", "entries": [], "answer": 1}}')


@pytest.mark.parametrize(
    "annotation",
    [
        *("list[int]", "tuple[int, ...]", "object", Any, Sized, list[int]),
        *("1 + 'one'", "a_name_that_is_gone", "int.nothing"),
    ],
)
def test_rule_of_a_user_is_read_whatever_its_annotation_says(annotation):
    """What cannot be evaluated, or is no plain type, is not checked."""
    name, body = f"Own{str(annotation).encode().hex()}", {"decide": lambda self, view: None}
    held = [("held", annotation)]
    rule = make_dataclass(name, held, bases=(Policy,), frozen=True, namespace=body)
    assert from_json(to_json(rule((1, 2)))) == rule((1, 2))
