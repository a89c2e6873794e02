"""What calls make again is made again in forwards that follow steps, and looked at before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sac_policies.engines.recipe._calls import GIVEN
from sac_policies.engines.recipe._recipes import reader
from sac_policies.engines.recipe._run import known_of
from sac_policies.engines.recipe._shared_values import SharedValue
from sac_policies.engines.recipe.regions._followed import FollowedValues
from sac_policies.engines.recipe.regions._remade_steps import Again, followed
from sac_policies.engines.recipe.untracked._seen_calls import Untracked

from ._followed import ALL, learnt, shape_of
from ._recipe import Counts, bytes_kept, is_plain, leaf, run

ROWS, WIDTH = 512, 64
SCALE, SHIFT = leaf(WIDTH), leaf(WIDTH)
MATRIX = leaf(WIDTH, 16)


def _normed(t: Tensor) -> Tensor:
    return F.layer_norm(t.sin(), (WIDTH,), SCALE, SHIFT).cos() + (t + 1.0).cos()


def _batch_normed(t: Tensor) -> Tensor:
    image = t.sin().view(8, WIDTH * ROWS // 64, 8)
    return F.batch_norm(image, None, None, training=True).cos()


def _kept_and_normed(t: Tensor) -> Tensor:
    """The norm reads what no rule rebuilds."""
    return F.layer_norm(t.cumprod(-1), (WIDTH,)).cos()


def _counted(t: Tensor) -> Tensor:
    return (t.sin() * torch.arange(ROWS * WIDTH).view(ROWS, WIDTH)).cos() + (t + 1.0).cos()


def _routed(t: Tensor) -> Tensor:
    values, chosen = (t @ MATRIX).softmax(-1).topk(2, dim=-1)
    order = torch.sort(chosen.reshape(-1))[1]
    return t[order // 2] * values.reshape(-1)[order][:, None]


def _dropped(t: Tensor) -> Tensor:
    return F.dropout(t.sin().repeat(4, 1), 0.5).cos()


@pytest.mark.parametrize(
    "function", [_normed, _batch_normed, _kept_and_normed, _counted, _routed, _dropped]
)
def test_it_is_followed(function: Callable[[Tensor], Tensor]) -> None:
    """No other bit, and no more bytes than where each forward decides for itself."""
    x = leaf(ROWS, WIDTH)
    learnt(function, x)
    for turn in range(3):
        torch.manual_seed(turn)
        expected = torch.autograd.grad(function(x).sum(), x)
        torch.manual_seed(turn)
        assert torch.equal(torch.autograd.grad(run(function, x).sum(), x)[0], expected[0])
    shape = shape_of(function, x)
    assert shape.followed == 4
    assert any(type(what) is Again for _, _, what in shape.steps)
    kept = bytes_kept(function, x)
    shape.left, shape.steps = 3, None  # whoever left so often decides for itself
    assert kept <= bytes_kept(function, x)


def test_numbers_are_those_of_the_forward() -> None:
    """Another eps is followed, and found again in backward."""
    x, eps = leaf(ROWS, WIDTH), [1e-5]

    def function(t: Tensor) -> Tensor:
        return F.layer_norm(t.sin(), (WIDTH,), SCALE, SHIFT, eps[0]).cos()

    learnt(function, x)
    for each in (0.3, 1e-5, 7.0):
        eps[0] = each
        assert is_plain(function, x)
    assert shape_of(function, x).followed == 4


def _other(t: Tensor) -> Tensor:
    return torch.full((ROWS, WIDTH), 0.5).cumsum(0)


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "another call": _other,
    "nothing that was seen": lambda t: MADE,
    "written to since": lambda t: torch.arange(ROWS * WIDTH).view(ROWS, WIDTH).add_(1),
}
MADE = torch.arange(ROWS * WIDTH).view(ROWS, WIDTH)


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_made_otherwise_leaves_the_steps(name: str) -> None:
    """It is kept, or made again as it is now."""
    x, change, is_on = leaf(ROWS, WIDTH), CHANGES[name], [False]

    def function(t: Tensor) -> Tensor:
        made = change(t) if is_on[0] else torch.arange(ROWS * WIDTH).view(ROWS, WIDTH)
        return (t.sin() * made).cos() + (t + 1.0).cos()

    learnt(function, x)
    is_on[0] = True
    assert is_plain(function, x)
    assert shape_of(function, x).followed == 0


def test_other_result_leaves_the_steps() -> None:
    """What the call is to give is what it was written down to give."""
    x = leaf(ROWS, WIDTH)
    learnt(_normed, x)
    shape = shape_of(_normed, x)
    *steps, end = shape.steps
    others = (
        (number, kind, replace(what, at=what.at + 1) if type(what) is Again else what)
        for number, kind, what in steps
    )
    shape.steps = (*others, end)
    assert is_plain(_normed, x)
    assert shape.followed == 0


def test_function_that_steps_do_not_name_is_not_called_again() -> None:
    """The policy may save what it makes."""
    x = leaf(ROWS, WIDTH)
    learnt(_counted, x)
    shape = shape_of(_counted, x)
    *steps, end = shape.steps
    others = (
        (number, kind, Again(what.at, what.names - {"arange"}) if type(what) is Again else what)
        for number, kind, what in steps
    )
    shape.steps = (*others, end)
    assert is_plain(_counted, x)
    assert shape.followed == 0


def test_what_is_rebuilt_is_read_by_one_node() -> None:
    """Another's backward may end before, and free what is read: of such a value nothing is made."""
    entries = known_of(ALL).tables.anywhere
    values = FollowedValues(entries, reader(ALL), 0, ())
    made = leaf(ROWS, WIDTH).sin()
    values.shown[made.grad_fn, 0] = SimpleNamespace(cell=SharedValue())
    source, stays = values.held(made)
    assert source is not None
    assert not stays
    assert values.held(made.cos()) == (None, True)


