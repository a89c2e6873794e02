"""What a region made is told from what it found, by identity."""

from __future__ import annotations

import weakref

import torch

from sac_policies.engines.contexts._made import Made


def test_what_was_returned_is_known_and_its_views_are():
    """Also one of several results, in containers."""
    made, one, several = Made(), torch.ones(4), (torch.ones(2), [torch.ones(3)], None)
    made.add(one)
    made.add(several)
    assert made.has(one)
    assert made.has(one[1:].view(3, 1))
    assert made.has(several[1][0])
    assert not made.has(torch.ones(4))


def test_base_that_was_not_returned_makes_views_found():
    """A view that an operator returned is of what it was given."""
    made, found = Made(), torch.ones(4)
    made.add(found[1:])
    assert not made.has(found)
    assert not made.has(found[1:])


def test_another_tensor_in_the_place_of_one_that_is_gone_was_not_made():
    """Python gives identities again."""
    made, taken = Made(), 0
    for _ in range(200):
        made.add(torch.ones(1))
        found = torch.zeros(1)
        taken += id(found) in made
        assert not made.has(found)
    assert taken


def test_storages_are_those_of_what_is_alive():
    """An alias has no base, but the storage; what has none is left out."""
    made, one = Made(), torch.ones(4)
    made.add(one)
    made.add(torch.ones(2))
    sparse = torch.ones(3).to_sparse()
    made.add(sparse)
    assert not made.has(one.detach())
    assert made.storages() == {one.untyped_storage()._cdata}


def test_nothing_is_kept_alive():
    """The region may be the only one that knew the tensor."""
    made, one = Made(), torch.ones(4)
    made.add(one)
    gone = weakref.ref(one)
    del one
    assert gone() is None
    assert made.storages() == set()
