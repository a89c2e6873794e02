"""What a node forgets of its operands is seen where it is given, in regions with a use for it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.overrides import _get_current_function_mode_stack

from sac_policies import MATMULS, MutationError, checkpoint, profile, recompute_all, save_ops, solve
from sac_policies.engines.recipe import _calls

from ._recipe import bytes_held, bytes_kept, is_plain, leaf, run

pytestmark = pytest.mark.filterwarnings("ignore::sac_policies.UnmatchedEntryWarning")

ROWS, WIDTH = 64, 128
SIZE = ROWS * WIDTH * 4
CONSTANT = torch.linspace(-1, 1, WIDTH)
MASK = torch.arange(ROWS)[:, None] >= torch.arange(ROWS)
ADDED = torch.zeros(ROWS, ROWS).masked_fill(~MASK, -1e9)


def _gelu(t: torch.Tensor) -> torch.Tensor:
    return t * (1.0 + torch.tanh(t.sin() + torch.pow(t, 3.0)))


def _attention(**more: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Attention that runs as its parts, as it does for a float that no kernel takes."""

    def attend(t: torch.Tensor) -> torch.Tensor:
        heads = t.view(1, ROWS, 4, -1).transpose(1, 2)
        return F.scaled_dot_product_attention(heads.sin(), heads.cos(), heads, **more)

    return lambda t: attend(t.double()).float()


FORGOTTEN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu by hand": _gelu,
    "number added": lambda t: (t.sin() + 1).cos(),
    "number added in place": lambda t: t.sin().add_(1).cos(),
    "by an operator's own name": lambda t: torch.add(t.sin(), other=2.0, alpha=0.5).cos(),
    "number less": lambda t: (1 - t.sin()).cos(),
    "row added": lambda t: (CONSTANT + t.sin()).cos(),
    "filled": lambda t: t.sin().masked_fill(t.detach() > 0.5, 0.1).cos(),
    "chosen": lambda t: torch.where(t.detach() > 0, t.sin(), -0.3).cos(),
    "padded": lambda t: F.pad(t.sin(), (2, 1), value=0.5).cos(),
    "together": lambda t: torch.cat([t.sin(), CONSTANT[None]]).cos(),
    "softmax of a sum": lambda t: (t.sin() + CONSTANT).softmax(-1),
}


@pytest.mark.parametrize("name", FORGOTTEN)
def test_value_is_made_again_from_what_was_given(name: str) -> None:
    """In the first forward and in later ones: no large value is kept, and no bit is another."""
    function, x = FORGOTTEN[name], leaf(ROWS, WIDTH)
    for _ in range(3):
        gc.collect()
        assert bytes_kept(function, x) < SIZE // 2
        assert is_plain(function, x)
    assert bytes_held(function, x) < SIZE // 2


@pytest.mark.parametrize(
    "more",
    [{"is_causal": True}, {"attn_mask": MASK}, {"attn_mask": ADDED.double()}],
    ids=["causal", "allowed", "added"],
)
def test_scores_are_made_again_with_their_mask(more: dict[str, Any]) -> None:
    """Attention saves its softmax while it runs: the mask is known by then."""
    monkey = _attention(dropout_p=1e-9, **more)
    x = leaf(ROWS, WIDTH)
    scores = 4 * ROWS * ROWS * 8
    for _ in range(2):
        assert bytes_kept(monkey, x) < scores
        torch.manual_seed(0)
        (plain,) = torch.autograd.grad(monkey(x).sum(), x)
        torch.manual_seed(0)
        assert torch.equal(torch.autograd.grad(run(monkey, x).sum(), x)[0], plain)


def test_mask_is_known_when_its_attention_has_ended() -> None:
    """Whoever was told of it in between may read it later, and of no other node."""

    class AddBackward0:
        pass

    calls, node = _calls.Calls(), AddBackward0()
    mask = _calls.Constant.of(MASK)
    with calls.attending(mask):
        number = _calls.sequence_number() + 1
        assert calls.operand(node, number, 1) is mask
    assert calls.operand(node, number, 1) is mask
    assert calls.operand(node, number + 1, 1) is None


