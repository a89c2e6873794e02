"""A named tensor is found under the call that made its storage, as that call returned it."""

from __future__ import annotations

import torch

from sac_policies.engines.contexts._producers import Producers

MM = torch.ops.aten.mm.default
TOPK = torch.ops.aten.topk.default


def test_tensor_that_no_call_made_has_no_maker():
    """An input of the region."""
    producers, out = Producers(), torch.ones(2)
    producers.note((MM, 0), out, 0)
    assert producers.find(torch.ones(2)) is None


def test_view_is_found_as_the_whole_output():
    """Of its call, with the number of its draw."""
    producers, out = Producers(), torch.arange(12.0).view(3, 4)
    producers.note((MM, 5), out, 7)
    key, value, drawn = producers.find(out[1:, 2])
    assert (key, drawn) == ((MM, 5), 7)
    assert value.untyped_storage().data_ptr() == out.untyped_storage().data_ptr()
    assert torch.equal(value, out)


def test_output_is_found_as_it_lay():
    """Its strides and its place in the storage are those that it had."""
    producers, storage = Producers(), torch.arange(12.0)
    out = storage[2:].view(2, 5).t()
    producers.note((MM, 0), out, 0)
    _, value, _ = producers.find(storage)
    assert (value.shape, value.stride(), value.storage_offset()) == ((5, 2), (1, 5), 2)


def test_last_call_that_wrote_to_a_storage_is_its_maker():
    """What it held before is gone."""
    producers, out = Producers(), torch.ones(3)
    producers.note((MM, 0), out, 0)
    producers.note((torch.ops.aten.sin_.default, 0), out, 0)
    assert producers.find(out)[0] == (torch.ops.aten.sin_.default, 0)


def test_one_of_several_outputs_is_found_with_the_others():
    """All that the call returned, in its kind of container; what is no tensor is as it is."""
    producers = Producers()
    values, indices = torch.ones(2), torch.zeros(2)
    producers.note((TOPK, 0), (values, None, indices), 3)
    for each in (values, indices):
        key, whole, drawn = producers.find(each.view(1, 2))
        assert (key, drawn) == ((TOPK, 0), 3)
        assert type(whole) is tuple
        assert whole[0].data_ptr() == values.data_ptr()
        assert whole[1] is None
        assert whole[2].data_ptr() == indices.data_ptr()


def test_what_is_found_has_no_history():
    """It would hold the graph of the forward."""
    producers = Producers()
    leaf = torch.ones(2, requires_grad=True)
    one, (first, second) = leaf.sin(), leaf.cos().split(1)
    producers.note((MM, 0), one, 0)
    producers.note((TOPK, 0), (first, second), 0)
    assert producers.find(one)[1].grad_fn is None
    assert [each.grad_fn for each in producers.find(first)[1]] == [None, None]


def test_storage_in_the_place_of_one_that_is_gone_was_made_by_no_call():
    """Torch gives a new storage the address of one that was freed."""
    producers = Producers()
    for index in range(50):
        out = torch.ones(3)
        producers.note((MM, index), out, 0)
        del out
        assert producers.find(torch.zeros(3)) is None
