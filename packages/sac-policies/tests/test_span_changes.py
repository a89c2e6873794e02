"""What changes between a span and its code's second run: right, kept, or refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from sac_policies import MutationError, RecomputeError, span

from . import _spans
from ._recipe import bytes_held, is_plain, run
from ._spans import NUMBYTES, WIDTH, own_silu

x, w = _spans.x, _spans.w


def test_inputs_that_the_code_writes_to_are_right_or_refused(x: Tensor, w: Tensor) -> None:
    """In place, before or after it saves them."""

    def before(t: Tensor) -> Tensor:
        return own_silu(t.mul_(0.5)).sin()

    def after(t: Tensor) -> Tensor:
        made = own_silu(t * 1.0).sin()
        t.add_(made.detach())
        return made

    for written in (before, after):
        assert is_plain(lambda x, w, f=written: span(f, "act")((x @ w).sin()) @ w, x, w)


def test_a_changed_parameter_is_refused(x: Tensor, w: Tensor) -> None:
    """Where it is not, gradients would be another model's."""
    scale = torch.ones(WIDTH, requires_grad=True)

    def block(x: Tensor, w: Tensor) -> Tensor:
        return span(lambda t: own_silu(t * scale), "act")(x @ w) @ w

    out = run(block, x, w)
    scale.data.mul_(2)
    with pytest.raises(MutationError) as error:
        out.sum().backward()
    assert str(error.value) == (
        "sac_policies.checkpoint: span 'act' gives other values for the saved tensor of shape "
        "(128, 64) than in the forward, but they must be the same: something changed what the "
        "span reads, or its code does not do the same twice. Change it after backward, or keep "
        "the span by save_modules(...)."
    )


def test_a_changed_input_is_refused(x: Tensor, w: Tensor) -> None:
    """By its version, as every kept value."""
    out = run(lambda x, w: span(own_silu, "act")(x.sin()).cos() @ w, x, w)
    with torch.no_grad():
        x.mul_(2)
    with pytest.raises(MutationError, match="was changed in place after it was saved"):
        out.sum().backward()


def test_code_that_saves_less_the_second_time_is_refused(x: Tensor, w: Tensor) -> None:
    """By name."""
    times = []

    def act(t: Tensor) -> Tensor:
        times.append(1)
        return own_silu(t).sin() if len(times) < 2 else t

    out = run(lambda x, w: span(act, "act")(x @ w).cos() @ w, x, w)
    with pytest.raises(RecomputeError) as error:
        out.sum().backward()
    assert str(error.value) == (
        "sac_policies.checkpoint: span 'act' saves or returns less when it is run again than in "
        "the forward, but it must do the same. Pass it all that it depends on as arguments, or "
        "name it in a policy that keeps it, as save_modules(...) does."
    )


def test_code_that_returns_less_or_another_size_is_refused(x: Tensor, w: Tensor) -> None:
    """Each by its own words."""
    times = []

    def fewer(t: Tensor) -> list[Tensor]:
        times.append(1)
        return [own_silu(t)][: 1 if len(times) == 1 else 0]

    out = run(lambda x, w: span(fewer, "act")(x @ w)[0] @ w, x, w)
    with pytest.raises(RecomputeError, match="span 'act' returns fewer tensors when it is run"):
        out.sum().backward()
    times.clear()

    def other(t: Tensor) -> Tensor:
        times.append(1)
        return own_silu(t if len(times) == 1 else t[:1])

    out = run(lambda x, w: span(other, "act")(x @ w) @ w, x, w)
    with pytest.raises(RecomputeError, match="span 'act' makes a value of another size when"):
        out.sum().backward()


def test_a_gradient_inside_of_code_that_runs_again_is_refused(x: Tensor, w: Tensor) -> None:
    """In the forward it is taken as ever."""

    def act(t: Tensor) -> Tensor:
        own = t.detach().requires_grad_()
        (grad,) = torch.autograd.grad(own_silu(own).sum(), own)
        return own_silu(t) * grad

    out = run(lambda x, w: span(act, "act")(x @ w) @ w, x, w)
    with pytest.raises(RecomputeError) as error:
        out.sum().backward()
    assert str(error.value) == (
        "sac_policies.checkpoint: a gradient is taken inside a span whose code runs again, but "
        "that run only makes what the span saves. Take it outside the span."
    )


def test_what_the_code_writes_to_is_written_to_once(x: Tensor) -> None:
    """Running statistics, and a buffer of the user's; hooks are registered once."""
    norm, seen, states = nn.BatchNorm1d(WIDTH), [], []
    total = torch.zeros(())

    def act(t: Tensor) -> Tensor:
        total.add_(t.detach().sum())
        norm.weight.register_hook(lambda grad: seen.append(1))
        return own_silu(norm(t)).sin()

    def block(x: Tensor) -> Tensor:
        return span(act, "act")(x * 2.0).cos()

    for function in (block, lambda x: run(block, x)):
        norm.reset_running_stats()
        total.zero_()
        seen.clear()
        function(x).sum().backward()
        states.append([norm.running_mean.clone(), norm.num_batches_tracked.clone(), total.clone()])
        assert seen == [1]
        norm.weight._backward_hooks.clear()
    assert all(map(torch.equal, *states))


def test_arguments_that_may_change_have_values_kept(x: Tensor, w: Tensor) -> None:
    """A set is not what it was when the code runs again."""

    def block(x: Tensor, w: Tensor) -> Tensor:
        return span(lambda t, names: own_silu(t), "act")(x @ w, {"a"}) @ w

    assert bytes_held(block, x, w) == NUMBYTES
    assert is_plain(block, x, w)
