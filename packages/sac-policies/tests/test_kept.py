"""Contexts engine: what is kept stays as it was when it was kept, here or in hooks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from sac_policies import MutationError, offload, save_ops
from sac_policies.engines.contexts._kept import keep, storages_of

from ._contexts import PRODUCTS, ab, contexts


def test_in_place_change_of_a_saved_value_inside_the_region(gradients, equal):
    """A saved value is kept as it was when a later operator writes over it."""
    a, b = ab()

    def body(p, q):
        return torch.selu_(p @ q).sin()

    plain = gradients(body, a, b)
    assert equal(gradients(lambda p, q: contexts(body, p, q, policy=PRODUCTS), a, b), plain)


def test_saved_in_place_operator_writes_its_value_back(gradients, equal):
    """A saved in-place operator leaves its value in the tensor it wrote to."""
    a, b = ab()

    def body(p, q):
        h = p @ q
        torch.selu_(h)
        return h.sin()

    plain = gradients(body, a, b)
    policy = save_ops("aten.elu_")
    assert equal(gradients(lambda p, q: contexts(body, p, q, policy=policy), a, b), plain)


def test_change_of_a_saved_value_after_the_region_is_an_error():
    """A saved output that the caller overwrites is reported with operator and line."""
    a, b = ab()
    held = []

    def body(p, q):
        h = p @ q
        held.append(h.detach())
        return h.sin()

    out = contexts(body, a, b, policy=PRODUCTS)
    held[0].zero_()
    with pytest.raises(
        MutationError, match=r"output of aten.mm.default .*test_kept.py:\d+ in body"
    ):
        out.sum().backward()


def test_batch_norm_updates_its_statistics_once_when_saved(equal):
    """A saved batch norm does not count the batch a second time in backward."""
    torch.manual_seed(0)
    plain, kept = nn.BatchNorm1d(8), nn.BatchNorm1d(8)
    a, _ = ab()
    plain(a.sin()).square().sum().backward()
    policy = save_ops("aten.native_batch_norm")
    contexts(lambda p: kept(p.sin()), a, policy=policy).square().sum().backward()
    assert torch.equal(plain.running_mean, kept.running_mean)


def test_offload_is_honoured_in_eager(counting):
    """An offloaded value is brought back, not computed again."""
    a, b = ab()
    kept = contexts(lambda p, q: (p @ q).sin().cos(), a, b, policy=offload("aten.mm"))
    with counting() as counts:
        kept.sum().backward()
    assert counts["aten.mm.default"] == 2


def test_saved_values_pass_through_the_users_hooks():
    """Saved-tensor hooks around the region see its saved values too."""
    a, b = ab()
    packed = []

    def pack(tensor):
        packed.append(tuple(tensor.shape))
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held):
        out = contexts(lambda p, q: (p @ q[:, :3]).sin(), a, b, policy=PRODUCTS)
    assert (8, 3) in packed
    out.sum().backward()


MM = torch.ops.aten.mm.default


def _read(kept: Any, *, last: bool = False) -> Any:
    return kept.read(MM, PRODUCTS, last=last)


def test_value_is_handed_out_as_it_is_only_to_the_last():
    """Before, as an alias of its own for each: what is done to one is nothing to the others."""
    value = torch.ones(2, 3)
    kept = keep(value, None, False, 0)
    first = _read(kept)
    first.requires_grad_()
    assert not _read(kept).requires_grad
    last = _read(kept, last=True)
    assert _read(kept, last=True) is last
    assert last.data_ptr() == first.data_ptr() == value.data_ptr()


def test_several_outputs_are_given_in_their_places():
    """Whatever stands between them; in the kind of container that they came in."""
    value = [torch.ones(2), None, (torch.zeros(3), 4)]
    found = _read(keep(value, None, False, 5))
    assert type(found) is list
    assert type(found[2]) is tuple
    assert torch.equal(found[0], value[0])
    assert torch.equal(found[2][0], value[2][0])
    assert (found[1], found[2][1]) == (None, 4)


@pytest.mark.parametrize("value", [torch.ones(2), (torch.ones(2), 3), 4], ids=repr)
def test_number_of_its_draw_is_kept_with_a_value(value):
    """Whatever kind it is of."""
    assert keep(value, None, False, 7).drawn == 7


def test_value_is_cloned_before_its_storage_is_written_to():
    """Of another storage nothing is."""
    value, other = torch.ones(2), torch.ones(2)
    kept = keep((value, other), None, False, 0)
    kept.leave(storages_of([value]))
    value.zero_()
    found = _read(kept)
    assert torch.equal(found[0], torch.ones(2))
    assert found[1].data_ptr() == other.data_ptr()


def test_one_write_may_be_expected_and_no_more():
    """That of the operator whose value it is: autograd counts it after it has run."""
    value = torch.ones(2)
    kept = keep(value, None, False, 0)
    kept.expect_write()
    value.add_(1)
    assert torch.equal(_read(kept), value)
    value.add_(1)
    with pytest.raises(MutationError, match=r"saved output of aten\.mm\.default was changed"):
        _read(kept)


def test_hooks_have_what_is_kept_and_give_it_again():
    """A change of the original is none of what they hold."""
    value, hooks = torch.ones(2), (lambda t: t.clone() * 2, lambda held: held + 1)
    kept = keep(value, hooks, False, 0)
    value.zero_()
    assert torch.equal(_read(kept), torch.full((2,), 3.0))
    assert torch.equal(_read(kept, last=True), torch.full((2,), 3.0))


def test_hooks_that_hold_the_tensor_itself_see_changes():
    """As those that only look."""
    value = torch.ones(2)
    kept = keep(value, (lambda t: t, lambda t: t), False, 0)
    value.add_(1)
    with pytest.raises(MutationError):
        _read(kept)


def test_what_was_moved_away_is_not_resident():
    """By offload, or by hooks; the rest is, in order."""
    value = (torch.ones(2), torch.ones(3), 4)
    assert [t.shape[0] for t in keep(value, None, False, 0).resident()] == [2, 3]
    assert list(keep(value, None, True, 0).resident()) == []
    assert list(keep(value, (str, float), False, 0).resident()) == []


def test_offloaded_value_is_copied_until_it_is_read_the_last_time():
    """On the CPU it is where it was; a reader may write to what it is given."""
    kept = keep(torch.ones(2), None, True, 0)
    _read(kept).zero_()
    assert torch.equal(_read(kept, last=True), torch.ones(2))
