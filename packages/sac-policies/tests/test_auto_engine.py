"""Which engine "auto" takes, and when it compares bits."""

from __future__ import annotations

import functools
import gc
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from sac_policies import MATMULS, MutationError, checkpoint, recompute_all, report, save_ops
from sac_policies import _checkpoint as checkpoint_module
from sac_policies.engines.recipe.regions import _region, _repeated

KIND = torch.accelerator.current_accelerator() or torch.device("cpu")
NEEDS_DEVICE = [
    pytest.mark.accelerator,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator"),
]


def accelerated(test: Any) -> Any:
    """Run a test where there is an accelerator."""
    for mark in NEEDS_DEVICE:
        test = mark(test)
    return test


class _MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(128, 256), nn.Linear(256, 128)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x)) * 2).sin()


def _model(device: torch.device) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = _MLP().to(device)
    return model, torch.randn(8, 128).to(device).requires_grad_()


def _gradients(model: nn.Module, x: Tensor, call: Callable[[], Tensor]) -> list[Tensor]:
    wanted = [x, *model.parameters()]
    return list(torch.autograd.grad(call().square().sum(), wanted))


def _written(model: nn.Module, call: Callable[[], Tensor]) -> None:
    """Run a step whose weights are written to, past their versions, before its backward."""
    out = call()
    model.up.weight.data.mul_(0.5)
    try:
        out.sum().backward()
    finally:
        model.up.weight.data.mul_(2)


ENGINES = pytest.mark.parametrize("engine", ["recipe", "contexts"])


def _policy(engine: str) -> Any:
    """A policy for which "auto" takes this engine; the first weight is read again under it."""
    if engine == "recipe":
        return recompute_all()

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
        return op is torch.ops.aten.silu.default

    return policy


@accelerated
@ENGINES
def test_accelerator_compares_bits_in_first_step_only(engine: str, equal: Any) -> None:
    """A write that no version shows is an error in the first step, and not looked for later."""
    policy = _policy(engine)
    model, x = _model(KIND)
    plain = _gradients(model, x, lambda: model(x))
    call = functools.partial(checkpoint, model, x, policy=policy)
    assert report(model, x, policy=policy).engine == engine
    with pytest.raises(MutationError):
        _written(model, call)
    for _ in range(4):
        assert equal(_gradients(model, x, call), plain)
    _written(model, call)


@accelerated
@ENGINES
def test_accelerator_checks_versions_in_every_step(engine: str) -> None:
    """A write that a version shows is refused whenever it is made."""
    model, x = _model(KIND)
    call = functools.partial(checkpoint, model, x, policy=_policy(engine))
    for _ in range(4):
        out = call()
        with torch.no_grad():
            model.up.weight.add_(0.0)
        with pytest.raises(MutationError):
            out.sum().backward()
        call().sum().backward()


@accelerated
@ENGINES
def test_named_engine_compares_bits_in_every_step(engine: str) -> None:
    """Who names an engine has it compare always, on every device."""
    model, x = _model(KIND)
    call = functools.partial(checkpoint, model, x, policy=_policy(engine), engine=engine)
    for _ in range(4):
        with pytest.raises(MutationError):
            _written(model, call)
        call().sum().backward()


@ENGINES
def test_cpu_compares_bits_in_every_step(engine: str) -> None:
    """There comparisons cost little."""
    model, x = _model(torch.device("cpu"))
    call = functools.partial(checkpoint, model, x, policy=_policy(engine))
    for _ in range(4):
        with pytest.raises(MutationError):
            _written(model, call)
        call().sum().backward()


def test_proofs_are_made_in_first_step_of_accelerator(
    monkeypatch: pytest.MonkeyPatch, equal: Any
) -> None:
    """Also of a forward inside others' hooks, which may run again and must save the same."""
    monkeypatch.setattr(checkpoint_module, "is_accelerator", lambda device: True)
    asked: list[Any] = []
    for module in (_region, _repeated):
        made = module.proof_of
        monkeypatch.setattr(
            module, "proof_of", lambda tensor, made=made: asked.append(tensor) or made(tensor)
        )
    model, x = _model(torch.device("cpu"))
    plain = _gradients(model, x, lambda: model(x))
    call = functools.partial(checkpoint, model, x, policy=recompute_all())

    def proofs(run: Callable[[], Tensor]) -> bool:
        asked.clear()
        assert equal(_gradients(model, x, run), plain)
        return bool(asked)

    def inside() -> Tensor:
        return torch_checkpoint(call, use_reentrant=False)

    assert [proofs(call) for _ in range(5)] == [True, False, False, False, False]
    assert [proofs(inside) for _ in range(2)] == [True, True]


