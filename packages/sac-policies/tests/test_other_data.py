"""Contexts engine: changes of what a region found, or saves again without reading it."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from sac_policies import MutationError, checkpoint, recompute_all, save_ops
from sac_policies.engines.contexts._leaves import Leaves

from ._changes import UNSEEN, add, fresh, larger


def _product_grads(change, function=None) -> list[torch.Tensor]:
    """Gradients under contexts that keep products, after `change(weight, state, input)`."""
    torch.manual_seed(0)
    layer, x = nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)
    state, hidden = torch.randn(4, 4), x * 1.5

    def own(t):
        return (layer(t) @ state.t()).sin()

    run, products = own, ["aten.addmm", "aten.mm"]
    if function is not None:
        run, products = lambda t: function(layer, t), ["aten.addmm"]
    out = checkpoint(run, hidden, policy=save_ops(*products), engine="contexts")
    change(layer.weight, state, hidden)
    return list(torch.autograd.grad(out.sum(), [*layer.parameters(), x]))


def _other(tensor: torch.Tensor) -> None:
    tensor.data = tensor.data * 0.5


@pytest.mark.parametrize("at", [0, 1], ids=["weight", "buffer"])
def test_other_data_under_a_view_that_a_kept_operator_saved_is_refused(at):
    """No operator reads the weight again, but its transposed view is saved again."""
    with pytest.raises(
        MutationError,
        match=r"tensor of shape \(4, 4\) was given other data after the region read it, but "
        r"aten\.t\.default of the recomputation reads it as it was \(read at .*\)\. "
        r"Change it after backward\.",
    ):
        _product_grads(lambda *tensors: _other(tensors[at]))


def test_other_data_in_a_storage_where_the_old_one_was_is_refused():
    """A freed storage is no proof of anything: another one may be made in its place."""

    def change(weight, state, hidden) -> None:
        weight.data = torch.empty(0)
        weight.data = torch.full((4, 4), 2.0)

    for _ in range(20):
        with pytest.raises(MutationError, match="given other data"):
            _product_grads(change)


def test_storage_that_is_freed_and_filled_again_is_not_refused(equal):
    """FSDP frees the gathered weights and gathers them in the same storage for backward."""

    def change(weight, state, hidden) -> None:
        before, storage = weight.data.clone(), weight.untyped_storage()
        storage.resize_(0)
        torch.empty(64)
        storage.resize_(64)
        weight.data.copy_(before)

    assert equal(_product_grads(change), _product_grads(lambda *tensors: None))


def test_data_that_the_region_gathers_itself_is_not_refused(equal):
    """Gathered in the region to a new storage each time, and freed there."""
    shards = torch.randn(16)

    def gathers(layer, t):
        layer.weight.data = shards.clone().view(4, 4)
        y = layer(t)
        layer.weight.data = shards[:4]
        return y.sin()

    def gathered(*tensors) -> None:
        tensors[0].data = shards.clone().view(4, 4)  # as the hooks of backward leave it

    wanted = _product_grads(lambda *tensors: None, function=lambda layer, t: layer(t).sin())
    found = _product_grads(gathered, function=gathers)
    assert [each.shape for each in found] == [each.shape for each in wanted]


def test_other_data_of_what_a_kept_operator_saved_itself_is_read_as_plain_reads_it(equal):
    """Autograd saves the tensor, not its data, where no view stands between."""
    grads = []
    for engine in (None, "contexts"):
        torch.manual_seed(0)
        weight, x = torch.randn(4, 4, requires_grad=True), torch.randn(2, 4, requires_grad=True)

        def function(t, weight=weight):
            return (t @ weight).sin()

        out = function(x) if engine is None else checkpoint(function, x, policy=save_ops("aten.mm"))
        weight.data = weight.data * 0.5
        grads.append(list(torch.autograd.grad(out.sum(), [weight, x])))
    assert equal(*grads)


@pytest.mark.parametrize("width", [4, 128])
@pytest.mark.parametrize("how", ["argument", "closure", "view", "view of the closure"])
@pytest.mark.parametrize("change", UNSEEN, ids=lambda change: change.__name__)
def test_values_with_a_history_are_guarded(change, how, width):
    """What others made and the region reads again, given to it or found by it."""
    x = torch.randn(4, width, requires_grad=True)
    hidden = x * 1.5
    given = hidden.view(2, 2, width) if how == "view" else hidden

    def function(t):
        read = hidden.view(2, -1) if how == "view of the closure" else hidden
        return (read if "closure" in how else t).exp().sin()

    argument = x.sin() if "closure" in how else given
    out = checkpoint(function, argument, policy=recompute_all(), engine="contexts")
    if change in (fresh, larger) and how == "view":
        return  # the view lies where it lay
    with torch.no_grad():
        change(hidden)
    with pytest.raises(MutationError, match="was changed after the region read it"):
        out.sum().backward()


@pytest.mark.filterwarnings("ignore::sac_policies.UnmatchedEntryWarning")
@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("policy", [recompute_all(), save_ops("aten.mm", "aten.convolution")])
@pytest.mark.parametrize("last", [torch.mm, nn.functional.conv1d])
@pytest.mark.parametrize("needs_grad", [True, False])
def test_leaf_that_only_the_last_operator_saves_is_refused(last, policy, early_stop, needs_grad):
    """Nothing runs after it has saved its inputs, which plain autograd would refuse."""
    shape = (4, 4) if last is torch.mm else (4, 4, 1)
    x, w = torch.randn(4, 4, requires_grad=True), torch.randn(shape, requires_grad=needs_grad)
    run = functools.partial(checkpoint, engine="contexts", policy=policy, early_stop=early_stop)
    out = run(lambda t: last(t.sin(), w), x)
    with torch.no_grad():
        w.mul_(2)
    with pytest.raises(
        MutationError,
        match=r"tensor of shape \(4, 4.*\) was changed in place after the region read it, but "
        r".* of the recomputation reads it as it was \(read at .*\)\. Change it after backward\.",
    ):
        out.sum().backward()


@pytest.mark.parametrize("change", [add, fresh])
@pytest.mark.parametrize("outer", [save_ops("aten.mm"), recompute_all()], ids=["mm", "nothing"])
def test_values_with_a_history_are_guarded_in_regions_inside_others(outer, change):
    """Those are given another tensor of the same values when the one around runs again."""
    x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4)
    hidden = x * 1.5

    def inner(t):
        return (t @ w).sin().cos()

    def around(t):
        policy = recompute_all()
        return checkpoint(inner, t, policy=policy, engine="contexts").sigmoid()

    out = checkpoint(around, hidden, policy=outer, engine="contexts")
    change(hidden)
    with pytest.raises(MutationError, match=r"was changed after the region read it, but aten\.mm"):
        out.sum().backward()


def test_value_with_a_history_that_is_written_after_the_region_is_refused():
    """Plain autograd refuses as well, as it saved what the region found."""
    x = torch.randn(4, 4, requires_grad=True)
    hidden = x * 1.5
    out = checkpoint(
        lambda t: (t * hidden).sin(), x.sin(), policy=recompute_all(), engine="contexts"
    )
    hidden.mul_(2)
    with pytest.raises(MutationError, match=r"shape \(4, 4\) was changed in place"):
        out.sum().backward()


@pytest.mark.parametrize("keyword", [False, True])
def test_input_that_is_written_after_the_region_is_refused_by_name(keyword):
    """Torch's checkpoint notices; what it says does not help."""
    x = torch.randn(4, 4, requires_grad=True)
    hidden = x * 1.5

    def function(t, other=None):
        return t.sin().exp() if other is None else (t * other).sin()

    given = {"other": hidden} if keyword else {}
    first = x.sin() if keyword else hidden
    out = checkpoint(function, first, policy=recompute_all(), engine="contexts", **given)
    hidden.mul_(2)
    with pytest.raises(
        MutationError,
        match=r"sac_policies\.checkpoint: argument other was changed in place after its region had "
        r"run, but mul of the recomputation reads it as it was \(.*\)\. Change it after backward, "
        r"or pass the region a copy\."
        if keyword
        else r"sac_policies\.checkpoint: an input of the region was changed in place after the "
        r"region ran, but the recomputation reads it as it was \(at .*; policy .*\)\. Change it "
        r"after backward, or pass the region a copy\.",
    ):
        out.sum().backward()


def test_values_of_the_region_are_not_noted():
    """Nor views of them: they are made again."""
    noted: list[int] = []
    protect = Leaves.protect

    def counting(self, *given):
        noted.append(len(self))
        protect(self, *given)

    weight, x = torch.randn(4, 4, requires_grad=True), torch.randn(2, 4, requires_grad=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Leaves, "protect", counting)

        def function(t):
            y = (t @ weight.t()).sin()
            a, b = y.chunk(2, dim=1)
            return (a * b.exp()).view(-1).cos().reshape(2, 2)

        checkpoint(function, x * 2, policy=recompute_all(), engine="contexts").sum().backward()
    assert noted == [2]  # the weight and the input
