"""Whether a graph is being captured, asked of any kind of device."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sac_policies import EngineError
from sac_policies.eager import _capturing


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


def test_a_device_is_asked_by_torchs_name(monkeypatch):
    """One whose module does not know the question has no graphs."""
    for api, answer in (
        (SimpleNamespace(is_current_stream_capturing=lambda: True), True),
        (SimpleNamespace(), False),
    ):
        _capturing._asks.cache_clear()
        monkeypatch.setattr(torch, "get_device_module", lambda kind, api=api: api)
        assert _capturing.is_capturing(torch.device("cuda")) is answer


def test_captured_copies_need_a_torch_that_keeps_pinned_memory(monkeypatch):
    """What is not captured needs none."""
    monkeypatch.setattr(_capturing, "_KEEPS_PINNED_MEMORY", False)
    _capturing.refuse_old_torch(False)
    with pytest.raises(EngineError, match=r"pinned memory is a graph's own only from torch 2\.13"):
        _capturing.refuse_old_torch(True)
    monkeypatch.setattr(_capturing, "_KEEPS_PINNED_MEMORY", True)
    _capturing.refuse_old_torch(True)
