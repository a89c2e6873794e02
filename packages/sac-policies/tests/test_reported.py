"""Faults that users of checkpointing reported to other projects; none of them is silent here."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.profiler import ProfilerActivity, profile

from sac_policies import MATMULS, checkpoint, fit_, recompute_all, report, save_modules, save_ops

POLICIES = [recompute_all(), save_ops(MATMULS)]


def gradients(run: Callable[[Tensor], Tensor], x: Tensor, module: nn.Module) -> list[Tensor]:
    """Gradients of the input and of all parameters."""
    return list(torch.autograd.grad(run(x).square().sum(), [x, *module.parameters()]))


def leaf(*shape: int) -> Tensor:
    """Spread values that need a gradient."""
    numel = torch.Size(shape).numel()
    return torch.linspace(-1.3, 1.7, numel).reshape(shape).requires_grad_()


@pytest.mark.parametrize("policy", POLICIES)
def test_noise_that_is_saved_before_it_is_written(policy: Any) -> None:
    """pytorch#193671: `nn.RReLU` saves its noise, and its kernel fills it after that."""
    block, x = nn.Sequential(nn.Linear(64, 64), nn.RReLU(), nn.Linear(64, 64)), leaf(32, 64)
    for seed in range(3):
        torch.manual_seed(seed)
        plain = gradients(block, x, block)
        torch.manual_seed(seed)
        found = gradients(lambda t: checkpoint(block, t, policy=policy), x, block)
        assert all(map(torch.equal, found, plain))


class Retrying(nn.Module):
    """Fails in its second attempt, which a second forward would make, and tries again."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.tries = nn.Parameter(torch.randn(16, 16) / 4), 0

    def attempt(self, x: Tensor) -> Tensor:
        h = (x @ self.w).sin().exp()
        self.tries += 1
        if self.tries == 2:
            raise MemoryError
        return h * (h @ self.w).tanh()

    def forward(self, x: Tensor) -> Tensor:
        try:
            return self.attempt(x)
        except MemoryError:
            return self.attempt(x)


@pytest.mark.parametrize("policy", POLICIES)
def test_function_that_tries_again_runs_once(policy: Any) -> None:
    """unsloth-zoo#1047: a second forward that retries saves other tensors than the first."""
    block, x = Retrying(), leaf(16, 16)
    found = gradients(lambda t: checkpoint(block, t, policy=policy), x, block)
    assert block.tries == 1
    assert all(map(torch.equal, found, gradients(Retrying.attempt.__get__(_calm(block)), x, block)))


def _calm(block: Retrying) -> Retrying:
    block.tries = 9
    return block


class Adapted(nn.Module):
    """Two adapters, of which one is active."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(16, 16)
        self.adapters = nn.ModuleDict({name: nn.Linear(16, 16) for name in "ab"})
        self.active = "a"

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.adapters[self.active](x.sin()))


@pytest.mark.parametrize("policy", POLICIES)
def test_adapter_of_the_forward_is_that_of_backward(policy: Any) -> None:
    """peft#2832: one forward for each adapter, and then one backward."""
    block, x = Adapted(), leaf(8, 16)

    def both(run: Callable[[Tensor], Tensor]) -> list[Tensor]:
        outs = []
        for block.active in "ab":
            outs.append(run(x))
        return list(torch.autograd.grad(sum(outs).sum(), list(block.parameters())))  # type: ignore[union-attr]

    found = both(lambda t: checkpoint(block, t, policy=policy))
    assert all(map(torch.equal, found, both(block)))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # dynamo's
@pytest.mark.parametrize("policy", [save_modules("w"), *POLICIES])
def test_policy_around_compiled_blocks_compiles_nothing_of_ours(policy: Any) -> None:
    """pytorch#144787: three blocks are one graph; hooks around them are none."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.v = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.v(self.w(x).sin().exp()).cos()

    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    blocks = nn.Sequential(*(Block() for _ in range(3)))
    for block in blocks:
        block.compile(backend=backend)
    x = leaf(32, 32)

    def run(t: Tensor) -> Tensor:
        for block in blocks:
            t = checkpoint(block, t, policy=policy)
        return t

    plain = gradients(blocks, x, blocks)
    before = len(graphs)
    for _ in range(3):
        found = gradients(run, x, blocks)
        assert all(map(torch.allclose, found, plain))
    assert len(graphs) <= before + 2


def kept_bytes(forward: Callable[[], Any]) -> int:
    """Bytes that a forward leaves for backward, by the allocator's count."""
    for _ in range(2):
        forward().sum().backward()
    gc.collect()
    cpu = [ProfilerActivity.CPU]
    with profile(activities=cpu, profile_memory=True, acc_events=True) as found:
        out = forward()
    # The profiler's sums count a record once for each thread with an event at the time.
    events = found.profiler.kineto_results.events()
    size = sum(event.nbytes() for event in events if event.name() == "[memory]")
    del out
    return size


@pytest.fixture
def mesh() -> Iterator[Any]:
    """A mesh of this process alone."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def test_tensor_parallel_region_keeps_less_than_plain(mesh: Any) -> None:
    """With matmuls kept at most three quarters; the report says the same each time."""

    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(64, 512, bias=False), nn.Linear(512, 64, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.nn.functional.silu(self.a(x)))

    model = parallelize_module(Mlp(), mesh, {"a": ColwiseParallel(), "b": RowwiseParallel()})
    assert isinstance(model.a.weight, DTensor)
    assert model.a.weight.placements == (Shard(0),) != (Replicate(),)
    x = leaf(512, 64)
    plain = kept_bytes(lambda: model(x))
    policy = save_ops(MATMULS)
    kept = kept_bytes(lambda: checkpoint(model, x, policy=policy))
    assert kept <= 0.75 * plain
    assert kept_bytes(lambda: checkpoint(model, x, policy=recompute_all())) <= 0.1 * plain
    told = [report(model, x, policy=policy).held_bytes for _ in range(3)]
    assert told[0] == told[1] == told[2] == 512 * 512 * 4


@torch.library.custom_op("sac_policies_tests::swiglu", mutates_args=())
def swiglu(a: Tensor, b: Tensor) -> Tensor:
    """A fused operator of another library."""
    return torch.nn.functional.silu(a) * b


def _saved(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _derivative(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    a, b = ctx.saved_tensors
    s = torch.sigmoid(a)
    return grad * b * (s + a * s * (1 - s)), grad * a * s


swiglu.register_autograd(_derivative, setup_context=_saved)


def test_custom_operator_is_not_kept() -> None:
    """Its arguments are the products that are kept; its result is made again."""

    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(64)
            self.up, self.gate = (nn.Linear(64, 256, bias=False) for _ in range(2))
            self.down = nn.Linear(256, 64, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            h = self.norm(x)
            return x + self.down(swiglu(self.gate(h), self.up(h)))

    model, x = Mlp(), leaf(512, 64)
    found = gradients(lambda t: checkpoint(model, t, policy=save_ops(MATMULS)), x, model)
    assert all(map(torch.equal, found, gradients(model, x, model)))
    held = report(model, x, policy=save_ops(MATMULS))
    assert held.held_bytes == 2 * 512 * 256 * 4
    assert not held.kept_anyway


def test_blocks_in_sequentials_are_found() -> None:
    """A stack of nn.Sequential has as many blocks as one of other modules."""
    blocks = (
        nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()) for _ in range(4)
    )
    model = nn.Sequential(*blocks)
    found = fit_(model, torch.randn(512, 64), "72%", loss=lambda out: out.square().sum())
    assert found
    assert [region.path for region in found.regions] == ["0", "1", "2", "3"]
    found.undo()
