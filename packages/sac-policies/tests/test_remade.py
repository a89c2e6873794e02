"""What no gradient flows to is made again by the calls that made it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from sac_policies import (
    MATMULS,
    profile,
    recompute_all,
    report,
    save_modules,
    save_ops,
    solve,
)
from sac_policies.engines.recipe._writes import Habit, habits_of

from ._recipe import bytes_held, bytes_kept, is_plain, leaf, run

pytestmark = pytest.mark.filterwarnings("ignore::sac_policies.UnmatchedEntryWarning")

ROWS, WIDTH = 512, 16
PRODUCTS = save_ops(MATMULS)
WEIGHT, BIAS = leaf(WIDTH), leaf(WIDTH)
MATRIX = leaf(WIDTH, WIDTH)
STEPS = torch.arange(64)


def _normed(t: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(t.sin(), (WIDTH,), WEIGHT, BIAS, 1e-3).cos()


def _routed(t: torch.Tensor) -> torch.Tensor:
    values, chosen = (t @ MATRIX).softmax(-1).topk(2, dim=-1)
    _, order = torch.sort(chosen.reshape(-1))
    return t[order // 2] * values.reshape(-1)[order][:, None]


def _embedded(t: torch.Tensor) -> torch.Tensor:
    """A chain of calls over a small input, as the embedding of a timestep."""
    steps = STEPS if t.numel() else STEPS + 1
    waves = torch.exp(-torch.arange(WIDTH * 4, device=t.device) / 7)
    angles = steps[:, None].float() * waves[None, :]
    made = torch.cat([angles.sin(), angles.cos()], -1)
    return F.linear(made, t.view(-1, WIDTH * 8)[:8]).sin()


CASES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], int]] = {
    # Function, and bytes of what would else be kept.
    "statistics of a norm": (_normed, 2 * ROWS * 4),
    "indices of routing": (_routed, 3 * 2 * ROWS * 8),
    "embedding of a timestep": (_embedded, 64 * WIDTH * 8 * 4),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_made_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first forward and later ones, with no other bit; without calls it is kept."""
    function, size = CASES[name]
    x = leaf(ROWS, WIDTH)
    for _ in range(3):
        gc.collect()
        kept = bytes_kept(function, x, policy=PRODUCTS)
        assert is_plain(function, x, policy=PRODUCTS)
    monkeypatch.setattr(
        "sac_policies.engines.recipe.regions._remade.Operands.remade", lambda *_: None
    )
    monkeypatch.setattr("sac_policies.engines.recipe.regions._remade.narrowed", lambda _: None)
    assert bytes_kept(function, x, policy=PRODUCTS) >= kept + 3 * size // 4


def test_gradients_of_a_norm_are_those_of_no_checkpointing() -> None:
    """Of its input, its weight and its bias; also where these need none, and without them."""
    x = leaf(ROWS, WIDTH)
    assert is_plain(lambda t, w, b: F.layer_norm(t.sin(), (WIDTH,), w, b).cos(), x, WEIGHT, BIAS)
    frozen = WEIGHT.detach()
    assert is_plain(lambda t: F.layer_norm(t.sin(), (WIDTH,), frozen, BIAS.detach()).cos(), x)
    assert is_plain(lambda t: F.layer_norm(t.sin(), normalized_shape=(WIDTH,)).cos(), x)
    norm = nn.LayerNorm(WIDTH)
    assert is_plain(lambda t: norm(norm(t.view(2, -1, WIDTH).transpose(0, 1)).sin()), x)


def test_plan_counts_what_is_kept() -> None:
    """A profile knows what is made again and what is kept narrower, to the byte."""
    x = leaf(ROWS, WIDTH)
    for function, _ in CASES.values():
        plan = solve(profile(function, x, unit="flops"), "100%")
        assert plan.kept_bytes == report(function, x, policy=plan).held_bytes
        assert is_plain(function, x, policy=plan)


def test_report_counts_it_as_replayed() -> None:
    """It is neither held nor listed as kept."""
    told = report(_normed, leaf(ROWS, WIDTH), policy=PRODUCTS, engine="recipe")
    statistics = [each for each in told.saved if each.shape == (ROWS, 1)]
    assert len(statistics) == 2
    assert all(each.replayed and not each.why for each in statistics)


