"""A handle is text that stands for one living object, and holds none."""

from __future__ import annotations

import copy
import pickle

import pytest

from sac_policies import save_ops
from sac_policies.policies._handles import behind, handle_of


def test_handles_are_of_one_object_and_one_process():
    """Equal policies have handles of their own; a copy gets another, a pickle carries none."""
    policy = save_ops("aten.mm")
    copies = [save_ops("aten.mm"), copy.copy(policy), pickle.loads(pickle.dumps(policy))]
    handles = {policy.handle, *(each.handle for each in copies)}
    assert len(handles) == 4
    assert all(each == policy for each in copies)
    assert policy.handle.encode() not in pickle.dumps(policy)
    assert behind(policy.handle) is policy


def test_handles_keep_nothing_alive():
    """A policy that nobody holds is gone, and its handle with it."""
    handle = save_ops("aten.mm").handle
    with pytest.raises(KeyError):
        behind(handle)


def test_handle_says_what_it_is_of():
    """Compilers write it in their graphs, where people read it."""
    assert handle_of(_Thing()).startswith("_Thing ")


def test_each_handle_of_one_object_stands_for_it():
    """Both are good as long as the object lives."""
    thing = _Thing()
    first, second = handle_of(thing), handle_of(thing)
    assert first != second
    assert behind(first) is behind(second) is thing
    del thing
    with pytest.raises(KeyError):
        behind(first)


class _Thing:
    """Nothing but an object that can be referred to weakly."""
