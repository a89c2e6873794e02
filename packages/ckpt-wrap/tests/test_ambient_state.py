"""What surrounds a forward is captured and replayed, on every device an input lives on."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ckpt_wrap import checkpoint_
from ckpt_wrap.checkpointing._ambient_state import _accelerator_types, capture, replay


class Generators:
    """Random states of a device type that is not there."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.states = {0: "a", 1: "b"}

    def get_rng_state(self, *device):
        return self.states[self._index(device)]

    def set_rng_state(self, state, *device):
        self.states[self._index(device)] = state

    def _index(self, device) -> int:
        assert len(device) == (0 if self.kind == "mps" else 1)
        return device[0].index if device else 0


def _tensor_on(device: str) -> SimpleNamespace:
    return SimpleNamespace(device=torch.device(device), is_cpu=False, is_meta=False)


def test_random_state_of_every_device_is_replayed_and_put_back(monkeypatch):
    """Two devices of one type and one of another, beside the CPU."""
    kinds = {kind: Generators(kind) for kind in ("cuda", "mps")}
    monkeypatch.setattr(torch, "get_device_module", lambda device: kinds[device.type])
    monkeypatch.setattr(
        "ckpt_wrap.checkpointing._ambient_state._device_types", lambda devices: ("cpu",)
    )
    tensors = [_tensor_on(d) for d in ("cuda:0", "cuda:1", "mps:0", "cuda:0")]
    ambient = capture([torch.ones(1), *tensors], preserve_rng_state=True)
    assert len(ambient.rng) == 4
    kinds["cuda"].states = {0: "later", 1: "later"}
    kinds["mps"].states = {0: "later"}
    with replay(ambient):
        assert kinds["cuda"].states == {0: "a", 1: "b"}
        assert kinds["mps"].states == {0: "a"}
    assert kinds["cuda"].states == {0: "later", 1: "later"}
    assert kinds["mps"].states == {0: "later"}


@pytest.mark.parametrize(
    ("found", "has_autocast", "types"),
    [
        (None, True, ("cpu",)),
        ("cuda", True, ("cpu", "cuda")),
        ("mps", False, ("cpu",)),
    ],
)
def test_autocast_of_the_accelerator_is_kept_if_it_has_one(monkeypatch, found, has_autocast, types):
    """Beside that of the CPU; asking for one that is not there would raise."""
    device = None if found is None else torch.device(found)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: device)
    monkeypatch.setattr(torch.amp, "is_autocast_available", lambda kind: has_autocast)
    assert _accelerator_types.__wrapped__() == types


def test_nothing_random_is_touched_unless_asked():
    """Without preserving, no state is read and none is set."""
    ambient = capture([torch.ones(1)], preserve_rng_state=False)
    assert ambient.rng == ()
    with replay(ambient):
        drawn = torch.rand(1)
    assert drawn.shape == (1,)


def test_state_is_put_back_after_an_exception():
    """The random state outside survives an exception inside."""
    ambient = capture([], preserve_rng_state=True)
    torch.rand(3)
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="inside"), replay(ambient):
        torch.rand(5)
        raise ValueError("inside")
    assert torch.equal(before, torch.get_rng_state())


def test_autocast_that_was_off_is_off_again():
    """Backward called inside autocast recomputes without it if forward ran without."""
    ambient = capture([], preserve_rng_state=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with replay(ambient):
            assert not torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_enabled("cpu")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_dropout_on_a_device_is_replayed_for_keyword_tensors():
    """Gradients equal the plain module's where the only tensor is a keyword."""

    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, *, x):
            return nn.functional.dropout(torch.tanh(self.linear(x)), 0.5)

    plain = Dropped().cuda()
    changed = checkpoint_(copy.deepcopy(plain))
    x = torch.randn(64, 64, device="cuda")
    for module in (plain, changed):
        torch.manual_seed(0)
        module(x=x).sum().backward()
    assert torch.equal(plain.linear.weight.grad, changed.linear.weight.grad)
