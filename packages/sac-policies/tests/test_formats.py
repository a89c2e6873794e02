"""A copy is taken for row-major only where what was saved of it lies so."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from sac_policies import MutationError, checkpoint, recompute_all
from sac_policies.engines.recipe._formats import is_row_major

from ._recipe import leaf

View = Callable[[torch.Tensor], torch.Tensor]


def _is_row_major(copy: torch.Tensor, view: View) -> bool:
    return is_row_major(view(copy), copy.grad_fn)


VIEWS: dict[str, View] = {
    "itself": lambda c: c,
    "transposed": lambda c: c.t(),
    "transposed and back": lambda c: c.t().t(),
    "swapped": lambda c: c.transpose(0, -1),
    "permuted": lambda c: c.view(2, 2, 6).permute(2, 0, 1),
    "permuted twice": lambda c: c.view(2, 2, 6).permute(-1, 0, 1).permute(1, 0, 2),
    "flat": lambda c: c.view(-1),
    "with one more": lambda c: c.unsqueeze(1),
    "split and swapped": lambda c: c.view(4, 2, 3).transpose(1, 2),
    "expanded to itself": lambda c: c.expand(4, 6),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_that_keep_all_elements_show_how_their_copy_lies(name: str) -> None:
    """A row-major one, here."""
    assert _is_row_major(leaf(6, 4).t().contiguous(), VIEWS[name])


@pytest.mark.parametrize("name", ["itself", "transposed", "transposed and back", "swapped"])
def test_copy_that_lies_otherwise_is_not_row_major(name: str) -> None:
    """Not even where the view of it happens to be contiguous."""
    assert not _is_row_major(leaf(6, 4).t().clone(), VIEWS[name])


def test_view_of_a_swap_does_not_hide_how_the_copy_lies() -> None:
    """Such a view is contiguous where the copy is not row-major."""
    copy = leaf(6, 4).t().clone()
    assert copy.t().view(24).is_contiguous()
    assert not _is_row_major(copy, lambda c: c.t().view(24))


@pytest.mark.parametrize(
    "view",
    [
        lambda c: c[1:],
        lambda c: c[0],
        lambda c: c.unsqueeze(0).expand(2, 4, 6),
        lambda c: c.diagonal(),
        lambda c: c.t().unsqueeze(0),
    ],
    ids=["slice", "select", "expand", "diagonal", "one more after a swap"],
)
def test_views_that_do_not_tell_are_taken_for_no(view: View) -> None:
    """They leave elements out, or their strides say nothing of the copy."""
    assert not _is_row_major(leaf(6, 4).t().contiguous(), view)


def test_strides_of_a_single_element_do_not_matter() -> None:
    """No element lies at a second place."""
    copy = leaf(4, 1).t().clone()
    assert _is_row_major(copy, lambda c: c)
    assert _is_row_major(leaf(1, 4).t().clone(), lambda c: c.t())


def test_empty_copy_is_row_major() -> None:
    """There is nothing that could lie otherwise."""
    assert _is_row_major(leaf(0, 4).clone(), lambda c: c.t())
    assert _is_row_major(leaf(4, 0).clone(), lambda c: c)


def test_channels_last_copy_is_not_row_major() -> None:
    """Its node does not know the memory format."""
    images = leaf(2, 3, 4, 5)
    assert not _is_row_major(images.clone(memory_format=torch.channels_last), lambda c: c)
    assert _is_row_major(images.clone(), lambda c: c)


IMAGES, POLICY = (2, 3, 4, 5), recompute_all()
USES: dict[str, View] = {
    "all of it": lambda c: c,
    "swapped": lambda c: c.transpose(0, 1),
    "what is made of it": lambda c: c.exp(),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("check", ["default", "none"])
@pytest.mark.parametrize("given", ["rows first", "channels last"])
def test_a_cast_to_another_format_in_a_later_forward(use: str, check: str, given: str) -> None:
    """Of which the first, which is watched, shows nothing: gradients are plain's, or an error."""
    formats = {"rows first": torch.contiguous_format, "channels last": torch.channels_last}
    wanted = [torch.preserve_format, *formats.values()]
    x = leaf(*IMAGES).detach().contiguous(memory_format=formats[given]).requires_grad_()
    chosen = [torch.preserve_format]

    def function(x: torch.Tensor) -> torch.Tensor:
        cast = (x * 1.0).to(torch.float64, memory_format=chosen[0])
        return USES[use](cast).sin().sum()

    for chosen[0] in (*wanted, *wanted):
        (plain,) = torch.autograd.grad(function(x), x)
        out = checkpoint(function, x, policy=POLICY, engine="recipe", determinism_check=check)
        try:
            (found,) = torch.autograd.grad(out, x)
        except MutationError:
            assert use == "swapped"
            assert check == "default"
        else:
            assert torch.equal(found, plain)
