"""Where a function raises, torch's checkpoint leaves no modes and no hooks behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.utils.checkpoint

from sac_policies import RecomputeError, _torch_compat, checkpoint, save_ops
from sac_policies._torch_compat import _checkpoint_ends
from sac_policies._torch_compat._checkpoint_ends import leave_checkpoints

from .test_second_forward import again, leaves


def test_failed_forward_leaves_nothing_entered():
    """While its error is held, later operators are not the region's, nor are their tensors."""
    x = torch.ones(2, 2, requires_grad=True)

    def fail(t):
        raise KeyError(t @ t)

    def inner(t):
        return checkpoint(fail, t, policy=save_ops("aten.mm"))

    with pytest.raises(KeyError) as held:
        checkpoint(inner, x, policy=save_ops("aten.mm"))
    assert _torch_compat.saved_tensor_hooks() is None
    assert held.traceback


def _frame_of_torch(gen: Any, then: Callable[[], Any]) -> Any:
    """Call in a frame that is torch's checkpoint's own, where `gen` stands for its contexts."""
    found: dict[str, Any] = {}
    code = compile("def run(gen, then):\n    then()", torch.utils.checkpoint.__file__, "exec")
    exec(code, found)
    return found["run"](gen, then)


def _left(name: str, ended: list[str]) -> Iterator[None]:
    """Contexts that were entered, and note it when they end."""

    def contexts() -> Iterator[None]:
        try:
            yield
        finally:
            ended.append(name)

    gen = contexts()
    next(gen)
    return gen


def _fail() -> None:
    raise KeyError("ours")


def test_contexts_of_an_error_end_from_the_inside_out() -> None:
    """While the error is held, its frames hold them."""
    ended: list[str] = []
    outer, inner = _left("outer", ended), _left("inner", ended)
    with pytest.raises(KeyError) as held:
        _frame_of_torch(outer, lambda: _frame_of_torch(inner, _fail))
    assert ended == []
    leave_checkpoints(held.value)
    assert ended == ["inner", "outer"]


def test_generators_of_others_go_on() -> None:
    """Only what torch's checkpoint has in its own frames is ended."""
    ended: list[str] = []

    def theirs(gen: Any) -> None:
        assert gen
        _fail()

    with pytest.raises(KeyError) as held:
        theirs(_left("theirs", ended))
    leave_checkpoints(held.value)
    assert ended == []


@pytest.mark.parametrize("gen", [None, iter([1])])
def test_what_torch_calls_otherwise_is_left_alone(gen: Any) -> None:
    """Where its local of that name is no generator."""
    with pytest.raises(KeyError) as held:
        _frame_of_torch(gen, _fail)
    leave_checkpoints(held.value)


def test_error_without_a_traceback_went_through_no_checkpoint() -> None:
    """Nothing is asked of it."""
    leave_checkpoints(KeyError("never raised"))


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_contexts_have_ended_when_an_error_leaves_the_checkpoint(error: type[BaseException]):
    """An interrupt too; the error is the function's own."""
    ended: list[str] = []

    @contextmanager
    def noting(name: str) -> Iterator[None]:
        try:
            yield
        finally:
            ended.append(name)

    def fail(t: torch.Tensor) -> None:
        raise error("ours")

    with pytest.raises(error, match="ours"):
        _checkpoint_ends.checkpoint(
            fail,
            torch.ones(2, requires_grad=True),
            use_reentrant=False,
            context_fn=lambda: (noting("forward"), noting("recomputation")),
        )
    assert ended == ["forward"]


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_contexts_that_torch_leaves_entered_are_ended(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch before 2.13 does, of which this has no more than the frame."""
    ended: list[str] = []
    contexts = _left("torchs", ended)
    monkeypatch.setattr(
        torch.utils.checkpoint, "checkpoint", lambda function: _frame_of_torch(contexts, function)
    )

    def fail() -> None:
        raise error("ours")

    with pytest.raises(error, match="ours"):
        _checkpoint_ends.checkpoint(fail)
    assert ended == ["torchs"]


def test_checkpoint_is_torchs() -> None:
    """With its options, its output and its gradients."""
    x = torch.linspace(0, 1, 4).requires_grad_()
    runs = []

    def function(t: torch.Tensor, scale: float) -> torch.Tensor:
        runs.append(scale)
        return t.sin().mul(scale).cos()

    out = _checkpoint_ends.checkpoint(function, x, scale=2.0, use_reentrant=False)
    (found,) = torch.autograd.grad(out.sum(), x)
    assert runs == [2.0, 2.0]
    assert torch.equal(found, torch.autograd.grad(function(x, 2.0).sum(), x)[0])


def test_whether_second_runs_stop_early_is_asked_of_torch(monkeypatch):
    """Without the name behind it they do."""
    assert _checkpoint_ends.stops_early()
    with torch.utils.checkpoint.set_checkpoint_early_stop(False):
        assert not _checkpoint_ends.stops_early()
    monkeypatch.delattr(torch.utils.checkpoint, "_enable_checkpoint_early_stop")
    assert _checkpoint_ends.stops_early()


def test_our_second_run_goes_to_its_end_where_torch_is_told_so() -> None:
    """As torch's checkpoint does, by the setting of the forward; an error at its end is its own."""
    after: list[int] = []

    def function(y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        z = (y @ w).sin()
        after.append(1)
        if len(after) > 2:
            raise ValueError("at the end")
        return z

    x, w = leaves()
    with torch.utils.checkpoint.set_checkpoint_early_stop(False):
        out = again(function, x, w).sum()
    expected = torch.autograd.grad((x @ w).sin().sum(), [x, w])
    assert all(map(torch.equal, torch.autograd.grad(out, [x, w], retain_graph=True), expected))
    assert len(after) == 2
    with pytest.raises(ValueError, match="at the end"):
        out.backward()


def test_a_second_run_to_the_end_saves_no_more_than_the_first() -> None:
    """It is refused, as one that saves less is."""
    runs: list[int] = []

    def function(y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        z = (y @ w).sin()
        return z if len(runs) == 1 else z.cos()

    with torch.utils.checkpoint.set_checkpoint_early_stop(False):
        out = again(function, *leaves()).sum()
    with pytest.raises(RecomputeError, match=r"saves 4 tensors in its second .* 3 in its first"):
        out.backward()
