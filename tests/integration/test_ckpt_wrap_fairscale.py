"""Behaviour that users of fairscale's `checkpoint_wrapper` rely on, tested with ours."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from _checks import assert_same, assert_same_grads, kept_bytes, tensors_of
from _models import need
from torch import Tensor, nn

import ckpt_wrap

Wrapper = Callable[[nn.Module], nn.Module]


def theirs(module: nn.Module) -> nn.Module:
    """fairscale's wrapper."""
    return need("fairscale.nn.checkpoint").checkpoint_wrapper(module)


LAYERS: dict[str, Wrapper] = {
    "fairscale": theirs,
    "checkpoint_wrapper": ckpt_wrap.checkpoint_wrapper,
    "checkpoint_": ckpt_wrap.checkpoint_,
}
layers = pytest.mark.parametrize("layer", list(LAYERS))


class Block(nn.Module):
    """Takes keywords and returns a dict, like blocks of fairscale's users."""

    def __init__(self, *, dropout: float = 0.1) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(32, 64), nn.Dropout(dropout), nn.GELU(), nn.Linear(64, 32)
        )

    def forward(self, x: Tensor, *, scale: Tensor | None = None, note: str = "") -> dict[str, Any]:
        """Return the output and a value that is not a tensor."""
        out = self.net(x)
        return {"out": out if scale is None else out * scale, "note": note}


def run(module: nn.Module, *, steps: int = 2) -> list[Tensor]:
    """Run forward and backward; return outputs and the input's gradients."""
    found = []
    for step in range(steps):
        torch.manual_seed(step)
        x, scale = torch.randn(4, 32, requires_grad=True), torch.randn(32, requires_grad=True)
        out = module(x, scale=scale, note="kept")
        assert out["note"] == "kept"
        out["out"].pow(2).sum().backward()
        assert x.grad is not None and scale.grad is not None
        found += [out["out"].detach(), x.grad, scale.grad]
    return found


@pytest.mark.parametrize("layer", ["checkpoint_wrapper", "checkpoint_"])
def test_keywords_and_dictionaries(layer: str) -> None:
    """Keyword tensors get gradients; a dict with other values is returned unchanged.

    fairscale's own wrapper returns a tuple here.
    """
    plain = Block()
    module = LAYERS[layer](copy.deepcopy(plain))
    assert all(torch.equal(a, b) for a, b in zip(run(module), run(plain), strict=True))
    gradients = zip(module.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in gradients)


@layers
@pytest.mark.parametrize("outer", list(LAYERS))
def test_wrapped_within_wrapped(layer: str, outer: str) -> None:
    """A checkpointed module inside another, theirs and ours in any order."""
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2)) for _ in range(2)))
    module = copy.deepcopy(plain)
    for index in range(2):
        module[index] = LAYERS[layer](module[index])
    module = LAYERS[outer](module)  # type: ignore[assignment]
    outs = []
    for either in (module, plain):
        torch.manual_seed(0)
        out = either(torch.ones(4, 8, requires_grad=True)).pow(2)
        out.sum().backward()
        outs.append(out.detach())
    assert torch.equal(*outs)
    gradients = zip(module.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in gradients)


def test_bytes_kept_are_no_more_than_theirs() -> None:
    """Live bytes after a forward through four blocks, for each layer."""
    kept = {}
    for name, layer in LAYERS.items():
        torch.manual_seed(0)
        blocks = [
            layer(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)))
            for _ in range(4)
        ]
        model, x = nn.Sequential(*blocks), torch.randn(16, 32, requires_grad=True)
        kept[name] = kept_bytes(lambda m=model, x=x: m(x).sum())
    assert kept["checkpoint_"] <= kept["checkpoint_wrapper"] <= kept["fairscale"]


