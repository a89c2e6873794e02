"""The sentence about a failed case: what it expected, and what came."""

from __future__ import annotations

import pytest

from torchparts_conformance._failure import apart, difference, sentence, text_of

HEAD = """
import pytest
import torch
from torch import nn

class Odd:
    def __init__(self):
        self.runs = 1
        self.asked = 0

    def ask(self):
        self.asked += 1
        return False

    def __repr__(self):
        return f"<Odd at {id(self):#x}>"

def same(left, right):
    assert torch.equal(left, right)

def test(odd, one, other):
"""


@pytest.fixture
def sentence_of(tmp_path):
    """`sentence_of(body)` runs the body of a case and returns the sentence about its failure."""
    path = tmp_path / "cases/ckpt_wrap/test_it.py"
    path.parent.mkdir(parents=True)

    def run(body):
        import torch

        path.write_text(HEAD + "".join(f"    {line}\n" for line in body.splitlines()))
        names = {}
        exec(compile(path.read_text(), str(path), "exec"), names)
        odd = names["Odd"]()
        with pytest.raises(BaseException) as raised:
            names["test"](odd, torch.zeros(2, 3), torch.full((2, 3), 0.5))
        assert odd.asked <= 1
        _parsed.cache_clear()
        return sentence(raised.value)

    from torchparts_conformance._failure import _parsed

    return run


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("assert odd.runs == 2", "expected `odd.runs == 2`, but `odd.runs` was 1"),
        ("assert not odd.runs", "expected `not odd.runs`, but `odd.runs` was 1"),
        (
            "a, b = ['x', 'y'], ['x', 'z']\nassert a == b",
            "expected `a == b`, but `a` had 'y' at 1 in place of 'z'",
        ),
        ("assert torch.equal(one, other)", "but the tensors differed by up to 0.5"),
        ("same(one, other)", "expected `torch.equal(left, right)`, but the tensors differed"),
        (
            "pairs = [one, one], [one, other]\nassert all(map(torch.equal, *pairs))",
            "expected `all(map(torch.equal, *pairs))`, but the tensors differed by up to 0.5",
        ),
        (
            "for name in ('first', 'second'):\n    assert odd.runs > 1, f'of {name}'",
            "expected `odd.runs > 1` (of first), but `odd.runs` was 1",
        ),
        ("assert odd.ask()", "expected `odd.ask()`, but it was false"),
        ("assert odd.ask() == 3", "expected `odd.ask() == 3`, but it was false"),
        ("assert isinstance(odd, nn.Module)", "but `odd` was a Odd"),
        (
            "with pytest.raises(ValueError, match='no'):\n    odd.ask()",
            "expected `odd.ask()` to raise ValueError that says 'no', but nothing was raised",
        ),
        (
            "with pytest.raises(ValueError, match='no'):\n    raise ValueError('yes')",
            "to raise ValueError that says 'no', but it raised ValueError: yes",
        ),
        (
            "with pytest.raises(ValueError):\n    odd.nothing()",
            "expected `odd.nothing()` to raise ValueError, but it raised AttributeError: 'Odd'",
        ),
        (
            "odd.nothing()",
            "expected `odd.nothing()` to pass, but it raised AttributeError: 'Odd' object has no",
        ),
        (
            "torch.testing.assert_close(one, other)",
            "expected `torch.testing.assert_close(one, other)` to pass, but it raised Assertion",
        ),
    ],
)
def test_sentence_says_what_was_expected_and_what_came(sentence_of, body, said):
    assert said in sentence_of(body)


def test_error_outside_of_a_case_is_named():
    with pytest.raises(ZeroDivisionError) as raised:
        1 / 0  # noqa: B018
    assert sentence(raised.value) == "ZeroDivisionError: division by zero"


def test_sentence_of_a_rank_is_kept():
    assert sentence(AssertionError("rank 1: expected `a`, but it was 2\nTraceback")) == (
        "rank 1: expected `a`, but it was 2"
    )


@pytest.mark.parametrize(
    ("left", "right", "said"),
    [
        ({1, 2}, {2, 3}, "also had {1} and lacked {3}"),
        ([1, 2, 3], [1, 2], "had 3 items in place of 2"),
        ({"a": 1}, {"a": 2}, "had 1 for 'a' in place of 2"),
        ({"a": 1}, {}, "had 1 for 'a' in place of nothing"),
        (1, 2, ""),
        ([1], (1,), ""),
    ],
)
def test_difference_of_collections_is_named(left, right, said):
    assert difference("==", left, right) == said
    assert difference("!=", left, right) == ""


def test_values_have_short_texts_without_addresses():
    import torch

    assert text_of(torch.ones(2)) == "tensor([1.0, 1.0])"
    assert text_of([torch.ones(3, 4), torch.nn.Linear(1, 1)]) == (
        "[a tensor of shape (3, 4), a Linear]"
    )
    assert "0x..." in text_of(object())
    assert len(text_of(list(range(1000)))) < 100
    assert apart(torch.ones(2), torch.ones(3)).startswith("one was of ((2,)")
    assert apart(torch.ones(2), None) == "one was tensor([1.0, 1.0]) and the other None"
