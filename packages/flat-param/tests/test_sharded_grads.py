"""One segment's gradients, from leaves to parameters, as some ranks in one process have them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from flat_param import ParameterError, fully_shard
from flat_param.buffers._views import memory_order
from flat_param.comm._comm import CommLog, Communicator, Pending
from flat_param.layout._options import Precision
from flat_param.sharded import _sharded_grads
from flat_param.sharded._guards import by_comm
from flat_param.sharded._sharded_grads import Reduction, ShardedGrads
from flat_param.sharded._sharded_params import ShardedParams

Make = Callable[..., list[ShardedParams]]


class Made(TorchDispatchMode):
    """Notes the sizes of tensors that are made of nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in ("empty", "zeros", "new_empty", "new_zeros"):
            self.sizes.append(out.numel())
        return out


@pytest.mark.usefixtures("group_of_one")
def test_summed_gradients_have_no_memory_but_their_own() -> None:
    """From the second step on they are summed where the optimizer finds them."""
    model = fully_shard(nn.Linear(31, 17))
    x, made = torch.randn(3, 31), Made()
    numel = sum(param.numel() for param in model.parameters())
    for step in range(3):
        model.zero_grad()
        loss = model(x).sum()
        if step:
            with made:
                loss.backward()
        else:
            loss.backward()
    assert max(made.sizes, default=0) < numel


def _reduce(all_grads: list[ShardedGrads], used: list[bool] | None = None) -> None:
    for pending in [grads.start_reduce(Reduction()) for grads in all_grads]:
        pending.wait()
    for grads in all_grads:
        grads.assign_grads([True] * len(grads.leaves) if used is None else used)


def _give(grads: ShardedGrads, *values: Tensor | None) -> None:
    for index, value in enumerate(values):
        if value is not None:
            grads.owner.leaves[index].grad = value.clone()
            grads.take(index)


