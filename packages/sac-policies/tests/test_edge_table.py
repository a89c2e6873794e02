"""Replays through edges give torch's bits, and none is tried whose node forgot an argument."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from ._recipe import TABLE, bytes_held, is_plain, leaf

pytestmark = pytest.mark.filterwarnings("ignore::sac_policies.UnmatchedEntryWarning")


KEPT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "number added": lambda t: (t.cos() + 1.0).sin(),
    "constant added": lambda t: (t.cos() + TABLE).sin(),
    "filled": lambda t: (t.masked_fill(t.detach() > 0, 0.5) + t).sin(),
    "copied as it lay": lambda t: (t.cos().t().clone() * 2).sin(),
    "padded": lambda t: F.pad(t, (1, 1)).sin(),
}


@pytest.mark.parametrize("name", KEPT)
def test_value_whose_node_forgot_an_argument_is_kept(name: str) -> None:
    """The number added, the memory format: no node knows them, and nothing is guessed."""
    x = leaf(6, 6)
    assert bytes_held(KEPT[name], x) >= 144
    assert is_plain(KEPT[name], x)
