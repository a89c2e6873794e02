"""Replays of operators whose nodes save their result give torch's bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from sac_policies.engines.recipe.tables._replay_table import RULES
from sac_policies.engines.recipe.tables._result_table import RESULT_RULES

from ._recipe import is_same, leaf, through_edges

aten = torch.ops.aten
X = leaf(3, 4)
MASKED = torch.full((2, 3), -torch.inf).index_fill_(0, torch.tensor([1]), 0.5).requires_grad_()

CASES: dict[str, Callable[[], torch.Tensor]] = {
    "tanh": lambda: X.tanh(),
    "sigmoid": lambda: X.sigmoid(),
    "relu": lambda: X.relu(),
    "exp": lambda: X.exp(),
    "expm1": lambda: X.expm1(),
    "square root": lambda: X.sqrt(),
    "one over the square root": lambda: X.rsqrt(),
    "one over": lambda: X.reciprocal(),
    "softmax": lambda: X.softmax(-2),
    "softmax of one": lambda: X.softmax(1),
    "log softmax": lambda: X.log_softmax(-1),
    "safe softmax": lambda: aten._safe_softmax(MASKED, 1),
}


@pytest.mark.parametrize("name", CASES)
def test_operator_runs_again_on_what_its_edge_leads_to(name: str) -> None:
    """Not a number where it gave none, a row of zeros where all was masked."""
    made = CASES[name]()
    found = through_edges(CASES[name])
    assert is_same(found.view(torch.int32), made.detach().view(torch.int32))


@pytest.mark.parametrize("name", CASES)
def test_node_saves_its_result_as_the_last(name: str) -> None:
    """What is saved after all else is the output itself."""
    saved: list[int] = []
    with saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t):
        made = CASES[name]()
    assert saved[-1] == made.data_ptr()
    assert RULES[type(made.grad_fn).__name__].keeps_result


def test_every_rule_here_is_for_nodes_that_keep_their_result() -> None:
    """An engine leaves it out as long as it can tell which node runs."""
    assert all(rule.keeps_result for rule in RESULT_RULES)
