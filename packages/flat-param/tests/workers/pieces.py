"""Parameters, gradients and state of a sharded module answer torch's functions as whole ones do."""

from __future__ import annotations

import contextlib
import math
import sys
import types
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import product
from typing import Any

import torch
import torch._dynamo  # wraps torch.manual_seed
import torch.distributed as dist
from _harness import options_of, raises, same_bits, stepping, whole_state
from _whole import same_grads
from safetensors.torch import save
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

import flat_param

BOUNDARIES = ("element", "row", "tensor")


def _cautious(param: Tensor, state: dict[str, Any], lr: float) -> None:
    moment = state.setdefault("moment", torch.zeros_like(param))
    moment.lerp_(param.grad, 0.1)
    mask = (moment * param.grad > 0).to(param.grad.dtype)
    mask.div_(mask.mean().clamp_(min=1e-3))
    param.add_(moment * mask, alpha=-lr)


CautiousSGD = stepping(_cautious)
"""Reduces a mask, as optimizers with `caution=True` do."""
RootMeanSquare = stepping(
    lambda param, *_: param.sub_(param.grad * (param.norm() / param.numel() ** 0.5))
)
"""Divides a norm by a power of the number of elements."""


def _scaled(param: Tensor, *_: Any) -> None:
    grad = param.grad / (param.grad.abs().max() + param.grad.std())  # type: ignore[union-attr]
    param.sub_(grad * (param.norm() / param.shape.numel() ** 0.5))


ScaledMeanSquare = stepping(_scaled)
"""Asks before that for values that no elements do not have, and for the number by the shape."""


class ByShape(torch.optim.SGD):
    """Steps matrices in another way than vectors, and tells them by their sizes."""

    def is_matrix(self, param: Tensor) -> bool:
        """As some versions of Muon do."""
        return len([size for size in param.shape if size > 1]) > 1

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                moment = self.state[param].setdefault("moment", torch.zeros(param.shape))
                moment.add_(param.grad)
                param.sub_(moment.sign() if self.is_matrix(param) else moment, alpha=0.01)


class BySize(ByShape):
    """Asks for a single size."""

    def is_matrix(self, param: Tensor) -> bool:
        """Of each dimension."""
        return param.dim() > 1 and param.size(1) > 1


class ByDimensions(ByShape):
    """Asks for dimensions only."""

    def is_matrix(self, param: Tensor) -> bool:
        """A piece has as many as its parameter."""
        return len(param.shape) > 1


