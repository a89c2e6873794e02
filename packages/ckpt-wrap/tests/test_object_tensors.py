"""Tensors in objects: had again unchanged, refused changed, and their places held when given up."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from ckpt_wrap.checkpointing._object_tensors import (
    Gone,
    Leaf,
    Refused,
    is_put_there,
    note_put_there,
)

AT = "tensor '.keys' of the argument of class Cache"


def test_a_tensor_that_did_not_change_is_had_again():
    """The very values, with its place in the graph."""
    tensor = torch.ones(2, requires_grad=True) * 2
    again = Leaf(tensor, AT, keep=True).get()
    assert torch.equal(again, tensor)
    assert again.grad_fn is tensor.grad_fn


def test_a_tensor_that_changed_is_refused():
    """Saying which, and what to do."""
    tensor = torch.ones(2)
    leaf = Leaf(tensor, AT, keep=True)
    tensor.add_(1)
    with pytest.raises(Refused) as caught:
        leaf.get()
    assert caught.value.what == AT
    assert caught.value.rule == (
        "was changed in place since the forward, but recomputation needs it as it was. Change a "
        "clone of it instead, or change it after backward."
    )


def test_what_is_kept_stays_and_what_is_not_goes():
    """Of the latter only its place is held."""
    for keep in (True, False):
        tensor = torch.ones(2)
        gone = weakref.ref(tensor)
        storage = torch.multiprocessing.reductions.StorageWeakRef(tensor.untyped_storage())
        leaf = Leaf(tensor, AT, keep=keep)
        del tensor
        gc.collect()
        assert storage.expired() is not keep
        assert gone() is None or keep
        leaf.get()


def test_what_its_owner_kept_is_given_unless_it_changed():
    """It is the tensor itself."""
    tensor = torch.ones(2)
    leaf = Leaf(tensor, AT, keep=False)
    assert leaf.get() is tensor
    tensor.add_(1)
    assert isinstance(leaf.get(), Gone)


def test_the_place_of_a_tensor_may_be_asked_for_its_shape():
    """Which a cache is asked for where its values are not needed."""
    gone = Gone.instead_of(torch.ones(2, 3, dtype=torch.float64), AT)
    assert gone.shape == gone.size() == (2, 3)
    assert gone.size(1) == 3
    assert (gone.dim(), gone.ndim, gone.numel()) == (2, 2, 6)
    assert gone.dtype is torch.float64
    assert gone.stride() == (3, 1)


@pytest.mark.parametrize(
    "read",
    [
        lambda gone: gone + 1,
        lambda gone: torch.cat([torch.ones(1, 3), gone]),
        lambda gone: gone[0],
        lambda gone: gone.sum(dim=0),
        lambda gone: torch.add(torch.ones(2, 3), other=gone),
        lambda gone: gone.add_(1),
    ],
    ids=["operator", "in a list", "item", "method", "keyword", "in place"],
)
def test_anything_else_about_it_is_refused(read):
    """However it is given to an operator; the error says what to keep."""
    with pytest.raises(Refused) as caught:
        read(Gone.instead_of(torch.ones(2, 3), AT))
    assert caught.value.what == AT
    assert caught.value.rule.endswith("Keep the argument until backward has run.")


def test_what_a_call_put_there_is_known_while_it_is_there():
    """By identity, not by value; places that were given up are always of such."""
    tensor = torch.ones(2)
    assert not is_put_there(tensor)
    note_put_there(tensor)
    assert is_put_there(tensor)
    assert not is_put_there(tensor.clone())
    assert is_put_there(Gone.instead_of(tensor, AT))


def test_noting_a_tensor_does_not_keep_it():
    """It is its owner's to keep."""
    tensor = torch.ones(2)
    note_put_there(tensor)
    gone = weakref.ref(tensor)
    del tensor
    gc.collect()
    assert gone() is None
