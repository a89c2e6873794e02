"""Policies round-trip through JSON; invalid text is refused."""

from __future__ import annotations

import json
import random
from collections.abc import Sized
from copy import deepcopy
from dataclasses import make_dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sac_policies import (
    Policy,
    PolicyError,
    SacError,
    first_match,
    offload,
    profile,
    save_by_bytes,
    save_by_flops,
    save_by_shape,
    save_every_nth,
    save_modules,
    save_named,
    save_ops,
    solve,
)
from sac_policies.policies import Decision, as_policy, from_json, save_by_index, to_json

X = torch.ones(4, 4, requires_grad=True)
TRACE = profile(lambda t: (t @ t).sin().mul(t), X, unit="flops")
POLICY = first_match(
    ~save_ops("aten.mm", "@attention") | save_by_shape((None, 3)),
    save_every_nth("aten.sin", n=2) & save_by_bytes(at_least=4, at_most=8),
    save_named("h*"),
    save_modules("attn", missing_ok=True),
    offload(save_by_flops(at_least=7)),
    save_by_index({("aten.mm.default", 2): Decision.OFFLOAD}),
    solve(TRACE, "50%"),
)
TEXT = to_json(POLICY)
FOREIGN = [None, True, -1, 2**64, 0.5, "", "aten.mm", "@nothing", [], [1], {}, {"rule": "Always"}]
FOREIGN += [{"decision": "save"}, {"decision": []}, [["aten.mm.default", 0], {"decision": "save"}]]


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) in parsed JSON."""
    if not isinstance(value, (list, dict)):
        return []
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    return [(value, key) for key in keys] + [p for key in keys for p in _places(value[key])]


def _damaged(text: str, seed: int) -> str:
    """A valid document with one to three of its values replaced, removed, copied or renamed."""
    chance, value = random.Random(seed), json.loads(text)
    for _ in range(chance.randint(1, 3)):
        holder, key = chance.choice(_places(value))
        how = chance.randrange(4)
        if how == 0 and isinstance(holder, dict):
            holder[chance.choice(["rule", "entries", "decision", "colour"])] = holder.pop(key)
        elif how == 1:
            del holder[key]
        elif how == 2:
            holder[key] = json.loads(json.dumps(chance.choice(_places(value))[0]))
        else:
            holder[key] = deepcopy(chance.choice(FOREIGN))
        if not _places(value):
            break
    return json.dumps(value)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32))
def test_changed_document_is_refused_or_read_as_a_value(seed):
    """Either the package's error is raised, or the value round-trips."""
    try:
        value = from_json(_damaged(TEXT, seed))
    except SacError as error:
        assert str(error).startswith("sac_policies.from_json: ")  # noqa: PT017 - either outcome is right
        return
    assert from_json(to_json(value)) == value


@settings(max_examples=100, deadline=None, derandomize=True)
@given(at=st.integers(0, 10**6), junk=st.text(max_size=3))
def test_cut_or_overwritten_text_is_refused_or_read(at, junk):
    """Cut short, or with other characters in the middle."""
    at %= len(TEXT)
    for damaged in (TEXT[:at], TEXT[:at] + junk + TEXT[at + 1 :]):
        try:
            from_json(damaged)
        except SacError:
            continue


def test_valid_document_round_trips():
    """Every rule is restored with an equal hash, and written as equal text."""
    again = from_json(TEXT)
    assert again == POLICY
    assert hash(again) == hash(POLICY)
    assert to_json(again) == TEXT


def test_function_cannot_be_written():
    """A plain function has no JSON; the error recommends an alternative."""
    with pytest.raises(PolicyError, match="is Python code, but JSON holds rules only"):
        to_json(as_policy(lambda ctx, op, *args, **kwargs: True))


@pytest.mark.parametrize(
    "text",
    [
        *("", "[" * 100_000, '{"a":' * 100_000, "null", "NaN", "[[[1]]]", "9" * 5_000, "\x00"),
        *(None, 3, b"\xff\xfe", object(), ["[]"]),
    ],
    ids=lambda text: repr(text)[:12],
)
def test_text_that_is_no_document_is_refused(text):
    """Not even the parser's RecursionError is raised."""
    with pytest.raises(SacError, match=r"sac_policies\..*from_json: .*, but .*\. "):
        from_json(text)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"rule": "Always", "answer": None}, "answer is None"),
        ({"rule": "Always", "answer": 1}, "answer is 1"),
        ({"rule": "Always"}, "Always lacks 'answer'"),
        ({"rule": "Always", "answer": {"decision": "save"}, "handle": "x"}, "has no 'handle'"),
        ({"rule": "OpRule", "entries": "aten.mm", "answer": {"decision": "save"}}, "entries is"),
        ({"rule": "EveryNth", "entries": ["a"], "n": True, "phase": 0}, "n is True"),
        ({"rule": "FirstMatch", "rules": []}, r"rules \(\) are empty"),
        ({"rule": "Complement", "inner": 3}, "inner is 3"),
        ({"rule": "Plan", "choices": [[["a", -1], {"decision": "save"}]]}, "negative number"),
        ({"rule": "Plan", "choices": [[["a", 0], {"decision": "save"}]] * 2}, "listed twice"),
        ({"rule": "FunctionPolicy", "function": "print"}, "function is 'print'"),
        ({"rule": "_Recorded", "inner": 3}, "no rule '_Recorded'"),
        ({"rule": ["Always"]}, r"no rule \['Always'\]"),
        ({"rule": "ShapeRule", "shapes": [[-1]]}, r"shape \(-1,\) is not a shape"),
        ({"decision": "keep"}, "'keep' is not a valid Decision"),
        (3, "it holds a int"),
    ],
    ids=str,
)
def test_document_of_wrong_values_is_refused_with_the_reason(value, reason):
    """A rule's declared types and the checks of its builder."""
    with pytest.raises(PolicyError, match=rf"from_json: text cannot be read \(.*{reason}"):
        from_json(json.dumps(value))


def _plan(**changed: Any) -> str:
    whole = solve(TRACE, "100%")
    return json.dumps({**json.loads(to_json(whole)), **changed})


@pytest.mark.parametrize(
    "changed",
    [
        {"kept_bytes": -1},
        {"recompute_cost": -1},
        {"unit": "s"},
        {"backend": "eager"},
    ],
    ids=str,
)
def test_plan_of_wrong_numbers_is_refused(changed):
    """Numbers that no solver returns are refused."""
    from_json(_plan())
    with pytest.raises(PolicyError, match="from_json: text cannot be read"):
        from_json(_plan(**changed))


@pytest.mark.parametrize(
    "annotation",
    [
        *("list[int]", "tuple[int, ...]", "object", Any, Sized, list[int]),
        *("1 + 'one'", "a_name_that_is_gone", "int.nothing"),
    ],
)
def test_rule_of_a_user_is_read_whatever_its_annotation_says(annotation):
    """Annotations that cannot be evaluated, or are not plain types, are not checked."""
    name, body = f"Own{str(annotation).encode().hex()}", {"decide": lambda self, view: None}
    held = [("held", annotation)]
    rule = make_dataclass(name, held, bases=(Policy,), frozen=True, namespace=body)
    assert from_json(to_json(rule((1, 2)))) == rule((1, 2))
