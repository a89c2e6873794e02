"""Compiled regions with a policy: saved operators are in the forward graph only."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy

from torchparts_conformance import requirement
from torchparts_conformance.cases.sac_policies._graphs import (
    aten,
    compile_kept,
    count,
    products,
    run_compiled,
    square,
)

PRODUCTS = (aten.mm.default,)


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    torch.compiler.reset()


def _policy(save=(), recompute=()):
    def policy(ctx, op, *args, **kwargs):
        if op in save:
            return CheckpointPolicy.MUST_SAVE
        if op in recompute:
            return CheckpointPolicy.MUST_RECOMPUTE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def _save_products():
    return _policy(save=PRODUCTS)


def _products(x, y):
    return torch.sigmoid(torch.matmul(torch.matmul(x, y), y)) * y


@requirement(
    "SP-014",
    "A policy function given to `context_fn` MUST decide which products are recomputed: such a "
    "product is in backward once more than a saved one.",
    source="test_compile_selective_checkpoint_must_recompute",
)
@pytest.mark.parametrize(
    ("lists", "in_backward"), [({"recompute": PRODUCTS}, 3), ({"save": PRODUCTS}, 2)]
)
def test_function_decides_what_is_recomputed(part, device, lists, in_backward):
    """A recomputed product is in backward once more than a saved one."""
    context_fn = part.context_fn(_policy(**lists))

    def body(x):
        return torch.sigmoid(torch.matmul(x, x))

    def fn(x):
        return torch.utils.checkpoint.checkpoint(
            body, x, use_reentrant=False, context_fn=context_fn
        )

    assert products(fn, square(device)) == (1, in_backward)


@requirement(
    "SP-015",
    "Products that a policy function saves MUST NOT be recomputed in the compiled backward.",
    source="test_compile_selective_checkpoint_must_not_recompute_gemm",
)
def test_function_saves_products(part, device):
    """Saved products are not in backward: two forward, four gradients."""
    policy = _save_products()

    def fn(x, y):
        return part.checkpoint(_products, x, y, policy=policy)

    assert products(fn, square(device), square(device)) == (2, 4)


@requirement(
    "SP-029",
    "A list of operators MUST be accepted as a policy that saves these operators.",
    source="torch.utils.checkpoint.create_selective_checkpoint_contexts",
    quote="If a list of operations is provided, it is equivalent to a policy",
)
def test_list_saves_products(part, device):
    """A list of operators saves these operators."""
    policy = list(PRODUCTS)

    def fn(x, y):
        return part.checkpoint(_products, x, y, policy=policy)

    assert products(fn, square(device), square(device)) == (2, 4)


class _Pair(torch.Tensor):
    """A tensor subclass that applies every operator to two tensors."""

    @staticmethod
    def __new__(cls, a, b):
        return torch.Tensor._make_wrapper_subclass(
            cls, a.shape, dtype=a.dtype, device=a.device, requires_grad=a.requires_grad
        )

    def __init__(self, a, b):
        self.a, self.b = a, b

    def __repr__(self):
        return f"_Pair({self.a}, {self.b})"

    def __tensor_flatten__(self):
        return ["a", "b"], None

    @staticmethod
    def __tensor_unflatten__(inner, meta, size, stride):
        return _Pair(inner["a"], inner["b"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def pick(side):
            return torch.utils._pytree.tree_map_only(cls, lambda t: getattr(t, side), args)

        left, right = (func(*pick(side), **(kwargs or {})) for side in "ab")
        return cls(left, right) if isinstance(left, torch.Tensor) else left


@requirement(
    "SP-016",
    "If a tensor subclass holds two tensors, the operators of both MUST be saved.",
    source="test_compile_selective_checkpoint_tensor_subclass",
)
def test_tensor_subclass(part, device):
    """Every product runs and is saved twice."""
    policy = _save_products()

    def fn(x, y):
        return part.checkpoint(_products, x, y, policy=policy)

    x, y = (_Pair(torch.randn(4, 4, device=device), torch.randn(4, 4, device=device)) for _ in "xy")
    graphs = run_compiled(fn, x.requires_grad_(), y.requires_grad_(), check=False)
    assert count(graphs.forward, aten.mm.default) == 4
    assert count(graphs.backward, aten.mm.default) == 8


@requirement(
    "SP-017",
    "A policy function with state MUST be called once for each operator, in order.",
    source="test_compile_selective_checkpoint_custom_rule",
)
def test_rule_with_state(part, device):
    """A function that counts products saves all but the second, in forward and recomputation."""

    def make():
        seen = {False: 0, True: 0}

        def policy(ctx, op, *args, **kwargs):
            if op is aten.mm.default:
                seen[ctx.is_recompute] += 1
            return op in PRODUCTS and seen[ctx.is_recompute] != 2

        return policy

    def context_fn():
        return part.context_fn(make())()

    def body(x, y):
        return torch.sigmoid(torch.sigmoid(torch.matmul(torch.matmul(x, y) * y, y) * y))

    def fn(x, y):
        return torch.utils.checkpoint.checkpoint(
            body, x, y, use_reentrant=False, context_fn=context_fn
        )

    assert products(fn, square(device), square(device)) == (2, 5)


def _make_contexts(context_fn, ops):
    return context_fn(_policy(save=tuple(ops)))()


@requirement(
    "SP-018",
    "A `functools.partial` MUST be accepted as `context_fn`.",
    source="test_compile_selective_checkpoint_partial_ctx_fn",
)
def test_partial_context_fn(part, device):
    """A partial of a function that makes the contexts is traced."""
    context_fn = functools.partial(_make_contexts, part.context_fn, list(PRODUCTS))

    def fn(x, y):
        return torch.utils.checkpoint.checkpoint(
            _products, x, y, use_reentrant=False, context_fn=context_fn
        )

    assert products(fn, square(device), square(device)) == (2, 4)


@requirement(
    "SP-019",
    "Operators between saved ones MUST be recomputed, and the saved ones MUST NOT be.",
    source="test_compile_selective_checkpoint_outplace_op",
)
def test_out_of_place_operators(part, device):
    """Saved products and a saved sigmoid are not in backward; operators between them are."""
    policy = _policy(save=(aten.mm.default, aten.sigmoid.default))

    def body(x, y):
        return torch.sigmoid(torch.selu(torch.matmul(torch.matmul(x, y), y))).relu()

    def fn(x, y):
        return part.checkpoint(body, x, y, policy=policy)

    graphs = run_compiled(fn, square(device), square(device))
    assert count(graphs.forward, aten.mm.default) == 2
    assert count(graphs.forward, aten.sigmoid.default) == 1
    assert count(graphs.backward, aten.mm.default) == 4
    assert count(graphs.backward, aten.sigmoid.default) == 0


@requirement(
    "SP-020",
    "In-place operators between saved ones MUST NOT change gradients.",
    source="test_compile_selective_checkpoint_inplace_op",
)
def test_in_place_operators(part, device):
    """In-place operators between saved ones change nothing."""
    policy = _policy(save=(aten.mm.default, aten.sigmoid.default))

    def body(x, y):
        return torch.sigmoid(torch.selu_(torch.matmul(torch.matmul(x, y), y))).mul(2).relu_()

    def fn(x, y):
        return part.checkpoint(body, x, y, policy=policy)

    torch.compiler.reset()
    x, y = square(device), square(device)
    plain = torch.autograd.grad(body(x, y).sum(), (x, y))
    compiled = torch.compile(fn, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(torch.autograd.grad(compiled(x, y).sum(), (x, y)), plain)


@requirement(
    "SP-021",
    "A random operator between saved ones MUST use the numbers of forward, with and without "
    "`preserve_rng_state`.",
    source="test_compile_selective_checkpoint_random_op",
)
@pytest.mark.parametrize("preserve_rng_state", [True, False])
def test_random_operator_between_saved_ones(part, device, preserve_rng_state):
    """Saved sigmoids around a dropout: backward has no sigmoid, and uses forward's mask."""
    policy = _policy(save=(aten.sigmoid.default,))

    def body(x):
        return torch.sigmoid(torch.dropout(torch.sigmoid(x), p=0.5, train=True))

    def fn(x):
        return part.checkpoint(body, x, policy=policy, preserve_rng_state=preserve_rng_state)

    compiled, graphs = compile_kept(fn)
    x = square(device)
    out = compiled(x)
    found = torch.autograd.grad(out.sum(), x)
    again = torch.sigmoid(torch.sigmoid(x) * (out != 0.5) * 2)
    torch.testing.assert_close(found, torch.autograd.grad(again.sum(), x))
    assert count(graphs.forward, aten.sigmoid.default) == 2
    assert count(graphs.backward, aten.sigmoid.default) == 0