def test_frozen_bias_is_read_again() -> None:
    """As beside adapters: the weights need no gradient, and the product is replayed."""
    layer = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def function(t: torch.Tensor) -> torch.Tensor:
        return layer(t.sin()).cos()

    x = leaf(ROWS, WIDTH)
    assert bytes_kept(function, x) < SIZE
    assert is_plain(function, x)
    assert is_plain(lambda t: layer(t[None].sin()).cos(), x)


def _modes(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> list[int]:
    """How many function modes each of three forwards of a function is under."""
    seen: list[int] = []

    class Looking(nn.Module):
        def forward(self, t: torch.Tensor) -> torch.Tensor:
            seen.append(len(_get_current_function_mode_stack()))
            return function(t)

    region = Looking()  # functions are known by their code, modules by themselves
    for _ in range(3):
        torch.autograd.grad(run(region, x).sum(), x)
    return seen


def test_mode_is_entered_where_it_is_of_use() -> None:
    """The first forward tells; where all operands are saved there is no mode any more."""
    large, small = leaf(ROWS, WIDTH), leaf(4, 4)
    assert _modes(_gelu, large) == [1, 1, 1]
    assert _modes(lambda t: t.sin().cos(), large) == [1, 0, 0]
    assert _modes(_gelu, small) == [1, 0, 0]


def test_mode_is_left_after_an_error() -> None:
    """Whatever the region raises."""

    def region(t: torch.Tensor) -> torch.Tensor:
        (t + 1).cos()
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        run(region, leaf(ROWS, WIDTH))
    assert _get_current_function_mode_stack() == []


def test_under_other_hooks_nothing_is_asked() -> None:
    """They may be a checkpoint's, whose second forward has to save the same."""
    x = leaf(ROWS, WIDTH)
    with save_on_cpu():
        assert _modes(_gelu, x) == [0, 0, 0]
        assert is_plain(_gelu, x)


def test_inside_a_checkpoint_both_forwards_save_the_same() -> None:
    """What the first forward of a function taught is not used in its recomputation."""
    x = leaf(ROWS, WIDTH)
    (plain,) = torch.autograd.grad(_gelu(_gelu(x)).sum(), x)
    for _ in range(3):
        out = torch.utils.checkpoint.checkpoint(
            lambda t: run(_gelu, run(_gelu, t)), x, use_reentrant=False
        )
        assert torch.equal(torch.autograd.grad(out.sum(), x)[0], plain)


def test_small_constant_is_copied() -> None:
    """Plain autograd saves no copy of what is added: it may be written to before backward."""
    row = CONSTANT.clone()
    x = leaf(ROWS, WIDTH)
    (plain,) = torch.autograd.grad((x.sin() + row).cos().sum(), x)
    out = run(lambda t: (t.sin() + row).cos(), x)
    row.zero_()
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], plain)


def test_large_constant_that_changes_is_an_error() -> None:
    """It is not copied; a wrong gradient it must not give."""
    rows = torch.linspace(-1, 1, 160 * 128).view(160, 128)
    x = leaf(4, 160, 128)
    out = run(lambda t: (t.sin() + rows).cos(), x)
    rows.zero_()
    with pytest.raises(MutationError, match="changed in place after it was saved"):
        out.sum().backward()


def test_large_constant_that_changes_unseen_is_an_error() -> None:
    """Past its version counter: what is rebuilt is another value."""
    rows = torch.linspace(-1, 1, 160 * 128).view(160, 128)
    x = leaf(4, 160, 128)
    out = run(lambda t: (t.sin() + rows).cos(), x)
    rows.data.zero_()
    with pytest.raises(MutationError, match="other values than the forward"):
        out.sum().backward()


def test_constant_as_large_as_the_value_is_of_no_use() -> None:
    """It would be kept in the value's place, or beside it."""
    x = leaf(ROWS, WIDTH)
    assert bytes_kept(lambda t: (t.sin() + t.detach().exp()).cos(), x) <= SIZE
    assert is_plain(lambda t: (t.sin() + t.detach().exp()).cos(), x)


