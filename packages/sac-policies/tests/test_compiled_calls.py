"""Compiled modules inside regions behave as in torch's own checkpointing."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from sac_policies import (
    MATMULS,
    MutationError,
    checkpoint,
    context_fn,
    recompute_all,
    save_all,
    save_modules,
    save_ops,
    scoped,
)
from sac_policies._torch_compat._dispatch import LETS_COMPILE

from ._kept import kept_bytes

pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor:UserWarning",  # dynamo's
    "ignore::sac_policies.UnmatchedEntryWarning",
)
Run = Callable[..., Tensor]


class Block(nn.Module):
    """Two matmuls with activations between them."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply them."""
        h = self.w(x).sin()
        return x + self.v(h.exp() * h.tanh()).cos() * h


class Outer(nn.Module):
    """Calls a function with a block and its own arguments."""

    def __init__(self, block: nn.Module, call: Run) -> None:
        super().__init__()
        self.block, self.call = block, call

    def forward(self, *args: Tensor) -> Tensor:
        return self.call(self.block, *args)


def taped(policy: Any, block: nn.Module, x: Tensor) -> Tensor:
    """Run a block in a region."""
    return checkpoint(block, x, policy=policy)


def selective(block: nn.Module, x: Tensor) -> Tensor:
    """Run a block in torch's selective checkpoint."""
    make = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    return torch_checkpoint(block, x, use_reentrant=False, context_fn=make)


def whole(block: nn.Module, x: Tensor) -> Tensor:
    """Run a block in torch's checkpoint."""
    return torch_checkpoint(block, x, use_reentrant=False)


def adapted(block: nn.Module, x: Tensor) -> Tensor:
    """Run a block in torch's checkpoint with an adapted policy."""
    make = context_fn(save_ops(MATMULS))
    return torch_checkpoint(block, x, use_reentrant=False, context_fn=make)


def measured(run: Run, backend: str = "aot_eager_decomp_partition") -> tuple[Any, ...]:
    """Graphs, graph breaks, kept bytes and gradients of three compiled blocks."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    blocks = [Block() for _ in range(3)]
    plain = nn.Sequential(*copy.deepcopy(blocks))
    for block in blocks:
        block.compile(backend=backend)
    x = torch.linspace(-1, 1, 256 * 32).view(256, 32).requires_grad_()

    def forward() -> Tensor:
        h = x
        for block in blocks:
            h = run(block, h)
        return h

    expected = torch.autograd.grad(plain(x).square().sum(), [x, *plain.parameters()])
    wanted = [x, *(each for block in blocks for each in block.parameters())]
    for _ in range(3):
        found = torch.autograd.grad(forward().square().sum(), wanted)
        torch.testing.assert_close(found, expected)
    kept = kept_bytes(forward)
    graphs = counters["stats"]["unique_graphs"]
    return graphs, sum(counters["graph_break"].values()), kept


@pytest.fixture(scope="module")
def torchs() -> Callable[[Run], tuple[Any, ...]]:
    """The same measurements for one of torch's two kinds of checkpointing."""
    return functools.cache(measured)


WAYS: dict[str, tuple[Run, Run]] = {
    "matmuls": (functools.partial(taped, save_ops(MATMULS)), selective),
    "context_fn": (adapted, selective),
    "nothing": (functools.partial(taped, recompute_all()), whole),
    "modules": (functools.partial(taped, save_modules("w")), whole),
    "scoped": (functools.partial(taped, scoped(save_ops(MATMULS), "w")), whole),
}


@pytest.mark.parametrize(
    "way", [pytest.param(each, marks=[pytest.mark.nightly] * (each != "matmuls")) for each in WAYS]
)
def test_graphs_breaks_and_bytes_are_torchs(torchs, way):
    """pytorch#144787, #161889: gradients of each step are right, and nothing compiles twice.

    Until torch 2.9 code under a dispatch mode runs eagerly, as in torch's selective checkpoint.
    """
    run, like = WAYS[way]
    graphs, breaks, kept = measured(run)
    expected = torchs(selective if graphs == 0 else like)
    assert (graphs, breaks) == expected[:2]
    assert kept <= expected[2]


def compiled() -> tuple[Block, Tensor]:
    """Make a compiled block and its input."""
    torch._dynamo.reset()
    block = Block()
    block.compile(backend="aot_eager")
    return block, torch.randn(8, 32, requires_grad=True)


def test_region_leaves_module_as_it_was():
    """A compiled module's call is replaced while the region is open, and restored on errors too."""
    block, x = compiled()
    before = dict(vars(block))

    def fails(t: Tensor) -> Tensor:
        del t
        raise ValueError

    block.register_forward_pre_hook(lambda module, args: fails(*args))
    with pytest.raises(ValueError):  # raised by the module
        checkpoint(block, x, policy=recompute_all())
    block._forward_pre_hooks.clear()
    checkpoint(block, x, policy=save_modules("w"))
    assert vars(block) == before
    wrapped = torch.compile(Block(), backend="aot_eager")
    before = dict(vars(wrapped))
    checkpoint(wrapped, x, policy=recompute_all()).sum().backward()
    assert vars(wrapped) == before


@pytest.mark.parametrize("policy", [recompute_all(), save_modules("other")])
def test_region_goes_on_after_error_of_compiled_block(policy):
    """What runs while the error is handled belongs to the region, not to the block."""
    block, x = compiled()

    def fails(module: nn.Module, args: Any) -> None:
        raise ValueError

    block.register_forward_pre_hook(fails)

    def handles(inner: nn.Module, t: Tensor) -> Tensor:
        try:
            return inner(t)
        except ValueError:
            return outer.other(t).sin() * t

    outer = Outer(block, handles)
    outer.other = nn.Linear(32, 32)
    wanted = [x, outer.other.weight]
    expected = torch.autograd.grad(outer(x).sum(), wanted)
    found = torch.autograd.grad(checkpoint(outer, x, policy=policy).sum(), wanted)
    assert all(map(torch.equal, found, expected))


