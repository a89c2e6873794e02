"""Who moves a parameter's values, found from the parameter."""

import gc

import pytest
from torch import nn

from flat_param import ParameterError
from flat_param.memory._owners import FLATTENED, UNIT, Owner, check_owners


@pytest.fixture
def pair():
    """Two layers that share a weight, and their parent."""
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight = first.weight
    return first, second, nn.ModuleList([first, second])


@pytest.mark.parametrize("kind", [FLATTENED, UNIT])
def test_a_parameter_moved_beside_is_refused_with_both_names(pair, kind):
    """The error names the caller, both parameters, what moves the other, and a next step."""
    first, second, _ = pair
    owner = Owner(kind, first, [("theirs", first.weight)])
    with pytest.raises(ParameterError) as caught:
        check_owners("fully_shard", second, [("ours", second.weight)], (FLATTENED, UNIT))
    assert str(caught.value) == (
        f"flat_param.fully_shard: parameter 'ours' is tied to 'theirs' in {kind} beside this "
        "module, but tied parameters are moved together. Flatten or shard their common parent."
    )
    assert owner.kind == kind


def test_an_owner_counts_for_as_long_as_it_is_kept(pair):
    """Dropped, it refuses nothing."""
    first, second, _ = pair
    owner = Owner(UNIT, first, first.named_parameters())
    del owner
    gc.collect()
    check_owners("flatten", second, second.named_parameters(), (UNIT,))