@torch.library.custom_op("sac_policies_tests::swiglu", mutates_args=())
def _swiglu(a: Tensor, b: Tensor) -> Tensor:
    return F.silu(a) * b


@_swiglu.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return torch.empty_like(a)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _swiglu_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    a, b = ctx.saved_tensors
    s = torch.sigmoid(a)
    return grad * b * (s + a * s * (1 - s)), grad * a * s


_swiglu.register_autograd(_swiglu_backward, setup_context=_save)


class _Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.up, self.gate = nn.Linear(64, 256, bias=False), nn.Linear(64, 256, bias=False)
        self.down = nn.Linear(256, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(_swiglu(self.gate(h), self.up(h)))


def _kept_bytes(call: Callable[[], Tensor]) -> int:
    """Bytes that a forward leaves allocated, its output among them, after two steps."""
    for _ in range(2):
        call().sum().backward()
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as found:
        out = call()
    kept = sum(event.self_cpu_memory_usage for event in found.key_averages())
    del out
    return kept


def test_custom_operator_keeps_no_more_than_torchs_sac(equal: Any) -> None:
    """No rule rebuilds its output, which a product saves; the forward can make it again."""
    torch.manual_seed(0)
    model, x = _Fused(), torch.randn(512, 64, requires_grad=True)
    policy = save_ops(MATMULS)
    torchs = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    call = functools.partial(checkpoint, model, x, policy=policy)
    sac = functools.partial(torch_checkpoint, model, x, use_reentrant=False, context_fn=torchs)
    assert report(model, x, policy=policy).engine == "recipe"
    assert _kept_bytes(call) <= _kept_bytes(sac)
    assert report(model, x, policy=policy).engine == "contexts"
    assert equal(_gradients(model, x, call), _gradients(model, x, lambda: model(x)))


def test_small_custom_operator_leaves_engine_to_recipe() -> None:
    """Where little is kept for it, one forward costs less than two."""

    class Model(_MLP):
        def forward(self, x: Tensor) -> Tensor:
            scale = _swiglu(x[:1, :1], x[:1, :1])
            return super().forward(x) * scale

    model, x = Model(), torch.randn(64, 128, requires_grad=True)
    for _ in range(2):
        checkpoint(model, x, policy=recompute_all()).sum().backward()
    assert report(model, x, policy=recompute_all()).engine == "recipe"


class _Wrapped(Tensor):
    """A tensor that wraps another, as those of quantization and parallelism do."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, requires_grad=inner.requires_grad
        )

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(parts: Any, meta: Any, size: Any, stride: Any) -> Any:
        return _Wrapped(parts["inner"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def inner(value: Any) -> Any:
            return value.inner if isinstance(value, cls) else value

        def wrapped(value: Any) -> Any:
            return cls(value) if isinstance(value, Tensor) else value

        map_all = torch.utils._pytree.tree_map
        out = func(*map_all(inner, args), **map_all(inner, kwargs or {}))
        return map_all(wrapped, out)


def _wrap(model: nn.Module) -> None:
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            wrapped = nn.Parameter(_Wrapped(parameter.detach()))
            module._parameters[name] = wrapped


@pytest.mark.parametrize("place", ["parameters", "argument", "keyword", "later"])
def test_wrapper_subclass_runs_under_contexts(place: str) -> None:
    """From the first forward on that has one, wherever it lies."""
    model, x = _model(torch.device("cpu"))
    policy = save_ops(MATMULS)
    assert report(model, x, policy=policy).engine == "recipe"
    if place == "later":
        checkpoint(model, x, policy=policy).sum().backward()
    plain = model(x)
    if place in ("parameters", "later"):
        _wrap(model)
    given = _Wrapped(x.detach()).requires_grad_() if place in ("argument", "keyword") else x
    if place == "keyword":
        out = checkpoint(model, policy=policy, x=given)
        found = report(model, policy=policy, x=given)
    else:
        out = checkpoint(model, given, policy=policy)
        found = report(model, given, policy=policy)
    assert (found.engine, torch.equal(out.inner, plain)) == ("contexts", True)
    assert "tensor subclasses" in found.why
    out.sum().backward()


def test_nested_tensor_stays_with_recipe() -> None:
    """It wraps others, and its values have rules."""
    parts = [torch.randn(3, 128), torch.randn(5, 128)]
    x = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
    assert report(_MLP(), x, policy=save_ops(MATMULS)).engine == "recipe"


ONE_RANK = """
import gc, json, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from sac_policies import MATMULS, checkpoint, recompute_all, save_ops

# One rank: memory that gloo frees on its own threads is not in a profile.
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
found = {}
mesh = init_device_mesh("cpu", (1,))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 512, bias=False), nn.Linear(512, 64, bias=False)

    def forward(self, x):
        return self.b(F.silu(self.a(x)))


