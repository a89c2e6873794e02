"""Whole states, of a module that is not sharded, and on one rank of several."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import flat_param


def _trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A layer and its optimizer after a step."""
    module = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    module(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    return module, optimizer


def test_module_alone_is_loaded_from_either_form() -> None:
    """A plain state dict, or one with the model inside."""
    module, _ = _trained()
    for state in (module.state_dict(), flat_param.full_state_dict(module)):
        other = nn.Linear(3, 2)
        flat_param.load_full_state_dict(other, state)
        assert torch.equal(other.weight, module.weight)


def test_optimizer_comes_back_with_its_module() -> None:
    """Its next step is that of the one that was saved."""
    module, optimizer = _trained()
    state = copy.deepcopy(flat_param.full_state_dict(module, optimizer=optimizer))
    other = nn.Linear(3, 2)
    again = torch.optim.AdamW(other.parameters(), lr=0.5)
    flat_param.load_full_state_dict(other, state, optimizer=again)
    x = torch.randn(4, 3)
    for layer, steps in ((module, optimizer), (other, again)):
        steps.zero_grad()
        layer(x).sum().backward()
        steps.step()
    assert torch.equal(other.weight, module.weight)


@pytest.mark.parametrize("nested", [True, False])
def test_optimizer_without_a_state_is_refused_and_nothing_changes(nested: bool) -> None:
    """The keys that there are, and what to do."""
    module, optimizer = _trained()
    state = flat_param.full_state_dict(module) if nested else module.state_dict()
    before = module.weight.clone()
    with pytest.raises(flat_param.StateError) as raised:
        flat_param.load_full_state_dict(module, state, optimizer=optimizer)
    keys = ["model"] if nested else ["bias", "weight"]
    assert str(raised.value).startswith(
        f"flat_param.load_full_state_dict: the state has the keys {keys}, but an optimizer is "
        "loaded from 'optim' next to 'model'. Leave"
    )
    assert torch.equal(module.weight, before)


def test_plain_module_keeps_its_state_on_its_rank() -> None:
    """Where nothing is shared this is the first rank; state in CPU memory already stays there."""
    module, optimizer = _trained()
    state = flat_param.full_state_dict(
        module, optimizer=optimizer, rank0_only=True, offload_to_cpu=True
    )
    assert state["model"]["weight"].data_ptr() == module.weight.data_ptr()
    assert state["optim"]["state"]["weight"]["exp_avg"].shape == (2, 3)


CLAIMS = (
    "dtensors_are_refused_by_name",
    "first_rank_alone_has_all",
    "it_is_fsdp1s",
    "others_hold_one_unit_at_a_time",
    "what_is_in_no_unit_moves_too",
)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("claim", CLAIMS)
def test_claim_holds_on_every_rank(ranks: Callable[..., list[Any]], claim: str) -> None:
    """Each `check_<claim>` of workers/full_states.py, and no check is forgotten."""
    for rank, result in enumerate(ranks(2, "full_states")):
        assert sorted(result) == list(CLAIMS)
        assert not result[claim], f"rank {rank}: {result[claim]}"
