"""Names of tensors and paths of modules, followed without a second forward."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.nn.modules import module as torchs_modules
from torch.utils._python_dispatch import TorchDispatchMode

from sac_policies import (
    Policy,
    PolicyError,
    UnmatchedNameError,
    checkpoint,
    first_match,
    name,
    recompute_all,
    recompute_ops,
    report,
    save_modules,
    save_named,
    save_ops,
    scoped,
)

from ._recipe import bytes_held, leaf


class Block(nn.Module):
    """Two branches with a module inside a module; one value of each has a name."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.Linear(16, 16)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x: Tensor) -> Tensor:
        """(rows, 16) in and out."""
        x = x + name(self.attn(x), "attn").tanh()
        return x + name(self.mlp(F.silu(x)), "mlp").sigmoid()


class _Ran(TorchDispatchMode):
    """Counts operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def block() -> Block:
    """Seeded."""
    torch.manual_seed(0)
    return Block()


def _gradients(function: Callable[..., Tensor], x: Tensor, *others: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(function(x).sum(), [x, *others]))


def _under(
    policy: Policy, function: Callable[..., Any], engine: str = "recipe"
) -> Callable[..., Any]:
    return lambda x: checkpoint(function, x, policy=policy, engine=engine)


def _is_plain(policy: Policy, function: Callable[..., Any], x: Tensor) -> bool:
    others = list(function.parameters()) if isinstance(function, nn.Module) else []
    wanted = _gradients(function, x, *others)
    return all(map(torch.equal, wanted, _gradients(_under(policy, function), x, *others)))


def _again(policy: Policy, function: Callable[..., Any], x: Tensor, op: str) -> int:
    """How often backward runs an operator."""
    out = checkpoint(function, x, policy=policy, engine="recipe")
    with _Ran() as ran:
        out.sum().backward()
    return ran.ops.count(op)


RULES = (
    save_named("attn"),
    save_named("*"),
    save_modules("mlp"),
    save_modules("mlp.0"),
    scoped(save_ops("aten.addmm"), "attn"),
    scoped(recompute_ops("aten.addmm"), "mlp"),
    scoped(save_named("mlp"), "mlp", missing_ok=True),
    ~save_modules("attn"),
    save_ops("aten.addmm"),
    recompute_all(),
)


@settings(deadline=None)
@given(
    rules=st.lists(st.sampled_from(RULES), min_size=1, max_size=3),
    join=st.sampled_from(["first", "|", "&"]),
)
def test_both_engines_decide_alike(rules: list[Policy], join: str) -> None:
    """Gradients are plain in both; without a second forward no more is held."""
    torch.manual_seed(0)
    block, x = Block(), leaf(8, 16)
    policy = rules[0]
    for rule in rules[1:]:
        policy = policy | rule if join == "|" else policy & rule
    policy = first_match(*rules) if join == "first" else policy
    assert _is_plain(policy, block, x)
    held = {
        engine: report(block, x, policy=policy, engine=engine).held_bytes
        for engine in ("recipe", "contexts")
    }
    assert held["recipe"] <= held["contexts"]
    assert report(block, x, policy=policy).engine == "recipe"


@pytest.mark.parametrize(
    ("policy", "kept", "again"),
    [
        (recompute_all(), 0, 3),
        (save_named("attn"), 8 * 16, 2),
        (save_named("*"), 2 * 8 * 16, 1),
        (scoped(save_ops("aten.addmm"), "mlp.0"), 8 * 32, 2),
        (scoped(save_ops("aten.addmm"), "mlp.2"), 8 * 16, 2),
        (save_modules("mlp"), 2 * 8 * 32 + 8 * 16, 1),
        (first_match(scoped(recompute_all(), "mlp"), save_ops("aten.addmm")), 8 * 16, 2),
    ],
)
def test_what_is_kept_is_not_made_again(
    block: Block, policy: Policy, kept: int, again: int
) -> None:
    """Bytes beyond those of a policy that keeps nothing, and products that backward repeats."""
    x = leaf(8, 16)
    assert _again(policy, block, x, "aten.addmm.default") == again
    held = report(block, x, policy=policy, engine="recipe").held_bytes
    assert held - report(block, x, policy=recompute_all(), engine="recipe").held_bytes == 4 * kept


def test_named_value_that_no_node_saves_is_kept_for_replays() -> None:
    """Nobody saves the sum; two values that are saved are made from it, the product is not."""
    x, w = leaf(8, 8), torch.eye(8)

    def function(t: Tensor) -> Tensor:
        both = name(t @ w + t, "sum")
        return (both + t).sin() + (both - t).cos()

    policy = save_named("sum")
    assert _is_plain(policy, function, x)
    assert _again(policy, function, x, "aten.mm.default") == 1  # the gradient's
    assert _again(recompute_all(), function, x, "aten.mm.default") == 2
    assert report(function, x, policy=policy).held_bytes == 8 * 8 * 4


def test_name_nobody_reads_costs_nothing() -> None:
    """It is kept for what needs it, and here nothing does."""
    x = leaf(64, 64)
    policy = save_named("y")
    assert bytes_held(lambda t: name(t + 1.0, "y") + 1.0, x, policy=policy) == bytes_held(
        lambda t: (t + 1.0) + 1.0, x
    )


@pytest.mark.parametrize("named", [lambda t: t.view(4, 16), lambda t: t.t(), lambda t: t[2:]])
def test_name_of_a_view_is_that_of_its_base(named: Callable[[Tensor], Tensor]) -> None:
    """The storage is kept as a whole."""
    x = leaf(8, 8)

    def function(t: Tensor) -> Tensor:
        made = F.silu(t * 2.0)
        name(named(made), "view")
        return made.sin().cos()

    assert _is_plain(save_named("view"), function, x)
    (kept,) = [
        each
        for each in report(function, x, policy=save_named("view")).saved
        if each.why == "the policy saves it by name"
    ]
    assert kept.made_by == "SiluBackward0"


@torch.no_grad()
def _unseen(tensor: Tensor) -> None:
    tensor.mul_(3.0)


@pytest.mark.parametrize("write", [Tensor.relu_, lambda t: t.mul_(3.0), _unseen])
def test_value_that_is_written_to_after_its_name(write: Callable[[Tensor], Tensor]) -> None:
    """It is no operand any more; gradients are the plain ones."""
    x, w = leaf(8, 8), leaf(8, 8)

    def function(t: Tensor) -> Tensor:
        made = name(t @ w, "product")
        write(made)
        return (made * 0.5).sin().cos()

    assert _is_plain(save_named("product"), function, x)


def test_write_that_only_a_later_forward_does() -> None:
    """Nobody watches that one; what was named is left alone all the same."""
    x, w, writes = leaf(8, 8), leaf(8, 8), False

    def function(t: Tensor) -> Tensor:
        made = name(t @ w, "product")
        half = made * 0.5
        if writes:
            _unseen(made)
        return half.sin()

    assert _is_plain(save_named("product"), function, x)
    writes = True
    assert _is_plain(save_named("product"), function, x)


@pytest.mark.parametrize("given", [torch.ones(2), None])
def test_name_of_what_has_no_gradient(given: Tensor | None) -> None:
    """A constant, or the region's input."""
    x = leaf(4, 4)

    def function(t: Tensor) -> Tensor:
        name(t if given is None else given, "it")
        return t.sin().exp()

    assert _is_plain(save_named("it"), function, x)