def build() -> nn.Sequential:
    """Layers of sizes that ranks divide unevenly; ranks have no element of some biases."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 3))


def pair(**options: Any) -> tuple[nn.Sequential, nn.Sequential]:
    """The same module, plain and sharded."""
    reference, model = build(), build()
    for part in (model[0], model[2], model):
        flat_param.fully_shard(part, **options)
    return reference, model


def backward(*models: nn.Module, step: int = 0) -> None:
    """The same batch on each rank."""
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
    for model in models:
        model(x).square().mean().backward()


def tensors_of(reference: nn.Module, model: nn.Module) -> Iterator[tuple[Tensor, Any]]:
    """Parameters and gradients of both, and two entries of state dicts."""
    for whole, piece in zip(reference.parameters(), model.parameters(), strict=True):
        yield whole.detach(), piece
        yield whole.grad, piece.grad  # type: ignore[misc]
    state = model.state_dict()
    yield from ((reference.state_dict()[name], state[name]) for name in ("0.weight", "4.bias"))


REDUCTIONS: dict[str, Callable[[Any], Any]] = {
    **{
        name: (lambda t, name=name: getattr(t, name)())
        for name in ("sum", "mean", "norm", "max", "min", "amax", "amin", "std", "var", "nansum")
    },
    "prod": lambda t: t.prod(),
    "count": lambda t: (t > 0).sum(),
    "share": lambda t: (t > 0).float().mean(),
    "nonzero": lambda t: t.count_nonzero(),
    "finite": lambda t: torch.isfinite(t).all(),
    "any": lambda t: (t > 0.1).any(),
    "aminmax": lambda t: torch.stack([*torch.aminmax(t)]),
    "norm 1": lambda t: t.norm(1),
    "norm inf": lambda t: torch.linalg.vector_norm(t, math.inf),
    "foreach": lambda t: torch._foreach_norm([t, t * 2])[1],
    "foreach max": lambda t: torch._foreach_max([t])[0],
    "power": lambda t: t.detach().double().pow(2).sum(),
    "view": lambda t: t.flatten().abs().mean(),
    "histogram": lambda t: torch.histc(t, bins=5),
    "nan": lambda t: (t * math.nan).max(),
    "bfloat16": lambda t: t.bfloat16().mean(),
    "dot": lambda t: t.flatten().dot(t.flatten()),
}


def check_reductions_are_of_all_ranks(rank: int, world: int) -> None:
    """Of parameters, gradients, shards, and elementwise results of every dtype."""
    for boundary, way in (("element", "ZeRO-3"), ("element", "replicated")):
        reference, model = pair(boundary=boundary, **options_of(way))
        backward(reference, model)
        for whole, piece in tensors_of(reference, model):
            for name, call in REDUCTIONS.items():
                if name == "dot" and isinstance(piece, DTensor):
                    continue  # shards keep their shape when they are flattened
                expected, found = call(whole).float(), call(piece).float()
                near = torch.allclose(found, expected, rtol=1e-4, atol=1e-6, equal_nan=True)
                assert near, (name, found, expected)
            assert torch.equal(piece, piece.clone())
            assert not torch.equal(piece, piece + 1)


def check_whole_tensors_are_on_every_parameter(rank: int, world: int) -> None:
    """`full_tensor()` of parameters, gradients and state, cut in any way, is the plain one."""
    for boundary in BOUNDARIES:
        reference, model = pair(boundary=boundary)
        backward(reference, model)
        optimizer = torch.optim.AdamW(model.parameters())
        for whole, piece in zip(reference.parameters(), model.parameters(), strict=True):
            assert torch.equal(piece.full_tensor(), whole), boundary  # type: ignore[operator]
            assert piece.to_local().numel() == piece.numel()  # type: ignore[operator]
            if boundary == "element":
                assert torch.equal(piece.grad.full_tensor(), whole.grad)  # type: ignore[arg-type, union-attr, operator]
        optimizer.step()
        if boundary == "element":
            for param in model.parameters():
                moment = optimizer.state[param]["exp_avg"]
                assert torch.allclose(moment.full_tensor(), 0.1 * param.grad.full_tensor())  # type: ignore[union-attr, operator]


def check_initialisers_draw_the_whole(rank: int, world: int) -> None:
    """The same values as in one process, from the same seed."""

    def reset(module: nn.Module) -> None:
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()

    def by(name: str) -> Callable[[nn.Module], None]:
        def init(module: nn.Module) -> None:
            if isinstance(module, nn.Linear):
                getattr(nn.init, name)(module.weight)
                nn.init.zeros_(module.bias)

        return init

    def own(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(0.0, 0.02)
            nn.init.constant_(module.bias, 2.0)

    names = ("xavier_uniform_", "xavier_normal_", "kaiming_normal_", "kaiming_uniform_")
    more = ("trunc_normal_", "orthogonal_", "normal_", "uniform_", "ones_")
    for number, init in enumerate((reset, own, *map(by, names + more))):
        boundary = BOUNDARIES[number % 3]
        reference, model = pair(boundary=boundary)
        for each in (reference, model):
            torch.manual_seed(5)
            each.apply(init)
        same_bits(whole_state(model), dict(reference.state_dict()), init, boundary)
    # Each rank has all elements of a matrix, by chance.
    reference, model = (
        nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(world)]) for _ in range(2)
    )
    flat_param.fully_shard(model)
    for each in (reference, model):
        torch.manual_seed(5)
        each.apply(initialize_weights)
    same_bits(whole_state(model), dict(reference.state_dict()))
    reference, model = pair()
    noise = []
    for each in (reference, model):
        torch.manual_seed(6)
        noise.append([torch.randn_like(param) for param in each.parameters()])
    for whole, piece in zip(*noise, strict=True):
        assert torch.equal(piece.full_tensor(), whole)  # type: ignore[operator]


def initialize_weights(module: nn.Module) -> None:
    """A user's function, which reads shapes."""
    if isinstance(module, nn.Linear):
        nn.init.orthogonal_(module.weight, gain=module.weight.shape[1] ** 0.5)