@pytest.mark.parametrize("boundary", ["element", "row", "tensor"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_rank_gets_its_piece_of_the_mean(
    parts_of_ranks: Make, world: int, boundary: str
) -> None:
    """Whatever is cut where."""
    tensors = torch.randn(5, 3), torch.randn(7)
    parts = parts_of_ranks(world, *tensors, boundary=boundary)
    all_grads = [ShardedGrads(part) for part in parts]
    given = [[torch.randn_like(each) for each in tensors] for _ in parts]
    for grads, values in zip(all_grads, given, strict=True):
        _give(grads, *values)
    _reduce(all_grads)
    for part in parts:
        for index, param in enumerate(part.params):
            mean = torch.stack([values[index] for values in given]).mean(0)
            if part.leaves_out(index):
                assert param.grad is None
            else:
                piece = part.pieces[index]
                expected = memory_order(mean, piece.spec)[piece.start : piece.stop]
                assert torch.allclose(param.grad.as_strided((piece.numel,), (1,)), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_sum_is_divided_by_what_is_asked(parts_of_ranks: Make, dtype: torch.dtype) -> None:
    """A sum that float16 has no number for, too."""
    all_grads = [ShardedGrads(part) for part in parts_of_ranks(2, torch.zeros(4, dtype=dtype))]
    for grads in all_grads:
        _give(grads, torch.full((4,), 4e4, dtype=dtype))
    for pending in [grads.start_reduce(Reduction(4)) for grads in all_grads]:
        pending.wait()
    assert torch.cat([grads._reduced for grads in all_grads])[:4].tolist() == [2e4] * 4


def _alone(parts_of_ranks: Make, *tensors: Tensor, **options: Any) -> ShardedGrads:
    return ShardedGrads(parts_of_ranks(1, *tensors, **options)[0])


def test_gradients_of_one_leaf_add_up(parts_of_ranks: Make) -> None:
    """Until ranks are summed; leaves keep none, and a leaf without one changes nothing."""
    grads = _alone(parts_of_ranks, torch.zeros(3), torch.zeros(2))
    grads.take(0)
    assert grads.used == [False, False]
    for value in (1.0, 2.0):
        _give(grads, torch.full((3,), value), None)
    assert grads.used == [True, False]
    assert all(leaf.grad is None for leaf in grads.leaves)
    _reduce([grads], [True, False])
    weight, bias = grads.owner.params
    assert torch.equal(weight.grad, torch.full((3,), 3.0))
    assert bias.grad is None
    assert grads.used == [False, False]


@pytest.mark.parametrize("boundary", ["element", "tensor"])
def test_what_no_rank_used_is_zero_in_the_sum(parts_of_ranks: Make, boundary: str) -> None:
    """Gaps and leaves without a gradient too, though the buffer was somebody's before."""
    parts = parts_of_ranks(2, torch.zeros(3), torch.zeros(5), boundary=boundary)
    all_grads = [ShardedGrads(part) for part in parts]
    for grads in all_grads:
        grads._need_full_grad().fill_(float("nan"))
    _give(all_grads[0], torch.ones(3), None)
    for pending in [grads.start_reduce(Reduction()) for grads in all_grads]:
        pending.wait()
    found = torch.cat([grads._reduced for grads in all_grads])
    assert found.sum() == 1.5
    for grads in all_grads:
        grads.assign_grads([True, False])
    assert all(part.params[1].grad is None for part in parts)


def test_parameter_that_no_rank_used_keeps_its_gradient(parts_of_ranks: Make) -> None:
    """The one that it had, while others' are added to."""
    grads = _alone(parts_of_ranks, torch.zeros(3), torch.zeros(2))
    _give(grads, torch.ones(3), torch.ones(2))
    _reduce([grads])
    weight, bias = grads.owner.params
    kept = weight.grad, bias.grad
    _give(grads, torch.ones(3), None)
    _reduce([grads], [True, False])
    assert (weight.grad, bias.grad) == kept
    assert torch.equal(weight.grad, torch.full((3,), 2.0))
    assert torch.equal(bias.grad, torch.ones(2))


def test_gradients_that_are_assigned_nowhere_leave_nothing(parts_of_ranks: Make) -> None:
    """Before a sum there is nothing to hand out, and a second time neither."""
    grads = _alone(parts_of_ranks, torch.zeros(3))
    grads.assign_grads([True])
    assert grads.owner.params[0].grad is None
    _give(grads, torch.ones(3))
    _reduce([grads])
    grads.owner.params[0].grad = None
    grads.assign_grads([True])
    assert grads.owner.params[0].grad is None


class Copied(Communicator):
    """Of two copies that have the same gradients."""

    def __init__(self) -> None:
        super().__init__(None, log=CommLog())
        self.world_size = 2

    def all_reduce(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Pending:
        """The sum of both."""
        tensor.add_(tensor.clone())
        return Pending(self, "all_reduce")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_copies_are_averaged_too(parts_of_ranks: Make, dtype: torch.dtype) -> None:
    """Two copies of two shards: the mean of four, in float16 never beyond its range."""
    low = Precision(param_dtype=dtype)
    parts = parts_of_ranks(2, torch.zeros(8), precision=low)
    for part in parts:
        part.comms = replace(part.comms, replicate=Copied())
    all_grads = [ShardedGrads(part) for part in parts]
    for grads in all_grads:
        _give(grads, torch.full((8,), 40000.0, dtype=dtype))
    _reduce(all_grads)
    for part in parts:
        assert torch.equal(part.params[0].grad, torch.full((4,), 40000.0))


PRECISIONS = {
    "own": (Precision(), torch.float32, torch.float32),
    "low": (Precision(param_dtype=torch.bfloat16), torch.bfloat16, torch.float32),
    "reduce": (
        Precision(param_dtype=torch.bfloat16, reduce_dtype=torch.float64),
        torch.float64,
        torch.float32,
    ),
}


@pytest.mark.parametrize(("precision", "summed", "kept"), PRECISIONS.values(), ids=PRECISIONS)
def test_sums_and_gradients_are_of_the_dtypes_asked_for(
    parts_of_ranks: Make, precision: Precision, summed: torch.dtype, kept: torch.dtype
) -> None:
    """In a second backward, which adds to the first one's, too."""
    parts = parts_of_ranks(2, torch.zeros(8), precision=precision)
    all_grads = [ShardedGrads(part) for part in parts]
    for step in (1, 2):
        for grads in all_grads:
            assert grads.dtype == summed
            _give(grads, torch.ones(8, dtype=grads.leaves[0].dtype))
            assert grads._need_full_grad().dtype == summed
        _reduce(all_grads)
        for part in parts:
            (param,) = part.params
            assert param.grad.dtype == kept
            assert torch.equal(param.grad, torch.full((4,), float(step), dtype=kept))


def test_complex_gradients_are_summed(parts_of_ranks: Make) -> None:
    """As pairs of real numbers."""
    parts = parts_of_ranks(2, torch.zeros(4, dtype=torch.complex64))
    all_grads = [ShardedGrads(part) for part in parts]
    for value, grads in zip((1 + 2j, 3 - 6j), all_grads, strict=True):
        _give(grads, torch.full((4,), value))
    _reduce(all_grads)
    for part in parts:
        assert torch.equal(part.params[0].grad, torch.full((2,), 2 - 2j))


def test_hooks_see_the_mean_and_may_replace_it(parts_of_ranks: Make) -> None:
    """In order; those after accumulation are told when `.grad` is there, once for each sum."""
    grads = _alone(parts_of_ranks, torch.zeros(3), torch.zeros(2))
    weight, bias = grads.owner.params
    seen: list[Any] = []
    weight.register_hook(lambda grad: seen.append(grad.clone()))
    weight.register_hook(lambda grad: 2 * grad)
    weight.register_hook(lambda grad: grad + 1)
    weight.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.clone()))
    bias.register_post_accumulate_grad_hook(lambda param: seen.append(None))
    for expected in (3.0, 6.0):
        seen.clear()
        _give(grads, torch.ones(3), None)
        _reduce([grads], [True, False])
        first, last = seen
        assert torch.equal(first, torch.ones(3))
        assert torch.equal(last, torch.full((3,), expected))


@pytest.mark.parametrize(
    ("world", "boundary", "refused"),
    [(1, "element", False), (2, "tensor", False), (2, "element", True), (2, "row", True)],
)
def test_hooks_that_would_see_pieces_are_refused(
    parts_of_ranks: Make, world: int, boundary: str, refused: bool
) -> None:
    """Those of `register_hook` alone, by the name of the parameter."""
    (part, *_) = parts_of_ranks(world, torch.zeros(4), torch.zeros(4), boundary=boundary)
    grads = ShardedGrads(part)
    for param in part.params:
        param.register_post_accumulate_grad_hook(lambda param: None)
    grads.check_hooks()
    part.params[1].register_hook(lambda grad: grad)
    if refused:
        text = (
            "parameter 'p1' has a hook of register_hook and is spread over 2 ranks, but the hook "
            "would see a piece of the gradient. Use register_post_accumulate_grad_hook"
        )
        with pytest.raises(ParameterError, match=re.escape(text)):
            grads.check_hooks()
    else:
        grads.check_hooks()


def test_buffer_goes_back_once_and_not_from_a_stopped_backward(
    parts_of_ranks: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sum may still read the buffer of a backward that was stopped."""
    released: list[Tensor] = []
    monkeypatch.setattr(_sharded_grads, "release", released.append)
    grads = _alone(parts_of_ranks, torch.zeros(3))
    _give(grads, torch.ones(3))
    pending = grads.start_reduce(Reduction())
    pending.wait()
    pending.wait()
    assert len(released) == 1
    _give(grads, torch.ones(3))
    grads.start_reduce(Reduction())
    grads.forget()
    assert grads.used == [False]
    _reduce([grads], [True])
    assert len(released) == 2
    assert torch.equal(grads.owner.params[0].grad, torch.zeros(3))


def test_summed_after_it_was_forgotten_is_not_divided(parts_of_ranks: Make) -> None:
    """The end of a sum whose backward was stopped touches nothing."""
    parts = parts_of_ranks(2, torch.zeros(4))
    all_grads = [ShardedGrads(part) for part in parts]
    for grads in all_grads:
        _give(grads, torch.ones(4))
    pending = [grads.start_reduce(Reduction()) for grads in all_grads]
    for grads in all_grads:
        grads.forget()
    for each in pending:
        each.wait()
    for grads in all_grads:
        grads.assign_grads([True])
        assert grads.owner.params[0].grad is None


def test_gradient_follows_its_shard(parts_of_ranks: Make) -> None:
    """To another dtype: the flat gradient is made anew, and its pieces are marked as spread."""
    part, other = parts_of_ranks(2, torch.zeros(4))
    all_grads = [ShardedGrads(part), ShardedGrads(other)]
    for dtype in (torch.float32, torch.float64):
        for each in (part, other):
            each.rebind([param.detach().to(dtype) for param in each.params])
            for param in each.params:
                param.grad = None
        for grads in all_grads:
            _give(grads, torch.ones(4, dtype=dtype))
        _reduce(all_grads)
        assert part.params[0].grad.dtype == dtype
        assert list(by_comm([part.params[0].grad])) == [(part.comms.reduce,)]


def test_gradient_of_somebody_is_not_summed_over(parts_of_ranks: Make) -> None:
    """What a user keeps in `.grad` is in the flat gradient, and is added to, not overwritten."""
    parts = parts_of_ranks(2, torch.zeros(2), torch.zeros(2), boundary="row")
    all_grads = [ShardedGrads(part) for part in parts]
    for _ in range(2):
        for grads in all_grads:
            _give(grads, torch.ones(2), torch.ones(2))
        _reduce(all_grads)
        for grads in all_grads:
            grads.owner.params[0].grad = None
    found = [param.grad for part in parts for param in part.params]
    kept = [grad for grad in found if grad is not None and grad.numel()]
    assert [grad.tolist() for grad in kept] == [[2.0, 2.0]]


def test_offloaded_gradients_are_summed_where_they_were_computed(parts_of_ranks: Make) -> None:
    """And lie where the shard is."""
    grads = _alone(parts_of_ranks, torch.zeros(4), device="meta", cpu_offload=True)
    assert grads._destination().device.type == "meta"
    assert grads._need_grad().device.type == "cpu"
