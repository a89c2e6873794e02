"""Values of spans under the recipe engine: which their code makes again, and when it does not."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu

from sac_policies import (
    MATMULS,
    checkpoint,
    first_match,
    recompute_all,
    report,
    save_all,
    save_modules,
    save_ops,
    scoped,
    span,
)

from . import _spans
from ._recipe import bytes_held, is_plain, run
from ._spans import NUMBYTES, ROWS, WIDTH, Own, own_block, own_runs, own_silu

x, w = _spans.x, _spans.w


def test_what_no_rule_rebuilds_is_made_by_the_code_of_its_span(x: Tensor, w: Tensor) -> None:
    """It is kept without a span."""
    assert bytes_held(lambda x, w: Own.apply(x @ w) @ w, x, w) == NUMBYTES
    assert bytes_held(own_block, x, w) == 0
    assert own_runs(own_block, x, w) == 1


def test_code_runs_once_for_all_its_values(x: Tensor, w: Tensor) -> None:
    """Also for what it saves several times."""

    def block(x: Tensor, w: Tensor) -> Tensor:
        return span(lambda t: own_silu(own_silu(t).sin()) * own_silu(t), "act")(x @ w).cos() @ w

    assert bytes_held(block, x, w) == 0
    assert own_runs(block, x, w) == 3


def test_code_stops_where_the_last_value_is_saved(x: Tensor, w: Tensor) -> None:
    """What comes after it does not run again."""
    assert (
        own_runs(lambda x, w: span(lambda t: own_silu(t).sin() + own_silu(t), "act")(x @ w), x, w)
        == 1
    )


def test_span_that_a_policy_saves_is_kept(x: Tensor) -> None:
    """`save_modules` names it; a rule before it has it replayed."""
    module = _Module()
    act = save_modules("act")
    assert bytes_held(module, x, policy=act) == NUMBYTES
    assert bytes_held(module, x, policy=recompute_all()) == 0
    assert bytes_held(module, x, policy=save_all()) >= 2 * NUMBYTES
    replayed = first_match(scoped(recompute_all(), "act"), save_all())
    assert bytes_held(module, x, policy=replayed) == NUMBYTES  # the product that the span is given
    for policy in (act, replayed, save_all()):
        assert _is_plain_module(module, x, policy)


class _Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(span(own_silu, "act")(self.up(x)))


def _is_plain_module(module: nn.Module, x: Tensor, policy: Any) -> bool:
    leaves = [x, *module.parameters()]
    expected = torch.autograd.grad(module(x).sum(), leaves)
    return all(
        map(torch.equal, expected, torch.autograd.grad(run(module, x, policy=policy).sum(), leaves))
    )


def test_rules_are_used_where_there_are_any(x: Tensor, w: Tensor) -> None:
    """Then the code does not run again."""
    runs = []

    def act(t: Tensor) -> Tensor:
        runs.append(1)
        return F.gelu(t)

    assert is_plain(lambda x, w: span(act, "act")(x @ w) @ w, x, w)
    assert len(runs) == 2  # plain, and under the engine


def test_nested_spans_make_their_own_values(x: Tensor, w: Tensor) -> None:
    """The inner code runs for what is made in it, the outer for the rest."""

    def outer(t: Tensor) -> Tensor:
        return own_silu(span(own_silu, "inner")(t @ t.t()) @ t)

    def block(x: Tensor, w: Tensor) -> Tensor:
        return span(outer, "outer")(x @ w) @ w

    assert bytes_held(block, x, w) == 0
    assert is_plain(block, x, w)


def test_several_outputs_and_views_are_rebuilt(x: Tensor, w: Tensor) -> None:
    """A list with a dict in it, a transposed view, halves of one value."""

    def several(t: Tensor) -> Any:
        y = own_silu(t)
        left, right = y.chunk(2, -1)
        return [y.t(), {"left": left, "right": right}]

    def block(x: Tensor, w: Tensor) -> Tensor:
        turned, halves = span(several, "s")(x @ w)
        return (w @ turned).sum() + (halves["left"] * halves["right"].sin()).sum()

    assert bytes_held(block, x, w) == 0
    assert is_plain(block, x, w)


def test_a_span_returned_is_read_at_edges(x: Tensor, w: Tensor) -> None:
    """A sum of what it returned is rebuilt though nobody saves that."""

    def block(x: Tensor, w: Tensor) -> Tensor:
        made = span(own_silu, "act")(x @ w)
        return ((made + x).sin() + (made - x).cos()) @ w

    assert bytes_held(block, x, w) == 0
    assert own_runs(block, x, w) == 1


def test_random_numbers_are_drawn_again(x: Tensor, w: Tensor) -> None:
    """And what is drawn afterwards goes on as if the code had run once."""

    def block(x: Tensor, w: Tensor) -> Tensor:
        return span(lambda t: F.dropout(own_silu(t), 0.3), "act")(x @ w) @ w

    def step(function: Callable[[], Tensor]) -> list[Tensor]:
        torch.manual_seed(3)
        return [*torch.autograd.grad(function().sum(), (x, w)), torch.rand(4)]

    # What is held is the state of the generator.
    assert bytes_held(block, x, w) <= torch.get_rng_state().numel()
    wanted = step(lambda: block(x, w))
    for _ in range(2):
        assert all(map(torch.equal, wanted, step(lambda: run(block, x, w))))


def test_statistics_and_masks_are_made_again(x: Tensor, w: Tensor) -> None:
    """What is made without a gradient, and what the span's code found is kept."""
    table = torch.linspace(0, 1, ROWS * WIDTH).reshape(ROWS, WIDTH)

    def block(x: Tensor, w: Tensor) -> Tensor:
        return span(lambda t: own_silu(t) * (t.detach() > 0).float() * table, "act")(x @ w) @ w

    assert bytes_held(block, x, w) == 0
    assert is_plain(block, x, w)


