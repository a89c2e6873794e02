"""Tensors and threads that the tape must tell apart: subclasses, unsafe views, wrappers."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from sac_policies import (
    MATMULS,
    MutationError,
    checkpoint,
    offload,
    recompute_all,
    save_modules,
    save_ops,
)
from sac_policies.policies import as_policy

pytestmark = pytest.mark.filterwarnings("ignore::sac_policies.UnmatchedEntryWarning")

POLICIES = {
    "nothing": recompute_all(),
    "matmuls": save_ops(MATMULS),
    "offloaded": offload(MATMULS),
}
every_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


LAZY = {
    "linear": partial(nn.LazyLinear, 4),
    "batch norm": nn.LazyBatchNorm1d,
    "convolution": partial(nn.LazyConv1d, 4, 1),
}


@every_policy
@pytest.mark.parametrize("make", LAZY.values(), ids=LAZY)
def test_lazy_module_is_initialized_in_a_region(make, policy):
    """Its parameters get their shapes in the first forward."""
    found = []
    for run in (lambda module, x: module(x), lambda *args: checkpoint(*args, policy=policy)):
        torch.manual_seed(0)
        module, x = make(), torch.randn(3, 4, 5 if make.__class__ is partial else 1)
        x = x[..., 0] if make is nn.LazyBatchNorm1d else x
        run(module, x.requires_grad_()).square().sum().backward()
        found.append([each.grad for each in (x, *module.parameters())])
    assert all(map(torch.equal, *found))


@every_policy
@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("kind", ["product", "split"])
def test_unsafe_view_written_after_the_region_is_never_silent(kind, hooked, policy):
    """It has a version counter of its own, beside that of the product."""
    x, w = torch.randn(2, 3, 4), torch.randn(4, 4, requires_grad=True)

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        h = x @ w if kind == "product" else torch.unsafe_split(x[0] @ w, 1)[1]
        return h, (h + 1).sin()

    def gradient(call: Any) -> Tensor:
        around = saved_tensors_hooks(lambda t: t, lambda t: t) if hooked else nullcontext()
        with around:
            h, y = call(x)
        with torch.no_grad():
            h.mul_(3.0)
        return torch.autograd.grad(y.sum(), w)[0]

    expected = gradient(run)
    for _ in range(2):
        try:
            found = gradient(lambda x: checkpoint(run, x, policy=policy))
        except MutationError:
            assert policy is not POLICIES["nothing"]
        else:
            assert torch.equal(found, expected)


def test_kept_product_is_held_once_under_hooks():
    """The unsafe view of a product is packed, not the product beside it."""
    x, w = torch.randn(2, 3, 4), torch.randn(4, 4, requires_grad=True)
    packed: list[Tensor] = []

    def run(x: Tensor) -> Tensor:
        h = x @ w
        return (h + 1).sin() * h

    with saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        out = checkpoint(run, x, policy=save_ops(MATMULS))
    assert out.shape == (2, 3, 4)
    assert len({each.untyped_storage().data_ptr() for each in packed}) == len(packed) == 2


@every_policy
def test_distributed_tensor_written_in_place_in_a_region(policy, mesh):
    """Its inner tensor is read after the write, and the wrapper gets its version after it."""
    from torch.distributed.tensor import Shard, distribute_tensor

    x = distribute_tensor(torch.randn(4, 4), mesh, [Shard(0)]).requires_grad_()
    w = distribute_tensor(torch.randn(4, 4), mesh, [Shard(0)])

    def run(d: Any) -> tuple[Any, Tensor]:
        y = d.sin()
        y.mul_(2).add_(w)
        return y, y.to_local().cos()

    def gradient(call: Any) -> Tensor:
        y, local = call(x)
        total = y.sum().full_tensor() + local.sum()
        return torch.autograd.grad(total, x)[0].full_tensor()

    assert torch.equal(gradient(lambda x: checkpoint(run, x, policy=policy)), gradient(run))


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A mesh of this process alone."""
    dist = pytest.importorskip("torch.distributed")
    from torch.distributed.device_mesh import init_device_mesh

    store = tmp_path_factory.mktemp("store") / "file"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


class Waiting(nn.Module):
    """Waits inside its forward, with modules around the wait."""

    def __init__(self, began: threading.Event, goes_on: threading.Event) -> None:
        super().__init__()
        self.began, self.goes_on = began, goes_on
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Wait, then call the inner module."""
        self.began.set()
        assert self.goes_on.wait(30)
        return self.inner(x).sin() * x


class Outer(nn.Module):
    """Computes after its module."""

    def __init__(self, waits: nn.Module) -> None:
        super().__init__()
        self.waits = waits

    def forward(self, x: Tensor) -> Tensor:
        """Call the module."""
        return self.waits(x).cos()


@pytest.mark.parametrize("first", ["other", "region"])
def test_model_of_another_thread_is_not_followed(first):
    """Hooks that follow a region's modules run for all threads of the process."""
    events = {name: (threading.Event(), threading.Event()) for name in ("other", "region")}
    wrapped = nn.Sequential(nn.Sequential(nn.Sequential(Waiting(*events["other"]))))
    for each in wrapped.modules():  # torch reads global hooks at the end only of such modules
        each.register_forward_hook(lambda *args: None)
    region, errors = Outer(Waiting(*events["region"])), list[Exception]()
    paths: list[str] = []

    def decide(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
        paths.append(ctx.module)
        return False

    policy = save_modules("inner") | as_policy(decide)

    def work(name: str) -> None:
        x = torch.ones(2, 4, requires_grad=True)
        try:
            if name == "other":
                wrapped(x).sum().backward()
            else:
                checkpoint(region, x, policy=policy).sum().backward()
        except Exception as error:
            errors.append(error)

    threads = {name: threading.Thread(target=work, args=(name,)) for name in events}
    second = "region" if first == "other" else "other"
    for name in (first, second):
        threads[name].start()
        assert events[name][0].wait(30)
    for name in (first, second):
        events[name][1].set()
        threads[name].join(30)
    assert errors == []
    assert list(dict.fromkeys(paths)) == ["waits.inner", "waits", ""]


def test_threads_with_many_regions_do_not_fail():
    """Each region that writes visits the tapes of all others, which end meanwhile."""
    w, x, errors = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4), list[Exception]()

    def run(x: Tensor) -> Tensor:
        y = (x @ w).sin()
        y.mul_(2)
        return y.cos()

    def work() -> None:
        try:
            for _ in range(4):
                outs = [checkpoint(run, x, policy=recompute_all()) for _ in range(60)]
                torch.autograd.grad(sum(each.sum() for each in outs), w)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert errors == []
