"""`checkpoint` has the signature of torch's and follows every policy."""

from __future__ import annotations

import pytest
import torch

from sac_policies import (
    DecisionError,
    EngineError,
    PolicyError,
    _checkpoint,
    checkpoint,
    context_fn,
    offload,
    save_by_bytes,
    save_modules,
    save_named,
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


@pytest.mark.parametrize(
    "policy",
    [
        save_by_bytes(at_least=1),
        save_ops("aten.mm") | save_named("hidden"),
        ~save_modules("router"),
        offload("aten.mm"),
        offload(save_ops("aten.mm")),
    ],
    ids=str,
)
def test_context_fn_refuses_what_torch_cannot_follow(policy):
    """Policies of other values than operators, in combinations too, and offloading ones."""
    with pytest.raises(PolicyError, match=r"context_fn: policy .* reads more than the operator"):
        context_fn(policy)


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


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        (lambda ctx, op, *args, **kwargs: None, r"<lambda> returned None for operator aten\.mm"),
        (lambda ctx, op, *args, **kwargs: 1, r"<lambda> returned 1 for operator aten\.mm"),
        (lambda op: True, r"raised TypeError \(.*\) for operator aten\.mm"),
    ],
    ids=["no answer", "number", "signature"],
)
def test_wrong_answer_of_a_policy_is_refused(policy, said):
    """With the user's line. A TypeError inside `@` would become Python's "not supported"."""
    x = _leaf()
    with pytest.raises(DecisionError, match=rf"{said}\.default \(at .*:\d"):
        checkpoint(lambda t: t @ t, x, policy=policy)
