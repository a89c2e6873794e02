"""Batch norm in training and fused RNNs: replayed, without a second write to their state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from sac_policies import CONVOLUTIONS, checkpoint, recompute_all, save_all, save_ops

from ._kept import kept_bytes

pytestmark = pytest.mark.filterwarnings("ignore::sac_policies.UnmatchedEntryWarning")

POLICIES = [recompute_all(), save_ops(CONVOLUTIONS, "aten.mkldnn_rnn_layer"), save_all()]
every_policy = pytest.mark.parametrize("policy", POLICIES, ids=["nothing", "some", "all"])


class Residual(nn.Module):
    """Convolutions with batch norm, as in a ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in "ab")
        self.first, self.second = nn.BatchNorm2d(8), nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.relu(self.first(self.one(x)))
        return self.relu(x + self.second(self.two(inner)))


class Recurrent(nn.Module):
    """A norm and an LSTM."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.norm, self.rnn = nn.LayerNorm(16), nn.LSTM(16, 16, **options)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.rnn(self.norm(x))[0]
        return x + out[..., :16]


class ByHand(nn.Module):
    """Batch norm as in distributed training: operators whose schemas do not say that they write."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 1))
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("variance", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        before = (x * self.mean[:, None] + self.weight).sin()
        found = torch.batch_norm_update_stats(x.detach(), self.mean, self.variance, 0.1)
        return before * self.weight + found[0][:, None] * x + self.mean[:, None]


def _norm(kind: type[nn.Module], *args: Any, **options: Any) -> nn.Module:
    return nn.Sequential(nn.Conv1d(8, 8, 1), kind(*args, **options), nn.Softplus())


IMAGES, SEQUENCES = (4, 8, 16, 16), (12, 4, 16)
BLOCKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "residual": (Residual, IMAGES),
    "without averages": (lambda: _norm(nn.BatchNorm1d, 8, track_running_stats=False), (4, 8, 16)),
    "cumulative": (lambda: _norm(nn.BatchNorm1d, 8, momentum=None), (4, 8, 16)),
    "not affine": (lambda: _norm(nn.BatchNorm1d, 8, affine=False), (4, 8, 16)),
    "by hand": (ByHand, (4, 8, 16)),
    "instances": (lambda: _norm(nn.InstanceNorm1d, 8, track_running_stats=True), (4, 8, 16)),
    "evaluated": (lambda: Residual().eval(), IMAGES),
    "lstm": (Recurrent, SEQUENCES),
    "stacked": (lambda: Recurrent(num_layers=2, dropout=0.3), SEQUENCES),
    "both ways": (lambda: Recurrent(bidirectional=True, bias=False), SEQUENCES),
}


def outcome(make: Callable[[], nn.Module], shape: tuple[int, ...], run: Any) -> list[Tensor]:
    """Gradients and buffers after two steps of two blocks."""
    torch.manual_seed(0)
    blocks = nn.ModuleList(make() for _ in range(2))
    x = torch.randn(shape, requires_grad=True)
    for _ in range(2):
        out = x
        for block in blocks:
            out = run(block, out)
        out.square().sum().backward()
    found = [each.grad for each in (x, *blocks.parameters()) if each.grad is not None]
    return [*found, *blocks.buffers(), torch.rand(1)]


@every_policy
@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_gradients_and_buffers_are_bit_identical(block, policy):
    """Running statistics count each batch once, and the generator advances once."""
    expected = outcome(*block, lambda module, x: module(x))
    options = {"policy": policy, "determinism_check": "bits"}
    found = outcome(*block, lambda module, x: checkpoint(module, x, **options))
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("kind", ["residual", "lstm", "stacked", "instances"])
def test_a_policy_that_keeps_nothing_keeps_little(kind):
    """At most 8 % of plain, or a tenth more than torch's checkpoint."""
    make, shape = BLOCKS[kind]
    block, x = make(), torch.randn(shape, requires_grad=True)
    found = kept_bytes(lambda: checkpoint(block, x, policy=recompute_all()))
    plain = kept_bytes(lambda: block(x))
    full = kept_bytes(lambda: torch_checkpoint(block, x, use_reentrant=False))
    assert found <= max(0.08 * plain, 1.1 * full)


def test_kept_convolutions_keep_no_result_of_batch_norm():
    """Backward of batch norm reads its input, which is kept, and the statistics of the batch."""
    block, x = Residual(), torch.randn(IMAGES, requires_grad=True)
    whole = x.nbytes
    found = kept_bytes(lambda: checkpoint(block, x, policy=save_ops(CONVOLUTIONS)))
    assert found < 3.2 * whole  # two convolutions and the result


def test_solver_with_other_bits_in_each_call_runs_once(counting):
    """Two plain calls of `lstsq` differ."""
    a, b = torch.randn(8, 3, requires_grad=True), torch.randn(8, 8)

    def solve(a: Tensor) -> Tensor:
        return a @ torch.linalg.lstsq(a.sin(), b).solution.tanh()

    with counting() as counts:
        out = checkpoint(solve, a, policy=recompute_all(), determinism_check="none")
        out.square().sum().backward()
    assert counts["aten.linalg_lstsq.default"] == 1
