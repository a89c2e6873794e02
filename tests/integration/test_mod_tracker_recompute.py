"""Every library's recomputation is "recompute" in every report, and not backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from _models import need
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import ckpt_wrap
import sac_policies
from mod_tracker import profile_flops, profile_memory, profile_time, trace

Call = Callable[[nn.Module, Tensor], Tensor]


class Block(nn.Module):
    """Two products, with operators between them that belong to no other module."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32, bias=False), nn.Linear(32, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).sin().exp()).tanh()


class Model(nn.Module):
    def __init__(self, call: Call) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.call(block, x)
        return x


def by_remat(block: nn.Module, x: Tensor) -> Tensor:
    """Checkpoint by torch_remat."""
    checkpointed: Tensor = need("torch_remat").checkpoint(region_name="block")(block)(x)
    return checkpointed


WAYS: dict[str, Call] = {
    "torch": lambda block, x: torch_checkpoint(block, x, use_reentrant=False),
    "torch, reentrant": lambda block, x: torch_checkpoint(block, x, use_reentrant=True),
    "torch, a function": lambda block, x: torch_checkpoint(block.forward, x, use_reentrant=False),
    "torch_remat": by_remat,
    "ckpt_wrap": lambda block, x: ckpt_wrap.checkpoint_wrapper(block)(x),
    "tape": lambda block, x: sac_policies.checkpoint(block, x, policy=sac_policies.recompute_all()),
    "tape, a function": lambda block, x: sac_policies.checkpoint(
        block.forward, x, policy=sac_policies.recompute_all()
    ),
    "in_slices": lambda block, x: sac_policies.in_slices(block, 2)(x),
}


def batch() -> Tensor:
    """Make an input that needs a gradient, so that every product has both."""
    torch.manual_seed(1)
    return torch.randn(16, 8, requires_grad=True)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("retain_graph", [False, True])
def test_flops_of_each_module(way: str, retain_graph: bool) -> None:
    """Forward and backward are those of the plain model; each module has its own recompute."""
    plain, model = Model(lambda block, x: block(x)), Model(WAYS[way])
    with profile_flops(plain) as expected:
        plain(batch()).sum().backward()
    with profile_flops(model) as report:
        model(batch()).sum().backward(retain_graph=retain_graph)
    assert report.model_flops == expected.total == expected.model_flops
    for index in range(3):
        up, down = (report[f"blocks.{index}.{name}"] for name in ("up", "down"))
        assert up.recompute == up.forward == 2 * 16 * 8 * 32
        assert down.recompute in (0, down.forward)  # nothing may need its result
        assert (up.backward, down.backward) == (2 * up.forward, 2 * down.forward)


@pytest.mark.parametrize("way", WAYS)
def test_memory_and_stack(way: str) -> None:
    """Bytes that are made again are made in recompute, by the module that made them."""
    model = Model(WAYS[way])
    with profile_memory(model) as report:
        model(batch()).sum().backward()
    bytes_of = {
        stack[-1]: amounts.get("recompute", 0)
        for stack, amounts in report._stacks["allocated"].items()
        if stack
    }
    for index in range(3):
        assert bytes_of[f"Model.blocks.{index}.up"] == 16 * 32 * 4


@pytest.mark.parametrize("way", WAYS)
def test_time_and_trace(way: str) -> None:
    """Recomputation takes time, with or without modules."""
    model = Model(WAYS[way])
    with profile_time(model) as report, trace(model) as timeline:
        model(batch()).sum().backward()
    assert report.sum("self_recompute") > 0
    assert timeline.sum("self_recompute") > 0
    assert any(event.get("cat") == "recompute" for event in timeline.events)