def test_statistics_of_a_batch_are_made_again() -> None:
    """What the norm writes to is written once, as without checkpointing."""
    means, spreads = torch.zeros(512), torch.ones(512)
    weight, bias, x = leaf(512), leaf(512), leaf(8, 512)

    def normed(t: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(t.sin(), means, spreads, w, b, training=True, eps=1e-3).cos()

    assert bytes_held(normed, x, weight, bias) == 0
    written = []
    for function in (normed, partial(run, normed)):
        means.zero_()
        spreads.fill_(1)
        torch.autograd.grad(function(x, weight, bias).sum(), x)
        written.append((means.clone(), spreads.clone()))
    assert all(map(torch.equal, *written))
    assert is_plain(normed, x, weight, bias)
    assert is_plain(lambda t, w: F.batch_norm(t.sin(), means, spreads, w).cos(), x, weight)


def test_integers_that_are_written_to_are_kept_narrower() -> None:
    """No call gives them as they are; they fit 16 bits."""

    def scattered(t: torch.Tensor) -> torch.Tensor:
        order = torch.empty(ROWS, dtype=torch.long)
        at = torch.zeros_like(order)
        at[torch.arange(ROWS).flip(0)] = torch.arange(ROWS)
        return t.sin()[at].cos()

    x = leaf(ROWS, WIDTH)
    assert bytes_held(scattered, x) == ROWS * 2
    assert is_plain(scattered, x)


def test_few_integers_are_kept_narrower_than_few_numbers() -> None:
    """From 512 bytes on: 64 of them fit 8 bits each."""

    def scattered(t: torch.Tensor) -> torch.Tensor:
        at = torch.zeros_like(torch.arange(64))
        at[torch.arange(64).flip(0)] = torch.arange(64)
        return t.sin()[at].cos()

    x = leaf(64, WIDTH)
    run(scattered, x)
    assert bytes_held(scattered, x) == 64
    assert is_plain(scattered, x)


@pytest.mark.parametrize(
    ("function", "saved"),
    [(_normed, "aten.native_layer_norm"), (_routed, "aten.topk"), (_embedded, "aten.cat")],
)
def test_what_the_policy_saves_is_kept(
    function: Callable[[torch.Tensor], torch.Tensor], saved: str
) -> None:
    """Not made again: experts that are chosen once are not chosen again in backward."""
    x = leaf(ROWS, WIDTH)
    told = report(function, x, policy=PRODUCTS | save_ops(saved), engine="recipe")
    assert any(row.op.startswith(saved) and row.held_bytes for row in told.rows)
    assert is_plain(function, x, policy=PRODUCTS | save_ops(saved))


def test_what_a_module_makes_is_kept_where_the_policy_saves_it() -> None:
    """Also what no gradient flows to: the statistics of a norm."""
    norms = nn.Sequential(nn.LayerNorm(WIDTH), nn.SiLU(), nn.LayerNorm(WIDTH), nn.SiLU())
    x = leaf(ROWS, WIDTH)
    told = [
        report(norms, x, policy=policy, engine="recipe").saved
        for policy in (recompute_all(), save_modules("2"))
    ]
    replayed = [[e.replayed for e in each if e.shape == (ROWS, 1)] for each in told]
    assert replayed == [[True] * 4, [True, True, False, False]]


def test_one_of_two_backwards_frees_nothing_that_the_other_reads() -> None:
    """The indices come of what is rebuilt by nodes of the first loss alone."""
    x, y = leaf(ROWS, WIDTH), leaf(ROWS, WIDTH)

    def two(t: torch.Tensor, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = t.sin().cos()
        values, at = scores.topk(2, dim=-1)
        return values.sin(), u.gather(-1, at.flip(-1)).sin()

    expected = [
        torch.autograd.grad(each.sum(), of)[0] for each, of in zip(two(x, y), (x, y), strict=True)
    ]
    for _ in range(2):
        one, other = run(two, x, y)
        found = [torch.autograd.grad(one.sum(), x)[0], torch.autograd.grad(other.sum(), y)[0]]
        assert all(map(torch.equal, expected, found))


def test_calls_are_seen_where_that_is_a_share_of_what_is_saved() -> None:
    """A norm's statistics are at a width of 16; not at one of 4,096."""
    narrow, wide = nn.LayerNorm(WIDTH), nn.LayerNorm(4096)
    run(lambda_of := nn.Sequential(narrow, nn.SiLU()), leaf(ROWS, WIDTH))
    assert Habit.FORGETS in habits_of(lambda_of)
    run(other := nn.Sequential(wide, nn.SiLU()), leaf(256, 4096))
    assert Habit.FORGETS not in habits_of(other)


@pytest.mark.parametrize("name", ["statistics of a norm", "embedding of a timestep"])
def test_profile_of_fake_tensors_counts_the_same_bytes(name: str) -> None:
    """What is made again is so without data, too; how many bits an index needs, only data say."""
    function, _ = CASES[name]
    seen = []
    for mode in (nullcontext(), FakeTensorMode(allow_non_fake_inputs=True)):
        with mode:
            x = torch.randn(ROWS, WIDTH, requires_grad=True)
            seen.append([pack.storage_bytes for pack in profile(function, x).packs])
    assert seen[0] == seen[1]
