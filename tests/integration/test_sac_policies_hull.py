"""`fit_` on transformers' models, held against all mixtures of levels that there are."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from _models import need
from torch import nn

from sac_policies import fit_
from sac_policies.budget import Infeasible, InPlaceFit
from sac_policies.budget._fit_in_place import _Search
from sac_policies.budget._intervals import Steps
from sac_policies.budget._levels import LEVELS

DEPTH, NEAR = 4, 1.02


def llama() -> nn.Module:
    """Return a Llama with grouped heads."""
    shape = {"hidden_size": 64, "intermediate_size": 224, "num_hidden_layers": DEPTH}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128}
    t = need("transformers")
    return t.LlamaForCausalLM(t.LlamaConfig(**shape, **heads, use_cache=False))


def gpt2() -> nn.Module:
    """Return a GPT-2, with dropout."""
    t = need("transformers")
    shape = {"n_embd": 64, "n_layer": DEPTH, "n_head": 4, "n_positions": 128, "vocab_size": 128}
    return t.GPT2LMHeadModel(t.GPT2Config(**shape, use_cache=False))


@pytest.mark.parametrize("make", [llama, gpt2])
def test_no_mixture_that_fits_is_faster(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within 2 % of a step's time, at three budgets and at the smallest that can be reached.

    All mixtures are added up from the figures that `fit_` itself measured in that run.
    """
    figures: list[tuple[Steps, int, int]] = []

    def noted(search: _Search, measured: Any) -> Steps:
        steps = summed(search, measured)
        plain = sum(each.ns for each in measured[0])
        figures.append((steps, search._step.resident(), plain))
        return steps

    summed = _Search._steps
    monkeypatch.setattr(_Search, "_steps", noted)
    torch.manual_seed(0)
    model = make().train()
    ids = torch.randint(128, (4, 128))
    batch = {"input_ids": ids, "labels": ids}
    smallest = fit_(model, batch, 1)
    assert isinstance(smallest, Infeasible)
    for budget in (0.75, 0.5, 0.35, smallest.smallest_bytes):
        found = fit_(model, batch, budget)
        steps, before, plain = figures[-1]
        sizes = {
            choice: before + steps.growth(choice)
            for choice in itertools.product(range(len(steps.costs[0])), repeat=DEPTH)
        }

        def time_of(choice: tuple[int, ...], steps: Steps = steps, plain: int = plain) -> int:
            return plain + sum(own[n] for own, n in zip(steps.costs, choice, strict=True))

        if isinstance(found, Infeasible):
            assert min(sizes.values()) > found.budget_bytes
            assert found.smallest_bytes <= NEAR * min(sizes.values())
            continue
        assert isinstance(found, InPlaceFit)
        assert found.peak_bytes <= found.budget_bytes
        assert found.predicted_bytes == pytest.approx(found.peak_bytes, rel=0.02)
        done = tuple(LEVELS.index(each.level) for each in found.regions)
        fitting = [each for each, size in sizes.items() if size <= found.budget_bytes]
        assert time_of(done) <= NEAR * min(map(time_of, fitting))
        found.undo()