torch.manual_seed(0)
model = parallelize_module(MLP(), mesh, {"a": ColwiseParallel(), "b": RowwiseParallel()})
x = torch.randn(512, 64, requires_grad=True)


def kept(call):
    call().sum().backward()
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as p:
        out = call()
    return sum(event.self_cpu_memory_usage for event in p.key_averages())


def gradients(call):
    found = torch.autograd.grad(call().square().sum(), [x, *model.parameters()])
    return [getattr(each, "to_local", lambda each=each: each)() for each in found]


policies = {"matmuls": save_ops(MATMULS), "nothing": recompute_all()}
plain = gradients(lambda: model(x))
found["kept"] = {"plain": kept(lambda: model(x))}
found["equal"] = {}
for name, policy in policies.items():
    def call(policy=policy):
        return checkpoint(model, x, policy=policy)
    found["kept"][name] = kept(call)
    found["equal"][name] = all(map(torch.equal, gradients(call), plain))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        a, b = self.up(self.norm(x)).chunk(2, -1)
        return x + self.down(torch.cat([a * b, b], -1))


class Region(nn.Module):
    def __init__(self, block, options):
        super().__init__()
        self.block, self.options = block, options

    def forward(self, x):
        return checkpoint(self.block, x, **self.options) if self.options else self.block(x)


def sharded(**options):
    torch.manual_seed(0)
    net = nn.Sequential(*(Region(Block(), options) for _ in range(2)))
    for region in net:
        fully_shard(region.block.up, mesh=mesh)
        fully_shard(region, mesh=mesh)
    fully_shard(net, mesh=mesh)
    torch.manual_seed(1)
    found = []
    for _ in range(3):
        net(torch.randn(32, 32)).square().sum().backward()
        found += [p.grad.full_tensor() for p in net.parameters()]
        net.zero_grad()
    return found


plain = sharded()
found["nested units"] = {
    f"{name} {engine}": all(map(torch.equal, plain, sharded(policy=policy, engine=engine)))
    for name, policy in policies.items()
    for engine in ("auto", "recipe")
}
dist.destroy_process_group()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def one_rank() -> Any:
    """What a process found that is a process group alone."""
    done = subprocess.run(
        [sys.executable, "-c", ONE_RANK], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.dist
def test_tensor_parallel_region_keeps_what_policy_says(one_rank: dict[str, Any]) -> None:
    """Where each weight is a DTensor: less than plain, and the gradients of plain."""
    kept = one_rank["kept"]
    assert kept["nothing"] < kept["matmuls"] < kept["plain"]
    assert one_rank["equal"] == {"matmuls": True, "nothing": True}


@pytest.mark.dist
def test_fsdp_unit_in_region_gives_plain_gradients(one_rank: dict[str, Any]) -> None:
    """The unit frees its parameters before the region ends: nothing reads them there."""
    units = one_rank["nested units"]
    assert len(units) == 4
    assert [way for way, same in units.items() if not same] == []
