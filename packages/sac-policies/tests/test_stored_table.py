"""Replays of nodes that save every operand give torch's bits, for the operator policies know."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from sac_policies import recompute_all, save_ops
from sac_policies.engines.recipe._replay import Rule
from sac_policies.engines.recipe.tables._replay_table import RULES
from sac_policies.engines.recipe.tables._stored_table import STORED_RULES

from ._recipe import Counts, bytes_held, is_plain, is_same, leaf, run

pytestmark = pytest.mark.filterwarnings("ignore::sac_policies.UnmatchedEntryWarning")

X, Y = leaf(6, 5), leaf(5)
HIGH = torch.linspace(0.1, 3, 30).reshape(6, 5).requires_grad_()
TIES = torch.tensor([[2.0, 1.0, -0.0], [0.0, -1.0, 1.0]]).requires_grad_()
IMAGES = leaf(2, 3, 9, 8)

CASES: dict[str, Callable[[], torch.Tensor]] = {
    "larger": lambda: torch.maximum(X, Y),
    "larger than what is frozen": lambda: torch.maximum(X.detach(), Y),
    "larger of ties": lambda: torch.maximum(TIES, torch.zeros(3)),
    "smaller": lambda: torch.minimum(Y, X),
    "logarithm": lambda: HIGH.log(),
    "logarithm of one more": lambda: HIGH.log1p(),
    "angle": lambda: X.atan(),
    "error function": lambda: X.erfc(),
    "gate": lambda: F.hardsigmoid(X * 9),
    "celu": lambda: F.celu(X, 1.7),
    "shrunk": lambda: F.hardshrink(X, 0.2),
    "shrunk softly": lambda: F.softshrink(X, 0.3),
    "logarithm of a gate": lambda: F.logsigmoid(X),
    "prelu": lambda: F.prelu(X, Y),
    "prelu, frozen": lambda: F.prelu(X, Y.detach()[:1]),
    "between": lambda: torch.lerp(X, Y, HIGH),
    "windows": lambda: F.max_pool2d(IMAGES, 3, 2, 1),
    "windows that overlap": lambda: F.max_pool2d(IMAGES, (3, 2), (1, 3), dilation=2),
    "windows over the edge": lambda: F.max_pool2d(IMAGES[0], 2, ceil_mode=True),
    "windows, channels last": lambda: F.max_pool2d(
        IMAGES.contiguous(memory_format=torch.channels_last), 2
    ),
    "means": lambda: F.adaptive_avg_pool2d(IMAGES, (4, 3)),
    "means of one image": lambda: F.adaptive_avg_pool2d(IMAGES[0], 2),
}


@pytest.mark.parametrize("name", CASES)
def test_operator_runs_again_on_what_its_node_saved(name: str) -> None:
    """With the numbers that its node knows."""
    made = CASES[name]()
    with torch.no_grad():
        assert is_same(RULES[type(made.grad_fn).__name__].run(made.grad_fn, None), made.detach())


def test_between_two_of_which_one_is_frozen_is_kept() -> None:
    """Its node did not save what only the gradient of the weight reads."""
    made = torch.lerp(X, Y, HIGH.detach())
    assert not RULES["LerpBackward1"].ready(made.grad_fn)


@pytest.mark.parametrize("rule", STORED_RULES, ids=lambda rule: rule.node)
def test_policies_are_asked_about_the_operator_that_runs(rule: Rule) -> None:
    """A mode sees it run, and who saves it keeps the output."""
    with Counts() as counts:
        rule.probes[0](leaf)
    assert rule.op in counts.ops


@pytest.mark.parametrize("name", ["pooled", "largest"])
def test_region_with_such_values_keeps_none_of_them(name: str) -> None:
    """What is saved of them is made again; a policy that saves the operator keeps them."""
    x = leaf(2, 3, 32, 32)

    def pooled(t: torch.Tensor) -> torch.Tensor:
        return F.adaptive_avg_pool2d(F.max_pool2d(t.cos(), 2).sin(), 3).sin()

    def largest(t: torch.Tensor) -> torch.Tensor:
        return torch.maximum(t.sin(), t.cos()).exp().log1p().sin()

    body, op = {
        "pooled": (pooled, "aten.max_pool2d_with_indices"),
        "largest": (largest, "aten.maximum"),
    }[name]
    indices = 2 * 3 * 16 * 16 * 8 if name == "pooled" else 0
    for _ in range(3):
        assert is_plain(body, x)
    assert bytes_held(body, x) <= indices
    run(body, x)
    assert bytes_held(body, x, policy=save_ops(op)) > indices
    assert bytes_held(body, x, policy=recompute_all()) <= indices
