"""Norms of long vectors, and of several as one."""

import pytest
import torch
from torch import nn

from flat_param import flatten
from flat_param.memory._norm import joint_norm


def test_norm_of_many_elements_is_accurate():
    """Ten million squares in one float32 sum would be off by 3e-4."""
    layer = nn.Linear(1 << 12, 1 << 10, bias=False)
    true = layer.weight.detach().double().norm().float()
    torch.testing.assert_close(flatten(layer).norm(), true, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_of_none_is_zero_without_dimensions(dtype):
    """The result is a 0-dim zero for no vector, and for one or several empty ones."""
    empty = torch.zeros(0, dtype=dtype)
    for vectors in ([], [empty], [empty, empty]):
        norm = joint_norm(vectors, 2.0)
        assert (norm.shape, norm.item()) == ((), 0.0)


@pytest.mark.parametrize("ord", [0.5, 1.0, 2.0, 3.0, float("inf"), -float("inf")])
def test_several_vectors_have_the_norm_of_their_concatenation(ord):
    """For every order that torch knows, of vectors with zeros in them."""
    vectors = [torch.randn(7), torch.tensor([0.0, 2.0, -3.0]), torch.randn(1)]
    expected = torch.linalg.vector_norm(torch.cat(vectors), ord)
    torch.testing.assert_close(joint_norm(vectors, ord), expected)
