"""What judges is remembered, and whatever is not what it was is named."""

from __future__ import annotations

import sys

import pytest
import torch

from torchparts_conformance.run import _case_outcome
from torchparts_conformance.subject import _tamper


def test_nothing_is_named_where_nothing_was_replaced(request):
    """With pytest's plugins and without them."""
    plain, whole = _tamper.guard(), _tamper.guard(request.config.pluginmanager)
    assert plain() == []
    assert whole() == []


def test_hook_of_pytest_that_came_later_is_named(request):
    """Whoever can hook into the run can choose what it says; without plugins nobody looks."""
    manager = request.config.pluginmanager
    plain, whole = _tamper.guard(), _tamper.guard(manager)

    class Plugin:
        def pytest_runtest_makereport(self, item, call):
            return None

    plugin = Plugin()
    manager.register(plugin)
    try:
        assert whole() == ["pytest's hook pytest_runtest_makereport"]
        assert plain() == []
    finally:
        manager.unregister(plugin)
    assert whole() == []


def test_comparison_that_was_replaced_is_named(monkeypatch):
    """Of torch's own words, where cases compare."""
    look = _tamper.guard()
    monkeypatch.setattr(torch, "equal", lambda *_: True)
    assert "torch.equal" in look()


def test_method_of_a_judge_that_was_replaced_is_named(monkeypatch):
    """Methods of the classes that the suite's modules define, not only functions."""
    from torchparts_conformance.report import _known_failures

    look = _tamper.guard()
    monkeypatch.setattr(_known_failures.KnownFailure, "__init__", lambda *_: None)
    assert [name.rpartition(".")[2] for name in look()] == ["__init__"]


def test_code_inside_a_function_that_was_replaced_is_named(monkeypatch):
    """The function is the same object, and does something else."""
    from torchparts_conformance.report import _outcomes

    look = _tamper.guard()
    monkeypatch.setattr(_outcomes.worst, "__code__", (lambda outcomes: "pass").__code__)
    (name,) = look()
    assert name.endswith("worst")


def test_trace_function_is_named():
    """It sees every line of a case, and may change what it sees."""
    look, before = _tamper.guard(), sys.gettrace()
    sys.settrace(lambda *_: None)
    try:
        found = look()
    finally:
        sys.settrace(before)
    assert found == ["the trace function"]
    assert look() == []


def test_module_that_is_gone_is_named(monkeypatch):
    """What a judge cannot import any more, it cannot ask."""
    look = _tamper.guard()
    monkeypatch.delitem(sys.modules, "torchparts_conformance.report._outcomes")
    assert look() == ["sys.modules.torchparts_conformance.report._outcomes"]


@pytest.mark.parametrize("place", ["torch", "torch.Tensor", "torch.testing"])
def test_every_place_of_comparisons_is_remembered(monkeypatch, place):
    """Functions and methods."""
    owner = torch.Tensor if place == "torch.Tensor" else sys.modules[place]
    word = next(word for word in _tamper._COMPARED_BY if hasattr(owner, word))
    look = _tamper.guard()
    monkeypatch.setattr(owner, word, lambda *_: True)
    assert f"{place}.{word}" in look()


REPLACING = """
import pytest
import torch
import torch.testing
from adapter import good
from torchparts_conformance.run import _case_outcome

def replacement(*args, **options):
    return True

{statement}
"""


@pytest.mark.parametrize(
    ("statement", "named"),
    [
        ("torch.equal = replacement", "torch.equal"),
        ("torch.allclose = torch.equal", "torch.allclose"),
        ("torch.Tensor.item = replacement", "torch.Tensor.item"),
        ("torch.testing.assert_close = replacement", "torch.testing.assert_close"),
        ("pytest.raises = replacement", "pytest.raises"),
        (
            "_case_outcome.one_line.__code__ = replacement.__code__",
            "torchparts_conformance.subject._adapters.one_line",
        ),
        ("pytest.Function.runtest = replacement", "_pytest.python.Function.runtest"),
        ("import math; math.isclose = replacement", "math.isclose"),
    ],
)
def test_replacing_what_judges_is_not_conformant(suite, monkeypatch, statement, named):
    """A comparison or a function of the judge that was replaced is named, though all passes."""
    _restore_at_the_end(monkeypatch)
    suite.write("replacing.py", REPLACING.format(statement=statement))
    assert suite.run(impl="replacing:good").ret == 1
    problems = suite.report()["problems"]
    assert any(text.startswith(named) for text in problems)
    assert all(text.endswith(" was replaced by the code under test") for text in problems)


def _restore_at_the_end(monkeypatch):
    for owner, name in (
        (torch, "equal"),
        (torch, "allclose"),
        (torch.Tensor, "item"),
        (torch.testing, "assert_close"),
        (pytest, "raises"),
        (_case_outcome.one_line, "__code__"),
        (pytest.Function, "runtest"),
        (__import__("math"), "isclose"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))