def test_inner_region_decides_of_what_it_names() -> None:
    """The outer policy's name is of no matter in there."""
    x = leaf(8, 8)

    def inner(t: Tensor) -> Tensor:
        return (name(t.exp() * t, "it") * 0.5).sin().cos()

    def outer(t: Tensor) -> Tensor:
        return checkpoint(inner, t.tanh(), policy=recompute_all(), engine="recipe")

    def again(policy: Policy) -> int:
        return _again(policy, outer, x, "aten.mul.Tensor")

    assert _is_plain(save_named("it"), outer, x)
    assert again(save_named("it")) == again(recompute_all())


def test_module_that_runs_twice_is_inside_both_times() -> None:
    """Its path is one."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.Tanh()

        def forward(self, x: Tensor) -> Tensor:
            return self.act(self.act(x * 2.0).exp()).sin()

    x = leaf(8, 8)
    saved = report(Twice(), x, policy=save_modules("act")).saved
    assert [s.replayed for s in saved if s.made_by == "TanhBackward0"].count(True) == 0
    assert _is_plain(save_modules("act"), Twice(), x)


def test_hooks_of_an_offload_get_what_is_kept(block: Block) -> None:
    """Names and paths decide under them as well."""
    x = leaf(8, 16)
    for policy in (save_named("attn"), save_modules("mlp")):
        wanted = _gradients(block, x, *block.parameters())
        with save_on_cpu():
            out = checkpoint(block, x, policy=policy, engine="recipe")
        found = torch.autograd.grad(out.sum(), [x, *block.parameters()])
        assert all(map(torch.equal, wanted, found))


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        (save_named("atn"), "tensor 'atn' .* Did you mean 'attn'"),
        (save_modules("mlpp"), "module 'mlpp' .* Did you mean 'mlp'"),
    ],
)
def test_name_that_nothing_has_is_an_error_in_backward(
    block: Block, policy: Policy, says: str
) -> None:
    """With what there is; where another region of the forward has it, there is none."""
    x = leaf(8, 16)
    out = checkpoint(block, x, policy=policy, engine="recipe")
    with pytest.raises(UnmatchedNameError, match=says):
        out.sum().backward()


def test_name_that_another_region_has_is_no_error(block: Block) -> None:
    """The forward is asked as a whole."""
    x = leaf(8, 16)
    policy = save_named("late")
    out = checkpoint(block, x, policy=policy, engine="recipe")
    out = checkpoint(lambda t: name(t.exp(), "late").sin(), out, policy=policy, engine="recipe")
    out.sum().backward()


def test_name_that_a_later_forward_has_is_no_error() -> None:
    """Every forward is asked as long as a name is missing."""
    x, policy, names = leaf(8, 8), save_named("y"), iter(["x", "y"])

    def function(t: Tensor) -> Tensor:
        return name(t.sin(), next(names)).exp()

    first = checkpoint(function, x, policy=policy, engine="recipe")
    second = checkpoint(function, x, policy=policy, engine="recipe")
    (first + second).sum().backward()


def test_missing_name_is_fine_where_that_was_said(block: Block) -> None:
    """`missing_ok=True`."""
    assert _is_plain(save_named("nope", missing_ok=True), block, leaf(8, 16))


def test_path_without_a_module_is_refused() -> None:
    """A function has no modules below it."""
    with pytest.raises(PolicyError, match="begin at a module, but the function is neither"):
        checkpoint(torch.sin, leaf(2), policy=save_modules("mlp"), engine="recipe")


def test_nothing_stays_after_an_exception() -> None:
    """Neither hooks of modules nor what was named, nor a forward that counts as running."""
    made: list[weakref.ref[Tensor]] = []

    class Raises(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.Tanh()

        def forward(self, x: Tensor) -> Tensor:
            y = name(self.act(x), "y")
            made.append(weakref.ref(y))
            raise ValueError("stop")

    policy = save_named("y") | save_modules("act")
    before = len(torchs_modules._global_forward_hooks)
    with pytest.raises(ValueError, match="stop"):
        checkpoint(Raises(), leaf(4), policy=policy, engine="recipe")
    gc.collect()
    assert made[0]() is None
    assert len(torchs_modules._global_forward_hooks) == before
    missing = save_named("y") | save_modules("act")
    out = checkpoint(nn.Sequential(nn.Tanh(), nn.Tanh()), leaf(4), policy=missing, engine="recipe")
    with pytest.raises(UnmatchedNameError):
        out.sum().backward()
