"""Policies select modules by what they see of them, and form a set algebra."""

from __future__ import annotations

import pytest
from torch import nn

from ckpt_wrap import (
    ModuleError,
    ModuleInfo,
    Policy,
    PolicyError,
    by_class,
    by_function,
    by_name,
    by_size,
    every_nth,
    make_plan,
)


def test_policy_arguments_are_checked():
    """Building a policy from nonsense is an error at once."""
    for build_wrong, message in [
        (lambda: by_class(), "class None"),
        (lambda: by_class(3), "class 3"),
        (lambda: by_name(), "pattern None"),
        (lambda: by_size(at_least=3, at_most=2), "range 3 to 2"),
        (lambda: by_size(at_least=-1), "range -1 to None"),
        (lambda: by_size(at_most="1M"), "range 0 to '1M'"),
        (lambda: by_size(at_most=-1), "range 0 to -1"),
        (lambda: every_nth(0, of=by_name("x")), "n is 0"),
        (lambda: every_nth(2, of=by_name("x"), start=-1), "start is -1"),
        (lambda: every_nth(2, of=by_name("x"), start="1"), "start is '1'"),
    ]:
        with pytest.raises(PolicyError, match=message):
            build_wrong()
    with pytest.raises(ModuleError, match="make_plan: module is None"):
        make_plan(None, by_name("x"))


def test_a_function_without_a_signature_is_a_policy():
    """Some built-in functions have none, and are called as any other."""
    assert len(make_plan(nn.Sequential(nn.ReLU(), nn.ReLU()), by_function(bool)).steps) == 2


def _infos():
    """A model of two blocks, the second of which has two names."""
    block = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    return [
        ModuleInfo("", nn.Sequential(block), depth=0, index=0, numel=12),
        ModuleInfo("a", block, depth=1, index=0, numel=6),
        ModuleInfo("a.0", block[0], depth=2, index=0, numel=6),
        ModuleInfo("b.x", nn.Linear(2, 2), depth=2, index=1, numel=6, aliases=("c", "d.y")),
        ModuleInfo("e", nn.ReLU(), depth=1, index=2, numel=0),
    ]


def _selected(policy):
    return list(policy.select(_infos()))


def test_a_class_selects_its_subclasses():
    """As `isinstance` does, and any of several."""
    assert _selected(by_class(nn.Module)) == [0, 1, 2, 3, 4]
    assert _selected(by_class(nn.ReLU, nn.Sequential)) == [0, 1, 4]


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("a", [1]),
        ("a*", [1, 2]),
        ("?", [1, 3, 4]),
        ("d.*", [3]),
        ("", [0]),
        ("A", []),
        ("*.0", [2]),
    ],
)
def test_a_pattern_is_matched_with_every_name(pattern, found):
    """Whole names, those of a shared module among them; a star goes over dots."""
    assert _selected(by_name(pattern)) == found
    assert _selected(by_name("none", pattern)) == found


def test_sizes_include_their_bounds():
    """And end nowhere without a bound."""
    assert _selected(by_size(at_least=6, at_most=6)) == [1, 2, 3]
    assert _selected(by_size(at_least=7)) == [0]
    assert _selected(by_size(at_most=0)) == [4]
    assert _selected(by_size()) == [0, 1, 2, 3, 4]


def test_every_nth_is_counted_among_the_selected():
    """In the order of the model, from the one it starts with."""
    assert _selected(every_nth(2, of=by_name("?", "a.0"))) == [1, 3]
    assert _selected(every_nth(2, of=by_name("?", "a.0"), start=1)) == [2, 4]
    assert _selected(every_nth(1, of=by_class(nn.ReLU))) == [4]


class Backwards(Policy):
    """Selects all, the last first."""

    def select(self, modules):
        return {position: {} for position in reversed(range(len(modules)))}


def test_a_policy_of_ones_own_may_answer_in_any_order():
    """The order of the model counts, not the answer's."""
    assert _selected(every_nth(2, of=Backwards())) == [0, 2, 4]
    assert _selected(every_nth(3, of=Backwards(), start=1)) == [1, 4]
    assert Backwards().wishes() == ()


def test_a_function_gives_options_or_a_decision():
    """A mapping selects, even an empty one; False and None do not."""
    answers = {"": True, "a": {"x": 1}, "a.0": {}, "b.x": False, "e": None}
    policy = by_function(lambda info: answers[info.name])
    assert policy.select(_infos()) == {0: {}, 1: {"x": 1}, 2: {}}


def test_options_of_the_right_count():
    """Where both have an option; the others are those of both."""
    left = by_function(lambda info: {"x": 1, "y": 1} if info.depth < 2 else None)
    right = by_function(lambda info: {"x": 2, "z": 2} if info.depth > 0 else None)
    both = {"x": 2, "y": 1, "z": 2}
    assert (left & right).select(_infos()) == {1: both, 4: both}
    assert (left | right).select(_infos()) == {
        0: {"x": 1, "y": 1},
        1: both,
        2: {"x": 2, "z": 2},
        3: {"x": 2, "z": 2},
        4: both,
    }
    assert (~left).select(_infos()) == {2: {}, 3: {}}


def test_a_policy_does_not_change_what_a_function_gave():
    """Each module has options of its own."""
    shared = {"x": 1}
    selected = by_function(lambda info: shared).select(_infos())
    selected[0]["x"] = 2
    assert shared == selected[1] == {"x": 1}


def test_wishes_are_those_of_all_that_look_for_something():
    """For suggestions when a plan finds nothing; what is left out is not wished for."""
    policy = every_nth(2, of=by_name("a") | by_class(nn.ReLU)) & by_name("b")
    assert policy.wishes() == ("a", "ReLU", "b")
    assert (~by_name("a")).wishes() == by_size().wishes() == ()


@pytest.mark.parametrize("other", [lambda info: True, None, "a"], ids=["function", "none", "text"])
def test_policies_are_joined_with_policies_only(other):
    """The error says what to do with the others."""
    for join in (lambda: by_size() | other, lambda: by_size() & other):
        with pytest.raises(PolicyError, match=r"^ckpt_wrap\.Policy: .* Wrap a function in by_func"):
            join()
    with pytest.raises(PolicyError, match=r"^ckpt_wrap\.every_nth: policy"):
        every_nth(2, of=other)


def test_a_function_takes_one_argument_and_gives_a_decision():
    """The first is noticed when the policy is made, the second when it selects."""
    with pytest.raises(PolicyError, match="cannot be called with one argument"):
        by_function(lambda: True)
    with pytest.raises(PolicyError, match="decision for module '' is 'yes', but it must"):
        by_function(lambda info: "yes").select(_infos())