COLLECTIVES = ("all_reduce", "broadcast", "all_gather", "functional")


def check_what_needs_the_whole_is_refused(rank: int, world: int) -> None:
    """In one sentence that names `full_tensor()`; also of copies, elementwise results, shards."""
    _, model = pair()
    backward(model)
    param: Any = model[0].weight
    shard = model.state_dict()["0.weight"]
    for tensor in (param, param.grad, param.detach() * 2, param.data.bool(), shard):
        calls: dict[str, Callable[[Any], Any]] = {
            "__getitem__": lambda t: t[0],
            "slice": lambda t: t[: t.shape[0]],
            "__setitem__": lambda t: t.__setitem__(0, 1),
            "numpy": lambda t: t.detach().numpy(),
            "tolist": lambda t: t.tolist(),
            "item": lambda t: t.item(),
            "sort": lambda t: t.sort(),
            "median": lambda t: t.median(),
            "cumsum": lambda t: t.cumsum(0),
            "argmax": lambda t: t.argmax(),
            "unbind": lambda t: list(t),
            "nonzero": lambda t: t.nonzero(),
            "roll": lambda t: t.roll(1),
            "safetensors": lambda t: save({"t": t}),
            "matmul": lambda t: t @ t.T,
            "all_reduce": lambda t: dist.all_reduce(t.data),
            "broadcast": lambda t: dist.broadcast(t.detach(), 0),
            "all_gather": lambda t: dist.all_gather([t.to_local()] * world, t),
            "functional": lambda t: functional.all_reduce(t, "sum", dist.group.WORLD),
        }
        if tensor is shard and torch.__version__ < "2.13":  # DTensor's own error
            calls = {name: call for name, call in calls.items() if name not in COLLECTIVES}
        for call in calls.values():
            text = "Call full_tensor() on every rank"
            raises(flat_param.FlatParamError, text, lambda c=call, t=tensor: c(t))
    text = "__set__ of .grad with a whole tensor was called with parameter 'weight' of unit '0'"
    raises(flat_param.ParameterError, text, lambda: setattr(param, "grad", param.full_tensor()))
    assert f"{param}" in repr(param) and f"{shard}" and f"{param.detach().norm():.4f}"
    assert "elements 0 to" in repr(param) or "no element" in repr(param) or rank
    raises(flat_param.StateError, "the loss was computed with it", param.norm().backward)
    raises(flat_param.StateError, "computes with it", lambda: param * torch.ones(1, 9, 9))


def check_whole_tensors_beside_pieces(rank: int, world: int) -> None:
    """They are compared; other functions refuse them, and say how to write them."""
    reference, model = pair()
    backward(reference, model)
    for whole, piece in tensors_of(reference, model):
        assert torch.allclose(piece, whole) and not torch.equal(piece, whole + 1)
    for whole, piece in zip(reference.parameters(), model.parameters(), strict=True):
        assert torch.equal(piece, whole) and torch.equal(whole, piece)
    grad: Any = model[0].weight.grad
    mask = reference[0].weight.detach() > 0
    text = "mul_ with a whole tensor was called with parameter 'weight' of unit '0'"
    for other in (mask, mask[0], mask[:, :1]):
        raises(flat_param.ParameterError, text, lambda other=other: grad.mul_(other))
    grad.copy_(grad.full_tensor() * mask)
    assert torch.allclose(grad.full_tensor(), reference[0].weight.grad * mask)  # type: ignore[operator]


def check_gradients_are_cleared_by_hand(rank: int, world: int) -> None:
    """As loops do that were written for old torch; `autograd.grad` is refused."""
    reference, model = pair()
    for each in (reference, model):
        backward(each)
        for param in each.parameters():
            param.grad.detach_().zero_()  # type: ignore[union-attr]
        backward(each, step=1)
    same_grads(model, reference)
    loss, params = model(torch.ones(2, 5)).sum(), list(model.parameters())
    text = "autograd.grad looks for parameter 'weight' of unit '0' in the graph"
    raises(flat_param.StateError, text, lambda: torch.autograd.grad(loss, params))
    loss.backward()


