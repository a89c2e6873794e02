"""The name that a wrapper adds to keys is taken out and put in, and nothing else is."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from torch import nn

from ckpt_wrap import _CHECKPOINT_PREFIX, checkpoint_wrapper, clean_state_dict

WRAPPED = "_checkpoint_wrapped_module"


@pytest.mark.parametrize(
    ("name", "clean"),
    [
        ("weight", "weight"),
        (f"{WRAPPED}.weight", "weight"),
        (f"a.{WRAPPED}.{WRAPPED}.b.{WRAPPED}.weight", "a.b.weight"),
        (f"a.{WRAPPED}", "a"),
        (WRAPPED, ""),
        ("", ""),
        (f"a.my{WRAPPED}.weight", f"a.my{WRAPPED}.weight"),
        (f"a.{WRAPPED}s.weight", f"a.{WRAPPED}s.weight"),
    ],
)
def test_a_clean_name_has_no_wrappers_part(name, clean):
    """At the start, in the middle, at the end and twice; not a part that only contains it."""
    assert list(clean_state_dict({name: 1})) == [clean]


def test_a_clean_state_dict_has_the_same_tensors_in_order():
    """And the plain model loads it."""
    state = checkpoint_wrapper(nn.Linear(2, 2)).state_dict()
    torchs = OrderedDict((_CHECKPOINT_PREFIX + key, value) for key, value in state.items())
    clean = clean_state_dict(torchs)
    assert list(clean) == ["weight", "bias"]
    assert all(clean[key] is value for key, value in state.items())
    assert list(torchs) == [_CHECKPOINT_PREFIX + "weight", _CHECKPOINT_PREFIX + "bias"]
    nn.Linear(2, 2).load_state_dict(clean)
