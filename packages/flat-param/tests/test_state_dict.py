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


def _grouped(
    module: nn.Module, groups: list[dict[str, Any]], *, named: bool = False
) -> torch.optim.Optimizer:
    """AdamW whose groups are given by names of parameters."""
    found = []
    for group in groups:
        pairs = [(name, module.get_parameter(name)) for name in group["params"]]
        found.append({**group, "params": pairs if named else [param for _, param in pairs]})
    return torch.optim.AdamW(found)


WEIGHT = {"params": ["weight"], "lr": 0.1, "weight_decay": 0.1}
BIAS = {"params": ["bias"], "lr": 0.01, "weight_decay": 0.0}


@pytest.mark.parametrize("whole", [True, False])
def test_groups_in_another_order_are_matched_by_name(whole: bool) -> None:
    """With names of `full_state_dict`, and with those that torch saves beside positions."""
    module = nn.Linear(3, 2)
    optimizer = _grouped(module, [WEIGHT, BIAS], named=True)
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = flat_param.full_state_dict(module, optimizer=optimizer)
    if not whole:
        state["optim"] = optimizer.state_dict()
    other = _grouped(module, [{"params": ["bias"]}, {"params": ["weight"]}], named=True)
    flat_param.load_full_state_dict(module, state, optimizer=other)
    assert [(g["lr"], g["weight_decay"]) for g in other.param_groups] == [(0.01, 0), (0.1, 0.1)]
    assert [g["param_names"] for g in other.param_groups] == [["bias"], ["weight"]]
    for param in module.parameters():
        assert torch.equal(other.state[param]["exp_avg"], optimizer.state[param]["exp_avg"])


def test_positions_without_names_are_matched_in_order() -> None:
    """All that there is to go by."""
    module = nn.Linear(3, 2)
    state = {
        "model": module.state_dict(),
        "optim": _grouped(module, [WEIGHT, BIAS]).state_dict(),
    }
    other = _grouped(module, [{"params": ["weight"]}, {"params": ["bias"]}])
    flat_param.load_full_state_dict(module, state, optimizer=other)
    assert [g["lr"] for g in other.param_groups] == [0.1, 0.01]


def test_groups_with_equal_options_can_be_joined() -> None:
    """And a group without parameters keeps its own."""
    module = nn.Linear(3, 2)
    saved = _grouped(module, [WEIGHT, {**WEIGHT, "params": ["bias"]}])
    state = flat_param.full_state_dict(module, optimizer=saved)
    other = _grouped(module, [{"params": ["bias", "weight"]}, {"params": [], "lr": 0.7}])
    flat_param.load_full_state_dict(module, state, optimizer=other)
    assert [g["lr"] for g in other.param_groups] == [0.1, 0.7]


def test_group_saved_with_several_options_is_refused() -> None:
    """With the names of two parameters, and the options that differ."""
    module = nn.Linear(3, 2)
    state = flat_param.full_state_dict(module, optimizer=_grouped(module, [WEIGHT, BIAS]))
    other = _grouped(module, [{"params": ["weight", "bias"], "lr": 0.7}])
    said = r"group 0 .* 'weight' and 'bias', .* different options \(lr, weight_decay\)"
    with pytest.raises(flat_param.StateError, match=said):
        flat_param.load_full_state_dict(module, state, optimizer=other)
    assert other.param_groups[0]["lr"] == 0.7


def test_group_of_unsaved_parameters_is_refused() -> None:
    """No option of another group is taken for it."""
    module = nn.Linear(3, 2)
    state = flat_param.full_state_dict(module, optimizer=_grouped(module, [WEIGHT, BIAS]))
    state["optim"]["param_groups"][1]["params"] = ["head.bias"]
    other = _grouped(module, [WEIGHT, BIAS])
    with pytest.raises(flat_param.StateError, match=r"no parameter of group 1 .* 'bias'"):
        flat_param.load_full_state_dict(module, state, optimizer=other)


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