def test_other_threads_run_the_module_plainly():
    """A region affects one thread; the module is restored when the last region ends."""
    block, x = compiled()
    outs: list[Tensor] = []

    def call(inner: nn.Module, t: Tensor) -> Tensor:
        thread = threading.Thread(target=lambda: outs.append(inner(x)))
        thread.start()
        thread.join()
        return inner(t)

    outs.append(checkpoint(Outer(block, call), x, policy=recompute_all()))
    found = [torch.autograd.grad(each.sum(), x)[0] for each in outs]
    assert torch.equal(*found)


def test_block_that_is_kept_runs_once():
    """A policy that keeps everything keeps the tensors that the compiler saves.

    Until torch 2.9 the block runs eagerly in a region, and once.
    """
    block, x = compiled()
    runs: list[int] = []
    inner = block._compiled_call_impl
    block._compiled_call_impl = lambda *args: runs.append(1) or inner(*args)

    outer = Outer(block, lambda inner, t: inner(t.sin()))
    again = 2 if LETS_COMPILE else 1
    for policy, times in ((save_all(), 1), (save_modules("block"), 1), (recompute_all(), again)):
        runs.clear()
        checkpoint(outer, x, policy=policy).sum().backward()
        assert len(runs) == times


def test_input_of_compiled_block_changed_afterwards_is_refused():
    """Also if it is passed by keyword."""
    block, x = compiled()
    given = torch.ones(8, 32)

    outer = Outer(block, lambda inner, t, scale: inner(x=scale) * t)
    result = checkpoint(outer, x, given, policy=recompute_all())
    given.mul_(2)
    with pytest.raises((MutationError, RuntimeError), match=r"changed in place|modified by"):
        result.sum().backward()


def test_compiled_module_called_by_a_function_is_opaque():
    torch._dynamo.reset()
    block = nn.Sequential(nn.Linear(8, 8), nn.GELU())
    block.compile(backend="aot_eager")
    x = torch.randn(4, 8, requires_grad=True)

    def run(x: Tensor) -> Tensor:
        return block(x.sin()).exp().sum()

    (expected,) = torch.autograd.grad(run(x), x)
    for _ in range(2):
        (found,) = torch.autograd.grad(checkpoint(run, x, policy=recompute_all()), x)
        assert torch.equal(found, expected)


class Scaled(nn.Module):
    """Divides by a running scale, which a forward in training writes to first."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: Tensor, cache: Tensor) -> Tensor:
        """Write in the way of this kind, then read."""
        batch = x.detach().abs().mean(0)
        if self.kind == "writes":
            self.scale.mul_(0.9).add_(batch, alpha=0.1)
        elif self.kind == "replaces":
            self.scale = 0.9 * self.scale + 0.1 * batch
        elif self.kind == "argument":
            cache.mul_(0.9).add_(batch, alpha=0.1)
        elif self.training:
            self.scale.mul_(0.9).add_(batch, alpha=0.1)
        return (x / self.scale).tanh() / (cache + 1)


class Stateful(nn.Module):
    """A compiled module with state between others."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.scaled = Scaled(kind)

    def forward(self, x: Tensor, cache: Tensor) -> Tensor:
        return self.last(self.scaled(self.norm(self.first(x)), cache))


@pytest.mark.parametrize(
    "policy",
    [
        recompute_all(),
        pytest.param(save_ops(MATMULS), marks=pytest.mark.nightly),
        pytest.param(save_modules("first"), marks=pytest.mark.nightly),
    ],
)
@pytest.mark.parametrize("kind", ["writes", "replaces", "argument", "training"])
def test_compiled_module_that_writes_does_so_once(kind, policy):
    """It is not run again; one that only reads in evaluation mode is."""

    def outcome(run: Run) -> list[Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        block, cache, found = Stateful(kind), torch.zeros(8), []
        block.scaled.compile(backend="aot_eager")
        block.norm.compile(backend="aot_eager")
        for step in range(4):
            block.scaled.train(step % 2 == 0)
            x = torch.randn(4, 8, requires_grad=True)
            out = run(block, x, cache)
            found += torch.autograd.grad(out.square().sum(), [x, *block.parameters()])
            found += [each.clone() for each in (*block.buffers(), cache)]
        return found

    expected = outcome(lambda block, *args: block(*args))
    found = outcome(lambda block, *args: checkpoint(block, *args, policy=policy))
    close = functools.partial(torch.allclose, atol=1e-5)  # in a region 2.9 runs eager kernels
    same = torch.equal if LETS_COMPILE else close
    assert all(map(same, found, expected))


@pytest.mark.skipif(not LETS_COMPILE, reason="run eagerly, the module does not save the tensor")
def test_write_to_a_tensor_that_a_writing_module_saved_is_refused():
    """As by plain autograd; saved-tensor hooks turn off its own comparison."""
    torch._dynamo.reset()
    block, x = nn.Sequential(Scaled("writes")), torch.randn(4, 8, requires_grad=True)
    block[0].compile(backend="aot_eager")
    cache = torch.ones(8)
    outer = Outer(block[0], lambda inner, x: inner(x, cache))
    out = checkpoint(outer, x, policy=recompute_all())
    cache.mul_(2)
    with pytest.raises((MutationError, RuntimeError), match=r"changed in place|modified by"):
        out.sum().backward()
