"""A function that is recomputed in backward: plain gradients, nothing kept, or an error."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.flop_counter import FlopCounterMode

from sac_policies import MutationError, RecomputeError, checkpoint, recompute_all, save_ops
from sac_policies.eager._second_forward import is_possible, run


class Counted:
    """A function that counts its calls."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.calls = function, 0

    def __call__(self, *args: Any) -> Any:
        """Count, and call it."""
        self.calls += 1
        return self.function(*args)


def again(function: Callable[..., Any], *tensors: torch.Tensor) -> Any:
    """Run the function with recomputation."""
    assert is_possible(tensors)
    return run(function, tensors, "it", None)


def leaves() -> tuple[torch.Tensor, torch.Tensor]:
    """Two inputs."""
    torch.manual_seed(0)
    x, w = (torch.randn(4, 4, requires_grad=True) for _ in range(2))
    return x, w


def of(function: Callable[..., Any], *, times: int = 1) -> list[torch.Tensor]:
    """Gradients of a function of two inputs, from one or more backwards."""
    x, w = leaves()
    out = function(x * 2, w).square().sum()
    for _ in range(times):
        out.backward(retain_graph=times > 1)
    return [x.grad, w.grad]


def noisy(y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Matmuls, dropout, and operators that save their results."""
    return F.dropout((y @ w).sin().exp(), 0.5).tanh() @ w


@pytest.mark.parametrize("times", [1, 2])
def test_gradients_and_random_numbers_are_plain(times: int) -> None:
    """Also of a second backward, which recomputes again; later random numbers are unchanged."""
    it = Counted(noisy)
    found = of(lambda y, w: again(it, y, w), times=times)
    drawn = torch.rand(3)
    expected = of(noisy, times=times)
    assert all(map(torch.equal, found, expected))
    assert torch.equal(drawn, torch.rand(3))
    assert it.calls == 1 + times


def test_autocast_is_that_of_the_first_run() -> None:
    """On in forward and off in backward, or the reverse."""

    def stepped(call: Callable[..., Any], first: bool) -> list[torch.Tensor]:
        x, w = leaves()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=first):
            out = call(noisy, x, w)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not first):
            out.float().sum().backward()
        return [x.grad, w.grad]

    for first in (True, False):
        expected = stepped(lambda f, *given: f(*given), first)
        torch.manual_seed(0)
        assert all(map(torch.equal, stepped(again, first), expected))


Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _through_view(y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    z = y @ w
    z.view(-1).mul_(0.7)
    z[1].add_(0.3)
    z[0].copy_(y[2])
    return z


STEPS: tuple[Step, ...] = (
    _through_view,
    lambda y, w: y @ w,
    lambda y, w: y.sin() * y,
    lambda y, w: (y @ w).relu_(),
    lambda y, w: F.dropout(y, 0.3),
    lambda y, w: y.t(),
    lambda y, w: torch.cat([y[2:], y[:2].sin()]),
    lambda y, w: y.sin().exp(),
    lambda y, w: y.softmax(-1),
    lambda y, w: y + y.mean(0, keepdim=True).expand(4, 4),
)


def program_of(seed: int, region: Callable[..., torch.Tensor], depth: int = 0) -> Step:
    """Draw a few steps; some are regions, by `region(function, y, w)`."""
    rng = random.Random(seed)
    steps: list[Step] = []
    for _ in range(rng.randrange(2, 7)):
        if depth < 2 and rng.random() < 0.25:
            inner = program_of(rng.randrange(1 << 30), region, depth + 1)
            steps.append(lambda y, w, f=inner: region(f, y, w))
        else:
            steps.append(rng.choice(STEPS))

    def call(y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for step in steps:
            y = step(y, w)
        return y

    return call


@pytest.mark.filterwarnings("ignore::sac_policies.UnmatchedEntryWarning")
@pytest.mark.parametrize("seed", range(100))
def test_random_programs_have_the_gradients_of_no_checkpointing(seed, gradients, equal) -> None:
    """In-place operators, views, dropout, and regions inside."""
    torch.manual_seed(seed)
    x, w = (torch.randn(4, 4, requires_grad=True) for _ in range(2))
    inner = partial(checkpoint, policy=[recompute_all(), save_ops("aten.mm", "aten.sin")][seed % 2])

    def kept(x, w):
        return run(program_of(seed, inner), (x * w, w), "it", None)

    def plain(x, w):
        return program_of(seed, lambda function, *given: function(*given))(x * w, w)

    assert equal(gradients(kept, x, w), gradients(plain, x, w))


def test_nothing_that_is_saved_is_kept() -> None:
    """Only the inputs are kept, until backward; no reference cycle remains."""
    x, w = leaves()
    made: list[weakref.ref[torch.Tensor]] = []

    def told(y, w):
        z = (y @ w).exp()
        made.append(weakref.ref(z))
        return z.exp().sum()

    gc.collect()
    gc.disable()
    try:
        given = x * 2
        out = again(told, given, w)
        assert made[0]() is None
        seen = weakref.ref(given)
        del given
        assert seen() is not None
        out.backward()
        del out
        assert seen() is None
        assert [each() for each in made] == [None, None]
    finally:
        gc.enable()


def test_the_second_run_ends_with_the_last_value_that_is_saved() -> None:
    """No later operator runs, even if the function catches exceptions."""
    after: list[int] = []

    def careless(y, w):
        try:
            z = (y @ w).sin()
        except Exception as error:
            raise ValueError("it looked") from error
        after.append(1)
        return z

    x, w = leaves()
    again(careless, x, w).sum().backward()
    assert len(after) == 1

    def swallowing(y, w):
        z = y @ w
        try:
            return z.sin()
        except Exception:
            return z.cos()

    assert all(
        map(torch.equal, of(lambda y, w: again(swallowing, y, w)), of(lambda y, w: (y @ w).sin()))
    )


def test_noise_that_is_saved_before_it_is_written() -> None:
    """`rrelu` saves its noise, then draws it."""
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(64, 64), torch.randn(512, 64, requires_grad=True)
    grads = []
    for way in (lambda t: F.rrelu(layer(t), training=True), None):
        torch.manual_seed(1)
        if way is None:
            out = run(lambda t: F.rrelu(layer(t), training=True), [x], "a block", None)
        else:
            out = way(x)
        grads.append(torch.autograd.grad(out.square().sum(), [x, *layer.parameters()]))
    assert all(map(torch.equal, *grads))


def test_a_value_that_nobody_reads_is_not_held() -> None:
    """The value belonged to a dropped output, so recomputation does not keep it."""
    x, w = leaves()
    held: list[weakref.ref[torch.Tensor]] = []

    def two(y, w):
        z = y.exp()
        held.append(weakref.ref(z))
        return (y @ w).sin(), z

    out, dropped = again(two, x * 2, w)
    del dropped
    out.register_hook(lambda grad: None)
    other = out.grad_fn.next_functions[0][0]  # the matmul, whose backward follows that of sin
    left: list[bool] = []
    other.register_prehook(lambda grads: left.append(held[1]() is not None))
    out.sum().backward()
    assert left == [False]


def test_gradients_inside_and_of_gradients() -> None:
    """A function that differentiates inside; and a gradient penalty."""

    def forces(y, w):
        energy = (y @ w).sin().square().sum()
        (force,) = torch.autograd.grad(energy, y, create_graph=True)
        return force @ w

    expected = of(forces)
    assert all(map(torch.equal, of(lambda y, w: again(forces, y, w)), expected))

    def penalty(call):
        x, w = leaves()
        (grad,) = torch.autograd.grad(call(noisy, x, w).sum(), x, create_graph=True)
        grad.square().sum().backward()
        return [x.grad, w.grad]

    assert all(map(torch.equal, penalty(again), penalty(lambda f, *given: f(*given))))


def test_a_part_of_the_gradients() -> None:
    """The remaining gradients come from the same graph afterwards."""

    def parts(call):
        x, w = leaves()
        out = call(noisy, x, w).sum()
        return [torch.autograd.grad(out, each, retain_graph=True)[0] for each in (w, x)]

    assert all(map(torch.equal, parts(again), parts(lambda f, *given: f(*given))))


def test_checkpoints_inside_and_around() -> None:
    """Checkpoints of torch and of this package; hooks around the function prevent it."""

    def inside(y, w):
        z = torch_checkpoint(noisy, y, w, use_reentrant=False)
        return checkpoint(noisy, z, w, policy=recompute_all())

    def plain(y, w):
        return noisy(noisy(y, w), w)

    assert all(map(torch.equal, of(lambda y, w: again(inside, y, w)), of(plain)))
    asked: list[bool] = []
    torch_checkpoint(lambda y: asked.append(is_possible([y])), leaves()[0], use_reentrant=False)
    assert asked == [False]


def test_where_it_is_not_possible() -> None:
    """Without a graph, or where hooks, modes or transforms would observe the recomputation."""
    x, _ = leaves()
    with torch.no_grad():
        assert not is_possible([x])
    with torch.autograd.graph.save_on_cpu():
        assert not is_possible([x])
    with FlopCounterMode(display=False):
        assert not is_possible([x])
    with torch.inference_mode():
        y = torch.ones(2)
    assert not is_possible([y])
    assert torch.func.vmap(lambda row: row * is_possible([row]))(x).eq(0).all()
    assert is_possible([x])


def test_what_was_written_to_since_is_refused() -> None:
    """The error gives both versions, for any use of the tensor in backward."""
    x, w = leaves()
    given = x * 2
    out = again(noisy, given, w)
    given.mul_(2)
    with pytest.raises(MutationError) as caught:
        out.sum().backward()
    assert str(caught.value) == (
        "sac_policies.fit_: tensor 0 that it was given has been modified by an inplace operation "
        "since (it is at version 1, not 0), but the second forward needs it as it was. Pass a "
        "copy, or change it after backward."
    )


def test_a_parameter_that_was_written_to_since_is_refused() -> None:
    """As in plain autograd, unlike torch's checkpoint; writes by the function itself are allowed.

    A second backward runs the function again, which clips the parameter once more.
    """
    layer = torch.nn.Linear(4, 4)
    out = again(lambda y: layer(y).sin(), leaves()[0] * 2)
    with torch.no_grad():
        layer.weight.mul_(2)
    with pytest.raises(MutationError) as caught:
        out.sum().backward()
    assert str(caught.value).startswith(
        "sac_policies.fit_: a parameter (4, 4) of it has been modified by an inplace operation "
        "since (it is at version 2, not 1), but the second forward needs it as it was."
    )

    def clipping(y, w):
        with torch.no_grad():
            w.clamp_(-0.5, 0.5)
        return noisy(y, w)

    expected = of(clipping, times=2)
    assert all(
        map(torch.equal, of(lambda y, w: again(lambda y: clipping(y, w), y), times=2), expected)
    )


HELP = (
    " Make both do the same, by reading nothing but its arguments, parameters and buffers; or "
    "checkpoint it with a policy, which runs it once."
)


@pytest.mark.parametrize("hides", [False, True])
@pytest.mark.parametrize(
    ("second", "message"),
    [
        (
            lambda y, w: (y[:2] @ w).sin(),
            "sac_policies.fit_: tensor 1 that it saves is (2, 4) of torch.float32 on cpu in its "
            "second forward, but was (4, 4) of torch.float32 on cpu in its first.",
        ),
        (
            lambda y, w: y @ w,
            "sac_policies.fit_: it saves 2 tensors in its second forward, but saved 3 in its "
            "first.",
        ),
    ],
)
def test_another_second_run_is_refused(second: Any, message: str, hides: bool) -> None:
    """Saved tensors are compared, even if the function catches the error."""
    runs = iter([lambda y, w: (y @ w).sin(), second])

    def changing(y, w):
        try:
            return next(runs)(y, w)
        except Exception:
            if not hides:
                raise
            return y

    x, w = leaves()
    out = again(changing, x * 2, w)
    with pytest.raises(RecomputeError) as caught:
        out.sum().backward()
    assert str(caught.value) == message + HELP


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("at", [1, 2])
def test_what_ends_a_run_leaves_nothing(error: type[BaseException], at: int) -> None:
    """In either run: no hooks remain, random state is restored, and the next step is correct."""
    count = 0

    def failing(y, w):
        nonlocal count
        count += 1
        z = noisy(y, w)
        if count == at:
            raise error
        return noisy(z, w)

    x, w = leaves()
    with pytest.raises(error) if at == 1 else nullcontext():
        out = again(failing, x, w)
    if at == 2:
        state = torch.get_rng_state()
        with pytest.raises(error):
            out.sum().backward()
        assert torch.equal(torch.get_rng_state(), state)
    count = at
    found = of(lambda y, w: again(failing, y, w))
    assert all(map(torch.equal, found, of(lambda y, w: noisy(noisy(y, w), w))))