def snapshot() -> dict[tuple[str, ...], Any]:
    """Every function and method in the modules of torch that are loaded, and their closures."""
    found: dict[tuple[str, ...], Any] = {}
    kinds = (types.FunctionType, types.BuiltinFunctionType)
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "torch" and module is not None:
            for key, value in list(vars(module).items()):
                if issubclass(type(value), type) and value.__module__.startswith("torch"):
                    methods = {own: each for own, each in vars(value).items() if _is_code(each)}
                    found |= {(name, key, own): each for own, each in methods.items()}
                elif type(value) in kinds:
                    found[name, key] = value
    for where, value in list(found.items()):
        cells = value.__closure__ if isinstance(value, types.FunctionType) else None
        for index, cell in enumerate(cells or ()):
            with contextlib.suppress(ValueError):  # it is empty
                found[(*where, str(index))] = cell.cell_contents
    return found


def _is_code(value: Any) -> bool:
    return callable(value) or isinstance(value, (classmethod, property))


BEFORE = snapshot()


def check_nothing_of_torch_is_replaced(rank: int, world: int) -> None:
    """By `fully_shard`, a step, clipping, scaling and a state dict."""
    _, model = pair()
    optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(2, 5)).sum()).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.load_state_dict(optimizer.state_dict())
    after = snapshot()
    different = [name for name, value in BEFORE.items() if after.get(name) is not value]
    assert not different, different


def check_optimizers_train_as_on_whole_tensors(rank: int, world: int) -> None:
    """torch's elementwise ones, one by one, foreach and fused, and one that reduces a mask."""
    optim = torch.optim
    kinds: list[tuple[Any, dict[str, Any]]] = [
        *((kind, {}) for kind in (optim.SGD, optim.Adagrad, optim.Adam, optim.AdamW)),
        *((kind, {}) for kind in (optim.Adamax, optim.NAdam, optim.RAdam, optim.RMSprop)),
        *((kind, {}) for kind in (optim.ASGD, optim.Adadelta, optim.Rprop, CautiousSGD)),
        *((kind, {"foreach": True}) for kind in (optim.SGD, optim.Adam, optim.RMSprop)),
        *((kind, {"fused": True}) for kind in (optim.SGD, optim.AdamW, optim.Adagrad)),
    ]
    cases = [*product(kinds, ["element"]), *product(kinds[:4], ["tensor"])]
    for (kind, options), boundary in cases:
        reference, model = pair(boundary=boundary)
        optimizers = [kind(m.parameters(), lr=0.01, **options) for m in (reference, model)]
        for step in range(3):
            for each, optimizer in zip((reference, model), optimizers, strict=True):
                optimizer.zero_grad()
                backward(each, step=step)
                optimizer.step()
        same_bits(whole_state(model), dict(reference.state_dict()), kind, options, boundary)


def check_lbfgs_steps_over_all_ranks(rank: int, world: int) -> None:
    """Through products and norms of all gradients together; close, as sums are in other orders."""
    for search in (None, "strong_wolfe"):
        reference, model = pair()
        for each in (reference, model):
            optimizer = torch.optim.LBFGS(each.parameters(), max_iter=5, line_search_fn=search)

            def closure(each: Any = each, optimizer: Any = optimizer) -> Tensor:
                optimizer.zero_grad()
                loss: Tensor = each(torch.linspace(-1, 1, 20).view(4, 5)).square().mean()
                loss.backward()
                return loss

            for _ in range(3):
                optimizer.step(closure)
        for name, value in whole_state(model).items():
            assert torch.allclose(value, reference.state_dict()[name], atol=1e-4), (search, name)


