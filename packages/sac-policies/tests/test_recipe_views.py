"""Recipes take a view again from what its node knows: its values and its strides."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from sac_policies.engines.recipe._views import ROW_MAJOR, TAKES, VIEWS, signed, signed_all

from ._recipe import is_same, leaf

aten = torch.ops.aten


def test_views_are_nodes_of_this_torch() -> None:
    """Every view listed exists, so that none is a misspelling."""
    x = torch.ones(2, 3, 4, requires_grad=True)
    made = [
        x.expand(2, 3, 4), x.permute(2, 0, 1), x.view(6, 4), x[0], x[:, 1:], x.split(1)[0],
        x.split_with_sizes([1, 1])[0], x[0].t(), x.transpose(0, 1), x.unbind()[0], x.unsqueeze(0),
        x.diagonal(), x[:1].squeeze(0), x.as_strided((2,), (1,)), torch.ops.aten.alias(x),
        torch.ops.aten._unsafe_view(x, (6, 4)), x.unsafe_split(1)[0], x[:1].squeeze(),
        x[:1].squeeze((0,)), torch.ops.aten._reshape_alias(x, (6, 4), (4, 1)),
    ]  # fmt: skip
    assert {type(each.grad_fn).__name__ for each in made} == VIEWS


X = leaf(3, 4, 5)

View = Callable[[torch.Tensor], torch.Tensor]


def _whole(x: torch.Tensor) -> torch.Tensor:
    return x


TAKEN: dict[str, tuple[View, View]] = {
    "alias": (_whole, lambda x: aten.alias(x)),
    "as strided": (_whole, lambda x: x.as_strided((2, 3), (7, 2), 5)),
    "diagonal": (_whole, lambda x: x.diagonal(-1, -2, 0)),
    "expand": (lambda x: x[:, :, :1], lambda x: x.expand(3, 4, 6)),
    "permute": (_whole, lambda x: x.permute(-1, 0, 1)),
    "reshape": (_whole, lambda x: aten._reshape_alias(x, (12, 5), (5, 1))),
    "select": (_whole, lambda x: x.select(-2, -1)),
    "slice": (_whole, lambda x: x[:, 1:-1]),
    "slice in steps": (_whole, lambda x: x[:, :, 1::2]),
    "slice to the end": (_whole, lambda x: x[-2:]),
    "slice without an end": (_whole, lambda x: aten.slice(x, 1, 1)),
    "slice without bounds": (_whole, lambda x: aten.slice(x, -1, None, None, 2)),
    "split": (_whole, lambda x: x.split(2, -1)[2]),
    "split with sizes": (_whole, lambda x: x.split_with_sizes([1, 3], 1)[1]),
    "squeeze": (lambda x: x[:1, :, :1], lambda x: x.squeeze()),
    "squeeze one": (lambda x: x[:, :1], lambda x: x.squeeze(-2)),
    "squeeze one that is none": (_whole, lambda x: x.squeeze(0)),
    "squeeze several": (lambda x: x[:1, :, :1], lambda x: x.squeeze((0, -1))),
    "transpose a matrix": (lambda x: x[0], lambda x: x.t()),
    "transpose": (_whole, lambda x: x.transpose(-1, 0)),
    "unbind": (_whole, lambda x: x.unbind(-1)[3]),
    "unsafe split": (_whole, lambda x: x.unsafe_split(3, 1)[1]),
    "unsafe view": (_whole, lambda x: aten._unsafe_view(x, (4, 15))),
    "unsqueeze": (_whole, lambda x: x.unsqueeze(-1)),
    "view": (_whole, lambda x: x.view(15, -1)),
}


@pytest.mark.parametrize("name", TAKEN)
def test_view_is_taken_again_of_another_value(name: str) -> None:
    """Of the same storage, at the same place, with the same strides."""
    cut, view = TAKEN[name]
    made, value = view(cut(X)), cut(X.detach().cos())
    found = TAKES[type(made.grad_fn).__name__](made.grad_fn, value, made.output_nr)
    assert is_same(found, view(value))
    assert found.data_ptr() == view(value).data_ptr()


@pytest.mark.parametrize(("word", "number"), [(0, 0), (7, 7), (2**63 - 1, 2**63 - 1)])
def test_small_words_are_as_they_are(word: int, number: int) -> None:
    """Numbers from zero on have no sign to lose."""
    assert signed(word) == number


@pytest.mark.parametrize(("word", "number"), [(2**64 - 1, -1), (2**63, -(2**63))])
def test_large_words_are_negative_numbers(word: int, number: int) -> None:
    """A node's getter returns them without their sign."""
    assert signed(word) == number
    assert signed_all((word, 3)) == [number, 3]


def test_no_words_are_no_numbers() -> None:
    """Where a node was given none at all."""
    assert signed_all(None) == []


def test_views_that_keep_the_order_of_elements_are_views() -> None:
    """Each of them is contiguous where its base is."""
    assert ROW_MAJOR < VIEWS
    for view in (lambda x: x.view(5, 12), lambda x: x.unsqueeze(1)):
        made = view(X)
        assert type(made.grad_fn).__name__ in ROW_MAJOR
        assert made.is_contiguous()
