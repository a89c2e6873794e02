"""Whether a graph is being captured, asked of any kind of device."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

from flat_param import StateError, fully_shard
from flat_param.comm import _capturing


@pytest.fixture(autouse=True)
def _ask_anew():
    """What a kind of device answers is asked once."""
    _capturing._asks.cache_clear()
    yield
    _capturing._asks.cache_clear()


@pytest.mark.parametrize("kind", ["cpu", "meta"])
def test_what_is_no_accelerator_captures_nothing(kind):
    """Nobody is asked."""
    assert _capturing.is_capturing(torch.device(kind)) is False
    _capturing.refuse_capture("block", torch.device(kind))


def test_a_device_is_asked_by_torchs_name(monkeypatch):
    """One whose module does not know the question has no graphs."""
    for api, answer in (
        (SimpleNamespace(is_current_stream_capturing=lambda: True), True),
        (SimpleNamespace(), False),
    ):
        _capturing._asks.cache_clear()
        monkeypatch.setattr(torch, "get_device_module", lambda kind, api=api: api)
        assert _capturing.is_capturing(torch.device("cuda")) is answer


def test_a_unit_whose_gradients_go_to_the_host_is_not_captured(monkeypatch):
    """It is named."""
    api = SimpleNamespace(is_current_stream_capturing=lambda: True)
    monkeypatch.setattr(torch, "get_device_module", lambda kind: api)
    told = "unit 'block' has an offload_policy and a graph is being captured"
    with pytest.raises(StateError, match=told):
        _capturing.refuse_capture("block", torch.device("cuda"))


@pytest.mark.usefixtures("group_of_one")
def test_a_unit_without_parameters_has_none_to_offload():
    """It has no device, and runs."""
    policy = CPUOffloadPolicy()
    inner = fully_shard(nn.ReLU(), offload_policy=policy)
    module = fully_shard(nn.Sequential(inner), offload_policy=policy)
    assert module(torch.ones(2)).tolist() == [1.0, 1.0]