@layers
def test_batch_norm_advances_once(layer: str) -> None:
    """Running statistics advance once per step."""
    plain = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU())
    module = LAYERS[layer](copy.deepcopy(plain))
    for either in (module, plain):
        torch.manual_seed(0)
        for _ in range(3):
            either(torch.randn(4, 8, requires_grad=True)).sum().backward()
    gradients = zip(module.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in gradients)
    buffers = zip(module.buffers(), plain.buffers(), strict=True)
    assert all(torch.equal(a, b) for a, b in buffers)


@pytest.mark.parametrize("layer", ["checkpoint_wrapper", "checkpoint_"])
def test_names_stay_plain(layer: str) -> None:
    """State dicts load both ways between our wrapped model and fairscale's."""
    plain = nn.Sequential(Block(), Block())
    model = copy.deepcopy(plain)
    other = copy.deepcopy(plain)
    for index in range(2):
        model[index] = LAYERS[layer](model[index])
        other[index] = theirs(other[index])
    assert_same(tensors_of(model.state_dict()), tensors_of(plain.state_dict()))
    with torch.no_grad():
        for param in other.parameters():
            param.mul_(2)
    assert model.load_state_dict(other.state_dict()) == ([], [])
    assert_same(tensors_of(model.state_dict()), tensors_of(other.state_dict()))


@layers
def test_an_output_without_gradients(layer: str) -> None:
    """A frozen module whose input needs no gradient: the same values, and no graph."""
    plain = nn.Linear(4, 4).requires_grad_(False)
    module = LAYERS[layer](copy.deepcopy(plain))
    x = torch.randn(2, 4)
    out = module(x)
    assert torch.equal(out, plain(x))
    assert not out.requires_grad


@pytest.mark.parametrize("layer", ["checkpoint_wrapper", "checkpoint_"])
def test_a_frozen_input_still_trains_the_module(layer: str) -> None:
    """Parameters get gradients although no input needs one."""
    plain = Block(dropout=0.0)
    module = LAYERS[layer](copy.deepcopy(plain))
    for either in (module, plain):
        either(torch.ones(2, 32))["out"].sum().backward()
    assert_same_grads(module, plain)


def test_which_run_it_is() -> None:
    """`is_recomputing` equals fairscale's function of that name, in both forwards."""
    flags = importlib.import_module("ckpt_wrap").is_recomputing
    their_flag = need("fairscale.nn.checkpoint.checkpoint_activations").is_recomputing
    found: dict[str, list[bool]] = {"ours": [], "theirs": []}

    class Telling(nn.Module):
        def __init__(self, flag: Callable[[], bool], seen: list[bool]) -> None:
            super().__init__()
            self.linear, self.flag, self.seen = nn.Linear(4, 4), flag, seen

        def forward(self, x: Tensor) -> Tensor:
            self.seen.append(self.flag())
            return self.linear(x)

    for layer, flag, kind in (
        (ckpt_wrap.checkpoint_, flags, "ours"),
        (theirs, their_flag, "theirs"),
    ):
        layer(Telling(flag, found[kind]))(torch.ones(1, 4, requires_grad=True)).sum().backward()
    assert found["ours"] == found["theirs"] == [False, True]


def test_inside_their_flattened_parameters() -> None:
    """A checkpointed block inside `FlattenParamsWrapper`, where weights are plain tensors."""
    wrapper = need("fairscale.nn.misc").FlattenParamsWrapper
    plain = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    forwards = []
    results = []
    for layer in (None, *LAYERS.values()):
        inner = copy.deepcopy(plain)
        wrapped = wrapper(inner if layer is None else layer(inner))
        inner[0].register_forward_hook(lambda *_: forwards.append(1))
        out = wrapped(torch.ones(2, 8, requires_grad=True))
        out.sum().backward()
        results.append((out.detach(), wrapped.flat_param.grad))
    for out, grad in results[1:]:
        assert torch.equal(out, results[0][0]) and torch.equal(grad, results[0][1])
    assert len(forwards) == 1 + 2 * len(LAYERS)  # each of them ran twice
