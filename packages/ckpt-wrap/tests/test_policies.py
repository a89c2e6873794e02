"""Policies select modules by what they see of them, and form a set algebra."""

from __future__ import annotations

import pytest
from torch import nn

from ckpt_wrap import (
    ModuleError,
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