def test_replay_counts_its_reading_of_what_is_made_again() -> None:
    """The norm continues from statistics, with an eps that nobody uses: they are made once."""
    x = leaf(ROWS, WIDTH)

    def function(t: Tensor) -> Tensor:
        return F.layer_norm(t.sin(), (WIDTH,), SCALE, SHIFT, 0.123).cos()

    learnt(function, x)
    out = run(function, x)
    assert shape_of(function, x).followed == 2
    with Counts() as counts:
        out.sum().backward()
    assert counts.ops[torch.ops.aten.native_layer_norm.default] <= 1


@pytest.mark.parametrize(("function", "heeds"), [(_normed, {"layer_norm"}), (_routed, None)])
def test_only_what_steps_name_is_heeded(
    function: Callable[[Tensor], Tensor], heeds: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all other functions nothing is noted."""
    x, seen = leaf(ROWS, WIDTH), []
    learnt(function, x)
    named = shape_of(function, x).heeds
    assert heeds is None or named - GIVEN == heeds
    call = Untracked.call

    def noted(self: Untracked, function: Any, name: str, args: Any, kwargs: Any) -> Any:
        seen.append(name)
        return call(self, function, name, args, kwargs)

    monkeypatch.setattr(Untracked, "call", noted)
    run(function, x)
    assert seen
    assert named.issuperset(seen)


def test_rest_of_a_forward_that_left_heeds_all() -> None:
    """What begins where the steps end sees as much as any other."""
    x, is_on = leaf(ROWS, WIDTH), [False]

    def function(t: Tensor) -> Tensor:
        made = _normed(t.neg() if is_on[0] else t)
        return made * torch.arange(ROWS * WIDTH).view(ROWS, WIDTH) if is_on[0] else made.sin()

    learnt(function, x)
    is_on[0] = True
    kept = bytes_kept(function, x)
    assert kept < 3 * ROWS * WIDTH * 4 // 2
    assert is_plain(function, x)


def test_forward_without_calls_to_see_has_no_such_steps() -> None:
    """Who saw nothing takes nothing."""
    entries = known_of(ALL).tables.anywhere
    values = FollowedValues(entries, reader(ALL), 0, ())
    assert followed(values, torch.ones(ROWS), 1, Again(1, frozenset())) is None
