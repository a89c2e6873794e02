"""Recipes whose operands nobody saved: found at edges, counted, compared with the forward."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from sac_policies import RecomputeError, _torch_compat, checkpoint, save_ops
from sac_policies.engines.recipe import _edges, _sources

from ._recipe import TABLE, Counts, W, bytes_held, is_plain, leaf, run

aten = torch.ops.aten

pytestmark = pytest.mark.filterwarnings("ignore::sac_policies.UnmatchedEntryWarning")


FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda t: (t + t.sin()).sin(),
    "sum of a sum": lambda t: ((t - t.cos()) + t.sin()).cos(),
    "product with a constant": lambda t: (t.sin() * TABLE).sin(),
    "quotient by a number": lambda t: (t.sin() / 0.3).sin(),
    "number times": lambda t: (0.7 * (t + t.cos())).sin(),
    "rotary": lambda t: torch.cat([-t[:, 3:], t[:, :3]], -1).mul(TABLE).add(t).sin(),
    "stack": lambda t: torch.stack([t, t.cos()], 1).sin(),
    "tanh": lambda t: (t @ W).tanh() @ W,
    "in-place relu": lambda t: (t @ W).relu_() @ W,
    "in-place relu of an in-place sum": lambda t: (t @ W).add_(t.sin()).relu_() @ W,
    "sigmoid and exp": lambda t: (t @ W).sigmoid().exp() @ W,
    "softmax": lambda t: (t @ W).softmax(-1) @ W,
    "log softmax": lambda t: (t @ W).log_softmax(0) @ W,
    "square root": lambda t: (t.square() + t.square()).sqrt().sin(),
    "reshaped": lambda t: (t @ W).view(6, 2, 3).transpose(0, 1).reshape(2, 18).sin(),
    "contiguous": lambda t: (t @ W).t().contiguous().sin(),
    "copied, then scaled": lambda t: (t.cos().t().contiguous() * 2).sin(),
    "transposed copy": lambda t: (t @ W).t().contiguous().t().sin(),
    "cast": lambda t: (t @ W).double().sin(),
    "copied part": lambda t: t.sin()[1:4, 2:].to(torch.float32, copy=True).cos(),
    "views in between": lambda t: (t[1:, None].squeeze(1).unsqueeze(0) + t[:5]).sin(),
    "split": lambda t: (t.sin().split(2)[1] + t.chunk(3, -1)[2].t()[:2]).sin(),
    "mean": lambda t: (t - t.mean(-1, keepdim=True)).sin(),
    "total": lambda t: (t - t.sum()).sin(),
    "largest": lambda t: (t - t.max(-1, keepdim=True)[0]).exp(),
    "top": lambda t: (t.topk(2)[0] + t[:, :2]).sin(),
    "rows": lambda t: (t.cos()[torch.tensor([2, 0, 2])] + t[:3]).sin(),
    "where": lambda t: (torch.where(t.detach() > 0, t.sin(), t) + t).sin(),
    "attention": lambda t: _attention((t @ W).view(1, 1, 6, 6))[0, 0] @ W,
    "cumulative": lambda t: (t.cumsum(0) + t).sin(),
    "frozen product": lambda t: ((t @ W.detach()) + t).sin(),
    "hooked": lambda t: _hooked(t + t.cos()).sin(),
    "in place in between": lambda t: ((t + t.cos()).mul_(2).add_(t) - t).sin(),
}  # fmt: skip


def _attention(y: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(y, y, y)


def _hooked(y: torch.Tensor) -> torch.Tensor:
    y.register_hook(lambda grad: grad * 2)
    return y


BY_A_NUMBER = {"quotient by a number", "number times", "copied, then scaled", "in place in between"}
"""Kept before torch 2.13: it does not say there that a number was saved without hooks."""


def _tells_of_hooks() -> bool:
    x = leaf(1)
    return hasattr((x * x).grad_fn._raw_saved_self, "unpack_hook")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_value_without_saved_operands_is_rebuilt(name: str) -> None:
    """Nothing of the region is held, and gradients are bitwise those of no checkpointing."""
    x = leaf(6, 6)
    if name in BY_A_NUMBER and not _tells_of_hooks():
        assert is_plain(FUNCTIONS[name], x)
        return
    rows = 24 if name == "attention" else 0  # what attention keeps of each row besides
    masks = {"top": 96, "largest": 48, "where": 36}.get(name, 0)
    assert bytes_held(FUNCTIONS[name], x) == rows + masks
    assert is_plain(FUNCTIONS[name], x)


@pytest.mark.parametrize("give", [True, False])
def test_value_of_the_caller_is_read_where_the_region_was_given_it(give: bool) -> None:
    """An argument is kept for replays; what a closure holds is known only once it was saved."""
    x, given = leaf(6, 6), leaf(6, 6)
    made = given + given

    def body(t: torch.Tensor, u: Any = None) -> torch.Tensor:
        return (t + (made if u is None else u[0])).sin()

    args = (x, [made]) if give else (x,)
    assert bytes_held(body, *args) == (0 if give else 144)
    expected = torch.autograd.grad(body(*args).sum(), [x, given], retain_graph=True)
    found = torch.autograd.grad(run(body, *args).sum(), [x, given], retain_graph=True)
    assert all(map(torch.equal, expected, found))


def test_what_a_policy_saves_is_not_replayed_for_others() -> None:
    """The sum of a saved product is kept in its place; no product runs again."""
    x = leaf(6, 6)

    def body(t: torch.Tensor) -> torch.Tensor:
        return (t @ W + t).sin()

    assert bytes_held(body, x, policy=save_ops("aten.mm")) == 144
    assert bytes_held(body, x) == 0
    out = run(body, x, policy=save_ops("aten.mm"))
    with Counts() as counts:
        out.sum().backward()
    assert counts.ops[aten.mm.default] == 2


@pytest.mark.parametrize("depth", [2, _edges.MOST_EDGES, 3 * _edges.MOST_EDGES])
@pytest.mark.parametrize("saved", [True, False])
def test_long_chains_are_cut(depth: int, saved: bool) -> None:
    """A replay follows so many edges at most: the stack of no backward runs over."""
    x = leaf(6, 6)

    def body(t: torch.Tensor) -> torch.Tensor:
        y, total = t, t.sin()
        for _ in range(depth):
            y = y + t
            total = total + y.sin() if saved else total
        return total + y.sin()

    assert is_plain(body, x)
    held = bytes_held(body, x)
    assert held <= 144 * (1 + depth // _edges.MOST_EDGES) * 2
    assert (held > 0) is (depth > _edges.MOST_EDGES)


def test_nothing_is_held_after_backward() -> None:
    """Kept arguments go with the recipes that need them; hooks hold nothing of the forward."""
    x = leaf(64, 64)
    given = x.exp()
    out = run(lambda t: (t + t).sin() + (t - t).tanh(), given)
    storage = weakref.ref(given.untyped_storage())
    del given
    gc.disable()
    try:
        out.sum().backward()
        # exp keeps its result until its own backward, which has been.
        assert storage() is None
    finally:
        gc.enable()


def test_region_that_raises_leaves_nothing() -> None:
    """Neither in forward nor in backward."""
    x = leaf(6, 6)

    def fails(t: torch.Tensor) -> torch.Tensor:
        (t + t).sin().tanh()
        raise ArithmeticError

    def alive() -> int:
        gc.collect()
        return sum(type(each) is _sources.Edges and bool(each.cells) for each in gc.get_objects())

    before = alive()
    with pytest.raises(ArithmeticError):
        run(fails, x)
    assert alive() == before
    assert is_plain(FUNCTIONS["tanh"], x)


def test_retained_graph_and_double_backward_are_plains() -> None:
    """Values are made again in each backward, with equal bits."""
    x = leaf(6, 6)

    def body(t: torch.Tensor) -> torch.Tensor:
        y = (t + t @ W).tanh()
        return (y * TABLE + t).softmax(-1) * y

    out, plain = run(body, x), body(x)
    for _ in range(3):
        found = torch.autograd.grad(out.sum(), x, retain_graph=True)
        expected = torch.autograd.grad(plain.sum(), x, retain_graph=True)
        assert torch.equal(found[0], expected[0])

    def second(y: torch.Tensor) -> torch.Tensor:
        (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), x)[0]

    assert torch.equal(second(run(body, x)), second(body(x)))


def test_several_threads_may_run_backward_at_once() -> None:
    """Each over its own graph of shared parameters."""
    x = leaf(6, 6)
    (expected,) = torch.autograd.grad(FUNCTIONS["rotary"](x).sum(), x)
    found: list[bool] = []

    def work() -> None:
        for _ in range(20):
            (grad,) = torch.autograd.grad(run(FUNCTIONS["rotary"], x).sum(), x)
            found.append(torch.equal(grad, expected))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert found == [True] * 80


@pytest.mark.parametrize("view", [False, True])
def test_what_another_thread_made_is_not_the_regions(view: bool) -> None:
    """Each thread numbers its nodes for itself; a checkpoint runs the region again in this one."""
    x = leaf(6, 6)

    def attended(t: torch.Tensor) -> torch.Tensor:
        query, key, value = (each[None, None] for each in (t, t.sin(), t.cos()))
        return F.scaled_dot_product_attention(query, key, value)[0, 0] + t

    def given() -> torch.Tensor:
        return x.exp().t()[1:] if view else x.exp()

    expected = torch.autograd.grad(attended(given()).square().sum(), x)[0]
    for _ in range(2):
        out = torch_checkpoint(run, attended, given(), use_reentrant=False).square().sum()
        with ThreadPoolExecutor(1) as pool:
            (found,) = pool.submit(torch.autograd.grad, out, x).result()
        assert torch.equal(found, expected)


@pytest.mark.parametrize("inside", ["recipe", "contexts", "torch"])
def test_regions_inside_one_another(inside: str) -> None:
    """Sums, results and rotations across the edge of another region."""
    x = leaf(6, 6)

    def inner(t: torch.Tensor) -> torch.Tensor:
        return (t @ W + t).tanh() + t

    def call(t: torch.Tensor) -> torch.Tensor:
        if inside == "torch":
            return torch_checkpoint(inner, t, use_reentrant=False)
        return checkpoint(inner, t, policy=save_ops("aten.mm"), engine=inside)

    def outer(t: torch.Tensor, middle: Any = call) -> torch.Tensor:
        y = (t + t.cos()).exp()
        return ((middle(y) + y).sigmoid() - t).sin()

    expected = torch.autograd.grad(outer(x, inner).sum(), x)
    for _ in range(2):
        assert torch.equal(torch.autograd.grad(run(outer, x).sum(), x)[0], expected[0])


def test_hooks_around_have_what_is_kept() -> None:
    """An argument that replays read passes through them as well."""
    x = leaf(6, 6)
    with save_on_cpu():
        given = x.exp()
        out = run(lambda t: (t + t).sin() + (t - t).tanh(), given)
    (found,) = torch.autograd.grad(out.sum(), x)
    given = x.exp()
    plain = (given + given).sin() + (given - given).tanh()
    assert torch.equal(found, torch.autograd.grad(plain.sum(), x)[0])


def test_result_read_outside_of_its_backward_is_refused() -> None:
    """No recipe may hold the node that holds it."""
    out = run(torch.tanh, leaf(6, 6))
    with pytest.raises(RecomputeError, match=r"result of aten\.tanh\.default is read outside"):
        out.grad_fn._saved_result  # noqa: B018


def test_result_is_kept_where_torch_does_not_tell_the_running_node(monkeypatch) -> None:
    """An older torch: nothing is refused in backward."""
    monkeypatch.setattr(_torch_compat, "KNOWS_CURRENT_NODE", False)
    x = leaf(6, 6)
    assert bytes_held(torch.tanh, x) == 144
    assert is_plain(FUNCTIONS["tanh"], x)


def test_graph_of_results_is_freed_without_collector() -> None:
    """A result that its own node saves makes no cycle."""
    gc.disable()
    try:
        out = run(FUNCTIONS["tanh"], leaf(6, 6))
        alive = weakref.ref(out.grad_fn.metadata.setdefault("probe", Counts()))
        del out
        assert alive() is None
    finally:
        gc.enable()


def test_batch_of_a_block_is_freed_as_by_full_checkpointing() -> None:
    """A residual block in a row of others: everything goes but what the next is given."""
    block = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))
    assert bytes_held(lambda t: t + block(t), torch.randn(8, 16, requires_grad=True)) == 0
