"""All segments of one module, kept flat for as long as the module lives."""

import pytest
import torch
from torch import nn

from flat_param import ParameterError, VectorError, flat_params_of, flatten


def test_a_new_parameter_of_another_shape_is_refused_as_it_is_assigned(mlp):
    """By name; the module keeps the one it had."""
    flatten(mlp)
    kept = mlp[0].weight
    with pytest.raises(ParameterError, match=r"0\.weight"):
        mlp[0].weight = nn.Parameter(torch.ones(2))
    assert mlp[0].weight is kept
    assert flat_params_of(mlp).as_vector().numel()


def test_a_segment_is_found_by_one_name_only(mlp):
    """Where several match, or none, the error names them all."""
    mlp[2].double()
    flat = flatten(mlp)
    with pytest.raises(VectorError) as caught:
        flat.as_vector()
    assert "segment None matches 2 of" in str(caught.value)
    assert all(repr(name) in str(caught.value) for name in flat.layouts)
    with pytest.raises(VectorError, match="segment 'x' matches 0 of"):
        flat.as_vector("x")