def check_root_mean_squares_are_refused_before_a_step(rank: int, world: int) -> None:
    """`numel()` counts this rank's elements. On whole tensors it steps as on plain ones."""
    for kind in (RootMeanSquare, ScaledMeanSquare):
        _, model = pair()
        backward(model)
        before = whole_state(model)
        step = kind(model.parameters()).step
        raises(flat_param.ParameterError, "numel() counts the elements of this rank", step)
        same_bits(whole_state(model), before)
    reference, model = pair(boundary="tensor")
    backward(reference, model)
    for each in (reference, model):
        RootMeanSquare(each.parameters()).step()
    for name, value in whole_state(model).items():
        assert torch.allclose(value, reference.state_dict()[name])


def check_optimizers_that_read_sizes_are_refused_before_a_step(rank: int, world: int) -> None:
    """Those of a piece say nothing, unless it has whole tensors, or rows."""
    for kind in (ByShape, BySize):
        _, model = pair()
        backward(model)
        before = whole_state(model)
        step = kind(model.parameters(), lr=0.1).step
        raises(flat_param.ParameterError, f"{kind.__name__} reads sizes of parameter", step)
        same_bits(whole_state(model), before)
    for kind, boundary in ((ByDimensions, "element"), (ByShape, "tensor"), (BySize, "row")):
        reference, model = pair(boundary=boundary)
        backward(reference, model)
        for each in (reference, model):
            kind(each.parameters(), lr=0.1).step()
        same_bits(whole_state(model), dict(reference.state_dict()), kind, boundary)


def check_averages_of_parameters(rank: int, world: int) -> None:
    """torch's moving average, over lists of parameters and over state dicts."""
    reference, model = pair()
    averages = []
    for each in (reference, model):
        kept = [param.detach().clone() for param in each.parameters()]
        torch._foreach_add_(kept, 1.0)
        get_ema_multi_avg_fn(0.9)(kept, [param.detach() for param in each.parameters()], 1)
        averages.append(kept)
    for whole, piece in zip(*averages, strict=True):
        assert torch.equal(piece.full_tensor(), whole)  # type: ignore[operator]


def check_clipping_and_norms_of_any_boundary(rank: int, world: int) -> None:
    """torch's own `clip_grad_norm_` is right where each rank has some gradient; so is ours."""
    ways = (
        *(("element", None, 0.1), ("row", False, 0.1), ("tensor", None, 0.1)),
        *(("replicated", None, 0.1), ("element", None, 100.0)),
    )
    for (way, foreach, bound), order in product(ways, (1.0, 2.0, math.inf)):
        options = options_of(way) if way == "replicated" else {"boundary": way}
        reference, model, ours = (*pair(**options), pair(**options)[1])
        backward(reference, model, ours)
        norms = [
            nn.utils.clip_grad_norm_(each.parameters(), bound, order, foreach=foreach)
            for each in (reference, model)
        ]
        norms.append(ours.clip_grad_norm_(bound, order))  # type: ignore[operator]
        for norm, each in zip(norms[1:], (model, ours), strict=True):
            assert torch.isclose(norm, norms[0], rtol=1e-5), (way, order, norms)
            same_grads(each, reference)


def check_reduction_on_one_rank_alone_raises(rank: int, world: int) -> None:
    """After the timeout of the group, with a message that says who must call it."""
    group = dist.new_group(timeout=timedelta(seconds=3))
    mesh = DeviceMesh.from_group(group, "cpu")
    model = flat_param.fully_shard(nn.Linear(8, 8), mesh=mesh)
    if rank == 0:
        raises(flat_param.CommError, "Call it on every rank", model.weight.detach().sum)
    dist.barrier()


def check_searches_for_nodes_in_graphs_are_refused(rank: int, world: int) -> None:
    """Only unsharded parameters are in graphs. The first one is what zero-bubble pipelines do."""
    from torch.distributed.pipelining._backward import stage_backward_input

    _, model = pair()
    x = torch.ones(2, 5, requires_grad=True)
    loss, weight = model(x).sum(), model[0].weight
    for search in (
        lambda: stage_backward_input([loss], None, [x], model.parameters()),
        lambda: weight.expand_as(weight).grad_fn,
    ):
        raises(flat_param.StateError, "or use register_post_accumulate_grad_hook", search)
    loss.backward()