class _NoMode:
    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None


def _not_modes():
    return _NoMode(), _NoMode()


@requirement(
    "SP-022",
    "Contexts that are not dispatch modes MUST be refused under compilation, with torch's message.",
    source="test_compile_selective_checkpoint_invalid_context",
)
def test_contexts_that_are_not_modes_are_refused(part, device):
    """Under compilation, contexts have to be dispatch modes; the message says so."""

    def fn(x, y):
        return part.checkpoint(_products, x, y, use_reentrant=False, context_fn=_not_modes)

    with pytest.raises(Exception, match="must generate a tuple of two `TorchDispatchMode`s"):
        torch.compile(fn, backend="aot_eager", fullgraph=True)(square(device), square(device))


class _Wrapped(nn.Module):
    """A checkpointed module, like one of a checkpoint wrapper."""

    def __init__(self, part, inner, policy) -> None:
        super().__init__()
        self.inner, self.policy, self.checkpoint = inner, policy, part.checkpoint

    def forward(self, x):
        return self.checkpoint(self.inner, x, policy=self.policy)

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)


class _Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.c = 2

    def forward(self, x):
        return torch.cos(self.linear(torch.sin(x))) * self.c


@requirement(
    "SP-027",
    "A checkpointed module MUST compile to one graph with eager's result.",
    source="test_distributed_utils_checkpoint_wrapper",
)
def test_wrapped_module_under_compile(part, device):
    """It compiles to one graph with eager's result."""
    torch.compiler.reset()
    module = _Wrapped(part, _Inner().to(device), list(PRODUCTS))
    x = torch.randn(4, 4, device=device)
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), module(x))


@requirement(
    "SP-028",
    "Reading attributes through the wrapper of a checkpointed module MUST NOT break the graph.",
    source="test_dynamo_does_not_trace_getattr_as_top_frame",
)
def test_attributes_of_a_wrapped_module_do_not_break_the_graph(part, device):
    """Reading attributes through a wrapper does not break the graph."""
    torch.compiler.reset()
    linear = nn.Linear(1, 1, device=device)
    module = _Wrapped(part, nn.Sequential(linear, linear), list(PRODUCTS))
    module.inner.a = torch.ones(1, 1, device=device)

    def fn(x):
        return module(x) * module.a

    x = torch.randn(1, 1, device=device)
    torch.testing.assert_close(torch.compile(fn, backend="eager", fullgraph=True)(x), fn(x))
