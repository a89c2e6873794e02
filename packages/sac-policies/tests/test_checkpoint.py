"""`checkpoint` has the signature of torch's and follows every policy."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sac_policies import (
    DecisionError,
    EngineError,
    PolicyError,
    _checkpoint,
    checkpoint,
    context_fn,
    save_every_nth,
    save_ops,
)


def _leaf():
    torch.manual_seed(0)
    return torch.randn(4, 4, requires_grad=True)


def test_without_a_policy_it_is_torchs(counting):
    """Full checkpointing: the matmul is recomputed."""
    x = _leaf()
    out = checkpoint(lambda p: (p @ p).sin(), x)
    with counting() as counts:
        out.sum().backward()
    assert counts["aten.mm.default"] == 3


@pytest.mark.parametrize(
    ("given", "modes"),
    [
        (save_ops("aten.mm"), ["_CachingTorchDispatchMode", "_CachedTorchDispatchMode"]),
        ([torch.ops.aten.mm.default], ["TagForward", "TagRecompute"]),
    ],
)
def test_the_compiler_is_given_constants(given, modes):
    """torch.compile receives a partial over names and operators, not a policy."""
    made = _checkpoint._for_compiler(given)
    assert made.func.__module__ == _checkpoint.__name__
    assert all(isinstance(each, (str, list)) for each in made.args)
    assert [type(mode).__name__ for mode in made()] == modes


def test_keyword_arguments_reach_the_function():
    """Keyword arguments that are not options of checkpoint are passed to the function."""
    x = _leaf()
    out = checkpoint(
        lambda p, scale: (p @ p) * scale,
        x,
        scale=3,
        policy=save_ops("aten.mm"),
        preserve_rng_state=False,
        use_reentrant=False,
    )
    assert torch.equal(out, (x @ x) * 3)


def test_without_gradients_the_function_is_just_called():
    """Under no_grad nothing is kept, and the policy is not called."""
    x = _leaf()

    def never(ctx, op, *args, **kwargs):
        raise AssertionError("asked")

    with torch.no_grad():
        assert torch.equal(checkpoint(torch.mm, x, x, policy=never), x @ x)


def test_context_fn_serves_torchs_checkpoint(counting):
    """The contexts plug into torch.utils.checkpoint."""
    x = _leaf()
    out = torch.utils.checkpoint.checkpoint(
        lambda p: (p @ p).sin(),
        x,
        use_reentrant=False,
        context_fn=context_fn(save_ops("aten.mm")),
    )
    with counting() as counts:
        out.sum().backward()
    assert counts["aten.mm.default"] == 2


def test_plain_function_is_a_policy(counting):
    """A function (ctx, op, *args, **kwargs) sees the output of the operator."""
    x = _leaf()
    shapes = []

    def policy(ctx, op, *args, **kwargs):
        shapes.append(tuple(ctx.op_output.shape))
        assert ctx.is_recompute is False
        return op is torch.ops.aten.mm.default

    out = checkpoint(lambda p: (p @ p[:, :2]).sin(), x, policy=policy)
    with counting() as counts:
        out.sum().backward()
    assert counts["aten.mm.default"] == 2
    assert shapes == [(4, 2), (4, 2), (4, 2)]


@pytest.mark.parametrize("answer", [None, "save", 1])
def test_answer_that_is_no_decision_is_refused(answer):
    """The error names the function, the operator and the user's line."""
    x = _leaf()

    def policy(ctx, op, *args, **kwargs):
        return answer

    with pytest.raises(
        DecisionError, match=r"policy .*policy returned .* aten\.mm\.default \(at .*:\d"
    ):
        checkpoint(torch.mm, x, x, policy=policy)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"use_reentrant": True}, "reentrant checkpointing knows no policies"),
        ({"context_fn": tuple}, "context_fn is given beside policy"),
    ],
)
def test_options_that_do_not_go_together(kwargs, message):
    """Each wrong combination is refused before anything runs."""
    with pytest.raises(EngineError, match=message):
        checkpoint(torch.mm, _leaf(), _leaf(), policy=save_ops("aten.mm"), **kwargs)


def test_policy_of_another_type_is_refused():
    """A number is not a policy."""
    with pytest.raises(PolicyError, match=r"policy 3 is a int"):
        checkpoint(torch.mm, _leaf(), _leaf(), policy=3)


def test_wrapper_that_takes_a_checkpoint_fn(counting):
    """The wrapper calls it with module, arguments and keywords, as it calls torch's."""

    class Wrapper(nn.Module):
        def __init__(self, inner, checkpoint_fn, **options):
            super().__init__()
            self.inner, self.checkpoint_fn, self.options = inner, checkpoint_fn, options

        def forward(self, *args, **kwargs):
            return self.checkpoint_fn(self.inner, *args, **self.options, **kwargs)

    x = _leaf()
    policy = save_every_nth("aten.mm", n=1)
    module = Wrapper(nn.Linear(4, 4, bias=False), checkpoint, policy=policy)
    out = module(x).sin()
    with counting() as counts:
        out.sum().backward()
    assert counts["aten.mm.default"] == 2


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        (lambda ctx, op, *args, **kwargs: None, r"returned None for operator aten\.mm\.default"),
        (lambda op: True, r"raised TypeError \(.*\) for operator aten\.mm.*takes \(ctx, op"),
    ],
    ids=["no answer", "signature"],
)
def test_error_of_a_policy_passes_through_a_binary_operator(policy, said):
    """Python turns a TypeError inside `@` into "not supported"; our error is still raised."""
    x = _leaf()
    with pytest.raises(DecisionError, match=said):
        checkpoint(lambda t: t @ t, x, policy=policy)