def test_autocast_is_that_of_the_forward(x: Tensor, w: Tensor) -> None:
    """In the span and around it; backward may have another."""

    def inside(t: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return own_silu(t @ w)

    def step(function: Callable[..., Any]) -> list[Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = function(lambda x: span(lambda t: own_silu(t @ w).sin() @ w, "a")(x).float(), x)
        out = out + function(lambda x: span(inside, "b")(x).float(), x)
        with torch.autocast("cpu", dtype=torch.float16):
            return list(torch.autograd.grad(out.sum(), (x, w)))

    assert all(map(torch.equal, step(lambda f, x: f(x)), step(run)))


def test_an_exception_leaves_nothing_behind(x: Tensor, w: Tensor) -> None:
    """The next region is as ever, and so is a span that is tried again."""

    def broken(t: Tensor) -> Tensor:
        own_silu(t).sin()
        raise ValueError("in the span")

    def block(x: Tensor, w: Tensor) -> Tensor:
        with pytest.raises(ValueError, match="in the span"):
            span(broken, "act")(x @ w)
        return span(own_silu, "act")(x @ w) @ w

    with pytest.raises(ValueError, match="in the span"):
        run(lambda x: span(broken, "act")(x), x)
    assert is_plain(block, x, w)
    assert bytes_held(own_block, x, w) == 0


def test_a_region_inside_ends_what_the_code_makes_again(x: Tensor, w: Tensor) -> None:
    """What is saved after it is kept."""

    def act(t: Tensor) -> Tensor:
        return own_silu(run(lambda t: own_silu(t).sin(), own_silu(t)))

    assert is_plain(lambda x, w: span(act, "act")(x @ w).cos() @ w, x, w)


class _Act:
    def __call__(self, t: Tensor) -> Tensor:
        return own_silu(t)


def test_code_is_freed_with_the_graph(x: Tensor, w: Tensor) -> None:
    """Without the garbage collector, whether backward ran or not."""
    alive: list[weakref.ref[_Act]] = []

    def block(x: Tensor, w: Tensor) -> Tensor:
        act = _Act()
        alive.append(weakref.ref(act))
        return span(act, "act")(x @ w) @ w

    gc.disable()
    try:
        out = run(block, x, w)
        assert alive[-1]() is not None
        del out
        run(block, x, w).sum().backward()
        assert [each() for each in alive] == [None, None]
    finally:
        gc.enable()


def test_a_second_backward_and_a_second_derivative_run_it_again(x: Tensor, w: Tensor) -> None:
    """As every recipe."""
    out = run(own_block, x, w).sum()
    first = torch.autograd.grad(out, (x, w), retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(out, (x, w))))
    twice = []
    for function in (own_block, lambda x, w: run(own_block, x, w)):
        (grad,) = torch.autograd.grad(function(x, w).sin().sum(), x, create_graph=True)
        twice.append(torch.autograd.grad(grad.square().sum(), (x, w)))
    assert all(map(torch.equal, *twice))


def test_hooks_around_receive_what_the_code_is_given(x: Tensor, w: Tensor) -> None:
    """What is kept for it goes through them."""
    wanted = torch.autograd.grad(own_block(x, w).sum(), (x, w))
    with save_on_cpu():
        out = run(own_block, x, w)
    assert all(map(torch.equal, wanted, torch.autograd.grad(out.sum(), (x, w))))


def test_what_is_written_to_after_the_span_is_kept(x: Tensor, w: Tensor) -> None:
    """The code does not repeat that."""

    def block(x: Tensor, w: Tensor) -> Tensor:
        made = span(own_silu, "act")(x @ w)
        made.mul_(0.5)
        return made @ w

    assert is_plain(block, x, w)


def test_report_says_that_values_are_replayed(x: Tensor, w: Tensor) -> None:
    """And does not list them as kept."""
    told = report(own_block, x, w, policy=save_ops(MATMULS), engine="recipe")
    assert [row.op for row in told.kept_anyway] == []
    made = [each for each in told.saved if each.made_by == "OwnBackward"]
    assert [(each.replayed, each.why) for each in made] == [(True, "")]


def test_engines_agree_on_what_a_span_keeps(x: Tensor) -> None:
    """Contexts keep and recompute by the same paths."""
    module = _Module()
    for policy, runs in ((save_modules("act"), 0), (recompute_all(), 1)):
        for engine in ("recipe", "contexts"):
            out = checkpoint(module, x, policy=policy, engine=engine)
            Own.runs = 0
            out.sum().backward()
            # A second forward runs the function itself; what it calls is not run.
            assert Own.runs == (runs if engine == "recipe" else 1)
