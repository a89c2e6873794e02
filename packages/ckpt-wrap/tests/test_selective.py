"""Torch's selective contexts: what is to be saved or offloaded is not computed again."""

from __future__ import annotations

import gc
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from ckpt_wrap import OffloadOptions, by_class, checkpoint_, checkpoint_wrapper, make_plan
from ckpt_wrap.checkpointing._selective import honour_offload
from ckpt_wrap.offload._host_tier import HostTier
from ckpt_wrap.offload._offload_scheduler import OffloadScheduler

MM = torch.ops.aten.mm.default
LAYERS = [checkpoint_, checkpoint_wrapper]
OFFLOADS = [p for p in CheckpointPolicy if p.name.endswith("CPU_OFFLOAD")]
CANNOT_ASK = pytest.mark.skip(reason="torch before 2.10 has no decision that offloads")
with_offload = pytest.mark.parametrize(
    "offload", OFFLOADS[:1] or [pytest.param(None, marks=CANNOT_ASK)], ids=["offload"]
)


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is MM
        return func(*args, **(kwargs or {}))


class Block(nn.Module):
    """Two products whose results are saved for nothing but the recomputation."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 64, bias=False)
        self.down = nn.Linear(64, 8, bias=False)

    def forward(self, x):
        return torch.tanh(self.down(torch.tanh(self.up(x))))


def _contexts(decision, mutation=False):
    def policy(ctx, op, *args, **kwargs):
        return decision if op is MM else CheckpointPolicy.PREFER_RECOMPUTE

    return partial(create_selective_checkpoint_contexts, policy, mutation)


def _run(layer, decision):
    torch.manual_seed(0)
    block = layer(Block(), context_fn=_contexts(decision))
    x = torch.randn(16, 8, requires_grad=True)
    loss = block(x).sum()
    with Products() as products:
        loss.backward()
    return products.count, [x.grad, *(p.grad for p in block.parameters())]


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize(
    ("decision", "products"),
    [
        (CheckpointPolicy.MUST_SAVE, 4),
        (CheckpointPolicy.PREFER_SAVE, 4),
        *[(policy, 4) for policy in OFFLOADS],
        (CheckpointPolicy.PREFER_RECOMPUTE, 6),
        (CheckpointPolicy.MUST_RECOMPUTE, 6),
        (True, 4),
        (False, 6),
    ],
)
def test_backward_runs_the_products_the_policy_leaves_it(layer, decision, products, equal):
    """Four of backward's own; two more where the results were not kept."""
    count, gradients = _run(layer, decision)
    assert count == products
    assert equal(gradients, _run(lambda m, context_fn: m, None)[1])


def test_a_recomputation_that_asks_again_gets_the_answer_of_forward():
    """As torch before 2.13 does: what was offloaded was saved, and all else stays."""
    forward, _ = create_selective_checkpoint_contexts([MM])
    recomputation = SimpleNamespace(policy_fn=lambda context, op: op)
    honour_offload(forward, recomputation, None, "the model")
    answers = {wanted: recomputation.policy_fn(None, wanted) for wanted in CheckpointPolicy}
    saved = dict.fromkeys(OFFLOADS, CheckpointPolicy.MUST_SAVE)
    assert answers == {wanted: saved.get(wanted, wanted) for wanted in CheckpointPolicy}


class CountingLink:
    """Takes tensors of the CPU as those of a device; copies at once."""

    idle = False

    def __init__(self) -> None:
        self.out = 0
        self.back = 0

    def takes(self, device):
        return True

    def copy_out(self, source):
        self.out += source.numel()
        return Copied(source.clone())

    def copy_in(self, out):
        self.back += out.host.numel()
        return Copied(out.host.clone())


class Copied:
    """A copy that is made at once."""

    def __init__(self, host) -> None:
        self.host = self.tensor = host

    def done(self):
        return True

    def wait(self):
        pass

    def release(self):
        self.tensor = None


@pytest.fixture
def link(monkeypatch):
    """A link to another device, in the place of the accelerator's."""
    link, options = CountingLink(), OffloadOptions()
    scheduler = OffloadScheduler(HostTier(link), options)
    monkeypatch.setattr("ckpt_wrap.checkpointing._selective.scheduler_for", lambda _: scheduler)
    return link


@with_offload
def test_results_to_be_offloaded_leave_the_device_and_come_back(link, equal, offload):
    """The first product's result; the second's is below the size worth moving."""
    count, gradients = _run(checkpoint_, offload)
    assert count == 4
    assert (link.out, link.back) == (16 * 64 * 4, 16 * 64 * 4)
    assert equal(gradients, _run(lambda m, context_fn: m, None)[1])


@with_offload
def test_nothing_of_an_offloaded_result_stays_on_the_device(link, offload):
    """After forward, no tensor of its size is alive but the weights."""
    block = checkpoint_(Block(), context_fn=_contexts(offload))
    loss = block(torch.randn(16, 8, requires_grad=True)).sum()
    gc.collect()
    shapes = [tuple(t.shape) for t in gc.get_objects() if type(t) is torch.Tensor]
    assert (16, 64) not in shapes
    loss.backward()


def test_results_to_be_saved_stay(link):
    """Only what is to be offloaded moves."""
    _run(checkpoint_, CheckpointPolicy.MUST_SAVE)
    assert link.out == 0


@with_offload
def test_a_forward_that_raises_moves_nothing(link, offload):
    """And the module can be used again."""
    block = checkpoint_(Block(), context_fn=_contexts(offload))
    block.down.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        block(torch.randn(16, 8, requires_grad=True))
    assert link.out == 0
    block.down._forward_hooks.clear()
    block(torch.randn(16, 8, requires_grad=True)).sum().backward()
    assert link.back > 0


@with_offload
def test_a_plan_takes_selective_contexts(offload):
    """As the option of every planned module."""
    model = nn.Sequential(Block(), Block())
    contexts = _contexts(offload)
    make_plan(model, by_class(Block), context_fn=contexts).apply(model)
    with Products() as products:
        model(torch.randn(4, 8)).sum().backward()
    assert products.count == 4 + 7  # forward; backward, no gradient of the model's input