@pytest.mark.parametrize("name", ["together", "number added", "row added"])
def test_autocast_changes_nothing(name: str) -> None:
    """What it casts of a list of tensors nobody sees: there nothing is taken for granted."""
    x = leaf(ROWS, WIDTH)
    layer = nn.Linear(WIDTH, WIDTH)

    def function(t: torch.Tensor) -> torch.Tensor:
        return FORGOTTEN[name](layer(t)).float()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(2):
            assert is_plain(function, x)


class _Grouped(nn.Module):
    """Keys of one head, repeated for four of queries: (ROWS, WIDTH) to the same."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH // 4)

    def forward(self, t: torch.Tensor) -> torch.Tensor:
        keys = self.key(t).repeat(1, 4).cos()
        return (self.query(t).sin() * keys.exp()).sin()


def test_product_that_the_policy_keeps_is_kept_before_it_grows() -> None:
    """Rule 4: a quarter of what is read of it later."""
    torch.manual_seed(0)
    block, x, policy = _Grouped(), leaf(ROWS, WIDTH), save_ops(MATMULS)
    assert bytes_kept(block, x, policy=policy) > SIZE + SIZE // 2  # the first forward only tries
    for _ in range(2):
        assert bytes_kept(block, x, policy=policy) < SIZE + SIZE // 2
        assert is_plain(block, x, policy=policy)
    assert bytes_held(block, x, policy=policy) < SIZE + SIZE // 2


def test_product_that_is_written_to_is_not_what_it_was() -> None:
    """The result of the call is another value by then, and that is no error."""
    torch.manual_seed(0)
    layer = nn.Linear(WIDTH, WIDTH // 4)

    def function(t: torch.Tensor) -> torch.Tensor:
        made = layer(t)
        many = (made.repeat(1, 4) * 1.5).exp()
        made.add_(1.0)
        return many * made.sum()

    policy = save_ops(MATMULS)
    for _ in range(3):
        assert is_plain(function, leaf(ROWS, WIDTH), policy=policy)


def test_plans_count_on_it() -> None:
    """What the profile found replayable the planned region finds, too, in every forward."""
    x = leaf(ROWS, WIDTH)
    plan = solve(profile(_gelu, x, unit="flops"), 0)
    assert plan
    assert plan.kept_bytes == 0
    (plain,) = torch.autograd.grad(_gelu(x).sum(), x)
    for hooks in (torch.enable_grad(), save_on_cpu()):
        with hooks:
            out = checkpoint(_gelu, x, policy=plan)
        assert torch.equal(torch.autograd.grad(out.sum(), x)[0], plain)


def test_compiled_code_inside_is_compiled_once_more_at_most() -> None:
    """The mode says nothing to a compiler: no graph is broken, and none more is made later."""
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(len(graph.graph.nodes))
        return graph.forward

    inner = torch.compile(lambda t: (t.sin() + 1.0) * (2.0 - t), backend=backend)
    x = leaf(ROWS, WIDTH)
    (plain,) = torch.autograd.grad(_gelu((x.sin() + 1.0) * (2.0 - x)).sum(), x)
    for _ in range(4):
        out = run(lambda t: _gelu(inner(t)), x)
        assert torch.equal(torch.autograd.grad(out.sum(), x)[0], plain)
    assert len(graphs) <= 2
    assert len(set(graphs)) == 1


@pytest.mark.parametrize("given", ["number", "tensor", "subclass", "with a gradient", "text"])
def test_what_a_replay_could_read(given: str) -> None:
    """Numbers, and plain tensors that no gradient flows to."""

    class Odd(torch.Tensor):
        pass

    values = {
        "number": 1.5,
        "tensor": CONSTANT,
        "subclass": CONSTANT.as_subclass(Odd),
        "with a gradient": leaf(3),
        "text": "x",
    }
    found = _calls.Constant.of(values[given])
    assert (found is not None) is (given in ("number", "tensor"))


def test_policies_that_recompute_nothing_hold_what_they_held() -> None:
    """Everything is kept: no result is kept a second time."""
    x = leaf(ROWS, WIDTH)
    assert bytes_held(_gelu, x, policy=~recompute_all()) >= SIZE
    assert is_plain(_gelu, x, policy=~recompute_all())
